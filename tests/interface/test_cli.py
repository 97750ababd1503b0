"""The command line: what goes to stdout and what to stderr, where prompts come from, how runs end, what errors say.

Most tests call minigen.command.main.main in this process; what hangs on pipes, signals, locales or the interpreter's
exit runs `python -m minigen` as a user would. The expected text is that of minigen.generate, which
test_decode.py judges.
"""

import contextlib
import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import minigen
from minigen.command.arguments import FLAGS, GROUPS
from minigen.command.main import main
from tests.conftest import Result

ROOT = Path(__file__).resolve().parents[2]
NO_MODEL = "/nonexistent/model"
posix_only = pytest.mark.skipif(os.name != "posix", reason="signals and pipes as POSIX has them")


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


def test_text_on_stdout_and_the_rest_on_stderr(cli):
    code, out, err = cli("Once upon a time", "-n", "12", "--seed", "1")
    (text,) = texts(minigen.load(), "Once upon a time", max_tokens=12, seed=1)
    assert (code, out) == (0, f"Once upon a time{text}\n")
    header, closing = err.splitlines()
    for shown in ("minigen", "fairytale", "temperature 0.7", "top_p 0.9", "max_tokens 12", "seed 1"):
        assert shown in header
    for shown in ("4 tokens", "12 tokens", "length"):
        assert shown in closing


@pytest.mark.slow
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
    result = tiny_cli("ab", *args, "--ignore-eos", "--no-cache")
    assert result.code == 0
    header = result.err.splitlines()[0]
    assert str(tiny_folder) in header
    for name, value in given.items():
        shown = {"stop": r".*%%", "logit_bias": r".*11.*-2\.5"}.get(name, " " + re.escape(str(value)) + r"\b")
        assert re.search(rf"\b{name}{shown}", header), name
    assert "ignore_eos True" in header and "use_cache False" in header


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


@pytest.mark.slow
@pytest.mark.parametrize("more", [["--num-return-sequences", "2"], ["--stop", "Z", "--stop", "\ufffd"]], ids=str)
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


def test_log_probabilities_of_several_texts_have_headings(tiny_cli):
    args = ["-n", 2, "-s", 2, "--ignore-eos", "-q"]
    _, _, err = tiny_cli("abc", "de", *args, "--logprobs", 1)
    headings = [line for line in err.splitlines() if not re.match(r" *-\d", line)]
    assert [line.partition(":")[0] for line in headings] == ["text 1 of 2", "text 2 of 2"]
    assert err.startswith(headings[0]) and err.splitlines()[3] == headings[1]
    _, _, err = tiny_cli("abc", "de", *args, "--show-probs")
    headings = [line for line in err.splitlines() if not re.match(r" *\d", line)]
    assert all(re.match(r"text [12] of 2: unlikely tokens", line) for line in headings) and len(headings) == 2


def test_the_seed_is_printed_if_something_is_drawn(tiny_cli):
    assert "seed 7" in tiny_cli("ab", "-n", 1, "-s", 7).err
    for more in (["--temperature", 0], ["--num-beams", 2]):
        result = tiny_cli("ab", "-n", 1, "-s", 7, "--json", *more)
        assert not {"seed", "top_p"} & set(result.err.split()) and json.loads(result.out)["seed"] == 7
        assert "seed" not in tiny_cli("ab", "-n", 1, *more).err


@pytest.mark.slow
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
    args = ["abc", "-q", "--ignore-eos", "--max-tokens", "9", "--temperature", "1", "--seed", "1"]
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


@pytest.mark.slow
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
    for default in (
        "default 0.7",
        "default 0.9, 1 is off",
        "default 100",
        "default false",
        "default 0, off",
        "fairytale",
    ):
        assert default in shown
    lines = result.out.splitlines()
    assert max(map(len, lines)) <= 80
    groups = [line.removesuffix(":") for line in lines if re.fullmatch(r"\w[\w ]+:", line)]
    assert groups == [*GROUPS, "examples"]
    names = {flag for line in lines for flag in re.findall(r"^  (?:-\w, )?(--[\w-]+)", line)}
    assert names == set(FLAGS.values())
    for term in ("greedy decoding", "nucleus sampling", "speculative decoding", "perplexity", "beam search", "n-gram"):
        assert term in shown
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
    ("\ufeffé你😀\r\nb\r\n".encode("utf-16-le"), "é你😀\r\nb"),
    ("\ufeffé你😀\n".encode("utf-16-be"), "é你😀"),
    ("\ufeffab".encode("utf-16-le") + b"c", "ab\ufffd"),
]


