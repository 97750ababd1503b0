"""Records a run: the decoders' events become lists of numbers and strings, which page.py writes into an HTML page.

`Recorder` is a `Hooks` object. It takes nearly everything from the run: the distributions are those of
`next_token_probs` with the options switched on one after the other, the random numbers are those of each position's
`Noise`, and the attention weights follow from the queries and keys that the model's layers pass to the hook. Only the
probabilities of the prompt's own tokens need a forward pass after the run.

A choice is one place in one text where a token was chosen (or, in a prompt, given):

    {"row", "at", "token", "step", "shift",    row of the batch, index in the text, id, index in `steps`, ids dropped
     "candidates": [[id, [value of each column]], ...], "left": [tokens that each column leaves],
     "attention": [offset, first position, number of positions],         null if it was not recorded
     "race": [[id, E], ...],                   the exponential race: E of each listed candidate that is left, by E / p:
                                               the first is the token, the second the runner-up; null if p is one-hot
     "draft": {"token", "accepted", "rule", "p", "q", "u"}}              only if a draft was proposed for this place

The columns are the stages of the sampler; after them comes the draft's q, unless "q" is null (n-gram drafts have no
distribution), and then, if "rule" is "rejection" and the draft was rejected, the residual max(p - q, 0), normalised,
which "race" then draws from; "u" is the uniform number that decided. With "rule" "coupled" the draft was drawn from q
with the same E, so "race" also lists the draft's token, last if p excludes it, and "u" is null. In beam
search the first column is the model's probability, and the others are log-probabilities, null for -inf. A choice in a
prompt has no "row", "step" and "draft", and one column.
"""

from dataclasses import replace

import numpy as np

from minigen.engine.hooks import Hooks
from minigen.engine.ops import attention_weights
from minigen.engine.sampler import FILTERS, apply_logits_processors, log_softmax, next_token_probs, one_hot, top_ids
from minigen.engine.speculative import residual
from minigen.engine.validation import is_number
from minigen.options import SamplingConfig

# Candidates to record: this many of the best before the filters, and of the best after them.
TOP = 10
# The most choices that a page holds, over all rows, and the most attention weights, at one byte each.
MAX_TOKENS = 2000
MAX_ATTENTION_WEIGHTS = 12_000_000
# The prompt's queries per forward pass: their logits and attention weights are in memory together.
CHUNK = 32
# The sampler's stages in its order, each with the options that control it.
PENALTIES = "repetition_penalty", "presence_penalty frequency_penalty", "no_repeat_ngram_size", "logit_bias"
BEFORE_TEMPERATURE = *PENALTIES, "min_tokens ignore_eos", "logits_processors"
STAGES = *BEFORE_TEMPERATURE, "temperature", *FILTERS
NEUTRAL = SamplingConfig(temperature=1, top_p=1)


def stages(sampling, beams=False):
    """The sampler's stages that are switched on: (name, options up to and including it); the first is the model alone.

    Beam search, beams=True, has a stage for the logarithm and then only those before temperature.
    """
    config = replace(NEUTRAL, eos_ids=sampling.eos_ids)
    found = [("model", config)] + [("log p", config)] * beams
    for names in BEFORE_TEMPERATURE if beams else STAGES:
        given = {name: getattr(sampling, name) for name in names.split()}
        given = {name: value for name, value in given.items() if value != getattr(NEUTRAL, name)}
        if given:
            config = replace(config, **given)
            spelled = [f"{name} {value}" if is_number(value) else name for name, value in given.items()]
            found.append((", ".join(spelled), config))
        if sampling.temperature == 0 and "temperature" in given:
            break  # greedy decoding ends here
    return found


def _round(values):
    """Numbers to 5 significant digits, which keeps the JSON short; None for -inf, which JSON lacks."""
    return [float(f"{value:.5g}") if value > -np.inf else None for value in values]


