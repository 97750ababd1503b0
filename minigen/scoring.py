"""How probable a model finds a given text: the log-probability of each of its tokens, and perplexity.

    log p(text) = sum over t of log p(token t | the tokens before it)
    perplexity = exp(-log p(text) / number of tokens scored)

The first token has nothing before it and is not scored; to have it scored, put the model's begin-of-text token first.

A text longer than the context is run in windows of n_positions tokens, each `stride` tokens further on, and of each
only the tokens that the one before did not reach are scored: every token once, with at least n_positions - stride
tokens before it as soon as the text has so many. This is the strided perplexity of the transformers documentation
("Perplexity of fixed-length models"), but for its weights: the loop there counts one token too few in every window
after the first. A small stride is nearer to the text's true probability, and dearer: T / stride windows.
"""

import math
from dataclasses import dataclass

import numpy as np

from minigen.engine.sampler import log_softmax
from minigen.engine.validation import is_int
from minigen.options import require

# Tokens run at a time: their logits are 26 MB for GPT-2, where those of its whole context would be 206 MB.
CHUNK = 128


@dataclass(frozen=True)
class Score:
    """What a model gives a text. Logarithms are natural ones."""

    nll: float  # minus the sum of the log-probabilities, in nats
    n_tokens: int  # tokens scored
    stride: int  # that was used
    token_ids: list[int]
    logprobs: list[float | None]  # of each token; None where it was not scored

    @property
    def perplexity(self):
        """exp(nll / n_tokens); infinite where a float cannot hold that."""
        try:
            return math.exp(self.nll / self.n_tokens)
        except OverflowError:
            return math.inf

    def bits_per_byte(self, tokenizer):
        """nll in bits for each byte of the tokens scored: unlike perplexity, comparable between vocabularies."""
        scored = [token for token, logprob in zip(self.token_ids, self.logprobs, strict=True) if logprob is not None]
        return self.nll / math.log(2) / sum(len(tokenizer.token_bytes(token)) for token in scored)


def score(model, ids, stride=None):
    """The `Score` of one text, in windows of the model's n_positions where it is longer.

    ids: T token ids. stride: 1 to n_positions, how many tokens each window goes on; None is half of n_positions. With
    n_positions the windows do not overlap, and the first token of each is not scored, having nothing before it there.

    Raises ValueError for fewer than two tokens, an id outside the vocabulary, a stride out of range, and where the
    model's logits are not numbers.
    """
    n_positions, vocab_size = model.config.n_positions, model.config.vocab_size
    ok = stride is None or (is_int(stride, 1) and stride <= n_positions)
    require(ok, "stride", stride, f"a whole number from 1 to the model's context, {n_positions}")
    stride = max(n_positions // 2, 1) if stride is None else stride
    for token in ids:
        ok = is_int(token, 0) and token < vocab_size
        require(ok, "a token to score", token, f"a token id of 0 to {vocab_size - 1}")
    if min(len(ids), n_positions) < 2:
        raise ValueError(
            f"the text is too short to score (tokens: {len(ids)}, in windows of up to {n_positions}): the first token "
            "has nothing before it"
        )

    ids = np.asarray(ids)
    logprobs = [None] * len(ids)
    cache = model.new_cache(1, min(len(ids), n_positions))
    begin = reached = 0
    while reached < len(ids):
        end = min(begin + n_positions, len(ids))
        # Nothing of the window before is of use: its tokens stand at other positions now, and positions are learned
        # and in every key. Within a window, the cache lets it run in chunks.
        cache.truncate(0)
        first = max(reached, begin + 1)  # the first token to score; token t is scored by the logits after t - 1
        if begin < first - 1:
            model.forward(ids[None, begin : first - 1], cache)
        for start in range(first - 1, end - 1, CHUNK):
            chunk = ids[None, start : min(start + CHUNK, end - 1)]
            logits = model.forward(chunk, cache, last_only=False)[0]  # [1, T, V] -> [T, V]
            for t, row in enumerate(logits, start + 1):
                logprobs[t] = float(log_softmax(row)[ids[t]])
                if not math.isfinite(logprobs[t]):
                    raise ValueError(f"token {t} of the text cannot be scored: its log-probability is {logprobs[t]}")
        begin, reached = begin + stride, end

    scored = [logprob for logprob in logprobs if logprob is not None]
    return Score(-math.fsum(scored), len(scored), stride, ids.tolist(), logprobs)
