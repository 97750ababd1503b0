"""A run written down, as one HTML page that shows it: text, candidates, draws, attention, ring, beams and drafts.

`Recorder` is a `Hooks` that the decoders tell what they do. It computes little itself: the distributions are those of
`sampler.probs` with the options switched on one after the other, the uniforms are those the row's generator gave, and
the attention weights follow from the queries and keys that the model's layers had. `page` puts all of it, as JSON, into
tracing.html, which is in this folder and explains itself.

What the page cannot know from the run, what the model says of the prompt's own tokens, takes one more pass at the end.
"""

import base64
import json
import shlex
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

import minigen
from minigen.api import completions, stream
from minigen.engine.hooks import Hooks
from minigen.engine.ops import softmax
from minigen.engine.sampler import apply_logits_processors, log_softmax, next_token_probs
from minigen.engine.speculative import residual
from minigen.engine.validation import is_number
from minigen.files.atomic_write import beside, write_atomic
from minigen.options import BeamConfig, SamplingConfig

TEMPLATE = Path(__file__).with_name("page.html")
# The candidates that are written down: so many of the best before the filters, and of the best after them.
TOP = 10
# A page holds no more choices of a token, in all rows together, and no more attention weights, one byte each.
MAX_TOKENS = 2000
MAX_ATTENTION_WEIGHTS = 12_000_000
# Queries of the prompt that one pass takes: its logits and attention weights are in memory together.
CHUNK = 32
# The sampler's steps in its order, each by the options that rule it.
PENALTIES = "repetition_penalty", "presence_penalty frequency_penalty", "no_repeat_ngram_size", "logit_bias"
BEFORE_TEMPERATURE = *PENALTIES, "min_tokens ignore_eos", "logits_processors"
FILTERS = *BEFORE_TEMPERATURE, "temperature", "top_k", "top_p", "min_p", "typical_p"
NEUTRAL = SamplingConfig(temperature=1, top_p=1)


def stages(sampling, beams=False):
    """The sampler's steps that are switched on: (name, options up to and with this step); first the model alone.

    Beam search, beams=True, has only those before temperature.
    """
    config = replace(NEUTRAL, eos_ids=sampling.eos_ids)
    found = [("model", config)]
    for names in BEFORE_TEMPERATURE if beams else FILTERS:
        given = {name: getattr(sampling, name) for name in names.split()}
        given = {name: value for name, value in given.items() if value != getattr(NEUTRAL, name)}
        if given:
            config = replace(config, **given)
            spelled = [f"{name} {value}" if is_number(value) else name for name, value in given.items()]
            found.append((", ".join(spelled), config))
        if sampling.temperature == 0 and "temperature" in given:
            break  # the most probable token is taken here
    return found


class _RecordingRng:
    """A row's generator, with a memory of what it gave."""

    def __init__(self, rng):
        self.rng = rng
        self.given = []

    def random(self):
        self.given.append(self.rng.random())
        return self.given[-1]

    def take(self):
        """What was given since the last time."""
        given, self.given = self.given, []
        return given


def _short(values):
    """Numbers to 5 significant digits, enough to read; JSON spells each as briefly as it can."""
    return [float(f"{value:.5g}") for value in values]


def _runs(slots, slot_pos):
    """Slots and what they hold now, as [first slot, its position, how many]; -1 is nothing, and counts no further."""
    runs = []
    for slot, position in zip(slots.tolist(), slot_pos[slots].tolist(), strict=True):
        if runs:
            first, start, count = runs[-1]
            if slot == first + count and position == (-1 if start == -1 else start + count):
                runs[-1][2] += 1
                continue
        runs.append([slot, position, 1])
    return runs


def _best(p):
    """The ids of the `TOP` largest of p, [V], that are not 0."""
    best = np.argpartition(-p, TOP - 1)[:TOP] if len(p) > TOP else np.arange(len(p))
    return best[p[best] > 0].tolist()


