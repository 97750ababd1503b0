"""Speculative decoding: something cheap proposes tokens, the model checks them all in one pass.

A drafter proposes k tokens x, each with the distribution q it was drawn from. One pass of the target gives its own
distribution p at every one of these places. In order,

    x is accepted with probability min(1, p(x) / q(x));
    at the first rejection the token is drawn from max(p - q, 0), normalised, and the rest of the draft is dropped;
    if all are accepted, one more token is drawn from the target's next distribution.

The result is distributed exactly as the target's own sampling (Leviathan et al. 2023; Chen et al. 2023): q only decides
how often a draft is accepted. p and q come from the same `sampler.probs`, with the history that each place would have
had; greedy decoding is the case in which both are certain of one token.

It pays where one pass over k + 1 tokens costs less than the passes it saves: a large model's pass is bound by reading
its weights, and one pass reads them once for all tokens. How near it comes to that is for `ops.linear` to say.
"""

import time
from collections.abc import Iterator

import numpy as np

from minigen.engine.decode import NO_HOOKS, SpeculationStats, Step, feed, new_cache, prefill
from minigen.engine.sampler import History, draw, one_hot, probs

# ---------------------------------------------------------------------------------------- drafters


class ModelDrafter:
    """Proposes what a smaller model with the same token map would generate."""

    def __init__(self, model, n_vocab, context, sampling, config):
        self.model = model
        self.n_vocab = n_vocab  # the target's
        self.sampling = sampling
        self.cache = new_cache(model, [context[: model.config.n_positions]], config)

    def _can_read(self, context):
        """Whether the draft has a position and an embedding for every token."""
        return len(context) <= self.model.config.n_positions and max(context) < self.model.config.vocab_size

    def read(self, context):
        """Run a context, all but its last token, so that the first draft costs no more than the later ones."""
        if self._can_read(context):
            feed(self.model, self.cache, [context[:-1]])

    def propose(self, row, k):
        """Up to k tokens after `row.context`, fewer where the draft has no more to say.

        Returns the tokens and, for each, the distribution it was drawn from, float64 [V].
        """
        tokens, distributions = [], []
        while len(tokens) < k and self._can_read(row.context + tokens):
            logits = feed(self.model, self.cache, [row.context + tokens])[0][: self.n_vocab]
            # An id that only the target has is never proposed, one that only the draft has is no token of the target.
            logits = np.pad(logits, (0, self.n_vocab - len(logits)), constant_values=-np.inf)
            try:
                q = probs(logits, History(row.ids + tokens, row.n_prompt), self.sampling)
            except ValueError:
                break  # every token of the draft is ruled out; what that means for the text, the target decides
            tokens.append(draw(q, row.rng))
            distributions.append(q)
        return tokens, distributions

    def truncate(self, length):
        """Forget what was proposed after the first `length` tokens of the context."""
        self.cache.truncate(min(length, self.cache.length[0]))


class PromptLookupDrafter:
    """Proposes what followed the last time the text's last tokens occurred in it; no model, no cache (Saxena 2023)."""

    def __init__(self, n_vocab, max_matching_ngram_size):
        self.n_vocab = n_vocab
        self.max_matching_ngram_size = max_matching_ngram_size

    def read(self, context):
        """There is nothing to prepare."""

    def propose(self, row, k):
        """Up to k tokens, none where nothing matches, each with a distribution that is certain of it."""
        ids = row.context
        for size in range(min(self.max_matching_ngram_size, len(ids) - 1), 0, -1):
            end = ids[-size:]
            for start in range(len(ids) - size - 1, -1, -1):  # the latest occurrence first
                if ids[start : start + size] == end:
                    tokens = ids[start + size : start + size + k]
                    return tokens, [one_hot(token, self.n_vocab) for token in tokens]
        return [], []

    def truncate(self, length):
        """There is nothing to forget."""


# ---------------------------------------------------------------------------------------- verification


def residual(p, q):
    """What a rejected draft's replacement is drawn from: max(p - q, 0), normalised. p, q: float64 [V] -> [V]."""
    left = np.maximum(p - q, 0)
    total = left.sum()
    # Only where p and q differ by rounding alone can nothing be left.
    return left / total if total > 0 else p


def verify(token, p, q, rng):
    """Accept a token drawn from q, or replace it, such that the result is distributed as p: (token, accepted).

    p, q: float64 [V]. Takes one uniform for the decision, none where that is certain, and one for a replacement.
    """
    if p[token] >= q[token] or (p[token] > 0 and rng.random() * q[token] < p[token]):
        return token, True
    return draw(residual(p, q), rng), False


# ---------------------------------------------------------------------------------------- how much to propose


