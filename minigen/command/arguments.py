"""Command-line parsing: options (argparse), --help, and where prompts come from."""

import argparse
import codecs
import contextlib
import difflib
import os
import re
import shutil
import sys
import textwrap
from dataclasses import dataclass
from typing import NamedTuple

from minigen.engine.validation import is_int
from minigen.files.hub import DEFAULT_MODEL
from minigen.options import BIAS, OPTIONS, SWITCH, Config, Kind, check_conflicts, declared, option, whole

NAME = Kind("a name", lambda value: isinstance(value, str))
FILE = Kind("the name of a file", lambda value: isinstance(value, str) and value)
INPUT = FILE._replace(allowed="the name of a file, or - for stdin")
STRIDE = whole(1)._replace(contains=is_int)  # its range depends on the model
MAX_BYTES = 2**26  # the most that is read from a file: no longer text fits a model, or can be scored within a day


@dataclass(frozen=True)
class CommandConfig(Config):
    """The options that only the command has."""

    # fmt: off
    model: str | None = option(None, NAME, "NAME", "model", None, "-m",
        help=f"checkpoint folder, name or Hugging Face Hub id (default {DEFAULT_MODEL})")
    file: str | None = option(None, INPUT, "FILE", "prompt", None, "-f",
        help="continue the text of a file")
    prompts_file: str | None = option(None, INPUT, "FILE", "prompt",
        help="continue each line of a file")
    interactive: bool = option(False, SWITCH, None, "prompt", None, "-i",
        help="read a line, continue it, read the next; /help lists the commands")
    speculative: bool = option(False, SWITCH, None, "speculative decoding",
        help="the model's default draft model proposes tokens, the model verifies them")
    draft_model: str | None = option(None, NAME, "NAME", "speculative decoding",
        help="this smaller model proposes tokens, the model verifies them")
    prompt_cache: str | None = option(None, FILE, "FILE", "cache",
        help="save the prompt's K/V cache; the next run reuses what its prompt has in common")
    json: bool = option(False, SWITCH, None, "output",
        help="print each text as one line of JSON, with ids and timings")
    show_probs: bool = option(False, SWITCH, None, "output",
        help="on a terminal, colour tokens by probability; list unlikely ones")
    no_stream: bool = option(False, SWITCH, None, "output",
        help="print each text when it is complete")
    no_echo: bool = option(False, SWITCH, None, "output",
        help="do not print the prompt")
    trace: str | None = option(None, FILE, "FILE", "output",
        help="write a page (HTML) that shows each step of the run")
    score: str | None = option(None, INPUT, "FILE", "output",
        help="generate nothing: print the log-probability and perplexity of a file's text")
    stride: int | None = option(None, STRIDE, "N", "output",
        help="with --score: tokens between the starts of two windows (default half the context)")
    quiet: bool = option(False, SWITCH, None, "output", None, "-q",
        help="no header and no closing line on stderr")
    version: bool = option(False, SWITCH, None, "output",
        help="print the version")
    help: bool = option(False, SWITCH, None, "output", None, "-h",
        help="print this page")
    # fmt: on


ALL = declared(CommandConfig) | {name: item for name, item in OPTIONS.items() if item.group}


def _flags(name):
    """(the flags that the help page shows, hidden aliases) of an option."""
    more = ALL[name].flags.split()
    short = [flag for flag in more if flag[:2] != "--"]
    long = [flag for flag in more if flag[:2] == "--"]
    if ALL[name].default is not True:  # use_cache is typed as --no-cache
        long.insert(0, f"--{name.replace('_', '-')}")
    return [*short, long[0]], long[1:]


FLAGS = {name: _flags(name)[0][-1] for name in ALL}  # by which messages name an option that was not typed

# ---------------------------------------------------------------------------------------- help

GROUPS = ("model", "prompt", "length", "sampling", "beam search", "speculative decoding", "cache", "output")
EXAMPLES = """
examples:
  minigen "Once upon a time" --temperature 0.8 --seed 1
  minigen -m gpt2 "The capital of France is" --temperature 0 -n 20
  minigen -m gpt2 -f prompt.txt --num-beams 4
  minigen --prompts-file prompts.txt --json > texts.jsonl
  minigen -i
  minigen --score LICENSE
"""