def _candidate_rows(columns, extra):
    """Some candidates through all columns, float64 [V] each: the best before and after all filters, and `extra`.

    "candidates": [id, where it begins on the cumulative bar of the last column, [its value in each column]], by the
    first column; "left": for each column how many tokens it leaves.
    """
    first, last = columns[0], columns[-1]
    tokens = sorted({*_best(first), *_best(last), *extra}, key=lambda token: (-first[token], token))
    ends = np.cumsum(last)
    begins = (ends - last) / ends[-1] if ends[-1] else ends
    candidates = [[token, *_short([begins[token]]), _short([p[token] for p in columns])] for token in tokens]
    return {"candidates": candidates, "left": [int(np.count_nonzero(p)) for p in columns]}


def _probs(logits, history, config):
    """`sampler.probs`, and zeros where it refuses: a later step of the sampler may still allow something."""
    try:
        return next_token_probs(logits, history, config)
    except ValueError:
        return np.zeros(len(logits))


# ---------------------------------------------------------------------------------------- the recorder


class Recorder(Hooks):
    """Writes down one run of `stream`. A step is one change of the cache, a choice one place where a token was chosen.

    logits_processors are called again for what is shown, as speculation calls them for what it drops: they must be
    functions of (history, logits) alone.
    """

    def __init__(self, model, tokenizer):
        self.model, self.tokenizer = model, tokenizer
        self.sampling = self.config = None
        self.rows = {}  # index -> `Row`
        self.choices, self.steps, self.rounds, self.beam_steps = [], [], [], []
        self.asked = 0  # choices of the run, also those that no longer fit
        self.attention_hook = self._attend
        self._n_weights = 0
        self._running = []  # the rows of the last pass
        self._cache = None  # the last one seen, and for each row index its (slot_pos, length) then
        self._rings = {}
        self._wanted = 1  # queries at the end of the next pass whose attention is of interest
        self._weights = []  # the last pass's attention weights of these, [B, H, wanted, S] for each layer
        self._visible = None  # bool [B, wanted, S]: what they could look at
        self._place = 0  # the query that the next choice follows from
        self._beam_choices = {}  # (prompt index, generated ids) -> the choice of what follows them
        self._finished = {}  # (prompt index, generated ids) -> the entry in beam_steps

    def _full(self, n):
        """Whether n more choices are too many; from then on nothing is recorded, and the model's hook is off."""
        self.asked += n
        if self.asked > MAX_TOKENS:
            self.attention_hook = None
        return self.attention_hook is None

    def _attend(self, layer, q, keys, scale, mask):
        """softmax(q @ k.T * scale) of the last queries of a pass; see `ops.attention`."""
        B, S = keys.shape[0], keys.shape[3]
        if layer == 0:
            self._weights = []
            whole = np.ones((B, self._wanted, S), bool)
            self._visible = whole if mask is None else mask[:, 0, -self._wanted :]
        scores = q[..., -self._wanted :].swapaxes(2, 3) @ keys * scale  # [B, H, D, T] -> [B, H, wanted, S]
        self._weights.append(softmax(np.where(self._visible[:, None], scores, np.float32(-np.inf))))

    def _attention(self, batch, place, slot_pos):
        """The weights of one query as bytes, 255 for 1, by position: [first position seen, uint8 [L, H, n]]."""
        slots = np.flatnonzero(self._visible[batch, place])
        slots = slots[np.argsort(slot_pos[slots])]
        weights = np.stack([layer[batch, :, place][:, slots] for layer in self._weights])  # [H, S] -> [L, H, n]
        self._n_weights += weights.size
        if self._n_weights > MAX_ATTENTION_WEIGHTS:
            return None
        return [int(slot_pos[slots[0]]), np.rint(weights * 255).astype(np.uint8)]

    # ------------------------------------------------------------------------------------ what decoders tell

    def on_start(self, run, rows):
        self.sampling, self.config = run.sampling, run.config
        self._running = list(rows)
        for row in rows:
            self.rows[row.index] = row
            row.rng = _RecordingRng(row.rng)

    def _batch_index(self, row, B):
        """A row's place in a batch of B: the rows of one prompt share one until they differ."""
        return self._running.index(row) * B // len(self._running)

    def _record_step(self, cache, kind):
        if self.attention_hook is None:
            return
        is_new = cache is not self._cache
        if is_new:
            self._cache, self._rings = cache, {}
        self._running = [row for row in self._running if not row.finish_reason]
        rings = {}
        for row in self._running:
            batch = self._batch_index(row, cache.batch)
            slot_pos, length = cache.slot_pos[batch].copy(), int(cache.length[batch])
            old, old_length = self._rings.get(row.index, (np.full(cache.capacity, -1), 0))
            self._rings[row.index] = slot_pos, length
            ring = {"changes": _runs(np.flatnonzero(slot_pos != old), slot_pos), "length": length}
            ring |= {"n": len(row.ids), "shift": len(row.ids) - len(row.context)}
            if kind == "pass":
                visible = self._visible[batch, -1]
                ring |= {"written": [old_length, length], "sees": int(slot_pos[: len(visible)][visible].min())}
            if kind == "pass" or ring["changes"]:
                rings[row.index] = ring
        if rings:
            self.steps.append({"kind": kind, "new": is_new, "capacity": cache.capacity, "rows": rings})

    def on_forward(self, cache):
        self._record_step(cache, "pass")
        self._wanted, self._place = 1, 0

    def on_cache_change(self, cache):
        self._record_step(cache, "rolled back")

    def on_draft(self, row, tokens):
        row.rng.take()  # what a draft model's tokens were drawn with
        self._wanted = len(tokens) + 1
        if self.attention_hook is not None:
            self.rounds.append({"step": len(self.steps), "at": len(row.ids), "drafts": list(tokens), "choices": []})

    def on_token(self, row, logits, p, token, draft=None):
        uniforms = row.rng.take()
        if self._full(1):
            return
        choice = {"row": row.index, "at": len(row.ids), "token": token, "step": len(self.steps) - 1}
        choice["shift"] = len(row.ids) - len(row.context)
        columns = [_probs(logits, row.history, config) for _, config in stages(self.sampling)[:-1]] + [p]
        extra = [token]
        if draft:
            proposed, q, accepted = draft
            # `verify` takes a uniform only where its answer depends on one.
            u = uniforms.pop(0) if 0 < p[proposed] < q[proposed] else None
            pair = {"p": float(p[proposed]), "q": float(q[proposed])}
            choice["draft"] = {"token": proposed, "accepted": accepted, "u": u} | pair
            columns += [q] if accepted else [q, residual(p, q)]
            extra.append(proposed)
        choice["u"] = uniforms[0] if uniforms else None
        choice |= _candidate_rows(columns, extra)
        batch = self._batch_index(row, len(self._visible))
        choice["attention"] = self._attention(batch, self._place, self._rings[row.index][0])
        self._place = (self._place + 1) % self._visible.shape[1]
        if self.rounds:
            self.rounds[-1]["choices"].append(len(self.choices))
        self.choices.append(choice)

    def on_beam_step(self, beams, logits, candidates, kept, finished):
        if self._full(len(beams)):
            return
        row, step = self._running[0], len(self.steps) - 1
        for index, beam in enumerate(beams):
            ids = row.ids + beam  # the rows of a search hold the prompt alone until it ends
            log_p, history = log_softmax(logits[index]), row.history._replace(ids=ids)
            columns = [
                np.exp(apply_logits_processors(log_p, history, config))
                for _, config in stages(self.sampling, beams=True)
            ]
            choice = {"at": len(ids), "step": step, "shift": 0, "u": None}
            choice |= _candidate_rows(columns, [other.token for other in candidates if other.parent == index])
            choice["attention"] = self._attention(index, 0, self._cache.slot_pos[index])
            self._beam_choices[row.prompt_index, tuple(beam)] = choice
        scores = {tuple(hypothesis.tokens): hypothesis.score for hypothesis in finished}
        for (prompt, tokens), entry in self._finished.items():
            if prompt == row.prompt_index and tokens not in scores:
                entry.setdefault("out", len(self.beam_steps))  # better ones have taken its place
        entries = []
        for candidate in candidates:
            tokens = (*beams[candidate.parent], candidate.token)
            entry = {"parent": candidate.parent, "token": candidate.token, "sum": candidate.sum_logprob}
            if candidate in kept:
                entry["row"] = kept.index(candidate)
            elif tokens in scores:
                entry["score"] = scores[tokens]
                self._finished[row.prompt_index, tokens] = entry
            entries.append(entry)
        self.beam_steps.append({"step": step, "prompt": row.prompt_index, "candidates": entries})

    # ------------------------------------------------------------------------------------ what the page holds

    def _prompt_choices(self, ids):
        """What the model alone says of the second and every later token of a prompt; a pass of its own."""
        window = self.config.window and min(self.config.window, len(ids))
        cache = self.model.new_cache(1, len(ids), window)
        choices = []
        for start in range(0, len(ids) - 1, CHUNK):
            chunk = ids[start : min(start + CHUNK, len(ids) - 1)]
            self._wanted = len(chunk)
            logits = self.model.forward([chunk], cache, last_only=False, attention_hook=self._attend)  # [1, T, V]
            for place, row_logits in enumerate(logits[0]):
                choice = {"at": start + place + 1, "token": ids[start + place + 1], "shift": 0, "u": None}
                choice |= _candidate_rows([np.exp(log_softmax(row_logits))], [choice["token"]])
                choice["attention"] = self._attention(0, place, cache.slot_pos[0])
                choices.append(choice)
        return choices

    def _beam_path(self, row):
        """The choices along a finished hypothesis, as far as they were recorded."""
        tokens = row.ids[row.n_prompt :]
        for n, token in enumerate(tokens):
            choice = self._beam_choices.get((row.prompt_index, tuple(tokens[:n])))
            if choice:
                yield choice | {"row": row.index, "token": token}

    def _row(self, row, choices):
        n_shown = row.n_prompt + sum(choice["row"] == row.index for choice in choices)
        shown = {name: getattr(row, name) for name in ("index", "n_prompt", "n_generated", "finish_reason", "score")}
        return shown | {"prompt": row.prompt_index, "ids": row.ids[:n_shown]}

    def _spelled(self, token):
        """A token's text, or its bytes where these are only a part of a character."""
        data = self.tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return list(data)

    def data(self):
        """All that was recorded, of JSON's types. Runs the prompts once more; called once, after the run."""
        rows = list(self.rows.values())
        prompts = {row.prompt_index: row.ids[: row.n_prompt] for row in rows}
        prompts = {index: self._prompt_choices(ids) for index, ids in prompts.items()}
        choices = [*self.choices, *(choice for row in rows for choice in self._beam_path(row))]
        everything = [*choices, *(choice for found in prompts.values() for choice in found)]
        pieces, offset = [], 0
        for choice in everything:
            if choice["attention"]:
                first, weights = choice["attention"]
                choice["attention"] = [offset, first, weights.shape[2]]
                pieces.append(weights.tobytes())
                offset += weights.size
        rows = [self._row(row, choices) for row in rows]
        ids = {token for row in rows for token in row["ids"]}
        ids |= {candidate[0] for choice in everything for candidate in choice["candidates"]}
        ids |= {token for draft_round in self.rounds for token in draft_round["drafts"]}
        ids |= {entry["token"] for step in self.beam_steps for entry in step["candidates"]}
        return {
            "stages": [name for name, _ in stages(self.sampling, bool(self.beam_steps))],
            "rows": rows,
            "prompts": prompts,
            "choices": choices,
            "steps": self.steps,
            "rounds": self.rounds,
            "beams": self.beam_steps,
            "vocabulary": {token: self._spelled(token) for token in sorted(ids)},
            "layers": self.model.config.n_layer,
            "heads": self.model.config.n_head,
            "seed": self.config.seed,
            "use_cache": self.config.use_cache,
            "window": self.config.window,
            "keep": self.config.keep,
            "attention": base64.b64encode(zlib.compress(b"".join(pieces), 9)).decode(),
        }


