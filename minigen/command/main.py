"""The command line: text goes to stdout as it is made, everything else to stderr.

python -m minigen "Once upon a time" --temperature 0.8 --seed 1
"""

import contextlib
import json
import locale
import math
import os
import sys
import time
import warnings
from collections import defaultdict
from dataclasses import asdict
from functools import partial

import minigen
from minigen.api import OPTION_NAMES, check_options, load, stream
from minigen.command import signals
from minigen.command.arguments import DEFAULTS, build_parser, decode_file, read_file, read_prompts
from minigen.command.colors import UNLIKELY, TokenColorizer, has_colours, legend
from minigen.engine.validation import require
from minigen.files.hub import DEFAULT_MODEL, default_draft, resolve_checkpoint
from minigen.scoring import score
from minigen.session import Session
from minigen.tracing.page import check_file, stream_with_trace

# What --score makes use of; every other option is refused beside it.
FOR_SCORING = ("model", "score", "stride", "logprobs", "json", "quiet")


# ---------------------------------------------------------------------------------------- output


def _print_stderr(text):
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
        _print_stderr(f"{entry.logprob:9.4f}  {entry.text!r:16} {best}")


def _note_unlikely(completion):
    unlikely = [entry for entry in completion.logprobs if math.exp(entry.logprob) < UNLIKELY]
    if unlikely:
        _print_stderr(f"unlikely tokens (below {UNLIKELY * 100:.0f} %), and the most probable ones there:")
    for entry in unlikely:
        best = "  ".join(f"{text!r} {math.exp(logprob):.1%}" for _, text, logprob in entry.top)
        _print_stderr(f"{math.exp(entry.logprob):8.2%}  {entry.text!r:16} {best}")


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
    # The last to end: rows of one batch run side by side. Searches run one prompt after the other.
    timings = max((done.timings for done in completions), key=lambda timings: timings.seconds)
    if completions[0].score is not None:
        searches = {done.prompt_index: done.timings for done in completions}.values()
        seconds = {name: sum(getattr(run, name) for run in searches) for name in ("prompt_seconds", "seconds")}
        timings = timings._replace(**seconds)
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
        with contextlib.suppress(OSError):
            print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    return decode_file(line)


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
        _print_stderr(
            f"the text fills the model's context of {n_positions} tokens: /new begins another, --context-shift goes on"
        )


def run_interactive(session, prompts, args, model, to_cli_message):
    """Read turns, and print what the model makes of each, until stdin ends; the exit code.

    prompts: the first turns. A turn that cannot be run is told, and changes nothing. Where nobody is typing, it makes
    the exit code 2, and Ctrl-C ends all turns.
    """
    typed = sys.stdin is not None and sys.stdin.isatty()
    if typed:
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
        with contextlib.suppress(ImportError, AttributeError):  # Windows has neither
            if locale.nl_langinfo(locale.CODESET) != "UTF-8":
                os.environ["LC_ALL"] = "C.UTF-8"  # readline would drop characters that the locale does not have
            import readline  # noqa: F401  input() edits lines and remembers them from now on
        if not args.quiet:
            _print_stderr(
                "each line is added to the text, and continued; an empty one adds nothing; /new begins a new text"
            )
            _print_stderr("Ctrl-C stops the text, Ctrl-D leaves")
    prompts, stopped, failed = list(prompts), False, False
    while True:
        echo = not args.no_echo and (bool(prompts) or not typed)
        try:
            text = prompts.pop(0) if prompts else _read_turn()
        except EOFError:
            if typed:
                _print_stderr("")  # the shell's own prompt gets a line of its own
            return 2 if failed and not typed else 0
        except KeyboardInterrupt:
            if stopped or not typed:
                raise
            stopped = True
            _print_stderr("\nCtrl-C again leaves, as Ctrl-D does")
            signals.raise_on_next_signal()
            continue
        stopped = False
        try:
            if text == "/new":
                session.context = []
                if typed:
                    _print_stderr("a new text begins")
            else:
                _print_turn(session, text, args, model, echo)
        except ValueError as error:
            failed = True
            _print_stderr(f"minigen: {to_cli_message(str(error))}")
        except KeyboardInterrupt:
            if not typed:
                raise
            signals.raise_on_next_signal()  # it was the turn's end; the next one follows


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
        text = read_file(args.score)
    except OSError as error:
        raise OSError(f"cannot read the text of {args.score}: {error.strerror or error}") from error
    name = DEFAULT_MODEL if args.model is None else args.model
    folder = resolve_checkpoint(args.model)
    model, tokenizer = load(folder)
    if not args.quiet:
        _print_stderr(_model_line(name, folder, model))
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
        _print_stderr(f"stride {scored.stride} · {seconds:.2f} s ({scored.n_tokens / seconds:.1f} tokens/s)")
    return 0


