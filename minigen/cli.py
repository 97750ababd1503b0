"""The command line: text goes to stdout as it is made, everything else to stderr.

python -m minigen "Once upon a time" --temperature 0.8 --seed 1
"""

import argparse
import contextlib
import json
import math
import os
import re
import sys
import warnings
from collections import defaultdict
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path

import minigen
from minigen.api import CONFIGS, OPTION_NAMES, check_options, load, stream
from minigen.checkpoint import DEFAULT_MODEL, default_draft, find
from minigen.checks import is_number
from minigen.trace import check_file, traced

# Other engines' names for an option, accepted but not shown.
ALIASES = {
    "max_tokens": ["--max-new-tokens", "--n-predict"],
    "temperature": ["--temp"],
    "repetition_penalty": ["--repeat-penalty"],
    "stop": ["--reverse-prompt"],
}
DEFAULTS = {field.name: field.default for config in CONFIGS for field in fields(config)}


# ---------------------------------------------------------------------------------------- arguments


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line."""

    def error(self, message):
        raise ValueError(f"{message} (see {self.prog} --help)")


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
        description="Continue a text with GPT-2. The text goes to stdout, everything else to stderr.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="Filters work in this order, each on what the one before left: penalties, n-gram ban, bias, temperature,"
        "\ntop-k, top-p, min-p, typical-p.",
    )

    def option(group, flags, metavar, help, **kwargs):
        """One option of `generate`: absent unless given, of its default's type, and its default shown."""
        name = flags.split()[-1].removeprefix("--").replace("-", "_")
        default = DEFAULTS[name]
        if metavar:
            kwargs["metavar"] = metavar
        if "action" not in kwargs:
            kwargs.setdefault("type", float if isinstance(default, float) else int)
        if is_number(default):
            help += f" (default {default})"
        group.add_argument(*flags.split(), dest=name, default=argparse.SUPPRESS, help=help, **kwargs)
        for alias in ALIASES.get(name, ()):
            group.add_argument(alias, dest=name, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **kwargs)

    group = parser.add_argument_group("model")
    source = "a folder, a bundled model, or a hub id: gpt2, distilgpt2, owner/name"
    group.add_argument("-m", "--model", metavar="NAME", help=f"{source} (default {DEFAULT_MODEL})")

    group = parser.add_argument_group("prompt (one final newline of a file or of stdin is dropped)")
    group.add_argument("prompt", nargs="*", help="the text to continue, several texts, or - for stdin")
    group.add_argument("-f", "--file", metavar="FILE", help="continue the text of a file")
    group.add_argument("--prompts-file", metavar="FILE", help="continue each line of a file")

    group = parser.add_argument_group("length")
    option(group, "-n --max-tokens", "N", "the most tokens to generate")
    option(group, "--min-tokens", "N", "no end of text before so many tokens")
    option(group, "--ignore-eos", None, "go on where the model would end the text", action="store_true")
    option(group, "--stop", "TEXT", "end before this text; can be repeated", action="append", type=_text)
    option(group, "--num-return-sequences", "N", "continuations of each prompt")

    group = parser.add_argument_group("sampling")
    option(group, "--temperature", "T", "0 takes the most probable token, 1 leaves the model's probabilities")
    option(group, "--top-k", "K", "keep the K most probable tokens; 0 is off")
    option(group, "--top-p", "P", "keep the fewest tokens that hold P; 1 is off")
    option(group, "--min-p", "P", "keep what has P of the best one's probability; 0 is off")
    option(group, "--typical-p", "P", "keep the most typical tokens that hold P; 1 is off")
    option(group, "--repetition-penalty", "X", "make tokens of prompt and output less likely; 1 is off")
    option(group, "--presence-penalty", "X", "subtract from the logit of each output token; 0 is off")
    option(group, "--frequency-penalty", "X", "subtract each time the token occurs; 0 is off")
    option(group, "--no-repeat-ngram-size", "N", "no run of N tokens comes twice; 0 is off")
    bias_help = "add to a token's logit, ID-inf bans it; TEXT=BIAS names it by text; can be repeated"
    option(group, "--logit-bias", "ID+BIAS", bias_help, action="append", type=_bias)
    option(group, "-s --seed", "N", "repeat a run; the seed in use is printed (default random)")

    group = parser.add_argument_group("beam search")
    option(group, "--num-beams", "N", "keep the N best partial texts; 1 is off")
    option(group, "--length-penalty", "X", "0 ranks by the sum, more favours longer texts")
    stop_help = "stop at N finished texts, when no better one is likely, or when none is possible (default false)"
    option(group, "--early-stopping", "true|false|never", stop_help, type=_early_stopping)

    group = parser.add_argument_group("speculation")
    group.add_argument("--speculative", action="store_true", help="let a smaller model draft, the one known to fit")
    group.add_argument("--draft-model", metavar="NAME", help="let this model draft; it needs the same vocabulary")
    option(group, "--num-draft-tokens", "N|auto", "tokens it proposes at a time", type=_draft_tokens)
    option(group, "--prompt-lookup-num-tokens", "N", "draft N tokens from the text itself; 0 is off")
    option(group, "--max-matching-ngram-size", "N", "the longest end of the text to look up in it")

    group = parser.add_argument_group("cache and context")
    cache_help = "keep what the prompt gave in this file; a prompt that begins like the one in it starts sooner"
    group.add_argument("--prompt-cache", metavar="FILE", help=cache_help)
    option(
        group,
        "--window",
        "W",
        "bound the memory: each token sees only the last W tokens, which GPT-2 was not trained for",
    )
    option(
        group, "--context-shift", None, "when the context is full, drop its older half and go on", action="store_true"
    )
    option(group, "--keep", "N", "the first N tokens that --context-shift never drops")
    no_cache_help = "run the whole text again for every token: slow, for study"
    group.add_argument(
        "--no-cache", dest="use_cache", action="store_false", default=argparse.SUPPRESS, help=no_cache_help
    )

    group = parser.add_argument_group("output")
    option(group, "--logprobs", "N", "log-probabilities, also of the N best tokens at each place")
    group.add_argument("--json", action="store_true", help="one JSON object a line for each continuation")
    group.add_argument("--no-stream", action="store_true", help="print each text when it is complete")
    group.add_argument("--no-echo", action="store_true", help="do not print the prompt before its continuation")
    trace_help = "write a page to FILE that shows how each token came about, to open in a browser"
    group.add_argument("--trace", metavar="FILE", help=trace_help)
    group.add_argument("-q", "--quiet", action="store_true", help="no header and closing line on stderr")
    group.add_argument("--version", action="version", version=f"minigen {minigen.__version__}")
    return parser