# ---------------------------------------------------------------------------------------- the file


def _error(path, error):
    return OSError(f"cannot write the trace {path}: {getattr(error, 'strerror', None) or error}; name another file")


def check_file(path):
    """Raise OSError unless a file can be written there; what is there stays as it is."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is not an ordinary file")
        probe = beside(path)[1]
        probe.touch(exist_ok=False)
        probe.unlink()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name, or no name at all
        raise _error(path, error) from error


def page(data):
    """The HTML page that shows `Recorder.data` and whatever else tracing.html finds beside it."""
    # "<" would let a text end the script element; all else that HTML or JavaScript could trip over, json escapes.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace("{{data}}", text)


def _model_line(model, name):
    config = model.config
    size = f"{config.n_layer} layers of {config.n_head} heads, vocabulary {config.vocab_size:,}"
    return size if name is None else f"{name}, {size}"


def _as_typed(options):
    """Options as they are typed on the command line; of `logits_processors`, which it does not have, the name."""
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


def _about(model, draft_model, names, options):
    """What a page is a run of, in a few words each; names: (the model's, the draft model's), None if not known."""
    yield f"model: {_model_line(model, names[0])}"
    if draft_model:
        yield f"drafts: {_model_line(draft_model[0], names[1])}"
    elif options.get("prompt_lookup_num_tokens"):
        yield "drafts: n-gram lookup in the text"
    yield f"minigen {minigen.__version__}"
    yield from _as_typed(options)


def stream_with_trace(model, tokenizer, prompts, file, *, names=(None, None), draft_model=None, cache=None, **options):
    """`stream`, recorded: yields its steps, and writes the page to `file` when they end or are left, as by Ctrl-C.

    names: of the model and of the draft model, for the page's head. Raises what `stream` raises, and then writes
    nothing, and OSError at once where `file` cannot be written. Without a prompt there is no page.
    """
    check_file(file)
    recorder = Recorder(model, tokenizer)
    steps = stream(model, tokenizer, prompts, draft_model=draft_model, cache=cache, hooks=recorder, **options)

    def write():
        if recorder.rows:
            seed = {} if recorder.beam_steps else {"seed": recorder.config.seed}  # beam search draws nothing
            about = list(_about(model, draft_model, names, {**options, "seed": None} | seed))
            penalty = options.get("length_penalty", BeamConfig.length_penalty)
            limits = {"asked": recorder.asked, "most_choices": MAX_TOKENS, "most_weights": MAX_ATTENTION_WEIGHTS}
            html = page(recorder.data() | {"about": about, "length_penalty": penalty} | limits)
            try:
                write_atomic(file, html.encode())
            except OSError as error:
                raise _error(file, error) from error

    def run():
        try:
            yield from steps
        except (GeneratorExit, KeyboardInterrupt, SystemExit):
            write()
            raise
        write()

    return run()


def trace(model, tokenizer, prompts, file, *, draft_model=None, cache=None, **options):
    """`generate`, recorded: returns the `Completion`s and writes a page that shows how they came about to `file`.

    file: a path; the page is one HTML file that needs nothing else. Other arguments and errors are those of `generate`,
    and OSError is raised before anything is computed where `file` cannot be written. The texts are those of `generate`.
    """
    return completions(
        stream_with_trace(model, tokenizer, prompts, file, draft_model=draft_model, cache=cache, **options)
    )
