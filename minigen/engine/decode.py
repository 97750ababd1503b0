"""The decoding loop: run what the cache lacks, take the last logits, choose a token, append it, repeat.

    ids -> PrefixCache.feed -> model.forward -> logits -> sampler -> token -> ids

The cache knows which ids it holds, so one rule covers the prompt, each step, rejected drafts, a shifted context, the
next turn of a session and a saved prompt: keep the common prefix, run the rest.
"""

from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from minigen.engine.hooks import NO_HOOKS, Hooks
from minigen.engine.model import GPT2
from minigen.engine.sampler import History, Noise, next_token_probs, sample_token


def decode(run, rows):
    """Generate all rows in one batch, one token each per forward pass; yields a `GeneratedToken` for each.

    rows: `Sequence`s, prompt by prompt, num_return_sequences per prompt. Finished rows leave the batch.
    """
    run.hooks.on_start(run, rows)
    # Each prompt is run once; its continuations start from copies of its cache row.
    n = run.decoding.num_return_sequences
    logits = run.feed([row.context for row in rows[::n]])
    run.cache.reorder(np.arange(len(rows)) // n)
    logits = logits.repeat(n, axis=0)  # [prompts, 1, V] -> [B, 1, V]
    while True:
        for row, row_logits in zip(rows, logits[:, 0], strict=True):  # [B, 1, V] -> B x [V]
            p = next_token_probs(row_logits, row.history, run.sampling)
            token = sample_token(p, row.noise)
            run.hooks.on_token(row, row_logits, p, token)
            row.append(token)
            yield GeneratedToken(row, token, row_logits)
        unfinished = [i for i, row in enumerate(rows) if not row.finish_reason]
        if not unfinished:
            return
        if len(unfinished) < len(rows):
            rows = [rows[i] for i in unfinished]
            run.cache.reorder(unfinished)
        logits = run.feed([row.context for row in rows])


class GeneratedToken(NamedTuple):
    """One token of one row, as the decoders yield it."""

    row: "Sequence"
    token: int | None  # None if the row ends without another token
    logits: np.ndarray | None  # the model's own, [V], that the token was chosen from
    from_draft: bool = False


def common_prefix_length(a, b):
    """Length of the longest common prefix of two lists of ids."""
    if a == b[: len(a)]:  # in every plain step; comparing lists is 20 times as fast as the loop below
        return len(a)
    # len(b) if there is no difference: then b is a prefix of a.
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b))


