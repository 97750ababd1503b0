"""The command line: text goes to stdout as it is made, everything else to stderr.

python -m minigen "Once upon a time" --temperature 0.8 --seed 1
"""

import argparse
import contextlib
import difflib
import json
import math
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections import defaultdict
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path

import minigen
from minigen.api import CONFIGS, OPTION_NAMES, check_options, load, stream
from minigen.checkpoint import DEFAULT_MODEL, default_draft, find
from minigen.checks import is_number, require
from minigen.colours import UNLIKELY, Painter, has_colours, legend
from minigen.scoring import score
from minigen.session import Session
from minigen.tracing import check_file, traced

# Other engines' names for an option, accepted but not shown.
ALIASES = {
    "max_tokens": ["--max-new-tokens", "--n-predict"],
    "temperature": ["--temp"],
    "repetition_penalty": ["--repeat-penalty"],
    "stop": ["--reverse-prompt"],
}
DEFAULTS = {field.name: field.default for config in CONFIGS for field in fields(config)}
# What --score makes use of; every other option is refused beside it.
FOR_SCORING = ("model", "score", "stride", "logprobs", "json", "quiet")


# ---------------------------------------------------------------------------------------- arguments


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

    def as_typed(self, message, argv):
        """An error's message with options named as they were typed, and without None, True and False.

        argparse names an option by all its flags; the Python API by its keyword, which is known by its place at the
        message's beginning or by an underscore.
        """
        actions = self._option_string_actions
        # Of an option that was not typed the long flag; those of aliases come after it.
        flags = {action.dest: action.option_strings[-1] for action in reversed(actions.values())}
        flags |= {actions[flag].dest: flag for flag in (arg.partition("=")[0] for arg in argv) if flag in actions}

        names = "|".join(OPTION_NAMES & flags.keys())
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


def _whole_number(text):
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


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
    group.add_argument("--prompt-cache", metavar="FILE", help=cache_help)
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
    group.add_argument("--trace", metavar="FILE", help="write a page that shows the run (default none)")
    group.add_argument("--score", metavar="FILE", help="print a text's perplexity only (default none)")
    group.add_argument("--stride", type=int, metavar="N", help="between its windows (default half the context)")
    group.add_argument("-q", "--quiet", action="store_true", help="no header and closing line on stderr")
    group.add_argument("--version", action="version", version=f"minigen {minigen.__version__}", help="show it")
    group.add_argument("-h", "--help", action="help", help="show this")
    return parser


# ---------------------------------------------------------------------------------------- prompts


def _content(data):
    """The text of a file's bytes, without byte order mark and without one final newline."""
    return _decode(data.removeprefix(b"\xef\xbb\xbf").removesuffix(b"\n").removesuffix(b"\r"))


def _read_file(path):
    """The text of a file or of stdin ("-")."""
    require(path, "the name of the file", path, "that of a file, or - for stdin")
    if path == "-" and sys.stdin is None:
        raise OSError("the prompt should come from stdin, which is closed")
    return _content(sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes())


def read_prompts(args):
    """The prompts of a command line. Raises OSError for files that cannot be read, ValueError where there is none.

    Interactive mode takes one of the command line or of a file for its first turn, and leaves stdin alone.
    """
    sources = [bool(args.prompt), args.file is not None, args.prompts_file is not None]
    if sum(sources) > 1:
        raise ValueError("prompts come from the command line, from --file or from --prompts-file; give one of these")
    try:
        if args.file is not None:
            return [_read_file(args.file)]
        if args.prompts_file is not None:
            text = _read_file(args.prompts_file)
            if not text:
                raise ValueError(f"{args.prompts_file} is empty; it must hold a prompt on each line")
            return re.split("\r?\n", text)
    except OSError as error:
        raise OSError(
            f"cannot read the prompt from {args.file or args.prompts_file}: {error.strerror or error}"
        ) from error
    if args.prompt:
        return [_read_file("-") if prompt == "-" else _text(prompt) for prompt in args.prompt]
    if args.interactive:
        return []
    if sys.stdin is None or sys.stdin.isatty():
        raise ValueError('there is no prompt: give one, as in minigen "Once upon a time", or pipe it in')
    return [_read_file("-")]