def _print_texts(steps, prompts, args, model, decoding, tokenizer):
    """Print each row's prompt and text, as they come, or its JSON; the rows' `Completion`s.

    model: its name. tokenizer: where tokens are to be coloured, or else None.
    """
    completions, row, line_open, unshown = [], None, False, ""
    try:
        for step in _in_row_order(steps):
            done, prompt = step.completion, prompts[step.row // decoding.num_return_sequences]
            if args.json:
                text = _as_json(step, prompt, model, decoding.seed) if done else ""
            else:
                if step.row != row:
                    painter = TokenColorizer(tokenizer) if tokenizer else None
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
    return completions


def run(args, to_cli_message):
    """Read the prompts, load the models, print the continuations; the exit code.

    to_cli_message: puts an error's message in the words of the command line.
    """
    if args.score is not None:
        return run_score(args)
    if args.stride is not None:
        raise ValueError(f"--stride is {args.stride}, but only --score uses it: leave it out")
    if args.show_probs and args.json:
        raise ValueError("--show-probs colours a text, and --json prints none: use --logprobs with --json")
    options = {name: value for name, value in vars(args).items() if name in OPTION_NAMES}
    if args.show_probs:
        options.setdefault("logprobs", 3)
    coloured = args.show_probs and has_colours(sys.stdout)
    draft_name = args.draft_model
    if args.speculative and draft_name is None:
        draft_name = default_draft(args.model)
    # What needs no model is checked before one is loaded. A bias may name its token by text, which needs the tokenizer.
    without_bias = {name: value for name, value in options.items() if name != "logit_bias"}
    cached = args.prompt_cache is not None
    decoding = check_options(without_bias, drafts=draft_name is not None, cached=cached).decoding
    options |= {"seed": decoding.seed, "logit_bias": dict(options.get("logit_bias", ()))}
    if args.trace is not None:
        check_file(args.trace)
        for flag, path in (
            ("--prompt-cache", args.prompt_cache),
            ("--file", args.file),
            ("--prompts-file", args.prompts_file),
        ):
            if path is not None and os.path.realpath(path) == os.path.realpath(args.trace):
                raise ValueError(f"--trace and {flag} are both {path}: name another file for one of them")
    prompts = read_prompts(args)
    if args.interactive:
        require(len(prompts) < 2, "the number of prompts", len(prompts), "1 or none with --interactive")
        require(not cached, "--prompt-cache", args.prompt_cache, "left out with --interactive, which keeps its own")
        if args.trace is not None or args.show_probs:
            flag = "--show-probs" if args.show_probs else "--trace"
            raise ValueError(f"{flag} cannot be given with --interactive, which shows the text alone")
    name = DEFAULT_MODEL if args.model is None else args.model
    folder = resolve_checkpoint(args.model)
    model, tokenizer = load(folder)
    draft_model = None if draft_name is None else load(draft_name)
    # Until here a signal does what `__main__` says: a download's threads would let an exception wait for them.
    signals.raise_on_next_signal()
    if args.interactive:
        session = Session(model, tokenizer, draft_model=draft_model, **options)
        if not args.quiet:
            _print_stderr(_header(name, folder, model, draft_name, options))
        return run_interactive(session, prompts, args, name, to_cli_message)
    start = stream if args.trace is None else partial(stream_with_trace, file=args.trace, names=(name, draft_name))
    steps = start(model, tokenizer, prompts, draft_model=draft_model, cache=args.prompt_cache, **options)
    if not args.quiet:
        _print_stderr(_header(name, folder, model, draft_name, options))
        if any(prompt.endswith(" ") for prompt in prompts):
            _print_stderr(
                "hint: the prompt ends with a space; GPT-2 joins a space to the next word and does better without"
            )
        if coloured and has_colours(sys.stderr):
            _print_stderr(legend())

    try:
        # Close explicitly: this writes the trace, and an error raised during garbage collection would be lost.
        with contextlib.closing(steps):
            completions = _print_texts(steps, prompts, args, name, decoding, tokenizer if coloured else None)
    finally:
        if args.trace is not None and steps.written and not args.quiet:
            _print_stderr(steps.written)
    if decoding.logprobs is not None and not args.json:
        for done in completions:
            (_note_logprobs if "logprobs" in args else _note_unlikely)(done)
    if not args.quiet:
        _print_stderr(_closing_line(completions, args.prompt_cache))
        if any(done.finish_reason == "context" for done in completions):
            _print_stderr(
                f"the text fills the model's context of {model.config.n_positions} tokens; --context-shift goes on"
            )
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
    warnings.showwarning = lambda message, *_, **__: _print_stderr(f"minigen: warning: {message}")
    parser = build_parser()

    def to_cli_message(message):
        return parser.to_cli_message(message, argv)

    with signals.restored():
        try:
            return run(parser.parse_args(argv), to_cli_message)
        except BrokenPipeError:
            return 141  # the reader has left, as head does
        except KeyboardInterrupt:
            return 130
        except MemoryError as error:
            _print_stderr(
                f"minigen: there is not enough memory for this ({error or 'none left'}); ask for fewer or shorter texts"
            )
            return 2
        except (OSError, ValueError) as error:
            message = to_cli_message(str(error)) if isinstance(error, ValueError) else str(error)
            if isinstance(error, OSError) and error.errno is not None:  # the sentences of our own have none
                message = f"cannot write the text: {error.strerror}; send it somewhere else"
            _print_stderr("minigen: " + " ".join(message.splitlines()))  # a file's name may hold a line break
            return 2
        finally:
            signals.swallow_signals()
            # What a closed pipe or a full disk has left in a buffer must not come up again when Python exits.
            for output in (sys.stdout, sys.stderr):
                try:
                    output.flush()
                except OSError:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
