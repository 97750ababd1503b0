"""What the command prints: texts and JSON on stdout; header, closing line, log-probabilities and errors on stderr."""

import contextlib
import json
import math
import select
import sys
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import minigen
from minigen.command.colors import UNLIKELY, TokenColorizer
from minigen.kernels.batch_invariant import BATCH_INVARIANT
from minigen.kernels.linear import weights_are_blocked
from minigen.options import OPTIONS

# Control characters, which could move a terminal's cursor or set its title -> symbols. Newline and tab stay.
SYMBOLS = {code: 0x2400 + code for code in range(0x20)} | {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
SYMBOLS = {code: symbol for code, symbol in SYMBOLS.items() if chr(code) not in "\n\t"}


# ---------------------------------------------------------------------------------------- streams


def is_terminal(stream):
    """Whether a stream, which may be None or no file at all, is a terminal."""
    return stream is not None and stream.isatty()


def _write(stream, text, errors):
    """Write all of `text` as UTF-8, whatever the locale, at once. Raises OSError if that is not possible.

    It bypasses Python's buffer, where a failure would be noticed only at exit, and Python's text layer, which drops
    what the system does not accept in one piece, for example if the stream is a full pipe that does not block.
    """
    if stream is None:  # it was closed before Python started
        raise OSError("it is closed")
    binary = getattr(stream, "buffer", None)
    if binary is None:  # such as a StringIO
        stream.write(text)
        return
    raw, data = getattr(binary, "raw", binary), memoryview(text.encode("utf-8", errors))
    while data:
        written = raw.write(data)
        if written is None:
            select.select([], [raw], [])
        else:
            data = data[written:]


def write(text):
    """Write to stdout."""
    try:
        _write(sys.stdout, text, "replace")
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(f"cannot write to stdout: {error.strerror or error}") from error


def print_stderr(text, end="\n"):
    """Write to stderr, as far as possible: if it cannot be written, the text on stdout still matters."""
    with contextlib.suppress(OSError):
        _write(sys.stderr, text + end, "backslashreplace")


def print_error(message):
    """An error or a warning, on one line: a file's name may hold a line break."""
    print_stderr("minigen: " + " ".join(message.splitlines()).translate(SYMBOLS))


class TextWriter:
    """Writes texts to stdout, each ending with a newline.

    hold: write a text only when it has ended.
    """

    def __init__(self, hold):
        self.hold, self.held, self.line_open = hold, "", False

    def add(self, text, ends=False):
        """Add to the text. ends: with this, the text is complete."""
        self.held += text
        if text:
            self.line_open = not text.endswith("\n")
        if ends and self.line_open:
            self.held, self.line_open = self.held + "\n", False
        if ends or not self.hold:
            held, self.held = self.held, ""
            write(held)


# ---------------------------------------------------------------------------------------- texts


class Format(NamedTuple):
    """How texts are printed."""

    model: str  # its name
    json: bool
    hold: bool  # print each text only when it is complete
    echo: bool  # the prompt as well
    tokenizer: object = None  # set if tokens are to be coloured
    is_turn: bool = False  # an empty text has a line as well


def _in_row_order(steps):
    """Reorder steps so that rows are printed one after another, the current one as it comes."""
    current, held = 0, defaultdict(list)
    for step in steps:
        held[step.row].append(step)
        while held[current]:
            step = held[current].pop(0)
            yield step
            current += step.finish_reason is not None


def _layout():
    """How the weights lie in memory, as MINIGEN_LINEAR names it. The last bits of logits depend on it."""
    return "blocks" if weights_are_blocked() else "plain"


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
            "layout": _layout(),
            "batch_invariant": BATCH_INVARIANT,
            "speculation": done.speculation and asdict(done.speculation),
            "timings": done.timings._asdict(),
        },
        ensure_ascii=False,
    )