def _run_length_encode(slots, slot_pos):
    """Slots and the positions they hold, as [first slot, its position, count]; position -1 is an empty run."""
    runs = []
    for slot, position in zip(slots.tolist(), slot_pos[slots].tolist(), strict=True):
        if runs:
            first, start, count = runs[-1]
            if slot == first + count and position == (-1 if start == -1 else start + count):
                runs[-1][2] += 1
                continue
        runs.append([slot, position, 1])
    return runs


def _candidate_rows(columns, extra, beams=False):
    """The candidates to show: the best of the first and of the last column, and the ids `extra`.

    columns: float64 [V] each. Returns "candidates" and "left" as in the module's docstring, by the first column.
    """
    excluded = [0, *[-np.inf if beams else 0] * (len(columns) - 1)]
    first, last = columns[0], columns[-1]
    tokens = set(extra)
    for column, value in ((first, excluded[0]), (last, excluded[-1])):
        tokens |= {token for token in top_ids(column, TOP).tolist() if column[token] > value}
    candidates = [
        [token, _round(column[token] for column in columns)]
        for token in sorted(tokens, key=lambda token: (-first[token], token))
    ]
    left = [int(np.count_nonzero(column > value)) for column, value in zip(columns, excluded, strict=True)]
    return {"candidates": candidates, "left": left}


def _probs(logits, history, config):
    """`next_token_probs`, or zeros if every token is ruled out: a later stage may still allow some."""
    try:
        return next_token_probs(logits, history, config)
    except ValueError:
        return np.zeros(len(logits))


def _first_two(p, noise):
    """The ids that come first and second in the race for p, float64 [V]; none if p is one-hot."""
    tokens = np.flatnonzero(p)
    order = np.argsort(noise.exponentials(tokens) / p[tokens])
    return tokens[order[:2]].tolist() if len(tokens) > 1 else []


def _race(p, noise, tokens, draft):
    """[id, E] of the draft and of the tokens that take part in the race for p, by E / p; None if p is one-hot."""
    if np.count_nonzero(p) < 2:
        return None
    tokens = np.array([token for token in tokens if p[token] > 0 or (draft and token == draft.token)])
    exponentials = noise.exponentials(tokens)
    with np.errstate(divide="ignore"):
        order = np.argsort(exponentials / p[tokens])
    return [[int(tokens[i]), float(f"{exponentials[i]:.5g}")] for i in order]


