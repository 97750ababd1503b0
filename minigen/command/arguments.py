"""What may be typed on the command line: the options, the help page, and the prompts that it names."""

import argparse
import difflib
import os
import re
import sys
from dataclasses import fields
from pathlib import Path

import minigen
from minigen.engine.validation import is_number, require, short_repr
from minigen.files.hub import DEFAULT_MODEL
from minigen.options import CONFIGS
from minigen.options import OPTIONS as OPTION_NAMES

# Other engines' names for an option, accepted but not shown.
ALIASES = {
    "max_tokens": ["--max-new-tokens", "--n-predict"],
    "temperature": ["--temp"],
    "repetition_penalty": ["--repeat-penalty"],
    "stop": ["--reverse-prompt"],
}
DEFAULTS = {field.name: field.default for config in CONFIGS for field in fields(config)}


# ---------------------------------------------------------------------------------------- options


class Parser(argparse.ArgumentParser):
    """argparse with prompts anywhere between the options, errors of one line, and a help page of one screen."""

    def parse_args(self, argv):
        """The options of a command line, and its prompts: what is no option, and all that stands after `--`."""
        end = argv.index("--") if "--" in argv else len(argv)
        # argparse wants positional arguments to stand together; prompts are what a parser without any leaves over.
        args, args.prompt = self.parse_known_args(argv[:end])
        for text in args.prompt:
            # As argparse has it: what holds a space, and a negative number, is no option.
            if re.fullmatch(r"-[^ ]+", text) and not re.fullmatch(r"-\d+|-\d*\.\d+", text):
                flag = text.partition("=")[0]
                nearest = difflib.get_close_matches(flag, self._option_string_actions, 1, cutoff=0.7)
                advice = f"did you mean {nearest[0]}?" if nearest else "a prompt that begins so stands after --"
                self.error(f"there is no option {flag}: {advice}")
        args.prompt += argv[end + 1 :]
        return args

    def error(self, message):
        raise ValueError(f"{message} (see {self.prog} --help)")

    def to_cli_message(self, message, argv):
        """An error's message with options named as they were typed, and without None, True and False.

        argparse names an option by all its flags; the Python API by its keyword, which is known by its place at the
        message's beginning or by an underscore.
        """
        actions = self._option_string_actions
        # Of an option that was not typed the long flag; those of aliases come after it.
        flags = {action.dest: action.option_strings[-1] for action in reversed(actions.values())}
        flags |= {actions[flag].dest: flag for flag in (arg.partition("=")[0] for arg in argv) if flag in actions}

        message = re.sub(r": ignored explicit argument (.*) \(see", r": takes no value; leave \1 out (see", message)
        names = "|".join(OPTION_NAMES.keys() & flags.keys())
        message = re.sub(r"^argument (?:\S+/)?(\S+):", lambda match: f"{flags[actions[match[1]].dest]}:", message)
        message = re.sub(rf"^({names}) is .*; it must be (?:None|True|False) (?=with)", r"\1 cannot be given ", message)
        message = re.sub(rf"^((?:{names}) is .*), or None\b", r"\1", message)

        def as_flag(match):
            return flags[match[0]] if match.start() == 0 or "_" in match[0] else match[0]

        return re.sub(rf"(?<![\w/.'\"-])(?:{names})(?![\w/'\"])", as_flag, message)

    def format_help(self):
        """The usage and every option on a line of its own, by groups."""
        lines = [self.description]
        for group in self._action_groups:
            shown = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
            lines += [f"{group.title}:"] if shown else []
            for action in shown:
                flags = ", ".join(action.option_strings) + (f" {action.metavar}" if action.metavar else "")
                lines.append(f"  {flags:28} {action.help}")
        return "\n".join([*lines, self.epilog, ""])


def _decode(data):
    """Bytes -> text. What is not UTF-8 becomes U+FFFD, as in GPT-2's own training text."""
    return data.decode("utf-8", "replace")


def _text(argument):
    """An argument's text: fsencode gives back the bytes that the shell passed, whatever the locale made of them."""
    return _decode(os.fsencode(argument))


