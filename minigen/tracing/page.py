"""Renders a recorded run as one self-contained HTML page, and writes or shows it.

    steps of `stream` -> `Recorder`'s lists -> `page_data`, of JSON's types -> `render_page`, HTML -> file or notebook

page.html, in this folder, is the template; it contains the program that draws everything from the JSON.
"""

import base64
import html
import json
import shlex
import zlib
from collections.abc import Mapping
from pathlib import Path

import minigen
from minigen.api import completions, stream
from minigen.files.atomic_write import beside, write_atomic
from minigen.options import BeamConfig, SpeculationConfig, as_python
from minigen.tracing import recorder as recording
from minigen.tracing.recorder import Recorder, stages

TEMPLATE = Path(__file__).with_name("page.html")


# ---------------------------------------------------------------------------------------- lists -> JSON


def _pack_attention(choices):
    """Replace each choice's attention weights with their place in one array; return that, compressed, in base64."""
    pieces, offset = [], 0
    for choice in choices:
        if choice["attention"]:
            first, weights = choice["attention"]  # uint8 [L, H, n]
            choice["attention"] = [offset, first, weights.shape[2]]
            pieces.append(weights.tobytes())
            offset += weights.size
    return base64.b64encode(zlib.compress(b"".join(pieces), 9)).decode()


def _spell(tokenizer, token):
    """A token's text, or its bytes if they are only a part of a character."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def page_data(recorder, tokenizer):
    """Everything recorded, in JSON's types. Runs the prompts once more; called once, after the run."""
    choices = recorder.all_choices()
    rows = []
    for row in recorder.rows.values():
        shown = {name: getattr(row, name) for name in ("index", "n_prompt", "n_generated", "finish_reason", "score")}
        n_shown = row.n_prompt + sum(choice["row"] == row.index for choice in choices)
        rows.append(shown | {"prompt": row.prompt_index, "ids": row.ids[:n_shown]})
    prompts = {row["prompt"]: row["ids"][: row["n_prompt"]] for row in rows}
    prompts = {index: recorder.prompt_choices(ids) for index, ids in prompts.items()}
    everything = [*choices, *(choice for found in prompts.values() for choice in found)]
    ids = {token for row in rows for token in row["ids"]}
    ids |= {candidate[0] for choice in everything for candidate in choice["candidates"]}
    ids |= {token for draft_round in recorder.rounds for token in draft_round["drafts"]}
    ids |= {entry["token"] for step in recorder.beam_steps for entry in step["candidates"]}
    return {
        "stages": [name for name, _ in stages(recorder.sampling, bool(recorder.beam_steps))],
        "rows": rows,
        "prompts": prompts,
        "choices": choices,
        "steps": recorder.steps,
        "rounds": recorder.rounds,
        "beams": recorder.beam_steps,
        "vocabulary": {token: _spell(tokenizer, token) for token in sorted(ids)},
        "layers": recorder.model.config.n_layer,
        "heads": recorder.model.config.n_head,
        "use_cache": recorder.config.use_cache,
        "window": recorder.config.window,
        "keep": recorder.config.keep,
        "n_choices": recorder.n_choices,
        "max_choices": recording.MAX_TOKENS,
        "max_weights": recording.MAX_ATTENTION_WEIGHTS,
        "attention": _pack_attention(everything),
    }


# ---------------------------------------------------------------------------------------- the page's head


def _model_line(model, name):
    config = model.config
    size = f"{config.n_layer} layers of {config.n_head} heads, vocabulary {config.vocab_size:,}"
    return size if name is None else f"{name}, {size}"


def _as_typed(options):
    """Options as typed on the command line; `logits_processors`, which Python alone has, by name."""
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if name == "logits_processors":
            yield from [name] if value else []
        elif name == "use_cache":
            yield from [] if value else ["--no-cache"]
        elif isinstance(value, Mapping):
            yield from (f"{flag} {key}{'=' if isinstance(key, str) else ''}{bias:+g}" for key, bias in value.items())
        elif isinstance(value, list | tuple):
            yield from (f"{flag} {shlex.quote(str(item))}" for item in value)
        elif name == "early_stopping":
            yield f"{flag} {str(value).lower()}"
        elif value is True:
            yield flag
        elif value is not None and value is not False:
            yield f"{flag} {shlex.quote(str(value))}"


def _defaults(recorder, has_draft_model, options):
    """The options that shaped the run although they were not given."""
    values = {"max_tokens": recorder.config.max_tokens}
    if recorder.beam_steps:
        values |= {"length_penalty": BeamConfig.length_penalty, "early_stopping": BeamConfig.early_stopping}
    else:
        values |= {"temperature": recorder.sampling.temperature, "top_p": recorder.sampling.top_p}
    if has_draft_model:
        values["num_draft_tokens"] = SpeculationConfig.num_draft_tokens
    elif options.get("prompt_lookup_num_tokens"):
        values["max_matching_ngram_size"] = SpeculationConfig.max_matching_ngram_size
    return {name: value for name, value in values.items() if name not in options}


