"""Every benchmark runs; what it measures is for its reader to see."""

import argparse
import json
import re
import subprocess
import sys

import numpy as np
import pytest

import minigen
from benchmarks import all as all_benchmarks
from benchmarks import harness, speculative


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory):
    """(folder of figures, script -> its output) of one run of everything."""
    folder = tmp_path_factory.mktemp("figures")
    command = [sys.executable, "-m", "benchmarks.all", "--quick", "--json", folder]
    run = subprocess.run(command, cwd=harness.ROOT, capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stderr) == (0, "")
    _, *parts = re.split(r"^== (\w+)\n", run.stdout, flags=re.MULTILINE)
    return folder, dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("script", all_benchmarks.SCRIPTS)
def test_a_quick_run_prints_a_table_and_writes_its_figures(script, quick_run):
    folder, outputs = quick_run
    figures = json.loads((folder / f"{script}.json").read_text())
    assert figures["rows"] and figures["machine"]["numpy"] in outputs[script]
    for row in figures["rows"]:
        assert all(str(value) in outputs[script] or isinstance(value, float) for value in row.values())
        assert all(value > 0 for name, value in row.items() if name.startswith("ms "))


def test_a_benchmark_that_fails_does_not_stop_the_others_but_counts(monkeypatch, capfd):
    monkeypatch.setattr(all_benchmarks, "SCRIPTS", ["no_such", "nor_this"])
    assert all_benchmarks.main(["--quick"]) == 1
    assert "failed: no_such, nor_this" in capfd.readouterr().err


