"""Speculative decoding: a cheap drafter proposes tokens, the target model verifies them all in one forward pass.

A drafter proposes k tokens. One pass of the target gives its own distribution p at each of these positions. Then, in
order, the target's token is determined; as long as it is the proposed one, the draft is accepted, and at the first
difference the rest of the draft is dropped. If all are accepted, one more token follows from the last logits.

Two rules determine the target's token.

coupled    The target draws its token from p exactly as it would without drafts. The drafter draws with the same random
           numbers (`Noise`) from its own distribution q, so both tend to draw the same token. The text is that of plain
           decoding, whatever the drafts are (Daliri, Musco and Suresh 2024; Kobus and Gunduz 2025).
rejection  A draft x is accepted with probability min(1, p(x) / q(x)); otherwise the token is drawn from max(p - q, 0),
           normalised. The result is distributed exactly as the target's own samples (Leviathan et al. 2023; Chen et al.
           2023), and no rule accepts more, but the text is not the one without drafts.

p and q are the distributions after all filters. A draft that the filters remove would always be rejected, so q is
filtered too. The rejection rule yields p only if q is exactly the distribution that the draft was drawn from.

Speculation pays if one pass over k + 1 tokens costs less than the passes it saves. A large model's pass spends most of
its time reading the weights, and reads them once for all of these tokens; see kernels/linear.py.
"""

import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from minigen.engine.decode import GeneratedToken
from minigen.engine.sampler import NEG_INF, History, next_token_probs, sample_token
from minigen.kernels.parallel import single_threaded_blas


@dataclass
class SpeculationStats:
    """Draft acceptance statistics of one row."""

    rule: str  # a key of `RULES`
    drafted: int = 0
    accepted: int = 0
    target_passes: int = 0  # after the prompt; each gives at most one token more than it accepts
    draft_seconds: float = 0.0
    target_seconds: float = 0.0


def speculate(run, row, drafter, num_draft_tokens, rule):
    """Generate one row; each round is a draft, one pass of the target, and the accepted tokens plus one.

    rule: a function of `RULES`. Rejected drafts need no code: the next `feed` rolls the caches back to the ids that
    they still have in common with the text, so no query sees a rejected one.
    """
    run.hooks.on_start(run, [row])
    stats = row.speculation = SpeculationStats(rule.__name__)
    while True:
        context = row.context
        # Run the prompt, or what a context shift left; in other rounds nothing is missing.
        run.feed([context[:-1]], n_logits=0)
        # A round may give one token more than it drafts, and must overrun neither max_tokens nor the context. It
        # must be one pass: with a window, a second pass could overwrite what a rollback of the first needs.
        k = min(
            num_draft_tokens,
            run.decoding.max_tokens - row.n_generated - 1,
            run.model.config.n_positions - len(context),
            run.cache.kv.max_chunk - 1,
        )
        start = time.perf_counter()
        with single_threaded_blas():  # BLAS's own threads would go on spinning during the target's pass
            drafts = drafter.propose(row, k) if k else []
        drafted = time.perf_counter()
        run.hooks.on_draft(row, [draft.token for draft in drafts])
        logits = run.feed([context + [draft.token for draft in drafts]], n_logits=len(drafts) + 1)
        stats.draft_seconds += drafted - start
        stats.target_seconds += time.perf_counter() - drafted
        stats.target_passes += 1
        stats.drafted += len(drafts)
        for row_logits, draft in zip(logits[0], [*drafts, None], strict=True):  # [1, T, V] -> T x [V]
            p = next_token_probs(row_logits, row.history, run.sampling)
            if draft:
                token, accepted = rule(draft, p, row.noise)
            else:
                token, accepted = sample_token(p, row.noise), False
            run.hooks.on_token(row, row_logits, p, token, draft)
            stats.accepted += accepted
            row.append(token)
            yield GeneratedToken(row, token, row_logits, accepted)
            if row.finish_reason:
                return
            if not accepted:
                break


# ---------------------------------------------------------------------------------------- the two rules


class Draft(NamedTuple):
    """A proposed token, and the distribution that it was drawn from."""

    token: int
    q: np.ndarray | None = None  # float64 [V]; None if the drafter was certain


def coupled(draft, p, noise):
    """The target's own draw, and whether the draft is that token. p: float64 [V]."""
    token = sample_token(p, noise)
    return token, token == draft.token


def rejection(draft, p, noise):
    """Accept a token drawn from q, or replace it, such that the result is distributed as p: (token, accepted).

    p: float64 [V]. Decision and replacement have random numbers of their own, because the draft was drawn with `noise`.
    """
    (u,) = noise._replace(stream=1).uniforms([0])
    q = 1 if draft.q is None else draft.q[draft.token]
    if u * q < p[draft.token]:
        return draft.token, True
    return sample_token(residual(p, draft), noise._replace(stream=2)), False


def residual(p, draft):
    """The distribution of a rejected draft's replacement: max(p - q, 0), normalised. p: float64 [V] -> [V]."""
    difference = p.copy()
    if draft.q is None:
        difference[draft.token] = 0
    else:
        difference -= draft.q
        np.maximum(difference, 0, out=difference)
    total = difference.sum()
    # Nothing is left only if p and q differ by rounding alone.
    return difference / total if total > 0 else p


RULES = {"coupled": coupled, "rejection": rejection}


# ---------------------------------------------------------------------------------------- drafters
#
# A drafter has one method, propose(row, k): up to k `Draft`s that continue `row.context`, perhaps none.


class ModelDrafter:
    """Proposes what a smaller model with the same token map would generate; `cache` is its own `PrefixCache`."""

    def __init__(self, cache, n_vocab, sampling):
        self.cache = cache
        self.n_vocab = n_vocab  # the target's
        self.sampling = sampling

    def _can_read(self, context):
        """Whether the draft model has a position and an embedding for every token."""
        config = self.cache.model.config
        return len(context) <= config.n_positions and max(context) < config.vocab_size

    def propose(self, row, k):
        """Up to k `Draft`s from the draft model; fewer if it has no room or no token that the options allow."""
        drafts, ids, context = [], list(row.ids), list(row.context)
        while len(drafts) < k and self._can_read(context):
            # The ids that both models have; the target's others get -inf. [1, 1, V] -> [V]
            known = self.cache.feed([context])[0, 0][: self.n_vocab]
            logits = np.full(self.n_vocab, NEG_INF)
            logits[: len(known)] = known
            try:
                # Filtered as the target's: a token that the filters remove would always be rejected.
                q = next_token_probs(logits, History(ids, row.n_prompt), self.sampling)
            except ValueError:
                break  # the draft model cannot choose a token; the target may be able to, or raises the error
            token = sample_token(q, row.noise._replace(position=len(ids)))
            drafts.append(Draft(token, q))
            ids.append(token)
            context.append(token)
        return drafts


class PromptLookupDrafter:
    """Proposes what followed the last time the text's last n-gram occurred in it; no model, no cache (Saxena 2023)."""

    def __init__(self, max_matching_ngram_size):
        self.max_matching_ngram_size = max_matching_ngram_size

    def propose(self, row, k):
        """Up to k `Draft`s, the tokens that followed the n-gram the last time; none if it did not occur before."""
        ids = row.context
        for size in range(min(self.max_matching_ngram_size, len(ids) - 1), 0, -1):
            ngram = ids[-size:]
            for start in range(len(ids) - size - 1, -1, -1):  # the latest occurrence first
                if ids[start : start + size] == ngram:
                    return [Draft(token) for token in ids[start + size : start + size + k]]
        return []