class AdaptiveDraftLength:
    """num_draft_tokens="auto": the k that has promised the most tokens a second, from 0 (plain decoding) to `MOST`.

    If a draft token is accepted with probability a, a round of k gives 1 + a + ... + a^k tokens on average
    (Leviathan et al. 2023, equation 1) for k draft steps and one target pass. a and the seconds of both are running
    means of what the rounds showed. They are measured, so the same seed may give other texts, of the same distribution.
    """

    MOST = 8
    EMA_DECAY = 0.9  # weight of the past in a running mean
    RETRY_INTERVAL = 32  # rounds of plain decoding after which drafts get another chance

    def __init__(self):
        self.acceptance = 0.7
        self.draft_seconds = 0.0  # for one token
        self.target_seconds = {}  # number of drafts -> seconds of the pass that checks them
        self.plain_rounds = 0

    def choose(self):
        """The number of tokens to propose in the next round."""
        for first in (0, 4):  # the first two rounds measure a plain step and a round
            if first not in self.target_seconds:
                return first
        known = sorted(self.target_seconds)
        seconds = np.interp(range(self.MOST + 1), known, [self.target_seconds[k] for k in known])
        seconds += self.draft_seconds * np.arange(self.MOST + 1)
        tokens = np.cumsum(self.acceptance ** np.arange(self.MOST + 1))
        best = int(np.argmax(tokens / seconds))
        self.plain_rounds = self.plain_rounds + 1 if best == 0 else 0
        return 4 if best == 0 and self.plain_rounds % self.RETRY_INTERVAL == 0 else best

    def record(self, drafted, accepted, draft_seconds, target_seconds):
        """Learn from a round."""

        def fade(old, new):
            return new if old is None else self.EMA_DECAY * old + (1 - self.EMA_DECAY) * new

        self.target_seconds[drafted] = fade(self.target_seconds.get(drafted), target_seconds)
        if drafted:
            self.draft_seconds = fade(self.draft_seconds or None, draft_seconds / drafted)
        for was_accepted in [1.0] * accepted + [0.0] * (accepted < drafted):
            self.acceptance = fade(self.acceptance, was_accepted)


# ---------------------------------------------------------------------------------------- the loop


def speculate(
    model, row, drafter, sampling, config, num_draft_tokens, stopwatch, prompt_cache=None, hooks=NO_HOOKS
) -> Iterator[Step]:
    """Generate one row, each round a draft, one pass of the target, and as many tokens as it accepts plus one.

    Between rounds the target's cache holds all of `row.context` but its last token, and the draft's no more than that.
    prompt_cache: see `decode.prefill`; it is the target's, gets the prompt without its last token, and has no use for a
    context that was shifted.
    """
    hooks.began([row], sampling, config)
    if config.max_tokens == 0:
        yield row.end("length")
        return
    draft_length = AdaptiveDraftLength() if num_draft_tokens == "auto" else None
    stats = row.speculation = SpeculationStats()
    cache = new_cache(model, [row.context], config)
    while True:
        if len(row.context) - cache.length[0] > 1:  # the prompt, or a context that was shifted
            prefill(model, cache, [row.context[:-1]], stopwatch, None if row.n_generated else prompt_cache, hooks)
            if config.max_tokens - row.n_generated > 1:  # for a single token nothing is drafted
                drafter.read(row.context)
        stopwatch.lap(cache)
        # A round may give one token more than it drafts, and must overrun neither budget nor context.
        k = min(
            draft_length.choose() if draft_length else num_draft_tokens,
            config.max_tokens - row.n_generated - 1,
            model.config.n_positions - len(row.context),
            cache.max_chunk - 1,
        )
        start = time.perf_counter()
        drafts, distributions = drafter.propose(row, k)
        draft_seconds = time.perf_counter() - start
        hooks.drafted(row, drafts)
        ids = [row.context[-1:] + drafts]
        logits = model.forward(ids, cache, last_only=False, attention_hook=hooks.attention_hook)[
            0
        ]  # [1, T, V] -> [T, V]
        hooks.fed(cache)
        target_seconds = time.perf_counter() - start - draft_seconds
        stats.draft_seconds += draft_seconds
        stats.target_seconds += target_seconds
        stats.target_passes += 1
        stats.drafted += len(drafts)
        n_context, n_accepted = len(row.context), 0
        for place, place_logits in enumerate(logits):
            p = probs(place_logits, row.history, sampling)
            if place < len(drafts):
                token, accepted = verify(drafts[place], p, distributions[place], row.rng)
                draft = drafts[place], distributions[place], accepted
            else:
                token, accepted, draft = draw(p, row.rng), False, None
            hooks.chose(row, place_logits, p, token, draft)
            n_accepted += accepted
            stats.accepted += accepted
            yield row.accept(token, place_logits, from_draft=accepted)
            if not accepted or row.finish_reason:
                break
        if row.finish_reason:
            return
        if draft_length:
            draft_length.record(len(drafts), n_accepted, draft_seconds, target_seconds)
        # Where the context has shifted, nothing that the caches hold is of use.
        has_shifted = len(row.context) < n_context + place + 1
        kept = 0 if has_shifted else len(row.context) - 1
        cache.truncate(kept)
        hooks.changed(cache, "shifted" if has_shifted else "rolled back")
        drafter.truncate(kept)