class Recorder(Hooks):
    """Records one run of `stream`.

    steps: the changes of the cache. choices: see the module's docstring. rounds: of speculation. beam_steps: of beam
    search. logits_processors are called again to show their effect, so they must depend on (history, logits) only, as
    speculation requires too.
    """

    def __init__(self, model):
        self.model = model
        self.run = self.sampling = self.config = None
        self.rows = {}  # index -> `Sequence`
        self.choices, self.steps, self.rounds, self.beam_steps = [], [], [], []
        self.n_choices = 0  # of the run; those beyond MAX_TOKENS are not recorded
        self.attention_hook = self._attend
        self._n_weights = 0
        self._running = []  # the rows of the last pass
        self._rings = {}  # each row's (slot_pos, length) after the last step
        self._shifts = {}  # ids that context shifts had dropped of each row by then
        self._is_new = True  # whether the cache has been emptied since then
        self._n_queries = 1  # queries at the end of the next pass whose attention is recorded
        self._weights = []  # their attention weights in the last pass, [B, H, queries, S] for each layer
        self._visible = None  # bool [B, queries, S]: the slots that they could attend to
        self._place = 0  # the query that the next choice follows from
        self._beam_choices = {}  # (prompt index, generated ids) -> the choice of what follows them
        self._finished = {}  # (prompt index, generated ids) -> the entry in beam_steps

    def _is_full(self, n):
        """Count n more choices; return whether they exceed the limit, which ends the recording."""
        self.n_choices += n
        if self.n_choices > MAX_TOKENS:
            self.attention_hook = None
        return self.attention_hook is None

    # ------------------------------------------------------------------------------------ attention

    def _attend(self, layer, q, keys, scale, mask):
        """Compute the attention weights of the last queries of a pass, [B, H, queries, S]."""
        n, B, S = min(self._n_queries, q.shape[3]), keys.shape[0], keys.shape[3]
        if layer == 0:
            self._weights = []
            self._visible = np.ones((B, n, S), bool) if mask is None else mask[:, 0, -n:]
        self._weights.append(attention_weights(q[..., -n:], keys, scale, self._visible[:, None]))

    def _attention(self, batch, place, slot_pos):
        """One query's weights as bytes, 255 for 1, in the order of positions: [first position, uint8 [L, H, n]]."""
        slots = np.flatnonzero(self._visible[batch, place])
        slots = slots[np.argsort(slot_pos[slots])]
        weights = np.stack([layer[batch, :, place][:, slots] for layer in self._weights])  # [H, S] -> [L, H, n]
        self._n_weights += weights.size
        if self._n_weights > MAX_ATTENTION_WEIGHTS:
            return None
        return [int(slot_pos[slots[0]]), np.rint(weights * 255).astype(np.uint8)]

    # ------------------------------------------------------------------------------------ the decoders' events

    def on_start(self, run, rows):
        self.run, self.sampling, self.config = run, run.sampling, run.decoding
        self._running, self._rings, self._is_new = list(rows), {}, True
        self.rows |= {row.index: row for row in rows}

    def _batch_index(self, row, B):
        """A row's place in a batch of B: the continuations of one prompt share a place until they differ."""
        return self._running.index(row) * B // len(self._running)

    def _record_step(self, cache, kind):
        if self.attention_hook is None:
            return
        self._running = [row for row in self._running if not row.finish_reason]
        rings = {}
        for row in self._running:
            batch = self._batch_index(row, cache.batch)
            slot_pos, length = cache.slot_pos[batch].copy(), int(cache.length[batch])
            old, old_length = self._rings.get(row.index, (np.full(cache.capacity, -1), 0))
            self._rings[row.index] = slot_pos, length
            ring = {"changes": _run_length_encode(np.flatnonzero(slot_pos != old), slot_pos), "length": length}
            shift = len(row.ids) - len(row.context)
            if kind == "rolled back" and shift != self._shifts.get(row.index, 0):
                kind = "shifted"
            self._shifts[row.index] = shift
            ring |= {"n": len(row.ids), "shift": shift}
            if kind == "pass":
                visible = self._visible[batch, -1]
                ring |= {"written": [old_length, length], "sees": int(slot_pos[: len(visible)][visible].min())}
            if kind == "pass" or ring["changes"]:
                rings[row.index] = ring
        if rings:
            self.steps.append({"kind": kind, "new": self._is_new, "capacity": cache.capacity, "rows": rings})
            self._is_new = False

    def on_forward(self, cache):
        self._record_step(cache, "pass")
        self._n_queries, self._place = 1, 0

    def on_cache_change(self, cache):
        if not self.config.use_cache:
            self._rings, self._is_new = {}, True
        else:
            self._record_step(cache, "restored" if self._is_new else "rolled back")

    def on_draft(self, row, tokens):
        self._n_queries = len(tokens) + 1
        if self.attention_hook is not None:
            self.rounds.append({"step": len(self.steps), "at": len(row.ids), "drafts": list(tokens), "choices": []})

    def on_token(self, row, logits, p, token, draft=None):
        if self._is_full(1):
            return
        choice = {"row": row.index, "at": len(row.ids), "token": token, "step": len(self.steps) - 1}
        choice["shift"] = len(row.ids) - len(row.context)
        columns = [_probs(logits, row.history, config) for _, config in stages(self.sampling)[:-1]] + [p]
        noise, drawn_from, listed = row.noise, p, [token]
        if draft:
            is_rejection = row.speculation.rule == "rejection"
            accepted, q = token == draft.token, draft.q
            u = float(noise._replace(stream=1).uniforms([0])[0]) if is_rejection else None
            choice["draft"] = {"token": draft.token, "accepted": accepted, "u": u, "p": float(p[draft.token])}
            choice["draft"] |= {"q": None if q is None else float(q[draft.token])}
            choice["draft"] |= {"rule": row.speculation.rule}
            if q is not None:
                columns.append(q)
            if is_rejection:
                drawn_from = one_hot(token, len(p)) if accepted else residual(p, draft)
                noise = noise._replace(stream=2)
                columns += [] if accepted else [drawn_from]
            listed.append(draft.token)
        listed += _first_two(drawn_from, noise)
        choice |= _candidate_rows(columns, listed)
        choice["race"] = _race(drawn_from, noise, [candidate[0] for candidate in choice["candidates"]], draft)
        batch = self._batch_index(row, len(self._visible))
        choice["attention"] = self._attention(batch, self._place, self._rings[row.index][0])
        self._place = (self._place + 1) % self._visible.shape[1]
        if self.rounds:
            self.rounds[-1]["choices"].append(len(self.choices))
        self.choices.append(choice)

    def on_beam_step(self, beams, logits, candidates, kept, finished):
        if self._is_full(len(beams)):
            return
        row, step = self._running[0], len(self.steps) - 1
        for index, beam in enumerate(beams):
            ids = row.ids + beam  # until a search ends, its rows hold only the prompt
            log_p, history = log_softmax(logits[index]), row.history._replace(ids=ids)
            processed = [
                apply_logits_processors(log_p, history, config) for _, config in stages(self.sampling, beams=True)[1:]
            ]
            choice = {"at": len(ids), "step": step, "shift": 0, "race": None}
            extra = [candidate.token for candidate in candidates if candidate.parent == index]
            choice |= _candidate_rows([np.exp(log_p), *processed], extra, beams=True)
            choice["attention"] = self._attention(index, 0, self.run.cache.kv.slot_pos[index])
            self._beam_choices[row.prompt_index, tuple(beam)] = choice
        scores = {tuple(hypothesis.tokens): hypothesis.score for hypothesis in finished}
        for (prompt, tokens), entry in self._finished.items():
            if prompt == row.prompt_index and tokens not in scores:
                entry.setdefault("out", len(self.beam_steps))  # better texts replaced it
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

    # ------------------------------------------------------------------------------------ after the run

    def all_choices(self):
        """The run's choices: those recorded one by one, and those along the texts that beam search returned."""
        choices = list(self.choices)
        for row in self.rows.values():
            tokens = row.ids[row.n_prompt :]
            for n, token in enumerate(tokens):
                choice = self._beam_choices.get((row.prompt_index, tuple(tokens[:n])))
                if choice:
                    choices.append(choice | {"row": row.index, "token": token})
        return choices

    def prompt_choices(self, ids):
        """The model's probabilities for a prompt's second and later tokens, by a forward pass of its own."""
        window = self.config.window and min(self.config.window, len(ids))
        cache = self.model.new_cache(1, len(ids), window)
        choices = []
        for start in range(0, len(ids) - 1, CHUNK):
            chunk = ids[start : min(start + CHUNK, len(ids) - 1)]
            self._n_queries = len(chunk)
            logits = self.model.forward([chunk], cache, last_only=False, attention_hook=self._attend)  # [1, T, V]
            for place, row_logits in enumerate(logits[0]):
                choice = {"at": start + place + 1, "token": ids[start + place + 1], "shift": 0, "race": None}
                choice |= _candidate_rows([np.exp(log_softmax(row_logits))], [choice["token"]])
                choice["attention"] = self._attention(0, place, cache.slot_pos[0])
                choices.append(choice)
        return choices
