"""Sliding-window perplexity: the log-probability that a model gives each token of a text.

    log p(text) = sum over t of log p(token t | the tokens before it)
    perplexity = exp(-log p(text) / number of tokens scored)

The first token has no context and is not scored; to score it, put the model's begin-of-text token before it.

A text longer than the context is scored in windows of n_positions tokens, each starting `stride` tokens after the
previous one. Every token is scored exactly once, in the first window that reaches it, with at least n_positions -
stride tokens of left context (fewer only at the start of the text). This is the strided perplexity of the transformers
documentation ("Perplexity of fixed-length models"), except that the loop there under-weights every window after the
first by one token. A small stride is closer to the text's true probability, and slower: T / stride windows.
"""

import math
from dataclasses import dataclass

import numpy as np

from minigen.engine.sampler import log_softmax
from minigen.engine.validation import is_int
from minigen.options import check_loaded, require

# Tokens per forward pass: their logits take 26 MB for GPT-2; those of its whole context would take 206 MB.
CHUNK = 128


@dataclass(frozen=True)
class TextScore:
    """Result of scoring a text (natural logarithms)."""

    nll: float  # negative log-likelihood: minus the sum of the log-probabilities, in nats
    n_tokens: int  # tokens scored
    stride: int  # the one that was used
    token_ids: list[int]
    logprobs: list[float | None]  # per token; None if it was not scored

    @property
    def perplexity(self):
        """exp(nll / n_tokens); infinite if it does not fit a float."""
        try:
            return math.exp(self.nll / self.n_tokens)
        except OverflowError:
            return math.inf

    def bits_per_byte(self, tokenizer):
        """nll in bits per byte of the scored tokens: unlike perplexity, comparable between vocabularies.

        NaN if the scored tokens have no bytes.
        """
        scored = [token for token, logprob in zip(self.token_ids, self.logprobs, strict=True) if logprob is not None]
        n_bytes = sum(len(tokenizer.token_bytes(token)) for token in scored)
        return self.nll / math.log(2) / n_bytes if n_bytes else math.nan


def score(model, ids, stride=None):
    """The `TextScore` of one text, in sliding windows if it is longer than the model's n_positions.

    ids: T token ids. stride: 1 to n_positions, how far each window advances; None is half of n_positions. With a stride
    of n_positions the windows do not overlap, and the first token of each is not scored, because it has no context.

    Raises ValueError for fewer than two tokens, an id outside the vocabulary, an invalid stride, and if the model's
    logits are not numbers.
    """
    check_loaded(model=model)
    n_positions, vocab_size = model.config.n_positions, model.config.vocab_size
    ok = stride is None or (is_int(stride, 1) and stride <= n_positions)
    require(ok, "stride", stride, f"a whole number from 1 to the model's context, {n_positions}")
    stride = max(n_positions // 2, 1) if stride is None else int(stride)
    for token in ids:
        ok = is_int(token, 0) and token < vocab_size
        require(ok, "a token to score", token, f"a token id of 0 to {vocab_size - 1}")
    if min(len(ids), n_positions) < 2:
        raise ValueError(
            f"the text is too short to score (tokens: {len(ids)}, in windows of up to {n_positions}): the first token "
            "has no context"
        )

    ids = np.asarray(ids, int)
    logprobs = [None] * len(ids)
    cache = model.new_cache(1, min(len(ids), n_positions))
    window_start = scored_until = 0
    while scored_until < len(ids):
        window_end = min(window_start + n_positions, len(ids))
        # The previous window's cache cannot be reused: absolute positions have changed, and they are part of the keys.
        cache.truncate(0)
        first = max(scored_until, window_start + 1)  # token t is scored by the logits after token t - 1
        if window_start < first - 1:
            model.forward(ids[None, window_start : first - 1], cache)
        for start in range(first - 1, window_end - 1, CHUNK):
            chunk = ids[None, start : min(start + CHUNK, window_end - 1)]
            logits = model.forward(chunk, cache, last_only=False)[0]  # [1, T, V] -> [T, V]
            for t, row in enumerate(logits, start + 1):
                logprobs[t] = float(log_softmax(row)[ids[t]])
                if not math.isfinite(logprobs[t]):
                    raise ValueError(f"token {t} of the text cannot be scored: its log-probability is {logprobs[t]}")
        window_start, scored_until = window_start + stride, window_end

    scored = [logprob for logprob in logprobs if logprob is not None]
    return TextScore(-math.fsum(scored), len(scored), stride, ids.tolist(), logprobs)