def _bias(text):
    """ID+BIAS, ID-BIAS, or TOKEN=BIAS with a token's text -> (id or text, bias)."""
    text = _text(text)
    match = re.fullmatch(r"(\d+)([+-].+)", text, re.ASCII) or re.fullmatch(r"(.+)=([^=]+)", text, re.DOTALL)
    try:
        token, bias = match.groups()
        return (int(token) if match.re.pattern.startswith(r"(\d") else token), float(bias)
    except (AttributeError, ValueError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not ID+BIAS, ID-BIAS or TEXT=BIAS, such as 262-5, 262-inf or ' the'=1.5"
        ) from None


def _file(text):
    if not text:
        raise argparse.ArgumentTypeError("'' is not the name of a file")
    return text


def _whole_number(text):
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{short_repr(text)} is not a whole number") from None


def _number(text):
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _early_stopping(text):
    choices = {"true": True, "false": False, "never": "never"}
    if text not in choices:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(choices)}")
    return choices[text]


def _draft_tokens(text):
    if text != "auto" and not re.fullmatch(r"[+-]?\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor auto")
    return text if text == "auto" else int(text)


def build_parser():
    """The command line's options; those of `generate` are in the result only where they were given."""
    parser = Parser(
        prog="minigen",
        description="usage: minigen [PROMPT ...] [options]    Continues a text with GPT-2, on stdout.",
        epilog="Switches are off by default. Filters work in the order penalties, n-grams,\n"
        "bias, temperature, top-k, top-p, min-p, typical-p.",
        add_help=False,
        allow_abbrev=False,
    )

    def option(group, flags, metavar, help, off=None, **kwargs):
        """One option of `generate`: absent unless given, of its default's type, and its default shown.

        off: the value that switches it off; None where there is none.
        """
        name = flags.split()[-1].removeprefix("--").replace("-", "_")
        default = DEFAULTS[name]
        if metavar:
            kwargs["metavar"] = metavar
        if "action" not in kwargs:
            kwargs.setdefault("type", _number if isinstance(default, float) else _whole_number)
        if is_number(default):
            neutral = "" if off is None else ", off" if off == default else f", off at {off}"
            help += f" (default {default:g}{neutral})"
        group.add_argument(*flags.split(), dest=name, default=argparse.SUPPRESS, help=help, **kwargs)
        for alias in ALIASES.get(name, ()):
            group.add_argument(alias, dest=name, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **kwargs)

    group = parser.add_argument_group("model")
    source = "folder, name or hub id"
    group.add_argument("-m", "--model", metavar="NAME", help=f"{source} (default {DEFAULT_MODEL})")

    group = parser.add_argument_group("prompt (- is stdin, also read where there is no prompt)")
    group.add_argument("-f", "--file", metavar="FILE", help="continue the text of a file (default none)")
    group.add_argument("--prompts-file", metavar="FILE", help="continue each line of a file (default none)")
    group.add_argument("-i", "--interactive", action="store_true", help="read a line, continue it, read the next ...")

    group = parser.add_argument_group("length")
    option(group, "-n --max-tokens", "N", "the most tokens to generate")
    option(group, "--min-tokens", "N", "no end of text before N tokens", off=0)
    option(group, "--ignore-eos", None, "go on where the model would end the text", action="store_true")
    stop_help = "end before TEXT; repeatable (default none)"
    option(group, "--stop", "TEXT", stop_help, action="append", type=_text)
    option(group, "--num-return-sequences", "N", "continuations of each prompt")

    group = parser.add_argument_group("sampling")
    option(group, "--temperature", "T", "0 takes the best, 1 is neutral")
    option(group, "--top-k", "K", "the K best tokens only", off=0)
    option(group, "--top-p", "P", "the fewest that hold P", off=1)
    option(group, "--min-p", "P", "at least P times the best one", off=0)
    option(group, "--typical-p", "P", "the most typical that hold P", off=1)
    option(group, "--repetition-penalty", "X", "against tokens of the text", off=1)
    option(group, "--presence-penalty", "X", "against tokens of the output", off=0)
    option(group, "--frequency-penalty", "X", "the same, each time it occurs", off=0)
    option(group, "--no-repeat-ngram-size", "N", "no run of N tokens twice", off=0)
    bias_help = "or ID-inf, TEXT=BIAS; repeatable (default none)"
    option(group, "--logit-bias", "ID+BIAS", bias_help, action="append", type=_bias)
    option(group, "-s --seed", "N", "repeat a run (default random, and shown)")

    group = parser.add_argument_group("beams")
    option(group, "--num-beams", "N", "keep the N best partial texts", off=1)
    option(group, "--length-penalty", "X", "0: by sum; more: longer")
    stop_help = "true, false or never better (default false)"
    option(group, "--early-stopping", "WHEN", stop_help, type=_early_stopping)

    group = parser.add_argument_group("speculation")
    group.add_argument("--speculative", action="store_true", help="let the smaller model known to fit draft")
    group.add_argument("--draft-model", metavar="NAME", help="let this one draft (default none)")
    option(group, "--num-draft-tokens", "N|auto", "tokens it proposes at a time", type=_draft_tokens)
    option(group, "--prompt-lookup-num-tokens", "N", "draft from the text itself", off=0)
    option(group, "--max-matching-ngram-size", "N", "longest end to look up in it")

    group = parser.add_argument_group("cache")
    cache_help = "keep the prompt's keys and values (default none)"
    group.add_argument("--prompt-cache", type=_file, metavar="FILE", help=cache_help)
    option(group, "--window", "W", "see only the last W tokens (default all)")
    option(group, "--context-shift", None, "drop the older half when it is full", action="store_true")
    option(group, "--keep", "N", "but never the first N tokens")
    no_cache_help = "slow: run the whole text for each token"
    group.add_argument(
        "--no-cache", dest="use_cache", action="store_false", default=argparse.SUPPRESS, help=no_cache_help
    )

    group = parser.add_argument_group("output")
    option(group, "--logprobs", "N", "with those of the N best tokens (default off)")
    group.add_argument("--show-probs", action="store_true", help="colour tokens by probability, on a terminal")
    group.add_argument("--json", action="store_true", help="one JSON object a line for each text")
    group.add_argument("--no-stream", action="store_true", help="print each text when it is complete")
    group.add_argument("--no-echo", action="store_true", help="do not print the prompt")
    group.add_argument("--trace", type=_file, metavar="FILE", help="write a page that shows the run (default none)")
    group.add_argument("--score", type=_file, metavar="FILE", help="print a text's perplexity only (default none)")
    group.add_argument(
        "--stride", type=_whole_number, metavar="N", help="between its windows (default half the context)"
    )
    group.add_argument("-q", "--quiet", action="store_true", help="no header and closing line on stderr")
    group.add_argument("--version", action="version", version=f"minigen {minigen.__version__}", help="show it")
    group.add_argument("-h", "--help", action="help", help="show this")
    return parser