def _about(recorder, draft_model, names, options):
    """The run's models and options, a few words each; names: (the model's, the draft model's), None if unknown."""
    yield f"model: {_model_line(recorder.model, names[0])}"
    if draft_model:
        yield f"drafts: {_model_line(draft_model[0], names[1])}"
    elif options.get("prompt_lookup_num_tokens"):
        yield "drafts: n-gram lookup in the text"
    yield f"minigen {minigen.__version__}"
    seed = {} if recorder.beam_steps else {"seed": recorder.config.seed}  # beam search draws nothing
    yield from _as_typed({**options, "seed": None} | seed)
    yield from (f"{option} (default)" for option in _as_typed(_defaults(recorder, bool(draft_model), options)))


# ---------------------------------------------------------------------------------------- JSON -> HTML -> file


def render_page(data):
    """The HTML page that shows `page_data` together with "about" and "length_penalty"."""
    # "<" would let a text end the script element; json escapes everything else that HTML or JavaScript treat specially.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace("{{data}}", text)


def _write_error(path, error):
    return OSError(f"cannot write the trace {path}: {getattr(error, 'strerror', None) or error}; name another file")


def check_file(path):
    """Raise OSError unless a file can be written there; an existing file stays as it is."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is not an ordinary file")
        probe = beside(path)[1]
        probe.touch(exist_ok=False)
        probe.unlink()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name, or an empty name
        raise _write_error(path, error) from error


def write_page(path, page):
    """Write a page atomically. Raises OSError if that fails."""
    try:
        write_atomic(path, page.encode())
    except OSError as error:
        raise _write_error(path, error) from error


class TracedSteps:
    """Iterator over the steps of a recorded run. `page` is its HTML once the steps have ended or were closed.

    written: one sentence on the file that was written, None before that.
    """

    def __init__(self, steps, recorder, render, file):
        self.page = self.written = None
        self._recorder, self._render, self._file = recorder, render, file
        self._run = self._recorded(steps)

    def _recorded(self, steps):
        try:
            yield from steps
        except (GeneratorExit, KeyboardInterrupt, SystemExit):
            self._finish()
            raise
        self._finish()

    def _finish(self):
        if not self._recorder.rows:  # it was closed before its first step, or it has no prompts
            return
        self.page = self._render()
        if self._file is not None:
            write_page(self._file, self.page)
            path = Path(self._file).resolve()
            kilobytes = path.stat().st_size / 1000
            self.written = f"wrote the trace {self._file} ({kilobytes:,.0f} kB): open {path.as_uri()} in a browser"

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._run)

    def close(self):
        """Stop the run; the page then shows what was generated."""
        self._run.close()


def stream_with_trace(
    model, tokenizer, prompts, file=None, *, names=(None, None), draft_model=None, cache=None, **options
):
    """`stream` with a recorder: a `TracedSteps`, which writes the page to `file` at the end, also after Ctrl-C.

    names: of the model and of the draft model, for the page's head. Raises what `stream` raises, in which case nothing
    is written, and OSError at once if `file` cannot be written. Without prompts there is no page.
    """
    if file is not None:
        check_file(file)
    recorder = Recorder(model)
    steps = stream(model, tokenizer, prompts, draft_model=draft_model, cache=cache, hooks=recorder, **options)

    def render():
        given = {name: as_python(value) for name, value in options.items()}
        head = {"about": list(_about(recorder, draft_model, names, given))}
        head["length_penalty"] = float(given.get("length_penalty", BeamConfig.length_penalty))
        return render_page(page_data(recorder, tokenizer) | head)

    return TracedSteps(steps, recorder, render, file)


class Trace(list):
    """The `Completion`s of a recorded run, as a list that a notebook displays as the run's page."""

    def __init__(self, found, page):
        super().__init__(found)
        self.page = page  # HTML; None if there were no prompts

    @property
    def completions(self):
        return list(self)

    def save(self, path):
        """Write the page to a file. Raises OSError if that fails."""
        if self.page is None:
            raise ValueError("there is no page: the run had no prompts")
        check_file(path)
        write_page(path, self.page)

    def _repr_html_(self):
        """The page in a frame that runs its script but cannot touch the notebook."""
        if self.page is None:
            return None
        style = "width:100%;height:860px;border:0"
        return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{html.escape(self.page)}"></iframe>'


def trace(model, tokenizer, prompts, file=None, *, draft_model=None, cache=None, **options):
    """`generate` with a recorder: a `Trace`, the list of `Completion`s with a page that shows how they came about.

    file: the page is written there; it is one HTML file that needs nothing else. Without a file, `save` writes it, and
    a notebook displays the returned object. Other arguments, texts and errors are those of `generate`; OSError is
    raised before anything is computed if `file` cannot be written.
    """
    steps = stream_with_trace(model, tokenizer, prompts, file, draft_model=draft_model, cache=cache, **options)
    return Trace(completions(steps), steps.page)
