"""The loop: feed what the cache lacks, take the last position's logits, pick a token, append it, repeat.

    context -> model.forward(ids, cache) -> logits -> sampler.probs -> sampler.draw -> token -> text

One rule covers prompt, steps and the naive loop alike: feed `context[cache.length:]`. For a prompt that is all of it,
for each later step the one new token, and without a cache (`use_cache=False`) everything, every time.

`Row` holds one output while it grows, and says of each appended token whether the text ends there; beam search and
speculation append to the same rows.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from minigen.engine.hooks import Hooks
from minigen.engine.sampler import History, draw, log_softmax, probs
from minigen.files.prompt_cache import common_prefix_length, restore, save, verify_last_token
from minigen.text.stream import IncrementalUtf8Decoder, StopMatcher

# Slots of a windowed cache beyond the window: what has wrapped is run in chunks of one more than this.
WINDOW_SLACK = 63
NO_HOOKS = Hooks()


class TokenLogprob(NamedTuple):
    """A generated token's natural log-probability under the model itself, before any penalty or filter."""

    token: int
    text: str
    logprob: float
    top: list[tuple[int, str, float]]  # (token, text, logprob) of the best tokens, best first


class Timings(NamedTuple):
    """What a run cost. Seconds are those of the batch the row ran in."""

    prompt_tokens: int
    reused_tokens: int  # those of the prompt whose keys and values came from a prompt cache
    prompt_seconds: float  # from the start until the prompt has been run, reading and writing its cache included
    tokens: int
    seconds: float  # from then to the row's last token
    cache_bytes: int


@dataclass
class SpeculationStats:
    """How a row's drafts fared."""

    drafted: int = 0
    accepted: int = 0
    target_passes: int = 0  # after the prompt; each gives at most one token more than it accepts
    draft_seconds: float = 0.0
    target_seconds: float = 0.0


@dataclass(frozen=True)
class Completion:
    """One finished continuation.

    `token_ids` holds every generated id, end-of-text and those of a stop string included; `text` does not.
    """

    text: str
    token_ids: list[int]
    prompt_index: int
    finish_reason: str  # eos | stop | length | context
    stop_sequence: str | None
    logprobs: list[TokenLogprob] | None
    sum_logprob: float | None  # beam search's sum of log-probabilities; None elsewhere
    score: float | None  # and what it ranks by: sum_logprob / generated_length ** length_penalty
    speculation: SpeculationStats | None  # None without drafts
    timings: Timings


@dataclass(frozen=True)
class Step:
    """One token of one row as it is generated. The texts of a row's steps, joined, are its completion's text."""

    text: str  # what may be shown now: without half characters, or what may become a stop string
    token: int | None  # None where a row ends without another token
    logprob: TokenLogprob | None
    row: int
    from_draft: bool
    finish_reason: str | None
    completion: Completion | None  # set on the last step of a row


class Stopwatch:
    """Splits a run's time at the first logits."""

    def __init__(self):
        self.start = time.perf_counter()
        self.first_logits = None
        self.cache_bytes = 0
        self.reused_tokens = 0

    def lap(self, cache):
        """The prompt has been run, or a step: only the first call sets the time, the largest cache sets the bytes."""
        self.first_logits = self.first_logits or time.perf_counter()
        self.cache_bytes = max(self.cache_bytes, cache.nbytes)

    def timings(self, n_prompt, n_tokens):
        now = time.perf_counter()
        first_logits = self.first_logits or now
        prompt_seconds, seconds = first_logits - self.start, now - first_logits
        return Timings(n_prompt, self.reused_tokens, prompt_seconds, n_tokens, seconds, self.cache_bytes)


