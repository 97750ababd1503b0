"""--show-probs: each character in the style of its tokens' probability, on terminals only, and the text unchanged."""

import io
import math
import re

import numpy as np
import pytest

import minigen
from minigen.command.colors import TokenColorizer, has_colours

SGR = re.compile(r"\x1b\[([\d;]*)m")


def styled_characters(output):
    """[(character, style)] of a terminal's output; every style must be set once and ended before the next."""
    found, style = [], ""
    for index, part in enumerate(SGR.split(output)):  # text, style, text, style ... text
        if index % 2:
            assert (part == "0") == (style != ""), output
            style = "" if part == "0" else part
        else:
            found += [(character, style) for character in part]
    assert style == ""
    return found


def expected_style(probability):
    if probability >= 0.5:
        return ""
    return "36" if probability >= 0.1 else "4;33" if probability >= 0.01 else "1;4;31"


# ---- the characters and their styles -----------------------------------------------------------------------------


def forced(script):
    """A logits processor that leaves nothing but the next id of `script`; the log-probabilities stay the model's."""

    def processor(history, logits):
        only = np.full_like(logits, -np.inf)
        only[script[len(history.ids) - history.n_prompt]] = 0
        return only

    return processor


@pytest.mark.parametrize("stop", [[], ["!?"], ["€?", "?!", "b\nc!!!"], ["😀b"]], ids=repr)
def test_each_character_has_the_style_of_the_tokens_that_make_it(tiny, stop):
    model, tokenizer = tiny
    text = "aé你\n\n😀b\nc!!d€!z"  # tokens are bytes: 1, 2, 3, 1, 1, 4 ... to a character
    options = {"max_tokens": len(text.encode()), "logprobs": 0, "stop": stop, "temperature": 1.0}
    script = tokenizer.encode(text)
    # Of different sizes, so that every style comes about.
    sizes = iter(np.random.default_rng(1).choice([0.0, -0.1, -0.9, -3.0, -6.0], len(script)))
    colorizer, output, logprobs = TokenColorizer(tokenizer), "", []
    for step in minigen.stream(model, tokenizer, "x", logits_processors=(forced(script),), **options):
        logprobs.append(float(next(sizes)))
        rendered = colorizer.render(_with_logprob(step, logprobs[-1]))
        assert SGR.sub("", rendered) == step.text  # nothing earlier or later than the decoder shows it
        output += rendered
    characters = styled_characters(output)
    expected_text = min((text.split(s)[0] for s in stop if s in text), key=len, default=text)
    assert "".join(character for character, _ in characters) == expected_text
    first = 0
    for character, style in characters:
        last = first + len(character.encode())
        expected = "" if character == "\n" else expected_style(math.exp(sum(logprobs[first:last])))
        assert style == expected, (character, logprobs[first:last])
        first = last
    assert len({style for _, style in characters}) >= 3


def _with_logprob(step, logprob):
    entry = step.logprob._replace(logprob=logprob)
    return minigen.Step(step.text, step.token, entry, step.row, step.from_draft, step.finish_reason, step.completion)


def test_half_characters_at_the_end_and_rows_without_a_token(tiny):
    model, tokenizer = tiny
    half = tokenizer.encode("ab你")[:-1]
    eos = model.config.eos_ids[0]
    for script, reason in ((half, "length"), ([*half, eos], "eos")):
        colorizer = TokenColorizer(tokenizer)
        options = {"max_tokens": len(script), "logprobs": 0, "logits_processors": (forced(script),)}
        steps = list(minigen.stream(model, tokenizer, "x", **options))
        output = "".join(colorizer.render(step) for step in steps)
        assert steps[-1].finish_reason == reason
        assert SGR.sub("", output) == "ab\ufffd" == "".join(step.text for step in steps)
    (step,) = minigen.stream(model, tokenizer, "x", max_tokens=0, logprobs=0)
    assert TokenColorizer(tokenizer).render(step) == ""


# ---- the command line --------------------------------------------------------------------------------------------