@pytest.mark.parametrize("data, prompt", CONTENTS)
def test_a_prompt_from_a_file_or_stdin(tiny_cli, tmp_path, data, prompt):
    """C07, F12: line breaks, byte order marks and CRLF of files and stdin; UTF-16 with a byte order mark."""
    (tmp_path / "prompt.txt").write_bytes(data)
    options = ["-n", 1, "--json", "-q"]
    assert prompts_of(tiny_cli("--file", tmp_path / "prompt.txt", *options)) == [prompt]
    assert prompts_of(tiny_cli(*options, stdin=data)) == [prompt]


@pytest.mark.parametrize(
    "data, prompts",
    [
        (b"one\ntwo\n", ["one", "two"]),
        (b"\xef\xbb\xbfone\r\ntwo\r\n\r\nfour", ["one", "two", "", "four"]),
        (b"caf\xe9\n\xc3\xa9\n", ["caf\ufffd", "é"]),
        ("\ufeffone\r\né\r\n".encode("utf-16-le"), ["one", "é"]),
        # Form feeds, next-line and line separators are characters of a line, not its end.
        ("a\x0cb\x85c\u2028d\u2029e\x1cf\n".encode(), ["a\x0cb\x85c\u2028d\u2029e\x1cf"]),
        *((newline * n, [""] * n) for newline in (b"\n", b"\r\n") for n in (1, 2)),
    ],
)
def test_each_line_of_a_file_is_a_prompt(tiny_cli, tmp_path, data, prompts):
    """F28: an empty line is an empty prompt, also if it is the only one. F12: and of one in UTF-16."""
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


@posix_only
@pytest.mark.slow
def test_utf8_in_the_c_locale_and_bytes_that_are_not(tiny_folder, tiny):
    """T04, T09: bytes that are not UTF-8, typed and piped; files opened in the locale's encoding."""
    prompts = ["é你", "caf\ufffd", "caf\ufffd \ufffd"]
    expected = texts(tiny, prompts, max_tokens=9, seed=3)
    env = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    args = [os.fsencode(tiny_folder), "é你".encode(), b"caf\xe9", "-", "-n", "9", "-s", "3", "--no-stream"]
    code, out, err = run("--model", *args, env=env, stdin=b"\xef\xbb\xbfcaf\xe9 \xff\r\n")
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
    assert [line["seed"] for line in lines] == [4, 4, 4, 4]
    assert tiny_cli(*args, stdin=b"") == (0, "", result.err)


@pytest.mark.slow
def test_a_turn_that_cannot_be_run_and_a_new_text(tiny_cli, tiny):
    args = ["-i", "-n", 90, "-s", 4, "--ignore-eos", "--no-echo"]
    session = minigen.Session(*tiny, seed=4, max_tokens=90, ignore_eos=True)
    (first,) = [step.completion.text for step in session.turn("a") if step.completion]
    session.context = []
    session.seed += 1
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
        (["a", "b"], ["number of prompts is 2", "-i"]),
        (["--prompt-cache", tmp_path / "x"], ["--prompt-cache", "-i"]),
        (["--num-return-sequences", 2], ["--num-return-sequences is 2"]),
        (["--trace", tmp_path / "x.html"], ["--trace", "-i"]),
        (["--show-probs"], ["--show-probs", "-i"]),
        (["--score", tmp_path / "x"], ["-i", "--score"]),
    ):
        assert_refused(cli("-i", *args), *words)