def print_texts(steps, prompts, seed, style):
    """Print each row's prompt and text as they come, or its JSON; return the rows' `Completion`s.

    prompts: one per row. style: a `Format`. If an error or Ctrl-C ends the run, the text so far is printed.
    """
    show = (lambda text: text.translate(SYMBOLS)) if is_terminal(sys.stdout) else str
    out, completions, row = TextWriter(style.hold), [], None
    # Close explicitly: this writes the trace, and an error raised during garbage collection would be lost.
    with contextlib.closing(steps):
        try:
            for step in _in_row_order(steps):
                done, prompt = step.completion, prompts[step.row]
                start = ""
                if step.row != row:
                    colorizer = TokenColorizer(style.tokenizer) if style.tokenizer else None
                    start = ("" if row is None else "\n") + (show(prompt) if style.echo else "")
                    out.line_open, row = style.is_turn and not style.json, step.row
                if style.json:
                    text = show(_as_json(step, prompt, style.model, seed)) if done else ""
                else:
                    step = replace(step, text=show(step.text))
                    text = start + (colorizer.render(step) if colorizer else step.text)
                out.add(text, ends=bool(done))
                if done:
                    completions.append(done)
        finally:
            out.add("", ends=True)
    return completions


# ---------------------------------------------------------------------------------------- what goes to stderr


def print_logprobs(completions, only_unlikely):
    """The log-probability of each token, or only of unlikely ones, and of the most probable tokens at its place."""
    for number, done in enumerate(completions, 1):
        heading = f"text {number} of {len(completions)}: " if len(completions) > 1 else ""
        entries = done.logprobs
        if only_unlikely:
            entries = [entry for entry in entries if math.exp(entry.logprob) < UNLIKELY]
            heading += (
                f"unlikely tokens (below {UNLIKELY * 100:.0f} %), and the most probable ones there:" if entries else ""
            )
        elif heading:
            heading += "log-probabilities, and the most probable tokens in each place:"
        if heading and entries:
            print_stderr(heading)
        for entry in entries:
            if only_unlikely:
                best = "  ".join(f"{text!r} {math.exp(logprob):.1%}" for _, text, logprob in entry.top)
                print_stderr(f"{math.exp(entry.logprob):8.2%}  {entry.text!r:16} {best}")
            else:
                best = "  ".join(f"{text!r} {logprob:.3f}" for _, text, logprob in entry.top)
                print_stderr(f"{entry.logprob:9.4f}  {entry.text!r:16} {best}")


def model_line(name, folder, model):
    """Name, place and size of a model."""
    n_parameters = sum(map(math.prod, model.config.parameter_shapes().values()))
    folder = Path(folder).resolve()
    folder = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    return (
        f"minigen {minigen.__version__} · {name} ({folder}), {n_parameters / 1e6:.1f}M parameters, "
        f"context {model.config.n_positions}"
    )


def header(name, folder, model, draft_name, options):
    """The model, and every setting that is needed to repeat the run."""
    beams = options.get("num_beams", 1) > 1
    draws = not beams and options.get("temperature") != 0
    always = [*(["temperature"] if not beams else []), *(["top_p"] if draws else []), "max_tokens"]
    if draft_name or options.get("prompt_lookup_num_tokens"):
        always.append("speculation_rule")
    settings = {option: OPTIONS[option].default for option in always} | options
    if not draws:
        del settings["seed"]
    listed = " ".join(f"{option} {value!r}" for option, value in settings.items() if value != {})
    drafts = f" · drafts by {draft_name}" if draft_name else ""
    invariant = ", batch invariant" if BATCH_INVARIANT else ""
    return f"{model_line(name, folder, model)}{drafts} · {listed} · layout {_layout()}{invariant}"


def closing_line(completions, prompt_cache):
    """Tokens, speed, memory and finish reasons of a run."""
    # Rows of one batch run together, so the row that ends last has the time of all. Beam searches run one by one.
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
    if timings.reused_tokens:  # tokens per second would count tokens that were not computed
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