# ---------------------------------------------------------------------------------------- output


def _note(text):
    """One line on stderr; where nothing can be written there, the text on stdout still matters."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _in_row_order(steps):
    """The same steps, all of row 0 first, then all of row 1 ..., each as early as that allows."""
    current, held = 0, defaultdict(list)
    for step in steps:
        held[step.row].append(step)
        while held[current]:
            step = held[current].pop(0)
            yield step
            current += step.finish_reason is not None


def _as_json(step, prompt, model, seed):
    done = step.completion
    logprobs = None
    if done.logprobs is not None:
        logprobs = [
            {
                "token": entry.token,
                "text": entry.text,
                "logprob": entry.logprob,
                "top": [{"token": token, "text": text, "logprob": logprob} for token, text, logprob in entry.top],
            }
            for entry in done.logprobs
        ]
    return json.dumps(
        {
            "index": step.row,
            "prompt_index": done.prompt_index,
            "prompt": prompt,
            "text": done.text,
            "token_ids": done.token_ids,
            "finish_reason": done.finish_reason,
            "stop_sequence": done.stop_sequence,
            "logprobs": logprobs,
            "sum_logprob": done.sum_logprob,
            "score": done.score,
            "model": model,
            "seed": seed,
            "speculation": done.speculation and asdict(done.speculation),
            "timings": done.timings._asdict(),
        },
        ensure_ascii=False,
    )


def _note_logprobs(completion):
    for entry in completion.logprobs:
        best = "  ".join(f"{text!r} {logprob:.3f}" for _, text, logprob in entry.top)
        _note(f"{entry.logprob:9.4f}  {entry.text!r:16} {best}")


def _note_unlikely(completion):
    unlikely = [entry for entry in completion.logprobs if math.exp(entry.logprob) < UNLIKELY]
    if unlikely:
        _note(f"unlikely tokens (below {UNLIKELY * 100:.0f} %), and the most probable ones there:")
    for entry in unlikely:
        best = "  ".join(f"{text!r} {math.exp(logprob):.1%}" for _, text, logprob in entry.top)
        _note(f"{math.exp(entry.logprob):8.2%}  {entry.text!r:16} {best}")


def _model_line(name, folder, model):
    n_parameters = sum(map(math.prod, model.config.parameter_shapes().values()))
    return (
        f"minigen {minigen.__version__} · {name} ({folder}), {n_parameters / 1e6:.1f}M parameters, "
        f"context {model.config.n_positions}"
    )


def _header(name, folder, model, draft_name, options):
    """The model and every setting that repeats the run."""
    always = ["max_tokens"] if options.get("num_beams", 1) > 1 else ["temperature", "top_p", "max_tokens"]
    settings = {option: DEFAULTS[option] for option in always} | options
    shown = " ".join(f"{option} {value!r}" for option, value in settings.items() if value != {})
    drafts = f" · drafts by {draft_name}" if draft_name else ""
    return f"{_model_line(name, folder, model)}{drafts} · {shown}"


def _closing_line(completions, prompt_cache):
    """Tokens, speed, memory and reasons of a run, in one line."""
    timings = max((done.timings for done in completions), key=lambda timings: timings.seconds)
    prompt_tokens = sum({done.prompt_index: done.timings.prompt_tokens for done in completions}.values())
    tokens = sum(done.timings.tokens for done in completions)
    reasons = sorted({done.finish_reason for done in completions})

    def speed(count, seconds):
        return f"{count} tokens" + (f" in {seconds:.2f} s ({count / seconds:.1f}/s)" if count and seconds else "")

    prompt = speed(prompt_tokens, timings.prompt_seconds)
    if timings.reused_tokens:  # a speed would be that of no computation
        prompt = (
            f"{prompt_tokens} tokens ({timings.reused_tokens} from {prompt_cache}) in {timings.prompt_seconds:.2f} s"
        )

    drafts = ""
    if (stats := completions[0].speculation) and stats.drafted:
        drafts = (
            f" · accepted {stats.accepted} of {stats.drafted} drafts ({stats.accepted / stats.drafted:.0%}), "
            f"{tokens / stats.target_passes:.2f} tokens a pass, {stats.draft_seconds:.2f} s drafting, "
            f"{stats.target_seconds:.2f} s checking"
        )
    return (
        f"prompt {prompt} · generated {speed(tokens, timings.seconds)} · "
        f"K/V cache {timings.cache_bytes / 2**20:.1f} MiB{drafts} · finish_reason {', '.join(reasons)}"
    )


# ---------------------------------------------------------------------------------------- interactive mode


def _read_turn():
    """The next line of stdin, without its end. Raises EOFError where there is none."""
    if sys.stdin is None:
        raise EOFError
    if sys.stdin.isatty() and sys.stdout.isatty():
        return input("> ")  # with readline, where that was imported
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    return _content(line)


def _print_turn(session, text, args, model, echo):
    """One turn of interactive mode; whatever ends it, what there is of its text is shown, and a newline."""
    seed, unshown, end = session.next_seed, "", None
    try:
        with contextlib.closing(session.turn(text)) as steps:
            for step in steps:
                done = step.completion
                if args.json:
                    unshown = _as_json(step, text, model, seed) if done else ""
                else:
                    unshown += (text if echo else "") + step.text
                # What has begun ends with a newline, be it empty; of JSON only whole objects begin.
                echo, end = False, unshown[-1:] or end or (None if args.json else "")
                if not args.no_stream:
                    sys.stdout.write(unshown)
                    sys.stdout.flush()
                    unshown = ""
    finally:
        sys.stdout.write(unshown + ("\n" if end not in (None, "\n") else ""))
        sys.stdout.flush()
    if done.logprobs is not None and not args.json:
        _note_logprobs(done)
    if done.finish_reason == "context":
        n_positions = session.model.config.n_positions
        _note(
            f"the text fills the model's context of {n_positions} tokens: /new begins another, --context-shift goes on"
        )


def interact(session, prompts, args, model, as_typed):
    """Read turns, and print what the model makes of each, until stdin ends; the exit code.

    prompts: the first turns. A turn that cannot be run is told, and changes nothing.
    """
    typed = sys.stdin is not None and sys.stdin.isatty()
    if typed:
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  input() edits lines and remembers them from now on
        if not args.quiet:
            _note("each line is added to the text, and continued; an empty one adds nothing; /new begins a new text")
            _note("Ctrl-C stops the text, Ctrl-D leaves")
    prompts, stopped = list(prompts), False
    while True:
        echo = not args.no_echo and (bool(prompts) or not typed)
        try:
            text = prompts.pop(0) if prompts else _read_turn()
        except EOFError:
            if typed:
                _note("")  # the shell's own prompt gets a line of its own
            return 0
        except KeyboardInterrupt:
            if stopped or not typed:
                raise
            stopped = True
            _note("\nCtrl-C again leaves, as Ctrl-D does")
            continue
        stopped = False
        try:
            if text == "/new":
                session.context = []
                if typed:
                    _note("a new text begins")
            else:
                _print_turn(session, text, args, model, echo)
        except ValueError as error:
            _note(f"minigen: {as_typed(str(error))}")
        except KeyboardInterrupt:
            pass  # of the turn; the next one follows


# ---------------------------------------------------------------------------------------- the run


def run_score(args):
    """Score the text of a file instead of generating one; the exit code."""
    for name, value in vars(args).items():
        # Those of `generate` are there only where they were given, whatever their value.
        if name not in FOR_SCORING and (name in OPTION_NAMES or value not in (None, False, [])):
            shown = name if name in OPTION_NAMES or name == "prompt" else f"--{name.replace('_', '-')}"
            raise ValueError(f"{shown} is {value!r}, but --score generates nothing: leave it out")
    with_logprobs = "logprobs" in args
    if with_logprobs:
        require(args.logprobs == 0, "logprobs", args.logprobs, "0 with --score, which lists the text's own tokens")
    try:
        text = _read_file(args.score)
    except OSError as error:
        raise OSError(f"cannot read the text of {args.score}: {error.strerror or error}") from error
    name = DEFAULT_MODEL if args.model is None else args.model
    folder = find(args.model)
    model, tokenizer = load(folder)
    if not args.quiet:
        _note(_model_line(name, folder, model))
    start = time.perf_counter()
    scored = score(model, tokenizer.encode(text), args.stride)
    seconds = time.perf_counter() - start

    tokens = [
        {"token": token, "text": tokenizer.decode([token]), "logprob": logprob}
        for token, logprob in zip(scored.token_ids, scored.logprobs, strict=True)
    ]
    figures = {
        "perplexity": scored.perplexity,
        "bits_per_byte": scored.bits_per_byte(tokenizer),
        "nll": scored.nll,
        "n_tokens": scored.n_tokens,
        "stride": scored.stride,
        "logprobs": tokens if with_logprobs else None,
        "model": name,
    }
    if args.json:
        print(json.dumps(figures, ensure_ascii=False))
    else:
        for entry in tokens if with_logprobs else ():
            shown = "-" if entry["logprob"] is None else f"{entry['logprob']:.4f}"
            print(f"{shown:>9}  {entry['text']!r}")
        print(
            f"perplexity {scored.perplexity:.4f} · {figures['bits_per_byte']:.4f} bits a byte · "
            f"{scored.n_tokens} of {len(tokens)} tokens scored"
        )
    if not args.quiet:
        _note(f"stride {scored.stride} · {seconds:.2f} s ({scored.n_tokens / seconds:.1f} tokens/s)")
    return 0


SIGNALS = (signal.SIGINT, signal.SIGTERM)


def _terminate(number, _):
    raise SystemExit(128 + number)


def _signals_raise():
    """From now on Ctrl-C raises KeyboardInterrupt and SIGTERM SystemExit, so that every `finally` has its turn.

    A signal that whoever started the process had it ignore stays ignored.
    """
    for number, handler in zip(SIGNALS, (signal.default_int_handler, _terminate), strict=True):
        if signal.getsignal(number) != signal.SIG_IGN and threading.current_thread() is threading.main_thread():
            signal.signal(number, handler)


@contextlib.contextmanager
def _signals_restored():
    before = [signal.getsignal(number) for number in SIGNALS]
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # no other may set handlers, or has
            for number, handler in zip(SIGNALS, before, strict=True):
                signal.signal(number, handler)


def run(args, as_typed):
    """Read the prompts, load the models, print the continuations; the exit code.

    as_typed: puts an error's message in the words of the command line.
    """
    if args.score is not None:
        return run_score(args)
    if args.stride is not None:
        raise ValueError(f"stride is {args.stride}, but only --score uses it: leave it out")
    if args.show_probs and args.json:
        raise ValueError("--show-probs colours a text, and --json prints none: use --logprobs with --json")
    options = {name: value for name, value in vars(args).items() if name in OPTION_NAMES}
    if args.show_probs:
        options.setdefault("logprobs", 3)
    coloured = args.show_probs and has_colours(sys.stdout)
    draft_name = args.draft_model or (default_draft(args.model) if args.speculative else None)
    # What needs no model is checked before one is loaded. A bias may name its token by text, which needs the tokenizer.
    without_bias = {name: value for name, value in options.items() if name != "logit_bias"}
    cached = args.prompt_cache is not None
    decoding = check_options(without_bias, drafts=draft_name is not None, cached=cached).decoding
    options |= {"seed": decoding.seed, "logit_bias": dict(options.get("logit_bias", ()))}
    if args.trace is not None:
        check_file(args.trace)
    prompts = read_prompts(args)
    if args.interactive:
        require(len(prompts) < 2, "the number of prompts", len(prompts), "1 or none with --interactive")
        require(not cached, "--prompt-cache", args.prompt_cache, "left out with --interactive, which keeps its own")
    name = DEFAULT_MODEL if args.model is None else args.model
    folder = find(args.model)
    model, tokenizer = load(folder)
    draft_model = load(draft_name) if draft_name else None
    # Until here a signal does what `__main__` says: a download's threads would let an exception wait for them.
    _signals_raise()
    if args.interactive:
        session = Session(model, tokenizer, draft_model=draft_model, **options)
        if not args.quiet:
            _note(_header(name, folder, model, draft_name, options))
        return interact(session, prompts, args, name, as_typed)
    start = stream if args.trace is None else partial(traced, file=args.trace)
    steps = start(model, tokenizer, prompts, draft_model=draft_model, cache=args.prompt_cache, **options)
    if not args.quiet:
        _note(_header(name, folder, model, draft_name, options))
        if any(prompt.endswith(" ") for prompt in prompts):
            _note("hint: the prompt ends with a space; GPT-2 joins a space to the next word and does better without")
        if coloured and has_colours(sys.stderr):
            _note(legend())

    completions, row, line_open, unshown = [], None, False, ""
    try:
        for step in _in_row_order(steps):
            done, prompt = step.completion, prompts[step.row // decoding.num_return_sequences]
            if args.json:
                text = _as_json(step, prompt, name, decoding.seed) if done else ""
            else:
                if step.row != row:
                    painter = Painter(tokenizer) if coloured else None
                text = painter.paint(step) if painter else step.text
                if step.row != row:
                    text = ("" if row is None else "\n") + ("" if args.no_echo else prompt) + text
            if args.no_stream:
                text, unshown = (unshown + text, "") if done else ("", unshown + text)
            row = step.row
            line_open = not text.endswith("\n") if text else line_open
            if done and line_open:
                text, line_open = text + "\n", False
            sys.stdout.write(text)
            sys.stdout.flush()
            if done:
                completions.append(done)
    finally:
        # Where an error or Ctrl-C ends the run, the text so far is shown, and on lines of its own.
        if line_open or unshown:
            sys.stdout.write(unshown + "\n")
            sys.stdout.flush()

    if decoding.logprobs is not None and not args.json:
        for done in completions:
            (_note_logprobs if "logprobs" in args else _note_unlikely)(done)
    if not args.quiet:
        _note(_closing_line(completions, args.prompt_cache))
        if any(done.finish_reason == "context" for done in completions):
            _note(f"the text fills the model's context of {model.config.n_positions} tokens; --context-shift goes on")
    return 0


def main(argv=None):
    """Run a command line, by default the process's own; returns the exit code.

    0, or 2 where what was asked cannot be done, 130 after Ctrl-C, 141 after the reader of a pipe has left. SIGTERM
    raises SystemExit, with 143.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    # Python has None for a stream that was closed before it started.
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    # UTF-8 whatever the locale.
    sys.stdout.reconfigure(encoding="utf-8", errors="replace", newline="\n")
    sys.stderr.reconfigure(encoding="utf-8", errors="backslashreplace")
    warnings.showwarning = lambda message, *_, **__: _note(f"minigen: warning: {message}")
    parser = build_parser()

    def as_typed(message):
        return parser.as_typed(message, argv)

    with _signals_restored():
        try:
            return run(parser.parse_args(argv), as_typed)
        except BrokenPipeError:
            return 141  # the reader has left, as head does
        except KeyboardInterrupt:
            return 130
        except MemoryError as error:
            _note(
                f"minigen: there is not enough memory for this ({error or 'none left'}); ask for fewer or shorter texts"
            )
            return 2
        except OSError as error:
            _note(f"minigen: {error}")
            return 2
        except ValueError as error:
            _note(f"minigen: {as_typed(str(error))}")
            return 2
        finally:
            # What a closed pipe or a full disk has left in a buffer must not come up again when Python exits.
            for output in (sys.stdout, sys.stderr):
                try:
                    output.flush()
                except OSError:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