def test_commands_of_interactive_mode(tiny_cli):
    args = ["-i", "-n", 3, "-s", 4, "--ignore-eos", "-q"]
    first = tiny_cli(*args, stdin=b"one\n").out
    for leave in (b"/quit", b"quit", b"exit ", b"/exit"):
        assert tiny_cli(*args, stdin=b"one\n" + leave + b"\ntwo\n") == (0, first, "")
    # An unknown command is not part of the text, and nothing that only looks like one is refused.
    wrong = tiny_cli(*args, stdin=b"/nwe\none\n/help me\n")
    assert wrong.code == 2 and wrong.out == first
    refused, shown = wrong.err.split("\n", 1)
    assert refused.startswith("minigen: there is no command /nwe: ") and "/help" in refused
    assert all(command in shown for command in ("/new", "/help", "/quit", "Ctrl-D"))
    for text in (b"I quit", b"exit, left", b"/usr/bin", b" /new", b"1/2", b"quitter"):
        assert tiny_cli(*args, stdin=text + b"\n").out.startswith(text.decode())
    assert tiny_cli(*args, "quit", stdin=b"").out.startswith("quit")  # a prompt is a text


@posix_only
@pytest.mark.slow
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
            expect(r"there was a little")
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
@pytest.mark.slow
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
@pytest.mark.slow
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
@pytest.mark.slow
@pytest.mark.parametrize(
    "number, code, command",
    [  # as the script that an installation makes, and as `python -m minigen`
        ("SIGINT", 130, ["-c", "import sys; from minigen.__main__ import main; sys.exit(main())"]),
        ("SIGTERM", 143, ["-m", "minigen"]),
    ],
)
def test_a_signal_during_the_imports(tmp_path, number, code, command):
    # A module in place of a real one that is imported on the way sends the signal, and then takes its time.
    (tmp_path / "tiktoken.py").write_text(
        f"import os, signal, time\nos.kill(os.getpid(), signal.{number})\ntime.sleep(30)\n"
    )
    done = subprocess.run(
        [sys.executable, *command, "hi"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, b"", b"")


def test_what_is_imported_before_the_signal_handlers_is_little():
    """F18: Ctrl-C during the first imports: until there are handlers it prints a traceback."""
    script = "import sys, minigen.command.signals; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-S", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert {"minigen", "signal"} < (found := set(done.stdout.split())), done.stderr
    assert found.isdisjoint({"re", "typing", "argparse", "contextlib", "numpy"})


@posix_only
@pytest.mark.slow
def test_sigterm_shows_the_text_so_far_and_leaves_no_half_written_file(tmp_path):
    args = ["Once upon a time", "-n", "480", "--ignore-eos", "-s", "1", "--prompt-cache", str(tmp_path / "kv")]
    with start(*args) as process:
        first = os.read(process.stdout.fileno(), 1 << 16)
        process.send_signal(signal.SIGTERM)
        rest, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert first.startswith(b"Once upon a time") and (first + rest).endswith(b"\n") and len(first + rest) < 1000
    assert len(err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["kv"]


NO_FULL_DISK = not os.path.exists("/dev/full")
MODES = [["hi", "-n", "2", "-q"], ["--score", str(ROOT / "pyproject.toml"), "-q"], ["--help"], ["--version"]]


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def full_disk():
    return "/dev/full"


LOST = [(full_disk, 2, "minigen: cannot write to stdout: No space left on device\n"), (closed_pipe, 141, "")]


@pytest.mark.skipif(NO_FULL_DISK, reason="needs /dev/full")
@pytest.mark.parametrize("target, code, sentence", LOST, ids=["full disk", "closed pipe"])
@pytest.mark.parametrize("args", MODES, ids=" ".join)
def test_output_that_is_lost(cli, tiny_folder, monkeypatch, args, target, code, sentence):
    """F11: output that cannot be written is an error in every mode."""
    stdout = open(target(), "w", encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert cli("--model", tiny_folder, *args) == (code, "", sentence)
    with contextlib.suppress(OSError):
        stdout.close()


@pytest.mark.slow
@pytest.mark.skipif(NO_FULL_DISK, reason="needs /dev/full")
@pytest.mark.parametrize("lost, args, env", [(LOST[0], MODES[0], {}), (LOST[1], MODES[3], {"PYTHONUNBUFFERED": "1"})])
def test_output_that_is_lost_at_the_exit_of_a_process(lost, args, env):
    """F11: the exit code is right after the interpreter's own last flush."""
    target, code, sentence = lost
    with open(target(), "wb") as stdout:
        assert run(*args, stdout=stdout, env=env) == (code, None, sentence.encode())


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sets the size of a pipe")
def test_a_pipe_that_does_not_block(tiny_cli, tiny_folder, tmp_path):
    """F13: all of the output arrives, however late it is read."""
    import fcntl

    (tmp_path / "text").write_text("Once upon a time there was a fox. " * 40)
    args = ["--score", str(tmp_path / "text"), "--logprobs", "0", "-q"]
    expected = tiny_cli(*args).out.encode()
    args += ["--model", str(tiny_folder)]
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writer, False)
    with start(*args, stdout=writer) as process, open(reader, "rb") as pipe:
        os.close(writer)
        while select.select([reader], [], [], 0.2)[0] == []:  # the first page is there
            assert process.poll() is None
        time.sleep(0.5)
        out = pipe.read()
        assert process.wait(timeout=60) == 0
    assert len(expected) > 20_000 and out == expected


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_closed_stream(tiny_folder, capsys, monkeypatch, name):
    monkeypatch.setattr(sys, name, None)  # what Python makes of `>&-` and of `2>&-`
    code = main(["--model", str(tiny_folder), "ab", "-n", "2", "--stop", "zz", "--logit-bias", "64+99"])
    if name == "stderr":
        assert (code, capsys.readouterr().out) == (0, "abaa\n")
    else:
        assert code == 2 and "minigen: cannot write to stdout: it is closed\n" in capsys.readouterr().err


# ---- errors ------------------------------------------------------------------------------------------------------


def assert_refused(result, *words):
    """Exit code 2, nothing on stdout, and one line on stderr that names the words."""
    assert (result.code, result.out) == (2, "")
    assert len(result.err.splitlines()) == 1 and result.err.endswith("\n"), result.err
    assert result.err.startswith("minigen: ")
    for word in words:
        assert re.search(word, result.err), f"{word!r} is not in {result.err!r}"


@pytest.mark.parametrize(
    "args, sentence",
    [
        # By the flag that was typed, and never by the keyword of the Python API.
        (["--temp", "-1"], "--temp is -1.0; it must be a number of 0 or more"),
        (["--temp=-1"], "--temp is -1.0;"),
        (["-n-1"], "-n is -1; it must be a whole number of 0 or more\n"),
        (["--n-predict", "x", "--max-new-tokens", "3"], "--max-new-tokens is 'x'; it must be a whole number"),
        (["--trace", ""], "--trace is ''; it must be the name of a file\n"),
        (["--prompt-cache="], "--prompt-cache is ''; it must be the name of a file\n"),
        (["--stop", "a", "--stop", ""], "--stop is ''; it must be"),
        (["--logit-bias", "5"], "--logit-bias is '5'; it must be ID+BIAS, ID-BIAS or TEXT=BIAS"),
        (["--logit-bias", "5+much"], "--logit-bias is '5+much'; it must be ID+BIAS"),
        (["--logit-bias", "5+nan"], "--logit-bias of token 5 is nan; it must be a number"),
        # What was meant.
        (["--tempreature", "1"], "--tempreature: did you mean --temperature?"),
        (["--repeat-penaltyy=1"], "--repeat-penaltyy: did you mean --repeat-penalty?"),
        (["--top_p", "1"], "--top_p: did you mean --top-p?"),
        (["--max-tok", "3"], "--max-tok: did you mean --max-tokens?"),  # abbreviations would break with new options
        (["--max"], "--max: did you mean --max-tokens?"),
        (["--greedy"], "--greedy: use --temperature 0"),
        (["--max-length", "5"], "--max-length: use --max-tokens"),
        (["--prompt", "x"], "--prompt: give the prompt without an option"),
        (["-p", "x"], "-p: give the prompt without an option"),
        (["-x"], "-x: to use it as a prompt, put it after --"),
        (["--logits-processors", "x"], "there is no option --logits-processors"),
        (["--eos-ids", "5"], "there is no option --eos-ids"),
        (["--json=1"], "--json takes no value"),
        (["-q5"], "--quiet takes no value"),
        (["--top-k"], "--top-k needs a value"),
        (["-n"], "-n needs a value"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_name_options_as_they_were_typed(cli, args, sentence):
    result = cli("--model", NO_MODEL, "hello", *args)
    assert_refused(result)
    assert sentence in result.err and NO_MODEL not in result.err
    assert not re.search(r"\b(?<!--)[a-z]+_[a-z]|None|True|False", result.err.replace("--top_p", ""))


def test_models_that_cannot_be_loaded(cli, tmp_path, tiny_folder):
    assert_refused(cli("--model", NO_MODEL, "hello"), NO_MODEL)
    assert_refused(cli("--model", tiny_folder / "config.json", "hello"), "config.json", "folder")
    (tmp_path / "config.json").write_text('{"n_layer": "two"}')
    assert_refused(cli("--model", tmp_path, "hello"), r"config\.json", "n_layer", "two")


def test_prompts_that_are_not_there(tiny_cli, tmp_path):
    missing = tmp_path / "missing.txt"
    assert_refused(tiny_cli("-f", missing), r"missing\.txt")
    assert_refused(tiny_cli("--prompts-file", missing), r"missing\.txt")
    assert_refused(tiny_cli("-f", tmp_path), "directory")
    assert_refused(tiny_cli("-f", ""), "-f is '';", "name of a file", "stdin")
    names = tmp_path / "top_p.txt"  # is no option
    assert_refused(tiny_cli("--prompts-file", names), r"top_p\.txt")
    (tmp_path / "there.txt").write_text("there")
    assert_refused(tiny_cli("a prompt", "-f", tmp_path / "there.txt"), "file")
    assert_refused(tiny_cli("-f", tmp_path / "there.txt", "--prompts-file", tmp_path / "there.txt"), "file")


def test_a_file_without_a_line_has_no_prompts(tiny_cli, tmp_path):
    for data in (b"", b"\xef\xbb\xbf"):
        (tmp_path / "empty.txt").write_bytes(data)
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
    assert tiny_cli(text, "--context-shift", "-n", 1).code == 0  # the oldest half is dropped then
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


def test_a_closed_stdin_that_is_asked_for(tiny_folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    for arguments in (["-"], ["-f", "-"], []):
        assert main(["--model", str(tiny_folder), *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == "" and len(err.splitlines()) == 1
        assert "stdin" in err or not arguments


@pytest.mark.parametrize("error, told", [(MemoryError("7 TiB"), "7 TiB"), (MemoryError(), "none left")])
def test_too_much_memory(tiny_cli, monkeypatch, error, told):
    def full(*args, **kwargs):
        raise error

    monkeypatch.setattr("minigen.engine.decode.Run.new_cache", full)
    assert_refused(tiny_cli("hi", "-q"), rf"not enough memory for this \({told}\);")


def test_more_texts_than_the_memory_holds(tiny_cli, tmp_path, monkeypatch):
    """F17: the sentence names what asks for too many of them."""
    monkeypatch.setattr(os, "sysconf", lambda name: 1000, raising=False)  # pages, and bytes of each
    (tmp_path / "prompts").write_text("a\n" * 1000)
    assert_refused(tiny_cli("--prompts-file", tmp_path / "prompts"), "the number of prompts is 1000, but keys, values")
    assert_refused(tiny_cli("a", "--num-return-sequences", 900), "--num-return-sequences is 900, but keys, values")
    assert_refused(tiny_cli("a", "--num-beams", 900), "--num-beams is 900, but keys, values")


def test_a_stream_that_is_not_a_file(tiny_folder, monkeypatch):
    """F18: `main` with a StringIO as stdout and stderr."""
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert main(["--model", str(tiny_folder), "ab", "-n", "2", "--logit-bias", "64+99"]) == 0
    assert sys.stdout.getvalue() == "abaa\n" and "max_tokens 2" in sys.stderr.getvalue()


@pytest.mark.skipif(NO_FULL_DISK, reason="needs /dev/full")
def test_a_full_disk_behind_stderr(tiny_cli, monkeypatch):
    stderr = open("/dev/full", "w", encoding="utf-8")
    monkeypatch.setattr(sys, "stderr", stderr)
    assert tiny_cli("ab", "-n", 2, "--logit-bias", "64+99") == (0, "abaa\n", "")
    with contextlib.suppress(OSError):
        stderr.close()


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


# ---- faults of files and terminals -------------------------------------------------------------------------------


def test_utf_16_is_scored_as_its_text_and_refused_by_interactive_mode(tiny_cli, tmp_path):
    """F12: UTF-16, as PowerShell writes it."""
    (tmp_path / "utf-8").write_text("a fox", encoding="utf-8")
    (tmp_path / "utf-16").write_text("\ufeffa fox\r\n", encoding="utf-16-le", newline="")
    scores = [tiny_cli("--score", tmp_path / name, "-q").out for name in ("utf-8", "utf-16")]
    assert scores[0] == scores[1] != ""
    assert_refused(tiny_cli("-i", "-q", stdin="\ufeffa\n".encode("utf-16-le")), "UTF-16", "UTF-8")


def test_files_without_an_end(tiny_cli, tmp_path):
    """F18: a huge or endless file is refused before it fills the memory."""
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(2**40)
    for path in [tmp_path / "sparse"] + [Path("/dev/zero")] * os.path.exists("/dev/zero"):
        for option in ("-f", "--prompts-file", "--score"):
            assert_refused(tiny_cli(option, path), f"{path} has more than 64 MiB")


@posix_only
def test_a_stdin_for_writing_and_a_deleted_working_directory(cli, tiny_folder, tmp_path, monkeypatch):
    """F17: the sentence names what cannot be read."""
    with open(os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT)) as stdin:
        assert cli("-m", tiny_folder, "-q", stdin=stdin) == (2, "", "minigen: cannot read stdin: Bad file descriptor\n")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    os.rmdir(tmp_path / "gone")
    code, out, err = cli("-m", tiny_folder, "hi", "-q", "-n", "1", "--prompt-cache", "kv")
    assert (code, out) == (2, "") and "write the text" not in err
    assert re.fullmatch(r"minigen: .*(directory|kv).*: No such file or directory.*\n", err), err


def test_a_trace_over_a_file_of_the_model(cli, tiny_folder, tmp_path):
    """F18: --trace does not overwrite what the run reads."""
    merges = tiny_folder / "merges.txt"
    before = merges.read_bytes()
    (tmp_path / "link").symlink_to(merges)
    for path in (merges, tmp_path / "link"):
        assert_refused(cli("-m", tiny_folder, "a", "--trace", path), "--trace is", "a file of the model")
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("a")
    assert_refused(cli("-m", tiny_folder, "-f", prompt, "--trace", prompt), "--trace is", "also -f")
    assert (merges.read_bytes(), prompt.read_text()) == (before, "a")


def test_control_characters_in_messages_are_shown_as_symbols(cli, tmp_path):
    """F18: escape sequences of names do not reach the terminal."""
    folder = tmp_path / "a\x1b]0;title\x07b\nc"
    folder.mkdir()
    result = cli("-m", folder, "hello")
    assert result.code == 2 and "␛]0;title␇b c" in result.err and "\x1b" not in result.err


@posix_only
@pytest.mark.parametrize("more", [[], ["--no-stream"], ["--json"], ["--show-probs"]], ids=str)
def test_control_characters_are_shown_as_symbols_on_a_terminal(cli, tiny_folder, tmp_path, monkeypatch, more):
    """F18: what a model or a prompts file contains cannot move the cursor; a pipe gets the bytes."""
    import pty

    (tmp_path / "prompts").write_bytes("x\x1b[2Jy\tz\x7f\x9b\r\n".encode())
    args = ["--model", str(tiny_folder), "--prompts-file", str(tmp_path / "prompts"), "-n", "2", "-q", *more]
    args += ["--logit-bias", "\x1b=90"]
    piped = cli(*args).out
    assert ("\\u001b" if "--json" in more else "\x1b[2Jy\tz\x7f\x9b\x1b\x1b") in piped
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with open(theirs, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        assert cli(*args).code == 0
        out = b""
        while not out.endswith(b"\n"):
            out += os.read(ours, 1 << 16)
    os.close(ours)
    text, n_styles = re.subn(r"\x1b\[[\d;]*m", "", out.decode())
    assert (n_styles > 0) == ("--show-probs" in more)
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", text)
    if "--json" not in more:
        assert text.replace("\r\n", "\n") == "x␛[2Jy\tz␡\ufffd␛␛\n"