# ---------------------------------------------------------------------------------------- prompts


def decode_file(data):
    """The text of a file's bytes, without byte order mark and without one final newline."""
    return _decode(data.removeprefix(b"\xef\xbb\xbf").removesuffix(b"\n").removesuffix(b"\r"))


def read_file(path):
    """The text of a file or of stdin ("-")."""
    require(path, "the name of the file", path, "that of a file, or - for stdin")
    if path == "-" and sys.stdin is None:
        raise OSError("the prompt should come from stdin, which is closed")
    return decode_file(sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes())


def read_prompts(args):
    """The prompts of a command line. Raises OSError for files that cannot be read, ValueError where there is none.

    Interactive mode takes one of the command line or of a file for its first turn, and leaves stdin alone.
    """
    sources = [bool(args.prompt), args.file is not None, args.prompts_file is not None]
    if sum(sources) > 1:
        raise ValueError("prompts come from the command line, from --file or from --prompts-file; give one of these")
    try:
        if args.file is not None:
            return [read_file(args.file)]
        if args.prompts_file is not None:
            text = read_file(args.prompts_file)
            if not text:
                raise ValueError(f"{args.prompts_file} is empty; it must hold a prompt on each line")
            return re.split("\r?\n", text)
    except OSError as error:
        raise OSError(
            f"cannot read the prompt from {args.file or args.prompts_file}: {error.strerror or error}"
        ) from error
    if args.prompt.count("-") > 1:
        raise ValueError("- stands twice among the prompts, and stdin can be read once: leave one out")
    if args.prompt:
        return [read_file("-") if prompt == "-" else _text(prompt) for prompt in args.prompt]
    if args.interactive:
        return []
    if sys.stdin is None or sys.stdin.isatty():
        raise ValueError('there is no prompt: give one, as in minigen "Once upon a time", or pipe it in')
    return [read_file("-")]