def shifted(context, keep):
    """The context that a shift leaves: without the older half of what follows the first `keep` ids."""
    rest = context[keep:]
    return context[:keep] + rest[len(rest) - len(rest) // 2 :]


class Row:
    """One continuation while it grows: its ids, its random generator, and the text that may already be shown.

    ids are the prompt's and all generated ones, `context` those of them that the model still sees.
    """

    def __init__(self, index, prompt_index, prompt_ids, model, tokenizer, sampling, config, stopwatch):
        self.index = index
        self.prompt_index = prompt_index
        self.ids = list(prompt_ids)
        self.context = list(prompt_ids)
        self.n_prompt = len(prompt_ids)
        # From (seed, row) alone, so that a row's text does not depend on the others of its batch.
        self.rng = np.random.default_rng([config.seed, index])
        self.finish_reason = None
        self.logprobs = None if config.logprobs is None else []
        self.sum_logprob = self.score = None  # set by beam search
        self.speculation = None  # set by speculation
        self._n_positions = model.config.n_positions
        self._tokenizer = tokenizer
        self._eos_ids = sampling.eos_ids
        self._config = config
        self._stopwatch = stopwatch
        self._utf8 = IncrementalUtf8Decoder()
        self._stops = StopMatcher(config.stop)
        self._text = []

    @property
    def history(self):
        return History(self.ids, self.n_prompt)

    @property
    def n_generated(self):
        return len(self.ids) - self.n_prompt

    def _logprob(self, token, logits):
        log_p = log_softmax(logits)
        n_top = min(self._config.logprobs, len(log_p))
        top = np.argpartition(-log_p, n_top - 1)[:n_top] if n_top else np.array([], int)
        top = top[np.lexsort((top, -log_p[top]))]  # best first, of equals the lowest id
        spell = self._tokenizer.decode
        best = [(int(other), spell([other]), float(log_p[other])) for other in top]
        return TokenLogprob(token, spell([token]), float(log_p[token]), best)

    def _step(self, text, token, logprob, from_draft):
        completion = None
        if self.finish_reason and not self._stops.matched:
            text += self._stops.push(self._utf8.flush())
            if self._stops.matched:
                self.finish_reason = "stop"
            else:
                text += self._stops.flush()
        self._text.append(text)
        if self.finish_reason:
            completion = Completion(
                text="".join(self._text),
                token_ids=self.ids[self.n_prompt :],
                prompt_index=self.prompt_index,
                finish_reason=self.finish_reason,
                stop_sequence=self._stops.matched,
                logprobs=self.logprobs,
                sum_logprob=self.sum_logprob,
                score=self.score,
                speculation=self.speculation,
                timings=self._stopwatch.timings(self.n_prompt, self.n_generated),
            )
        return Step(text, token, logprob, self.index, from_draft, self.finish_reason, completion)

    def accept(self, token, logits=None, from_draft=False):
        """Append one token and return its `Step`; the one check for end-of-text, stop strings, budget and context.

        logits: the model's own, [V], from which the log-probability is reported if that was asked for.
        """
        self.ids.append(token)
        self.context.append(token)
        logprob = None
        if self.logprobs is not None:
            logprob = self._logprob(token, logits)
            self.logprobs.append(logprob)
        text = ""
        if token in self._eos_ids:
            self.finish_reason = "eos"
        else:
            text = self._stops.push(self._utf8.push(self._tokenizer.token_bytes(token)))
            if self._stops.matched:
                self.finish_reason = "stop"
            elif self.n_generated >= self._config.max_tokens:
                self.finish_reason = "length"
            elif len(self.context) > self._n_positions:  # the new token has no position to be fed at
                if self._config.context_shift:
                    self.context = shifted(self.context, self._config.keep)
                else:
                    self.finish_reason = "context"
        return self._step(text, token, logprob, from_draft)

    def end(self, finish_reason):
        """End the row without another token; its last `Step`."""
        self.finish_reason = finish_reason
        return self._step("", None, None, False)


def new_cache(model, contexts, config):
    """A cache for these rows, sized by what was asked: prompt and budget, within n_positions, or the window."""
    capacity = min(max(map(len, contexts)) + config.max_tokens, model.config.n_positions)
    if config.window and config.window < capacity:
        return model.new_cache(len(contexts), min(capacity, config.window + WINDOW_SLACK), config.window)
    return model.new_cache(len(contexts), capacity)


def feed(model, cache, contexts, hooks=NO_HOOKS):
    """Run the ids that each row's cache still lacks, in chunks that fit it; the logits after the last, [B, V]."""
    pending = [context[length:] for context, length in zip(contexts, cache.length, strict=True)]
    T = max(map(len, pending))
    pad = np.array([T - len(ids) for ids in pending])
    ids = np.array([[0] * (T - len(row)) + row for row in pending])
    start = 0
    while start < T:
        chunk = ids[:, start : start + cache.max_chunk]
        chunk_pad = np.clip(pad - start, 0, chunk.shape[1])
        logits = model.forward(chunk, cache, pad=chunk_pad, attention_hook=hooks.attention_hook)
        hooks.fed(cache)
        start += chunk.shape[1]
    return logits


class PrefixCache:
    """A cache of one row that outlives a run: what the next prompt has in common with its ids is not run again.

    ids: those whose keys and values are all there. What `kv` holds beyond them was left by a pass that did not end.
    lock: held by the run that uses it, see `exclusive`.
    """

    def __init__(self, model):
        self.model = model
        self.kv = model.new_cache()
        self.ids = []
        self.lock = threading.Lock()

    def truncate(self, length):
        """Forget all but the first `length` ids."""
        self.kv.truncate(min(length, self.kv.length[0]))
        self.ids = self.ids[:length]


def exclusive(lock, steps, what):
    """The same steps. The first raises ValueError where a run that holds the lock has not ended, nor been closed."""
    if not lock.acquire(blocking=False):
        raise ValueError(f"{what} is in use by a run that has not ended: finish that, or close its iterator")
    try:
        yield from steps
    finally:
        lock.release()


def prefill(model, cache, prompts, stopwatch, prompt_cache=None, hooks=NO_HOOKS):
    """`feed` for the prompts of a run; with a prompt cache, what that knows of the one prompt is not run.

    prompt_cache: a `PrefixCache`, `cache` then being its own, or the path of a file, which afterwards begins with the
    whole of `prompts`. Returns the logits after the last ids, [B, V]. Raises OSError and ValueError where the file
    cannot be used.
    """
    if prompt_cache is None:
        return feed(model, cache, prompts, hooks)
    (ids,) = prompts
    if isinstance(prompt_cache, PrefixCache):
        prompt_cache.truncate(min(common_prefix_length(prompt_cache.ids, ids), len(ids) - 1))
        stopwatch.reused_tokens = int(cache.length[0])
        hooks.changed(cache, "restored")
        return feed(model, cache, prompts, hooks)
    restored = restore(prompt_cache, model, cache, ids)
    stopwatch.reused_tokens = int(cache.length[0])
    hooks.changed(cache, "restored")
    logits = feed(model, cache, prompts, hooks)
    verify_last_token(prompt_cache, cache, restored)
    if restored.known < len(ids):
        save(prompt_cache, model, cache, ids)
    return logits


def decode(model, rows, sampling, config, stopwatch, prompt_cache=None, hooks=NO_HOOKS) -> Iterator[Step]:
    """Generate all rows side by side, one token each per forward pass; finished rows leave the batch.

    rows: prompt-major, `num_return_sequences` for each prompt. prompt_cache: see `prefill`.
    """
    hooks.began(rows, sampling, config)
    if config.max_tokens == 0:
        yield from (row.end("length") for row in rows)
        return
    # Each prompt is run once; its continuations start from copies of its cache row.
    firsts = rows[:: config.num_return_sequences]
    prefix = prompt_cache if isinstance(prompt_cache, PrefixCache) else None
    prompts = [row.context for row in firsts]
    cache = prefix.kv if prefix else new_cache(model, prompts, config)
    logits = prefill(model, cache, prompts, stopwatch, prompt_cache, hooks)
    logits = logits.repeat(config.num_return_sequences, axis=0)  # [prompts, V] -> [B, V]
    cache.reorder(np.repeat(np.arange(len(prompts)), config.num_return_sequences))
    stopwatch.lap(cache)
    while True:
        if prefix:
            prefix.ids = list(rows[0].context)  # all of it has been fed
        for row, row_logits in zip(rows, logits, strict=True):
            p = probs(row_logits, row.history, sampling)
            token = draw(p, row.rng)
            hooks.chose(row, row_logits, p, token)
            yield row.accept(token, row_logits)
        left = [i for i, row in enumerate(rows) if not row.finish_reason]
        if not left:
            return
        if len(left) < len(rows):
            rows = [rows[i] for i in left]
            cache.reorder(left)
        contexts = [row.context for row in rows]
        if not config.use_cache:
            cache = new_cache(model, contexts, config)
        elif config.context_shift:
            # A shifted context begins anew at position 0, so nothing of its row's cache is of use.
            cache.truncate(np.where(cache.length < list(map(len, contexts)), cache.length, 0))
            if prefix:
                prefix.truncate(int(cache.length[0]))
            hooks.changed(cache, "shifted")
        logits = feed(model, cache, contexts, hooks)