def shift_context(ids, n_positions, keep):
    """The ids that the model still sees of a text that outgrew its context: the first `keep`, and the last ones.

    Each shift drops the older half of what follows the first `keep` ids, and happens when the text would need position
    n_positions. So the result depends on the text alone. What moves gets another position, and is run again.
    """
    if len(ids) <= n_positions:
        return ids
    dropped = -(-(n_positions + 1 - keep) // 2)  # per shift, rounded up
    n_shifts = 1 + (len(ids) - n_positions - 1) // dropped
    return ids[:keep] + ids[keep + dropped * n_shifts :]


class PrefixCache:
    """A K/V cache that knows which ids it holds, and computes only what a new text adds to the prefix that it shares.

    ids: per row, those whose keys and values are complete. A window of the capacity or more has no effect.
    use_cache=False keeps nothing: every call runs the whole text again. A cache of one row can outlive a run: pass it
    to the next one, whose prompt then reuses it.
    """

    # Extra slots beyond the window: once the ring has wrapped, texts run in chunks of WINDOW_SLACK + 1 tokens.
    WINDOW_SLACK = 63

    def __init__(self, model, batch=1, capacity=None, window=None, use_cache=True):
        self.model = model
        capacity = min(capacity or model.config.n_positions, model.config.n_positions)
        if window and window < capacity:
            self.kv = model.new_cache(batch, min(capacity, window + self.WINDOW_SLACK), window)
        else:
            self.kv = model.new_cache(batch, capacity)
        self.use_cache = use_cache
        self.ids = [[] for _ in range(batch)]
        self.n_reused = 0  # ids that the last call found in the cache, of all rows together
        self.draft = None  # the draft model's own `PrefixCache`, if one outlives the run as well
        self.busy = False  # whether a run is using it

    def __repr__(self):
        return f"<PrefixCache: {[len(ids) for ids in self.ids]} ids in {self.kv!r}>"

    def copy(self):
        """An independent cache with the same contents."""
        other = copy(self)
        other.kv, other.ids, other.busy = deepcopy(self.kv), deepcopy(self.ids), False
        other.draft = self.draft and self.draft.copy()
        return other

    def feed(self, texts, n_logits=1, hooks=NO_HOOKS):
        """Run what each row's text adds to the ids in the cache; the logits after its last n_logits ids.

        texts: a list of ids per row -> float32 [B, n_logits, V], or None for n_logits=0. At least the last n_logits ids
        of each row are run, even if they are in the cache.
        """
        if len(texts) != len(self.ids):  # a beam search leaves several rows: keep the one nearest to each text
            rows = range(len(self.ids))
            nearest = [max(rows, key=lambda row: common_prefix_length(self.ids[row], text)) for text in texts]
            self.reorder(nearest)
        pairs = zip(self.ids, texts, strict=True)
        kept = np.array([min(common_prefix_length(old, new), len(new) - n_logits) for old, new in pairs])
        self._truncate(kept if self.use_cache else np.zeros_like(kept))
        # The new ids are added after the last pass: an interrupted one leaves nothing new to reuse.
        self.ids = [text[:length] for text, length in zip(texts, self.kv.length, strict=True)]
        self.n_reused = int(self.kv.length.sum())
        hooks.on_cache_change(self.kv)

        pending = [text[length:] for text, length in zip(texts, self.kv.length, strict=True)]
        T = max(map(len, pending))
        pad = np.array([T - len(ids) for ids in pending])
        ids = np.array([[0] * (T - len(row)) + row for row in pending])  # left padding: [B, T]
        start, logits = 0, []
        # The head costs as much as several layers: positions whose logits are needed get a pass of their own.
        split = T - n_logits if n_logits > 1 else T
        while start < T:
            all_logits = start >= split
            # If the cache is full, let `forward` say so.
            stop = min(start + max(self.kv.max_chunk, 1), T if all_logits else split)
            out = self.model.forward(
                ids[:, start:stop],
                self.kv,
                pad=np.clip(pad - start, 0, stop - start),
                last_only=not all_logits,
                attention_hook=hooks.attention_hook,
            )
            hooks.on_forward(self.kv)
            if stop > T - n_logits:
                logits.append(out if all_logits else out[:, None])  # [B, V] -> [B, 1, V]
            start = stop
        self.ids = [list(text) for text in texts]
        return np.concatenate(logits, axis=1) if logits else None

    def _truncate(self, kept):
        """Roll back to the first `kept` ids of each row, or to 0 if the ring has overwritten what they need."""
        if (kept < self.kv.length).any():
            self.kv.truncate(np.where(self.kv.can_truncate(kept), kept, 0))

    def reorder(self, rows):
        """Row i becomes what row rows[i] was; see `KVCache.reorder`."""
        moved = [(self.ids[i], self.ids[row]) for i, row in enumerate(rows[: len(self.ids)]) if i != row]
        if moved or len(rows) != len(self.ids):
            ids = [self.ids[row] for row in rows]
            self.ids = [[] for _ in self.ids]  # until all rows are copied: an interrupted reorder leaves none to reuse
            self.kv.reorder(rows, min((common_prefix_length(old, new) for old, new in moved), default=0))
            self.ids = ids


@dataclass
class Run:
    """All that the decoders share in one run: the model, the options, the cache and the callbacks."""

    model: GPT2
    sampling: Any  # options.SamplingConfig
    decoding: Any  # options.DecodingConfig
    hooks: Hooks = NO_HOOKS
    cache: PrefixCache | None = None  # None: one is made for the prompts, and sized by them and max_tokens
    stops: Callable | None = None  # generated ids -> whether their text holds a stop string
    on_pass: Callable = lambda cache: None  # called with the `PrefixCache` after each `feed`

    def new_cache(self, texts, model=None):
        """A `PrefixCache` with room for these texts and max_tokens more, or for the window."""
        capacity = max(map(len, texts)) + self.decoding.max_tokens
        return PrefixCache(model or self.model, len(texts), capacity, self.decoding.window, self.decoding.use_cache)

    def feed(self, texts, n_logits=1):
        """`PrefixCache.feed` with the run's cache and callbacks."""
        if self.cache is None:
            self.cache = self.new_cache(texts)
        logits = self.cache.feed(texts, n_logits, self.hooks)
        self.on_pass(self.cache)
        return logits

    def context(self, ids):
        """The ids that the model sees of a text: all, or with context_shift those that the shifts left."""
        if self.decoding.context_shift:
            return shift_context(ids, self.model.config.n_positions, self.decoding.keep)
        return ids

    def finish_reason(self, ids, n_prompt):
        """Why a text ends with its last id: "eos", "stop", "length" or "context"; None if it goes on.

        The only place that decides it, for all three decoders. Without a generated id it is "length": max_tokens is 0,
        or beam search found fewer texts than num_return_sequences.
        """
        generated = ids[n_prompt:]
        if not generated:
            return "length"
        if generated[-1] in self.sampling.eos_ids:
            return "eos"
        if self.stops is not None and self.stops(generated):
            return "stop"
        if len(generated) >= self.decoding.max_tokens:
            return "length"
        if len(ids) > self.model.config.n_positions and not self.decoding.context_shift:
            return "context"  # the new token has no position
        return None


class Sequence:
    """One continuation while it grows: all its ids, and why it ended.

    prompt_index: which prompt it continues, number: which of the prompt's continuations it is.
    """

    def __init__(self, run, prompt, prompt_index=0, number=0):
        self.run = run
        self.ids = list(prompt)
        self.n_prompt = len(prompt)
        self.prompt_index = prompt_index
        self.index = prompt_index * run.decoding.num_return_sequences + number
        self.number = number
        self.finish_reason = None
        self.sum_logprob = self.score = None  # set by beam search
        self.speculation = None  # set by speculation

    @property
    def history(self):
        return History(self.ids, self.n_prompt)

    @property
    def n_generated(self):
        return len(self.ids) - self.n_prompt

    @property
    def context(self):
        """The ids that the model sees."""
        return self.run.context(self.ids)

    @property
    def noise(self):
        """The random numbers that the next token is drawn with."""
        return Noise(self.run.decoding.seed, self.number, len(self.ids))

    def append(self, token):
        """Append a token; sets `finish_reason` if the text ends with it."""
        self.ids.append(token)
        self.update_finish_reason()

    def update_finish_reason(self):
        self.finish_reason = self.run.finish_reason(self.ids, self.n_prompt)