# ---------------------------------------------------------------------------------------- prompts


def _read_file(path):
    """The text of a file or of stdin ("-"), without byte order mark and without one final newline."""
    if path == "-" and sys.stdin is None:
        raise OSError("the prompt should come from stdin, which is closed")
    data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    return _decode(data.removeprefix(b"\xef\xbb\xbf").removesuffix(b"\n").removesuffix(b"\r"))


def read_prompts(args):
    """The prompts of a command line. Raises OSError for files that cannot be read, ValueError where there is none."""
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


def _header(name, folder, model, draft_name, options):
    """The model and every setting that repeats the run."""
    always = ["max_tokens"] if options.get("num_beams", 1) > 1 else ["temperature", "top_p", "max_tokens"]
    settings = {option: DEFAULTS[option] for option in always} | options
    shown = " ".join(f"{option} {value!r}" for option, value in settings.items() if value != {})
    n_parameters = sum(map(math.prod, model.config.parameter_shapes().values()))
    drafts = f" · drafts by {draft_name}" if draft_name else ""
    return (
        f"minigen {minigen.__version__} · {name} ({folder}), {n_parameters / 1e6:.1f}M parameters, "
        f"context {model.config.n_positions}{drafts} · {shown}"
    )


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


# ---------------------------------------------------------------------------------------- the run


def run(args):
    """Read the prompts, load the models, print the continuations; the exit code."""
    options = {name: value for name, value in vars(args).items() if name in OPTION_NAMES}
    draft_name = args.draft_model or (default_draft(args.model) if args.speculative else None)
    # What needs no model is checked before one is loaded. A bias may name its token by text, which needs the tokenizer.
    without_bias = {name: value for name, value in options.items() if name != "logit_bias"}
    cached = args.prompt_cache is not None
    decoding = check_options(without_bias, drafts=draft_name is not None, cached=cached).decoding
    options |= {"seed": decoding.seed, "logit_bias": dict(options.get("logit_bias", ()))}
    if args.trace is not None:
        check_file(args.trace)
    prompts = read_prompts(args)
    name = DEFAULT_MODEL if args.model is None else args.model
    folder = find(args.model)
    model, tokenizer = load(folder)
    draft_model = load(draft_name) if draft_name else None
    start = stream if args.trace is None else partial(traced, file=args.trace)
    steps = start(model, tokenizer, prompts, draft_model=draft_model, cache=args.prompt_cache, **options)
    if not args.quiet:
        _note(_header(name, folder, model, draft_name, options))
        if any(prompt.endswith(" ") for prompt in prompts):
            _note("hint: the prompt ends with a space; GPT-2 joins a space to the next word and does better without")

    completions, row, line_open, unshown = [], None, False, ""
    try:
        for step in _in_row_order(steps):
            done, prompt = step.completion, prompts[step.row // decoding.num_return_sequences]
            if args.json:
                text = _as_json(step, prompt, name, decoding.seed) if done else ""
            else:
                text = step.text
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
            _note_logprobs(done)
    if not args.quiet:
        _note(_closing_line(completions, args.prompt_cache))
        if any(done.finish_reason == "context" for done in completions):
            _note(f"the text fills the model's context of {model.config.n_positions} tokens; --context-shift goes on")
    return 0


def main(argv=None):
    """The console entry point; returns the exit code.

    0, or 2 where what was asked cannot be done, 130 after Ctrl-C, 141 after the reader of a pipe has left.
    """
    # Python has None for a stream that was closed before it started.
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    # UTF-8 whatever the locale.
    sys.stdout.reconfigure(encoding="utf-8", errors="replace", newline="\n")
    sys.stderr.reconfigure(encoding="utf-8", errors="backslashreplace")
    warnings.showwarning = lambda message, *_, **__: _note(f"minigen: warning: {message}")
    try:
        return run(build_parser().parse_args(argv))
    except BrokenPipeError:
        return 141  # the reader has left, as head does
    except KeyboardInterrupt:
        return 130
    except MemoryError as error:
        _note(f"minigen: there is not enough memory for this ({error or 'none left'}); ask for fewer or shorter texts")
        return 2
    except (OSError, ValueError) as error:
        _note(f"minigen: {error}")
        return 2
    finally:
        # What a closed pipe or a full disk has left in a buffer must not come up again when Python exits.
        for output in (sys.stdout, sys.stderr):
            try:
                output.flush()
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
