"""The command line: what goes to stdout and what to stderr, where prompts come from, how runs end, what errors say.

Most tests call minigen.command.main.main in this process; what hangs on pipes, signals, locales or the interpreter's
exit runs `python -m minigen` as a user would. The expected text is that of minigen.generate, which
test_decode.py judges.
"""

import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest

import minigen
from minigen.command.main import main
from tests.tiny import tiny_config, tiny_params, write_byte_vocab, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
NO_MODEL = "/nonexistent/model"
posix_only = pytest.mark.skipif(os.name != "posix", reason="signals and pipes as POSIX has them")


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    """A tiny checkpoint: 64 positions, one token a byte."""
    folder = tmp_path_factory.mktemp("tiny") / "modèle"
    config = tiny_config(vocab_size=257, n_positions=64)
    write_checkpoint(folder, config, tiny_params(config, seed=3))
    write_byte_vocab(folder)
    return folder


@pytest.fixture(scope="module")
def tiny(tiny_folder):
    return minigen.load(str(tiny_folder))


@pytest.fixture
def cli(capsys, monkeypatch):
    """Runs the command line in this process."""

    def run(*args, stdin=b""):
        stream = io.TextIOWrapper(io.BytesIO(stdin)) if isinstance(stdin, bytes) else stdin
        monkeypatch.setattr(sys, "stdin", stream)
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # main replaces it
        try:
            code = main([str(arg) for arg in args])
        except SystemExit as exit:
            code = exit.code
        captured = capsys.readouterr()
        return Result(code or 0, captured.out, captured.err)

    return run


@pytest.fixture
def tiny_cli(cli, tiny_folder):
    """The same, with the tiny model."""
    return lambda *args, stdin=b"": cli("--model", tiny_folder, *args, stdin=stdin)