def test_random_weights_of_a_shape_make_a_model():
    config = minigen.GPT2Config(
        vocab_size=300, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    parameters = dict(harness.random_parameters(config))
    assert {name: array.shape for name, array in parameters.items()} == config.parameter_shapes()
    assert all(array.dtype == np.float32 for array in parameters.values())
    assert parameters["wte.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert (parameters["h.1.ln_2.weight"] == 1).all() and not parameters["ln_f.bias"].any()
    logits = minigen.GPT2(config, parameters).forward([[1, 2, 3]])
    assert logits.shape == (1, 300) and np.isfinite(logits).all()


@pytest.mark.parametrize("name", ["gpt2", "distilgpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"])
def test_shapes_have_the_sizes_they_are_known_by(name):
    millions = {"distilgpt2": 82, "gpt2": 124, "gpt2-medium": 355, "gpt2-large": 774, "gpt2-xl": 1558}
    shapes = minigen.GPT2Config(**harness.SHAPES[name]).parameter_shapes()
    assert round(sum(map(np.prod, shapes.values())) / 1e6) == millions[name]


def test_a_case_may_time_itself():
    timings = harness.measure({"own": lambda: 0.25, "outside": lambda: None}, repetitions=3, warm_up=0)
    assert timings["own"] == (250, 250, 250)
    assert 0 < timings["outside"].min <= timings["outside"].median < 250


def test_a_report_of_rows_with_other_keys_is_several_tables_in_one_file(tmp_path, capsys):
    rows = [{"case": "a", "ms": 1.5}, {"case": "b", "ms": 2.0}, {"case": "c", "MB": 3}]
    harness.report("title", rows, argparse.Namespace(json=tmp_path / "figures.json"))
    tables = capsys.readouterr().out.partition("minigen ")[2].partition("\n")[2]
    assert tables == "case     ms\n   a  1.500\n   b  2.000\n\ncase  MB\n   c   3\n"
    assert json.loads((tmp_path / "figures.json").read_text())["rows"] == rows


def test_the_memory_has_a_speed():
    assert 0 < harness.gemv_rate(megabytes=4, repetitions=2) < 100_000


@pytest.mark.parametrize(
    "options, says",
    [
        (["--plot", "figure.txt"], "ends neither in .png nor in .svg"),
        (["--shape", "gpt5"], "gpt5"),
        (["--model", "gpt2", "--shape", "gpt2"], "not allowed with"),
    ],
)
def test_options_that_cannot_be_used_end_with_one_sentence(options, says, capsys):
    with pytest.raises(SystemExit) as stop:
        harness.parser("a benchmark", model=True, plot=True).parse_args(options)
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_a_plot_without_matplotlib_is_refused_at_once(monkeypatch, capsys):
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stop:
        harness.parser("a benchmark", plot=True).parse_args(["--plot", "figure.png"])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert "matplotlib is not installed" in err and err.count("\n") == 1


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_plot_is_written(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    with harness.plot(tmp_path / f"figure.{suffix}", "two panels", panels=2) as panels:
        for axes in panels:
            axes.bar(["a", "b"], [1, 2])
    assert (tmp_path / f"figure.{suffix}").stat().st_size > 1000


def test_checkpoints_are_found_on_disk_or_made(tmp_path, capsys):
    options = argparse.Namespace(model="distilfairytale", shape=None, quick=True)
    assert harness.checkpoint_of(options, tmp_path) == harness.ROOT / "weights" / "distilfairytale"
    options = argparse.Namespace(model="no/such", shape=None, quick=True)
    for asked in (lambda: harness.checkpoint_of(options, tmp_path), lambda: harness.model_of(options)):
        with pytest.raises(SystemExit) as exit:
            asked()
        assert exit.value.code == 2
        error = capsys.readouterr().err
        assert "no/such" in error and error.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--repetitions", "0"], ["--repetitions", "x"], ["--json", "no/folder/x.json"]])
def test_options_that_cannot_work_are_refused_before_anything_is_measured(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        harness.parser("").parse_args(arguments)
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert arguments[1] in error and error.count("\n") == 1


def test_rows_with_other_keys_make_another_table(capsys):
    rows = [{"a": 1, "b": 2.5}, {"a": 3, "b": 4.5}, {"c": "x"}]
    harness.report("two tables", rows, argparse.Namespace(json=None))
    assert capsys.readouterr().out.splitlines()[2:] == ["a      b", "1  2.500", "3  4.500", "", "c", "x"]


def test_speculation_is_given_the_drafts_that_the_acceptance_says():
    right = np.array([True, True, False, True, False, False, True])
    # In brackets what the target adds to the drafts it accepts.
    assert speculative.n_rounds(right, 3) == 4  # T T [F], T [F], [F], T
    assert speculative.n_rounds(right, 1) == 5  # T [T], [F], T [F], [F], T
    for acceptance, k in ((0.5, 1), (0.7, 4), (0.9, 8)):
        right = speculative.cast_lots(acceptance, k, 96)
        tokens = len(right) / speculative.n_rounds(right, k)
        assert tokens == pytest.approx((1 - acceptance ** (k + 1)) / (1 - acceptance), rel=0.03)
    assert speculative.mean_tokens(1.0, 4) == 5


def test_a_scripted_pair_accepts_what_was_ordered():
    target, draft = speculative.scripted("fairytale", 0), speculative.scripted("distilfairytale", 0)
    tokenizer = minigen.load("fairytale")[1]
    text = speculative.random_ids(target.config, speculative.PROMPT + 12)
    right = np.array([True, False, True, True, True, True, False, False, True, True, True, True])
    other = np.where(right, text[speculative.PROMPT :], np.roll(text[speculative.PROMPT :], 1))
    draft.script = text[: speculative.PROMPT] + other.tolist()
    (done,) = speculative.follow(target, tokenizer, text, draft_model=(draft, tokenizer), num_draft_tokens=3)
    assert done.speculation.target_passes == speculative.n_rounds(right, 3)


@pytest.mark.parametrize("options", [["--acceptance", "0.5,2"], ["--acceptance", "much"], ["--models", "gpt2,gpt5"]])
def test_speculation_refuses_what_it_cannot_measure(options, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["speculative", *options])
    with pytest.raises(SystemExit) as stop:
        speculative.main()
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert options[1].split(",")[-1] in err and err.count("\n") == 1
