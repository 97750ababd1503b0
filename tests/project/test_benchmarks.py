"""Every benchmark runs and prints its tables; what it measures is for its reader to see."""

import importlib
import json
import math
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import minigen
from benchmarks import all as all_benchmarks
from benchmarks import decode, harness, peers, speculative


@pytest.fixture(autouse=True)
def same_environment(monkeypatch):
    """What `peers` sets for its processes ends with the test, and other engines, whose start is slow, are left out."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(peers, "ENGINES", {"minigen": peers.Minigen})


@pytest.mark.slow
@pytest.mark.parametrize("script", all_benchmarks.SCRIPTS)
def test_a_quick_run_prints_its_tables_and_saves_them(script, tmp_path, capsys, monkeypatch):
    measure = harness.measure
    monkeypatch.setattr(harness, "measure", lambda cases, n, warm_up, progress: measure(cases, n, 0, progress))
    monkeypatch.setattr(speculative, "PROMPT", 16)
    monkeypatch.setattr(speculative, "STORIES", speculative.STORIES[:1])
    model = {"sampler": [], "speculative": ["--acceptance", "0.5"]}.get(script, ["--model", "distilfairytale"])
    arguments = ["--quick", *model, "--json", str(tmp_path / "figures.json")]
    importlib.import_module(f"benchmarks.{script}").main(arguments)
    out, err = capsys.readouterr()
    figures = json.loads((tmp_path / "figures.json").read_text(), parse_constant=pytest.fail)  # no NaN, no Infinity
    assert figures["tables"] and err == ""
    for table in figures["tables"]:
        printed = out.partition(f"\n{table['title']}\n")[2].partition("-> ")
        lines = printed[0].splitlines()
        assert printed[2].splitlines()[0] == table["shows"]
        assert lines[0].split() == " ".join(table["rows"][0]).split() and len(lines) == 1 + len(table["rows"])
        for row, line in zip(table["rows"], lines[1:], strict=True):
            assert line.strip().startswith(row["case"])
            assert 0 < row["min"] <= row["ms"] <= row["max"]


def test_the_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks import kv_cache

    rows = [{"case": f"tg1 @ d{depth}", "min": 1.0, "naive min": float(depth)} for depth in (16, 64, 128)]
    kv_cache.draw(rows, tmp_path / "plot.png", "title")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_calls_are_timed_in_turn_without_the_warm_up():
    seconds = iter([9.0, 1.0, 3.0, 2.0])
    calls = []
    cases = {"itself": lambda: next(seconds), "both": lambda: (0.5, 0.25), "outside": lambda: calls.append(1)}
    timings = harness.measure(cases, repetitions=3, warm_up=1)
    assert timings["itself"] == (2000, 1000, 3000, None)
    assert timings["both"] == (500, 500, 500, 250)
    assert len(calls) == 4 and 0 < timings["outside"].min <= timings["outside"].median < 250


def test_progress_is_shown_on_a_terminal_only(monkeypatch, capsys):
    arguments = harness.parser("", repetitions=1).parse_args(["--quick"])
    for terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal, raising=False)
        report = harness.Report("benchmark", arguments, {"quick": 1})
        report.table("table", {"a case": lambda: 1.0}, lambda timings: "shown", lambda *_: {})
        assert ("1 of 2: a case, about" in capsys.readouterr().err) == terminal


@pytest.mark.parametrize("name", harness.SHAPES)
def test_shapes_have_the_sizes_they_are_known_by(name):
    millions = {"distilgpt2": 82, "gpt2": 124, "gpt2-medium": 355, "gpt2-large": 774, "gpt2-xl": 1558}
    shapes = minigen.GPT2Config(**harness.SHAPES[name]).parameter_shapes()
    assert round(sum(map(np.prod, shapes.values())) / 1e6) == millions[name]


def test_work_is_counted_as_it_is_for_gpt2():
    config = minigen.GPT2Config()
    assert decode.step_bytes(config) == 4 * (124_439_808 - 1024 * 768)  # all parameters but the positions'
    # 11 layers, in each 12 * 768 ** 2 weights, and 768 products for q @ k and 768 for weights @ v, of 3 pairs; in the
    # last layer 3 * 768 ** 2 weights for both tokens, 9 * 768 ** 2 for one, and 2 pairs
    layers = 11 * (12 * 768**2 * 2 + 2 * 768 * 3)
    assert decode.prompt_flops(config, 2) == 2 * (layers + 3 * 768**2 * 2 + 9 * 768**2 + 2 * 768 * 2)


@pytest.mark.slow
def test_random_weights_make_a_model(tmp_path, monkeypatch):
    tiny = {"vocab_size": 50257, "n_positions": 64, "n_embd": 8, "n_layer": 2, "n_head": 2}
    monkeypatch.setitem(harness.SHAPES, "tiny", tiny)
    model, tokenizer = harness.load_model("tiny")
    (tmp_path / "checkpoint").mkdir()
    loaded, _ = minigen.load(harness.checkpoint_of("tiny", tmp_path / "checkpoint"))
    ids = [tokenizer.encode("Once upon a time")]
    logits = model.forward(ids)
    assert logits.shape == (1, 50257) and np.isfinite(logits).all() and logits.std() > 0
    np.testing.assert_allclose(loaded.forward(ids), logits, rtol=0, atol=1e-6)


def count_passes(right, k):
    """The passes of the target for a text whose tokens a draft of length k has right or not."""
    place = passes = 0
    while place < len(right):
        drafted = right[place : place + k]
        place += [*drafted, False].index(False) + 1
        passes += 1
    return passes


@pytest.mark.slow
def test_a_draft_is_accepted_as_often_as_ordered():
    target, draft = speculative.Scripted("fairytale"), speculative.Scripted("distilfairytale")
    text = speculative.fresh_ids(target.config, speculative.PROMPT + 12)
    for acceptance in (0, 0.5, 1):
        draft.script = speculative.draft_script(text, acceptance)
        right = [a == b for a, b in zip(draft.script, text, strict=True)][speculative.PROMPT :]
        assert sum(right) == 12 * acceptance
        (done,) = speculative.follow(target, text, draft_model=(draft, draft.tokenizer), num_draft_tokens=3)
        assert done.speculation.target_passes == count_passes(right, 3)


@pytest.mark.parametrize(
    "options, says",
    [
        (["--shape", "gpt5"], "gpt5"),
        (["--model", "fairytale", "--shape", "gpt2"], "not allowed with"),
        (["--model", "no/such"], "no/such"),
        (["--repetitions", "0"], "0 is not a whole number of 1 or more"),
        (["--json", "no/folder/x.json"], "no/folder/x.json"),
        (["--plot", "figure.txt"], "figure.txt"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_is_measured(options, says, capsys):
    with pytest.raises(SystemExit) as stop:
        harness.parser("a benchmark", repetitions=1, plot=True).parse_args(options)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and says in err and err.count("\n") == 1


def test_an_acceptance_rate_beyond_1_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        speculative.main(["--acceptance", "0.5", "2"])
    assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def table_of(title, idea, shows, **ms):
    return {"title": title, "idea": idea, "shows": shows, "rows": [{"case": case, "ms": x} for case, x in ms.items()]}


def test_all_writes_the_page_of_figures(monkeypatch, tmp_path):
    def run(command, cwd):
        name, file = command[2].rpartition(".")[2], command[-1]
        idea, tables = "an idea" if name == "beam" else None, [table_of("pp128", None, "-", minigen=20.0, other=9.5)]
        tables = tables if name == "peers" else [table_of(f"table of {name}", idea, f"{name} shows.", a=1.0)]
        file.write_text(json.dumps({"title": name, "machine": "2 cores", "notes": ["other 1.0"], "tables": tables}))
        return SimpleNamespace(returncode=0)

    page = tmp_path / "README.md"
    page.write_text(all_benchmarks.README.read_text())
    monkeypatch.setattr(all_benchmarks, "README", page)
    monkeypatch.setattr(subprocess, "run", run)
    for _ in range(2):  # the second run replaces the figures of the first
        assert all_benchmarks.main(["--readme"]) == 0
    text = page.read_text()
    assert text.count("| pp128 | 20.0 | **9.50** |") == 1 and "2 cores; other 1.0" in text
    assert "| an idea | beam shows. | `beam`: table of beam |" in text and "sampler shows." not in text


def test_a_benchmark_that_fails_does_not_stop_the_others_but_counts(monkeypatch, capsys):
    started = []
    monkeypatch.setattr(
        subprocess, "run", lambda command, cwd: started.append(command) or SimpleNamespace(returncode=1)
    )
    assert all_benchmarks.main(["--quick"]) == 1
    assert len(started) == len(all_benchmarks.SCRIPTS)
    assert f"failed: {', '.join(all_benchmarks.SCRIPTS)}" in capsys.readouterr().err


def test_estimates_are_for_both_kinds_of_run():
    for script in all_benchmarks.SCRIPTS:
        seconds = importlib.import_module(f"benchmarks.{script}").SECONDS
        assert 0 < seconds["quick"] < seconds["full"] < math.inf