def _help_line(name, width):
    """An option's flags, what it does, and its default."""
    item = ALL[name]
    details = ["repeatable"] if item.kind.repeatable else []
    if isinstance(item.default, int | float) and item.kind is not SWITCH:
        off = item.kind.off
        details.append(f"default {item.default:g}" if item.default is not False else "default false")
        details += [] if off is None else ["off"] if off == item.default else [f"{off} is off"]
    flags = f"  {', '.join(_flags(name)[0])} {item.metavar or ''}"
    text = item.help + (f" ({', '.join(details)})" if details else "")
    return textwrap.fill(text, width, initial_indent=f"{flags:<33}", subsequent_indent=" " * 33)


def help_page():
    """The text of --help, as wide as the terminal: every option by groups, and examples."""
    width = min(shutil.get_terminal_size().columns, 120)
    about = (
        "Continue a text with GPT-2. The text goes to stdout, everything else to stderr. Without a prompt, or with -, "
    )
    parts = ["usage: minigen [PROMPT ...] [options]", textwrap.fill(about + "the prompt is read from stdin.", width)]
    for group in GROUPS:
        parts.append("\n".join([f"{group}:", *(_help_line(name, width) for name in ALL if ALL[name].group == group)]))
    return "\n\n".join(parts) + "\n" + EXAMPLES


# ---------------------------------------------------------------------------------------- parsing

# Options of other programs -> what to do here.
HINTS = {
    "--greedy": "use --temperature 0",
    "--do-sample": "leave it out; --temperature 0 is greedy decoding",
    "--max-length": "use --max-tokens",
    "--length": "use --max-tokens",
    "--prompt": 'give the prompt without an option, as in minigen "Once upon a time"',
    "-p": 'give the prompt without an option, as in minigen "Once upon a time"',
    "--beam-size": "use --num-beams",
    "--beam-width": "use --num-beams",
    "--num-samples": "use --num-return-sequences",
    "--assistant-model": "use --draft-model",
}


class _Record(argparse.Action):
    """Records the texts of an option, and the flag by which it was typed."""

    def __call__(self, parser, typed, text, flag=None):
        typed.texts.setdefault(self.dest, []).append(text)
        typed.flags[self.dest] = flag


class _Parser(argparse.ArgumentParser):
    def _get_values(self, action, texts):
        # argparse drops the value of --stop=-- before Python 3.13.
        return texts[0] if texts else None


def build_parser():
    """All flags; the values stay text."""
    parser = _Parser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name, item in ALL.items():
        shown, hidden = _flags(name)
        nargs = {"nargs": 0} if item.kind is SWITCH else {}
        parser.add_argument(*shown, *hidden, dest=name, action=_Record, default=argparse.SUPPRESS, **nargs)
    return parser


class Typed(NamedTuple):
    """A command line as it was typed."""

    texts: dict[str, list[str]]  # option -> its values
    flags: dict[str, str]  # option -> the flag that was typed, or else its usual one
    prompts: list[str]


def parse(argv):
    """What a command line says. Prompts may stand anywhere between the options, and after `--`.

    Raises ValueError for an unknown option, and for one without its value.
    """
    parser, end = build_parser(), argv.index("--") if "--" in argv else len(argv)
    typed = argparse.Namespace(texts={}, flags=dict(FLAGS))
    try:
        _, prompts = parser.parse_known_args(argv[:end], typed)
    except argparse.ArgumentError as error:
        names = error.argument_name.split("/")
        flag = next((arg for arg in (arg.partition("=")[0] for arg in reversed(argv)) if arg in names), names[-1])
        problem = "takes no value" if "ignored" in error.message else "needs a value"
        raise ValueError(f"{flag} {problem} (see minigen --help)") from None
    if "help" in typed.texts or "version" in typed.texts:
        prompts = []
    for text in prompts:
        # As in argparse, neither a text with a space nor a negative number is an option.
        if re.fullmatch(r"-[^ ]+", text) and not re.fullmatch(r"-\d+|-\d*\.\d+", text):
            flag = text.partition("=")[0]
            known = parser._option_string_actions
            nearest = difflib.get_close_matches(flag, known, 1, cutoff=0.7)
            nearest = nearest or [other for other in known if other.startswith(flag) and len(flag) > 3]
            advice = f"did you mean {nearest[0]}?" if nearest else "to use it as a prompt, put it after --"
            raise ValueError(f"there is no option {flag}: {HINTS.get(flag, advice)} (see minigen --help)")
    return Typed(typed.texts, typed.flags, prompts + argv[end + 1 :])