def start(*args, env=(), **kwargs):
    """`python -m minigen` as a process of its own, with stdout and stderr as pipes unless told otherwise."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment |= {"PYTHONPATH": str(ROOT), **dict(env)}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-m", "minigen", *args], env=environment, **pipes | kwargs)


def run(*args, stdin=None, **kwargs):
    """The finished process: (exit code, stdout, stderr), both bytes."""
    pipe = {} if stdin is None else {"stdin": subprocess.PIPE}
    with start(*args, **pipe, **kwargs) as process:
        out, err = process.communicate(stdin, timeout=60)
    return Result(process.returncode, out, err)


def texts(model_and_tokenizer, prompts, **options):
    return [done.text for done in minigen.generate(*model_and_tokenizer, prompts, **options)]


# ---- a run as a user sees it -------------------------------------------------------------------------------------


def test_text_on_stdout_and_the_rest_on_stderr():
    code, out, err = run("Once upon a time", "-n", "12", "--seed", "1")
    (text,) = texts(minigen.load(), "Once upon a time", max_tokens=12, seed=1)
    assert (code, out.decode()) == (0, f"Once upon a time{text}\n")
    header, closing = err.decode().splitlines()
    for shown in ("minigen", "fairytale", "temperature 0.7", "top_p 0.9", "max_tokens 12", "seed 1"):
        assert shown in header
    for shown in ("4 tokens", "12 tokens", "length"):
        assert shown in closing


def test_the_printed_seed_repeats_the_run(tiny_cli):
    options = ["one", "two", "-n", "20", "--temp", "1.5", "--top-p", "1", "--num-return-sequences", "2", "--ignore-eos"]
    first, second = tiny_cli(*options), tiny_cli(*options)
    assert first.out != second.out  # a new seed each time
    for result in (first, second):
        seed = re.search(r"seed (\d+)", result.err)[1]
        assert tiny_cli(*options, "--seed", seed).out == result.out
        assert json.loads(tiny_cli(*options, "-s", seed, "--json").out.split("\n")[0])["seed"] == int(seed)
    assert tiny_cli(*options, "--seed", "0").out == tiny_cli(*options, "--seed", "0").out


def test_the_header_shows_every_setting_that_was_given(tiny_cli, tiny_folder):
    given = {
        "max_tokens": 3,
        "min_tokens": 1,
        "num_return_sequences": 2,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.75,
        "min_p": 0.01,
        "typical_p": 0.95,
        "repetition_penalty": 1.25,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.125,
        "no_repeat_ngram_size": 4,
        "seed": 99,
        "window": 32,
        "logprobs": 2,
        "stop": "%%",
        "logit_bias": "11-2.5",
    }
    args = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    result = tiny_cli("ab", *args, "--ignore-eos", "--no-cache", "--json")
    assert result.code == 0
    header = result.err.splitlines()[0]
    assert str(tiny_folder) in header
    for name, value in given.items():
        shown = {"stop": r".*%%", "logit_bias": r".*11.*-2\.5"}.get(name, " " + re.escape(str(value)) + r"\b")
        assert re.search(rf"\b{name}{shown}", header), name
    assert "ignore_eos True" in header and "use_cache False" in header
    # And it is what ran.
    options = given | {"logit_bias": {11: -2.5}, "ignore_eos": True, "use_cache": False}
    expected = minigen.generate(*minigen.load(str(tiny_folder)), "ab", **options)
    assert [json.loads(line)["token_ids"] for line in result.out.splitlines()] == [d.token_ids for d in expected]


def test_quiet(tiny_cli):
    loud, quiet = tiny_cli("ab ", "-n", 5, "-s", 1), tiny_cli("ab ", "-n", 5, "-s", 1, "-q")
    assert (quiet.code, quiet.err) == (0, "")
    assert quiet.out == loud.out
    assert len(loud.err.splitlines()) == 3  # header, a hint about the space at the end, closing line
    assert sum("hint" in line and "space" in line for line in loud.err.splitlines()) == 1
    assert not any("hint" in line for line in tiny_cli("ab", "-n", 5, "-s", 1).err.splitlines())


def test_json_lines(tiny_cli, tiny):
    prompts = ["a\n", "é"]
    options = dict(max_tokens=6, seed=4, num_return_sequences=2, logprobs=2, stop=["Z"], temperature=1.0)
    args = ["-n", 6, "-s", 4, "--num-return-sequences", 2, "--logprobs", 2, "--stop", "Z", "--temperature", 1]
    result = tiny_cli(*prompts, *args, "--json")
    assert result.code == 0 and result.out.endswith("\n")
    lines = [json.loads(line) for line in result.out.removesuffix("\n").split("\n")]
    expected = minigen.generate(*tiny, prompts, **options)
    assert len(lines) == 4
    for index, (line, done) in enumerate(zip(lines, expected, strict=True)):
        assert line["index"] == index
        assert line["prompt_index"] == index // 2 == done.prompt_index
        assert line["prompt"] == prompts[index // 2]
        assert line["seed"] == 4
        for name in ("text", "token_ids", "finish_reason", "stop_sequence"):
            assert line[name] == getattr(done, name), name
        assert [entry["token"] for entry in line["logprobs"]] == done.token_ids
        for entry, wanted in zip(line["logprobs"], done.logprobs, strict=True):
            assert (entry["text"], entry["logprob"]) == (wanted.text, wanted.logprob)
            assert [(top["token"], top["text"], top["logprob"]) for top in entry["top"]] == wanted.top
        assert line["timings"]["prompt_tokens"] == len(prompts[index // 2].encode())
        assert line["timings"]["tokens"] == len(done.token_ids)
        assert "tiny" in line["model"]
    assert len(result.err.splitlines()) == 2  # the log-probabilities are in the lines
    assert json.loads(tiny_cli("a", "-n", 1, "--json").out)["logprobs"] is None


def assert_consists_of(out, pieces):
    """All pieces in order and whole, each with a newline behind it, and nothing but newlines between."""
    for piece in pieces:
        before, found, out = out.partition(piece + "\n")
        assert found and before.strip("\n") == "", piece
    assert out == ""


@pytest.mark.parametrize("more", [[], ["--num-return-sequences", "2"], ["--stop", "Z", "--stop", "\ufffd"]], ids=str)
def test_streamed_and_complete_texts_are_the_same(tiny_cli, tiny, more):
    prompts = ["one", "", "a third prompt", "é"]  # of different lengths, so that the rows do not end together
    args = [*prompts, "-n", 40, "-s", 2, "--temperature", 1, "--top-p", 1, *more]
    streamed, complete = tiny_cli(*args), tiny_cli(*args, "--no-stream")
    assert streamed.code == complete.code == 0
    assert streamed.out == complete.out
    options = {"num_return_sequences": 2} if "--num-return-sequences" in more else {}
    options |= {"stop": ["Z", "\ufffd"]} if "--stop" in more else {}
    done = minigen.generate(*tiny, prompts, max_tokens=40, seed=2, temperature=1.0, top_p=1.0, **options)
    expected = [d.text for d in done]
    n = len(expected) // len(prompts)
    assert_consists_of(streamed.out, [prompts[index // n] + text for index, text in enumerate(expected)])
    assert_consists_of(tiny_cli(*args, "--no-echo").out, expected)
    closing = streamed.err.splitlines()[-1]
    assert f"prompt {3 + 1 + 14 + 2} tokens" in closing  # each prompt once; the empty one is the begin-of-text token
    assert f"generated {sum(len(d.token_ids) for d in done)} tokens" in closing
    assert all(d.finish_reason in closing for d in done)


def test_no_stream_waits_for_the_whole_text(tiny_cli, tiny, monkeypatch):
    (text,) = texts(tiny, "abc", max_tokens=30, seed=2, ignore_eos=True)
    writes = []
    monkeypatch.setattr("minigen.command.output.write", writes.append)
    tiny_cli("abc", "-n", 30, "-s", 2, "--ignore-eos", "-q")
    assert sum(map(bool, writes)) > 10 and not any(text in piece for piece in writes)
    writes.clear()
    tiny_cli("abc", "-n", 30, "-s", 2, "--ignore-eos", "-q", "--no-stream")
    assert [piece for piece in writes if piece] == [f"abc{text}\n"]


def test_no_echo(tiny_cli, tiny):
    (text,) = texts(tiny, "abc", max_tokens=7, seed=2)
    assert tiny_cli("abc", "-n", 7, "-s", 2).out == f"abc{text}\n"
    assert tiny_cli("abc", "-n", 7, "-s", 2, "--no-echo").out == f"{text}\n"
    assert tiny_cli("abc", "-n", 0).out == "abc\n"


def test_logprobs_can_be_read_on_stderr(tiny_cli, tiny):
    result = tiny_cli("abc", "-n", 5, "-s", 2, "--logprobs", 3, "--ignore-eos")
    (done,) = minigen.generate(*tiny, "abc", max_tokens=5, seed=2, logprobs=3, ignore_eos=True)
    lines = [line for line in result.err.splitlines() if re.match(r"\s*-\d+\.\d+", line)]
    assert len(lines) == 5
    for line, entry in zip(lines, done.logprobs, strict=True):
        assert float(line.split()[0]) == pytest.approx(entry.logprob, abs=1e-3)
        assert repr(entry.text) in line
        for _, text, logprob in entry.top:
            assert repr(text) in line and f"{logprob:.3f}" in line
    assert result.out == tiny_cli("abc", "-n", 5, "-s", 2, "--ignore-eos").out


@pytest.mark.parametrize(
    "name, alias, value",
    [
        ("--temperature", "--temp", "0.1"),
        ("--max-tokens", "--max-new-tokens", "3"),
        ("--max-tokens", "--n-predict", "3"),
        ("--max-tokens", "-n", "3"),
        ("--repetition-penalty", "--repeat-penalty", "5"),
        ("--stop", "--reverse-prompt", "\ufffd"),
        ("--seed", "-s", "5"),
    ],
)
def test_aliases(tiny_cli, name, alias, value):
    args = ["abc", "-q", "--ignore-eos", "--max-tokens", "30", "--temperature", "1", "--seed", "1"]
    result = tiny_cli(*args, alias, value)
    assert result.code == 0
    assert result.out == tiny_cli(*args, name, value).out != tiny_cli(*args).out


def test_options_that_can_be_repeated(tiny_cli, tiny):
    both = tiny_cli("x", "-n", 20, "--stop", "qq", "--reverse-prompt", "ab", "--logit-bias", "64+90", "-q")
    assert both.out.startswith("xaaaa")  # id 64 is "a"
    assert tiny_cli("x", "-n", 20, "--stop", "aaa", "--stop", "aa", "--logit-bias", "64+90", "-q").out == "x\n"
    assert tiny_cli("x", "-n", 2, "--logit-bias", "64+90", "--logit-bias", "b=99", "-q").out == "xbb\n"
    assert tiny_cli("x", "-n", 2, "--logit-bias", "64+90", "--logit-bias", "==99", "-q").out == "x==\n"
    banned = tiny_cli("x", "-n", 2, "--logit-bias", "64+90", "--logit-bias", "65+80", "--logit-bias", "a=-inf", "-q")
    assert banned.out == "xbb\n"


def test_context_and_cache_options(tiny_cli):
    full = tiny_cli("abc", "-n", 200, "-s", 1, "--ignore-eos", "--json")
    assert json.loads(full.out)["finish_reason"] == "context"
    assert "--context-shift" in full.err  # how to go on
    args = ["abc", "-n", 90, "-s", 1, "--ignore-eos", "--context-shift", "--keep", 2]
    shifted = tiny_cli(*args, "--json")
    assert (json.loads(shifted.out)["finish_reason"], len(json.loads(shifted.out)["token_ids"])) == ("length", 90)
    assert tiny_cli(*args).out == tiny_cli(*args, "--no-cache").out
    assert tiny_cli(*args[:-2]).out != tiny_cli(*args).out
    assert tiny_cli("abc", "-n", 30, "-s", 1, "--window", 2).out != tiny_cli("abc", "-n", 30, "-s", 1).out


def test_help_and_version(cli):
    result = cli("--help")
    assert (result.code, result.err) == (0, "")
    for name in ("max-tokens", "temperature", "top-k", "top-p", "min-p", "typical-p", "repetition-penalty", "stop"):
        assert f"--{name}" in result.out
    shown = " ".join(result.out.split())
    for default in ("default 0.7", "default 0.9", "default 100", "fairytale"):
        assert default in shown
    lines = result.out.splitlines()
    assert max(map(len, lines)) <= 80
    groups = [line.partition(" (")[0].rstrip(":") for line in lines if re.match(r"\w+( \(.*\))?:$", line)]
    assert groups == ["model", "prompt", "length", "sampling", "beams", "speculation", "cache", "output"]
    options = [line for line in lines if re.match(r" +-", line)]
    assert all(re.match(r"  (-\w, )?--[\w-]+( [A-Z][\w+|]*)? +\S", line) for line in options)
    assert len(lines) <= len(options) + len(groups) + 3  # nothing is wrapped
    taking = [line for line in options if re.match(r"  (-\w, )?--[\w-]+ [A-Z]", line)]
    assert len(taking) > 25 and [line for line in taking if "(default " not in line] == []
    assert cli("--version") == (0, f"minigen {minigen.__version__}\n", "")


def test_console_script():
    scripts = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.scripts]")[2]
    assert re.match(r'\s*minigen = "minigen\.__main__:main"\n', scripts)


# ---- where prompts come from -------------------------------------------------------------------------------------


def prompts_of(result):
    assert result.code == 0, result.err
    return [json.loads(line)["prompt"] for line in result.out.removesuffix("\n").split("\n")]


CONTENTS = [
    (b"one line\n", "one line"),
    (b"no final newline", "no final newline"),
    (b"\xef\xbb\xbfmark\n", "mark"),
    (b"a\xef\xbb\xbf", "a\ufeff"),
    (b"\xef\xbb\xbfa\r\nb\r\n", "a\r\nb"),
    (b"two\n\n", "two\n"),
    (b" spaces \t\n", " spaces \t"),
    (b"\n", ""),
    (b"", ""),
    (b"caf\xe9\n", "caf\ufffd"),
    ("é你😀\n".encode(), "é你😀"),
    (b"A<|endoftext|>B", "A<|endoftext|>B"),
]


@pytest.mark.parametrize("data, prompt", CONTENTS)
def test_a_prompt_from_a_file_or_stdin(tiny_cli, tmp_path, data, prompt):
    """C07: line breaks, byte order marks and CRLF of files and stdin."""
    (tmp_path / "prompt.txt").write_bytes(data)
    options = ["-n", 1, "--json", "-q"]
    assert prompts_of(tiny_cli("-f", tmp_path / "prompt.txt", *options)) == [prompt]
    assert prompts_of(tiny_cli("--file", tmp_path / "prompt.txt", *options)) == [prompt]
    assert prompts_of(tiny_cli(*options, stdin=data)) == [prompt]
    assert prompts_of(tiny_cli("-", *options, stdin=data)) == [prompt]


@pytest.mark.parametrize(
    "data, prompts",
    [
        (b"one\ntwo\n", ["one", "two"]),
        (b"\xef\xbb\xbfone\r\ntwo\r\n\r\nfour", ["one", "two", "", "four"]),
        (b"caf\xe9\n\xc3\xa9\n", ["caf\ufffd", "é"]),
        # Form feeds, next-line and line separators are characters of a line, not its end.
        ("a\x0cb\x85c\u2028d\u2029e\x1cf\n".encode(), ["a\x0cb\x85c\u2028d\u2029e\x1cf"]),
    ],
)
def test_each_line_of_a_file_is_a_prompt(tiny_cli, tmp_path, data, prompts):
    (tmp_path / "prompts.txt").write_bytes(data)
    assert prompts_of(tiny_cli("--prompts-file", tmp_path / "prompts.txt", "-n", 1, "--json", "-q")) == prompts


def test_prompts_from_the_command_line(tiny_cli):
    """C07: a typed backslash and n are no line break."""
    options = ["-n", 1, "--json", "-q"]
    assert prompts_of(tiny_cli("two", "one", "three", *options)) == ["two", "one", "three"]
    assert prompts_of(tiny_cli(*options, "two", "one")) == ["two", "one"]
    assert prompts_of(tiny_cli("a", "-", "b", *options, stdin=b"from stdin\n")) == ["a", "from stdin", "b"]
    assert prompts_of(tiny_cli("ignores stdin", *options, stdin=b"what is piped in")) == ["ignores stdin"]
    # As typed: no escapes, no stripping, and after -- no options.
    assert prompts_of(tiny_cli(r"a\nb", " c\n", "", *options)) == [r"a\nb", " c\n", ""]
    assert prompts_of(tiny_cli(*options, "--", "-5 degrees", "--top-k")) == ["-5 degrees", "--top-k"]
    # On both sides of options, and of those that take no value; -- ends the options, once.
    assert prompts_of(tiny_cli("a", *options, "b", "-s", 3, "c")) == ["a", "b", "c"]
    assert prompts_of(tiny_cli("a", *options, "b", "--", "-q", "--")) == ["a", "b", "-q", "--"]
    assert prompts_of(tiny_cli(*options, "-5", "- a list", "-.5")) == ["-5", "- a list", "-.5"]


def test_stdin_through_a_real_pipe_with_bytes_that_are_not_utf8(tiny_folder, tiny):
    """T04: bytes that are not UTF-8, through a pipe."""
    (text,) = texts(tiny, "caf\ufffd \ufffd", max_tokens=9, seed=3)
    result = run("--model", tiny_folder, "-n", "9", "-s", "3", "-q", stdin=b"\xef\xbb\xbfcaf\xe9 \xff\r\n")
    assert result == (0, f"caf\ufffd \ufffd{text}\n".encode(), b"")


@posix_only
def test_utf8_in_the_c_locale_and_bytes_that_are_not(tiny_folder, tiny):
    """T04: bytes that are not UTF-8, on the command line."""
    prompts = ["é你", "caf\ufffd"]
    expected = texts(tiny, prompts, max_tokens=9, seed=3)
    env = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    args = ["--model", os.fsencode(tiny_folder), "é你".encode(), b"caf\xe9", "-n", "9", "-s", "3", "--no-stream"]
    code, out, err = run(*args, env=env)
    assert code == 0
    assert b"Traceback" not in err and len(err.splitlines()) == 2
    assert_consists_of(out.decode(), [prompt + text for prompt, text in zip(prompts, expected, strict=True)])


# ---- interactive mode --------------------------------------------------------------------------------------------


def test_each_line_of_a_pipe_is_a_turn(tiny_cli, tiny):
    session = minigen.Session(*tiny, seed=4, max_tokens=6, ignore_eos=True)
    turns = ["one", "two é", "", "three"]
    continued = [[*session.turn(turn)][-1].completion for turn in turns]
    args = ["-i", "-n", 6, "-s", 4, "--ignore-eos"]
    stdin = "two é\r\n\nthree".encode()
    result = tiny_cli(*args, "one", stdin=stdin)
    assert_consists_of(result.out, [turn + done.text for turn, done in zip(turns, continued, strict=True)])
    assert len(result.err.splitlines()) == 1  # the header: who types into a pipe needs no prompt sign
    assert (result.code, result.out) == tiny_cli(*args, "one", "--no-stream", "-q", stdin=stdin)[:2]
    assert_consists_of(tiny_cli(*args, "--no-echo", stdin=b"one\n" + stdin).out, [done.text for done in continued])

    lines = [
        json.loads(line) for line in tiny_cli(*args, "--json", "one", stdin=stdin).out.removesuffix("\n").split("\n")
    ]
    assert [line["prompt"] for line in lines] == turns
    assert [line["token_ids"] for line in lines] == [done.token_ids for done in continued]
    assert [line["seed"] for line in lines] == [4, 5, 6, 7]
    assert tiny_cli(*args, stdin=b"") == (0, "", result.err)


def test_a_turn_that_cannot_be_run_and_a_new_text(tiny_cli, tiny):
    args = ["-i", "-n", 90, "-s", 4, "--ignore-eos", "--no-echo"]
    session = minigen.Session(*tiny, seed=4, max_tokens=90, ignore_eos=True)
    (first,) = [step.completion.text for step in session.turn("a") if step.completion]
    session.context = []
    (second,) = [step.completion.text for step in session.turn("a") if step.completion]
    result = tiny_cli(*args, "a", stdin=b"more\n/new\na\n")
    assert result.code == 2 and first != second  # nobody was typing who would have seen it
    assert_consists_of(result.out, [first, second])
    _, full, refused, full_again = result.err.splitlines()
    assert full == full_again and "/new" in full and "--context-shift" in full
    assert refused.startswith("minigen: ") and "--context-shift" in refused
    # With that, it goes on.
    on = tiny_cli(*args, "--context-shift", "a", stdin=b"more\nand more\n")
    assert on.code == 0 and len(on.out) > 3 * 80 and len(on.err.splitlines()) == 1


def test_what_does_not_go_with_interactive_mode(cli, tmp_path):
    for args, words in (
        (["a", "b"], ["number of prompts is 2", "--interactive"]),
        (["--prompt-cache", tmp_path / "x"], ["--prompt-cache", "--interactive"]),
        (["--num-return-sequences", 2], ["--num-return-sequences is 2"]),
        (["--trace", tmp_path / "x.html"], ["--trace", "--interactive"]),
        (["--show-probs"], ["--show-probs", "--interactive"]),
        (["--score", tmp_path / "x"], ["--interactive", "--score"]),
    ):
        assert_refused(cli("-i", *args), *words)


@posix_only
def test_interactive_mode_at_a_terminal():
    """Typed lines, Ctrl-C while the model writes and at the prompt sign, and Ctrl-D, as a terminal sends them."""
    import fcntl
    import pty
    import termios

    ours, theirs = pty.openpty()

    def own_terminal():
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def expect(pattern):
        nonlocal seen
        while not (found := re.search(pattern, seen, re.DOTALL)):
            assert select.select([ours], [], [], 60)[0], seen
            seen += os.read(ours, 1 << 16).decode()
        found, seen = seen[: found.end()], seen[found.end() :]
        return found

    def type_in(text):
        os.write(ours, text.encode())

    seen = ""
    terminal = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "preexec_fn": own_terminal}
    env = {"TERM": "dumb", "INPUTRC": os.devnull, "LC_ALL": "C"}
    with start("-i", "-n", "400", "--ignore-eos", "-s", "1", env=env, **terminal) as process:
        os.close(theirs)
        try:
            assert "Ctrl-D" in expect("\n> ")
            type_in("Once upon a time\n")
            expect(r"there was a little girl")
            type_in("\x03")
            assert len(expect("\n> ")) < 1200  # of some 1,600 letters that 400 tokens have
            # A signal between readline's prompt and its waiting for keys is seen by Python at the next key only.
            time.sleep(0.3)
            type_in("\x03")
            assert "Ctrl-C again" in expect("\n> ")
            type_in("The 漢 dog\n")  # had the first Ctrl-C ended the run, nobody would be there
            expect(r"The 漢 dog\r?\n[^\n]*\w\w\w")
            type_in("\x03")
            expect("\n> ")
            type_in("\x04")
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()
    os.close(ours)


# ---- pipes and signals -------------------------------------------------------------------------------------------


@posix_only
@pytest.mark.parametrize("more", [["-q"], []], ids=["quiet", "with header"])
def test_a_pipe_closed_by_its_reader(more):
    with start("Once upon a time", "-n", "300", "--ignore-eos", "-s", "1", *more) as process:
        assert process.stdout.read(20).startswith(b"Once upon a time")
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(timeout=60) in (0, 141)
    assert len(err.splitlines()) == (0 if more else 1), err  # the header


@posix_only
def test_text_comes_as_it_is_made_and_ctrl_c_ends_it():
    with start(
        "Once upon a time",
        "-n",
        "480",
        "--ignore-eos",
        "-s",
        "1",
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        chunks = [os.read(process.stdout.fileno(), 1 << 16) for _ in range(6)]
        assert process.poll() is None  # it is still running: nothing waited for a full buffer or for the end
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=60)
    out = b"".join(chunks) + rest
    assert all(chunks)
    assert process.returncode == 130
    assert out.startswith(b"Once upon a time") and out.endswith(b"\n") and not out.endswith(b"\n\n")
    text = "Once upon a time"
    for step in minigen.stream(*minigen.load(), text, max_tokens=480, ignore_eos=True, seed=1):
        text += step.text
        if len(text) > len(out) + 20:
            break
    assert len(b"Once upon a time") < len(out) < len(text.encode()) and text.encode().startswith(out[:-1])
    assert len(err.splitlines()) == 1, err  # the header; no traceback


@posix_only
def test_ctrl_c_again_and_again_and_a_trace_that_cannot_be_written(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    with start(
        "Once upon a time",
        *("-n", "480", "--ignore-eos", "--trace", str(folder / "page.html")),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        out = os.read(process.stdout.fileno(), 1 << 16)
        folder.rmdir()
        for _ in range(20):
            process.send_signal(signal.SIGINT)
            time.sleep(0.002)
        rest, err = process.communicate(timeout=60)
    assert process.returncode == 2 and (out + rest).endswith(b"\n")
    _, sentence = err.decode().splitlines()
    assert sentence.startswith("minigen: cannot write the trace") and "page.html" in sentence


@posix_only
@pytest.mark.parametrize("number, code", [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_during_the_imports(tmp_path, number, code):
    # A module in place of a real one that is imported on the way sends the signal, and then takes its time.
    (tmp_path / "tiktoken.py").write_text(
        f"import os, signal, time\nos.kill(os.getpid(), signal.{number})\ntime.sleep(30)\n"
    )
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    # As `python -m minigen`, and as the script that an installation makes.
    script = "import sys; from minigen.__main__ import main; sys.exit(main())"
    for command in (["-m", "minigen"], ["-c", script])[: 2 if number == "SIGINT" else 1]:
        done = subprocess.run(
            [sys.executable, *command, "hi"],
            env=env,
            capture_output=True,
            timeout=60,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        assert (done.returncode, done.stdout, done.stderr) == (code, b"", b"")


@posix_only
def test_sigterm_shows_the_text_so_far_and_leaves_no_half_written_file(tmp_path):
    # The signal comes when the bytes of the prompt cache are written, and the file has not got its name yet; and
    # then, in a second run, after some text.
    script = (
        "import os, signal, sys\n"
        "from minigen.__main__ import main\n"
        "os.fsync = lambda file: os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.exit(main())\n"
    )
    args = ["Once upon a time", "-n", "480", "--ignore-eos", "-s", "1", "--prompt-cache", str(tmp_path / "kv")]
    done = subprocess.run(
        [sys.executable, "-c", script, *args],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (143, b"", [])
    assert len(done.stderr.splitlines()) == 1  # the header
    with start(*args) as process:
        first = os.read(process.stdout.fileno(), 1 << 16)
        process.send_signal(signal.SIGTERM)
        rest, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert first.startswith(b"Once upon a time") and (first + rest).endswith(b"\n") and len(first + rest) < 1000
    assert len(err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["kv"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk():
    with open("/dev/full", "wb") as full:
        code, _, err = run("hi", "-n", "2", "-q", stdout=full)
    assert code == 2
    assert len(err.splitlines()) == 1 and err.startswith(b"minigen: ") and b"No space" in err
    assert b"cannot write the text" in err and b"Errno" not in err


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_closed_stream(tiny_folder, capsys, monkeypatch, name):
    monkeypatch.setattr(sys, name, None)  # what Python makes of `>&-` and of `2>&-`
    code = main(["--model", str(tiny_folder), "ab", "-n", "2", "--stop", "zz", "--logit-bias", "64+99"])
    assert isinstance(code, int)
    if name == "stderr":
        assert (code, capsys.readouterr().out) == (0, "abaa\n")


# ---- errors ------------------------------------------------------------------------------------------------------


def assert_refused(result, *words):
    """Exit code 2, nothing on stdout, and one line on stderr that names the words."""
    assert (result.code, result.out) == (2, "")
    assert len(result.err.splitlines()) == 1 and result.err.endswith("\n"), result.err
    assert result.err.startswith("minigen: ")
    for word in words:
        assert re.search(word, result.err), f"{word!r} is not in {result.err!r}"


@pytest.mark.parametrize(
    "args, words",
    [
        (["--temperature", "-1"], ["temperature", "-1"]),
        (["--temp", "nan"], ["--temp is nan"]),
        (["--temperature", "hot"], ["temperature", "hot"]),
        (["--top-k", "-1"], ["top.k", "-1"]),
        (["--top-k", "2.5"], ["top.k", "2.5"]),
        (["--top-p", "abc"], ["top.p", "abc"]),
        (["--top-p", "1.5"], ["top.p", "1.5"]),
        (["--min-p", "1.5"], ["min.p", "1.5"]),
        (["--typical-p", "0"], ["typical.p", "0"]),
        (["--repetition-penalty", "0"], ["repetition.penalty", "0"]),
        (["--presence-penalty", "inf"], ["presence.penalty", "inf"]),
        (["--frequency-penalty", "nan"], ["frequency.penalty", "nan"]),
        (["--no-repeat-ngram-size", "-2"], ["no.repeat.ngram.size", "-2"]),
        (["-n", "-1"], ["-n is -1"]),
        (["-n", "many"], ["-n: ", "many"]),
        (["--max-new-tokens", "1.5"], ["1.5"]),
        (["--min-tokens", "-3"], ["min.tokens", "-3"]),
        (["--num-return-sequences", "0"], ["num.return.sequences", "0"]),
        (["--seed", "-1"], ["seed", "-1"]),
        (["--stop", ""], ["stop"]),
        (["--logit-bias", "5"], ["logit.bias", "5"]),
        (["--logit-bias", "5+much"], ["logit.bias", "much"]),
        (["--window", "0"], ["window", "0"]),
        (["--keep", "-1"], ["keep", "-1"]),
        (["--logprobs", "-1"], ["logprobs", "-1"]),
        (["--num-beams", "0"], ["num.beams", "0"]),
        (["--num-beams", "2", "--length-penalty", "nan"], ["length.penalty", "nan"]),
        (["--num-beams", "2", "--early-stopping", "maybe"], ["early.stopping", "maybe"]),
        (["--num-beams", "2", "--temperature", "0.5"], ["temperature", "beam"]),
        (["--draft-model", "other", "--num-draft-tokens", "0"], ["num.draft.tokens", "0"]),
        (["--draft-model", "other", "--num-draft-tokens", "few"], ["num.draft.tokens", "few"]),
        (["--prompt-lookup-num-tokens", "-1"], ["prompt.lookup.num.tokens", "-1"]),
        (["--prompt-lookup-num-tokens", "2", "--max-matching-ngram-size", "0"], ["max.matching.ngram.size", "0"]),
        (["--nonsense"], ["--nonsense"]),
        (["--max-tok", "3"], ["--max-tok"]),  # no abbreviations: they would break when options are added
        (["--top-k"], ["top-k"]),
        (["--logits-processors", "x"], ["--logits-processors"]),
        (["--eos-ids", "5"], ["--eos-ids"]),
    ],
    ids=" ".join,
)
def test_bad_options_are_refused_before_the_model_is_loaded(cli, args, words):
    result = cli("--model", NO_MODEL, "hello", *args)
    assert_refused(result, *words)
    assert NO_MODEL not in result.err


@pytest.mark.parametrize(
    "args, sentence",
    [
        # By the name that was typed, and never by the keyword of the Python API.
        (["--temp", "-1"], "--temp is -1.0; it must be a number of 0 or more"),
        (["--temp=-1"], "--temp is -1.0;"),
        (["-n-1"], "--max-tokens is -1; it must be a whole number of 0 or more\n"),
        (["--n-predict", "x"], "--n-predict: 'x' is not a whole number"),
        (["--top-p", "x"], "--top-p: 'x' is not a number"),
        (["--seed", "-1"], "--seed is -1; it must be a whole number of 0 or more\n"),
        (["--keep", "3"], "--keep is 3, but only --context-shift uses it"),
        (["--num-beams", "2", "--context-shift"], "--context-shift cannot be given with beam search"),
        (["--no-cache", "--draft-model", "x"], "--no-cache cannot be given with speculation"),
        (
            ["--num-return-sequences", "3", "--num-beams", "2"],
            "--num-return-sequences is 3; it must be at most --num-beams, 2",
        ),
        (["--stop", ""], "--stop is ''; it must be"),
        # What was meant.
        (["--tempreature", "1"], "--tempreature: did you mean --temperature?"),
        (["--repeat-penaltyy=1"], "--repeat-penaltyy: did you mean --repeat-penalty?"),
        (["--top_p", "1"], "--top_p: did you mean --top-p?"),
        (["-x"], "-x: a prompt that begins so stands after --"),
        (["--json=1"], "--json: takes no value; leave '1' out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_speak_of_options_as_they_were_typed(cli, args, sentence):
    result = cli("--model", NO_MODEL, "hello", *args)
    assert_refused(result)
    assert sentence in result.err
    assert not re.search(r"\b(?<!--)[a-z]+_[a-z]|None|True|False", result.err)


def test_models_that_cannot_be_loaded(cli, tmp_path, tiny_folder):
    assert_refused(cli("--model", NO_MODEL, "hello"), NO_MODEL)
    assert_refused(cli("--model", "nonesuch", "hello"), "nonesuch", "fairytale")
    assert_refused(cli("--model", tiny_folder / "config.json", "hello"), "config.json", "folder")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert_refused(cli("--model", empty, "hello"), "empty", r"config\.json")
    only_pickle = write_byte_vocab(tmp_path / "pickle")
    (only_pickle / "config.json").write_text(json.dumps(tiny_config(vocab_size=257)))
    (only_pickle / "pytorch_model.bin").write_bytes(b"")
    assert_refused(cli("--model", only_pickle, "hello"), r"model\.safetensors", r"pytorch_model\.bin")
    (only_pickle / "config.json").write_text('{"n_layer": "two"}')
    assert_refused(cli("--model", only_pickle, "hello"), r"config\.json", "n_layer", "two")
    (only_pickle / "config.json").write_text("{")
    assert_refused(cli("--model", only_pickle, "hello"), r"config\.json")


def test_prompts_that_are_not_there(tiny_cli, tmp_path):
    missing = tmp_path / "missing.txt"
    assert_refused(tiny_cli("-f", missing), r"missing\.txt")
    assert_refused(tiny_cli("--prompts-file", missing), r"missing\.txt")
    assert_refused(tiny_cli("-f", tmp_path), "directory")
    assert_refused(tiny_cli("-f", ""), "name of the file is ''", "stdin")
    names = tmp_path / "top_p.txt"  # is no option
    assert_refused(tiny_cli("--prompts-file", names), r"top_p\.txt")
    (tmp_path / "there.txt").write_text("there")
    assert_refused(tiny_cli("a prompt", "-f", tmp_path / "there.txt"), "file")
    assert_refused(tiny_cli("-f", tmp_path / "there.txt", "--prompts-file", tmp_path / "there.txt"), "file")


def test_a_file_without_a_line_has_no_prompts(tiny_cli, tmp_path):
    (tmp_path / "empty.txt").write_bytes(b"")
    assert_refused(tiny_cli("--prompts-file", tmp_path / "empty.txt"), "prompt")


def test_nobody_has_typed_or_piped_a_prompt(cli):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stdin in (Terminal(), None):
        assert_refused(cli("--model", NO_MODEL, stdin=stdin), "prompt")


def test_prompts_too_long_for_the_model(tiny_cli, tmp_path):
    """K08: the same refusal on every way that a prompt can come."""
    text = "x" * 65
    (tmp_path / "long.txt").write_text(text)
    (tmp_path / "lines.txt").write_text(f"short\n{text}\n")
    words = [r"\b65\b", r"\b64\b"]
    assert_refused(tiny_cli(text), *words)
    assert_refused(tiny_cli("short", text, "-n", 0), *words)
    assert_refused(tiny_cli("-f", tmp_path / "long.txt"), *words)
    assert_refused(tiny_cli("--prompts-file", tmp_path / "lines.txt"), *words)
    assert_refused(tiny_cli(stdin=text.encode()), *words)
    assert_refused(tiny_cli("-", stdin=text.encode()), *words)
    assert_refused(tiny_cli(text, "--context-shift", "--json"), *words)
    assert tiny_cli("x" * 64, "-n", 1).code == 0


def test_options_that_the_model_refuses(tiny_cli):
    assert_refused(tiny_cli("a", "--context-shift", "--keep", 32), "keep", r"\b32\b", r"\b64\b")
    assert_refused(tiny_cli("a", "--logit-bias", "257+1"), "--logit-bias", "257")
    assert_refused(tiny_cli("a", "--logit-bias", "two=1"), "--logit-bias", "two")


def test_an_error_after_some_text(tiny_cli):
    """With no token allowed twice, a vocabulary of 256 bytes is soon used up."""
    result = tiny_cli("a", "-n", 400, "--no-repeat-ngram-size", 1, "--ignore-eos", "--context-shift", "-s", 1)
    assert result.code == 2
    assert result.out.startswith("a") and result.out.endswith("\n") and len(result.out) > 100
    _, error = result.err.splitlines()  # after the header
    assert error.startswith("minigen: ") and re.search(r"\b256\b", error)


def test_the_exit_code_of_a_process():
    start_time = time.perf_counter()
    result = run("hello", "--model", NO_MODEL)
    assert (result.code, result.out) == (2, b"")
    assert len(result.err.splitlines()) == 1
    assert time.perf_counter() - start_time < 20


def test_a_closed_stdin_that_is_asked_for(tiny_folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    for arguments in (["-"], ["-f", "-"], []):
        assert main(["--model", str(tiny_folder), *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == "" and len(err.splitlines()) == 1
        assert "stdin" in err or not arguments


def test_too_much_memory(tiny_cli, monkeypatch):
    def full(*args, **kwargs):
        raise MemoryError("Unable to allocate 7 TiB")

    monkeypatch.setattr("minigen.engine.decode.new_cache", full)
    result = tiny_cli("hi", "-q")
    assert (result.code, result.out) == (2, "")
    assert len(result.err.splitlines()) == 1 and "memory" in result.err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_behind_stderr():
    with open("/dev/full", "wb") as full:
        code, out, _ = run("hi", "-n", "2", "--seed", "1", stderr=full)
    assert code == 0 and out.startswith(b"hi")


def test_interrupted_without_streaming_shows_the_text_so_far(tiny_folder, capsys, monkeypatch):
    def interrupted(*args, **kwargs):
        for number, step in enumerate(minigen.stream(*args, **kwargs)):
            if number == 3:
                raise KeyboardInterrupt
            yield step

    monkeypatch.setattr("minigen.command.main.stream", interrupted)
    arguments = ["--model", str(tiny_folder), "ab", "-n", "9", "--logit-bias", "64+99", "-q"]
    assert main(arguments) == 130
    streamed = capsys.readouterr().out
    assert main([*arguments, "--no-stream"]) == 130
    assert capsys.readouterr().out == streamed == "abaaa\n"