@pytest.fixture
def cli(tiny_cli, monkeypatch):
    """Runs the command line in this process, as on a terminal if asked."""

    def run(*args, terminal=False):
        monkeypatch.setattr("minigen.command.main.has_colours", lambda file: terminal)
        return tiny_cli(*args)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["--no-stream", "--no-echo"],
        ["-n", "0"],
        ["two", "--num-return-sequences", "2"],
        ["--prompt-lookup-num-tokens", "3", "--temperature", "0.1"],
        ["--num-beams", "3", "--num-return-sequences", "2"],
        ["--stop", "aaaaa", "--stop", "\ufffd\ufffd\ufffd"],
    ],
    ids=" ".join,
)
def test_the_text_is_that_of_a_plain_run(cli, more):
    args = ["one one", *more, "-s", "3", "--logit-bias", "64+4", *([] if "-n" in more else ["-n", "30"])]
    code, plain, _ = cli(*args, "-q")
    assert code == 0
    assert cli(*args, "-q", "--show-probs")[:2] == (0, plain)
    code, coloured, err = cli(*args, "--show-probs", terminal=True)
    assert code == 0
    characters = styled_characters(coloured)
    assert "".join(character for character, _ in characters) == plain
    assert ({style for _, style in characters} != {""}) == ("-n" not in more)
    if "--no-echo" not in more:
        assert coloured.startswith("one one")  # prompts have no style
    assert "50 % and more" in err and "below 1 %" in err


def test_what_a_stop_string_cut_off_a_row_does_not_colour_the_next(cli, tiny):
    options = {"stop": "aa", "max_tokens": 30, "seed": 3, "logit_bias": {64: 4}, "logprobs": 0}
    model, tokenizer = tiny
    colorizers, rows = [TokenColorizer(tokenizer), TokenColorizer(tokenizer)], ["one", "two"]
    for step in minigen.stream(model, tokenizer, ["one", "two"], **options):
        rows[step.row] += colorizers[step.row].render(step)
        assert step.finish_reason in (None, "stop")
    args = ["one", "two", "--stop", "aa", "-n", "30", "-s", "3", "--logit-bias", "64+4", "-q", "--show-probs"]
    assert cli(*args, terminal=True)[1] == "\n\n".join(rows) + "\n"


def test_unlikely_tokens_are_listed_with_better_ones(cli, fairytale):
    args = ["Once upon a time", "--model", "fairytale", "-n", "20", "-s", "4", "-q", "--show-probs"]
    _, _, err = cli(*args)
    (done,) = minigen.generate(*fairytale, args[0], max_tokens=20, seed=4, logprobs=3)
    unlikely = [entry for entry in done.logprobs if math.exp(entry.logprob) < 0.1]
    heading, *lines = err.splitlines()
    assert "below 10 %" in heading
    assert 0 < len(unlikely) < 20 and len(lines) == len(unlikely)
    for entry, line in zip(unlikely, lines, strict=True):
        assert line.startswith(f"{100 * math.exp(entry.logprob):7.2f}%  {entry.text!r}")
        assert line.count("%") == 4 and f"{entry.top[0][1]!r} {100 * math.exp(entry.top[0][2]):.1f}%" in line
    # --logprobs lists all tokens, and as many alternatives as it says.
    _, _, err = cli(*args, "--logprobs", "1")
    assert len(err.splitlines()) == 20


def test_json_and_colours_do_not_go_together(cli):
    code, out, err = cli("one", "--show-probs", "--json")
    assert (code, out) == (2, "") and len(err.splitlines()) == 1 and "--show-probs" in err


@pytest.mark.parametrize(
    "is_terminal, env, coloured",
    [
        (True, {"TERM": "xterm"}, True),
        (True, {}, True),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (True, {"TERM": "xterm", "NO_COLOR": "0"}, False),  # whatever its value
        (True, {"TERM": "xterm", "NO_COLOR": ""}, True),  # empty counts as not set
        (True, {"TERM": "dumb"}, False),
        (False, {"TERM": "xterm"}, False),
    ],
)
def test_what_is_coloured(is_terminal, env, coloured, monkeypatch):
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)

    class File(io.StringIO):
        def isatty(self):
            return is_terminal

    assert has_colours(File()) is coloured