def _decode(data):
    """Bytes -> text. Bytes that are not UTF-8 become U+FFFD, as in GPT-2's own training text."""
    return data.decode("utf-8", "replace")


def _decode_argument(argument):
    """An argument's text: fsencode gives back the bytes that the shell passed, whatever the locale made of them."""
    return _decode(os.fsencode(argument))


NOT_FOR_SCORING = [name for name in ALL if name not in ("model", "score", "stride", "logprobs", "json", "quiet")]
# (option, whether a command line cannot have it, what an error says), as in options.py.
CONFLICTS = (
    *((name, lambda args: args.score, "{score} generates nothing: leave it out") for name in NOT_FOR_SCORING),
    ("stride", lambda args: not args.score, "only {score} uses it: leave it out"),
    ("show_probs", lambda args: args.json, "{json} prints no colours: use {logprobs} instead"),
    ("trace", lambda args: args.interactive, "{interactive} writes no page: leave it out"),
    ("show_probs", lambda args: args.interactive, "{interactive} prints no colours: leave it out"),
    ("prompt_cache", lambda args: args.interactive, "{interactive} keeps its own cache: leave it out"),
)  # fmt: skip


def read_options(typed):
    """(the `CommandConfig`, {option of `generate`: value}) of a command line. Raises OptionError."""
    values = {}
    for name, texts in typed.texts.items():
        item = ALL[name]
        if item.kind is SWITCH:
            values[name] = not item.default
            continue
        parsed = [item.kind.parse(_decode_argument(text) if item.kind.repeatable else text) for text in texts]
        if item.kind.repeatable:
            values[name] = dict(parsed) if item.kind is BIAS else parsed
        else:  # the last one counts
            values[name] = [item.check(name, value) for value in parsed][-1]
    args = CommandConfig(**{name: values[name] for name in declared(CommandConfig) if name in values})
    check_conflicts(CONFLICTS, values, args)
    return args, {name: value for name, value in values.items() if name in OPTIONS}


# ---------------------------------------------------------------------------------------- prompts

UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def decode_file(data):
    """The text of a file's bytes, without byte order mark."""
    return data.decode("utf-16", "replace") if data.startswith(UTF_16) else _decode(data.removeprefix(codecs.BOM_UTF8))


def drop_newline(text):
    """The text without one final newline."""
    return text.removesuffix("\n").removesuffix("\r")


def read_file(path):
    """The text of a file or of stdin ("-"). Raises OSError if it cannot be read, ValueError if it is too long."""
    name = "stdin" if path == "-" else path
    try:
        if path == "-" and sys.stdin is None:
            raise OSError("it is closed")
        with contextlib.nullcontext(sys.stdin.buffer) if path == "-" else open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise OSError(f"cannot read {name}: {error.strerror or error}") from error
    if len(data) > MAX_BYTES:
        raise ValueError(f"{name} has more than {MAX_BYTES // 2**20} MiB: give a part of it")
    return decode_file(data)


def read_prompts(args, prompts):
    """The prompts of a run: those that were typed, or those of files or stdin.

    Interactive mode needs none, and leaves stdin alone. Raises OSError for files that cannot be read, ValueError if
    there is no prompt.
    """
    if bool(prompts) + (args.file is not None) + (args.prompts_file is not None) > 1:
        raise ValueError("prompts come from the command line, from --file or from --prompts-file; give one of these")
    if args.file is not None:
        return [drop_newline(read_file(args.file))]
    if args.prompts_file is not None:
        text = read_file(args.prompts_file)
        if not text:
            raise ValueError(f"{args.prompts_file} is empty; it must hold a prompt on each line")
        return re.split("\r?\n", drop_newline(text))
    if prompts.count("-") > 1:
        raise ValueError("- (stdin) can be given only once")
    if prompts or args.interactive:
        return [drop_newline(read_file("-")) if prompt == "-" else _decode_argument(prompt) for prompt in prompts]
    if sys.stdin is None or sys.stdin.isatty():
        raise ValueError('there is no prompt: give one, as in minigen "Once upon a time", or pipe it in')
    return [drop_newline(read_file("-"))]
