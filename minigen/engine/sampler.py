"""From logits to a token: penalties and filters as pure functions, the probabilities they leave, and the draw.

The order is fixed, and from temperature on it is that of the transformers library:

    repetition penalty, presence and frequency penalty, n-gram ban, bias, end-of-text ban, the caller's own processors
    -> temperature -> top-k -> top-p -> min-p -> typical-p

each on what the one before left. Every filter takes one row of logits, [V], and returns one in which what it removes is
-inf; its argument stays as it is. Nothing here keeps state between tokens, so taking tokens back, as speculation does,
needs no undoing.
"""

import math
from collections import Counter
from typing import NamedTuple

import numpy as np

NEG_INF = np.float32(-np.inf)
FLOAT32 = np.finfo(np.float32)


class History(NamedTuple):
    """The ids so far: the first `n_prompt` are the prompt's, the rest were generated."""

    ids: list[int]
    n_prompt: int


# ---------------------------------------------------------------------------------------- penalties and bans


def apply_repetition_penalty(logits, ids, penalty):
    """Divide the positive and multiply the negative logits of every token in `ids`, each once (Keskar et al. 2019)."""
    logits = logits.copy()
    seen = np.unique(np.asarray(ids, int))
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / np.float32(penalty), logits[seen] * np.float32(penalty))
    return logits


def apply_presence_frequency(logits, output_ids, presence, frequency):
    """Take off each output token's logit `presence` once and `frequency` for each time it occurs."""
    logits = logits.copy()
    for token, count in Counter(output_ids).items():
        logits[token] -= presence + frequency * count
    return logits


def ban_repeated_ngrams(logits, ids, size):
    """Remove each token that would complete a run of `size` tokens that `ids` already holds; 0 removes none."""
    logits = logits.copy()
    if size == 0:
        return logits
    last = ids[len(ids) - size + 1 :]  # the size - 1 tokens that the next one would complete
    for end in range(size - 1, len(ids)):
        if ids[end - size + 1 : end] == last:
            logits[ids[end]] = NEG_INF
    return logits


def apply_logit_bias(logits, bias):
    """Add to each token's logit its bias. Raises ValueError for an id outside the vocabulary."""
    logits = logits.copy()
    for token, value in bias.items():
        if token >= len(logits):
            raise ValueError(f"logit_bias names token id {token}, outside the vocabulary, 0 to {len(logits) - 1}")
        logits[token] += value
    return logits


def process(logits, history, config):
    """All that comes before temperature: penalties, bans, bias and the caller's processors, on one row [V].

    Sampling applies it to logits, beam search to log-probabilities.
    """
    if config.repetition_penalty != 1:
        logits = apply_repetition_penalty(logits, history.ids, config.repetition_penalty)
    if config.presence_penalty or config.frequency_penalty:
        output_ids = history.ids[history.n_prompt :]
        logits = apply_presence_frequency(logits, output_ids, config.presence_penalty, config.frequency_penalty)
    if config.no_repeat_ngram_size:
        logits = ban_repeated_ngrams(logits, history.ids, config.no_repeat_ngram_size)
    if config.logit_bias:
        logits = apply_logit_bias(logits, config.logit_bias)
    n_generated = len(history.ids) - history.n_prompt
    if config.ignore_eos or n_generated < config.min_tokens:
        logits = apply_logit_bias(logits, dict.fromkeys(config.eos_ids, NEG_INF))
    for processor in config.logits_processors:
        processed = processor(history, logits.copy())  # a copy: it may work in place, and `logits` are the model's own
        ok = isinstance(processed, np.ndarray) and processed.shape == logits.shape and processed.dtype.kind in "fiu"
        if not ok:
            raise ValueError(
                f"generated token {n_generated + 1}: a logits processor returned {processed!r}; "
                f"it must return an array of {len(logits)} logits"
            )
        logits = processed
    return logits


def check_logits(logits, n_generated):
    """Raise ValueError, naming the step, where logits hold NaN or no token is left to choose."""
    best = logits.max()  # NaN if any of them is
    if not np.isfinite(best):
        fault = "every token is ruled out (all logits are -inf)" if best == -np.inf else f"the best logit is {best}"
        raise ValueError(f"generated token {n_generated + 1} cannot be chosen: {fault}")


# ---------------------------------------------------------------------------------------- temperature and filters


def _weights(logits):
    """exp(logits), scaled so that the largest is 1: probabilities up to a common factor, -inf becoming 0."""
    return np.exp(logits - logits.max())


def log_softmax(logits):
    """Natural logarithms of the probabilities of one row, float64 [V]."""
    # The sum is float64; its terms need not be, and float32 exp is several times as fast.
    log_sum = float(logits.max()) + math.log(_weights(logits).sum(dtype=float))
    return np.subtract(logits, log_sum, dtype=float)  # one array and not two: 0.16 instead of 0.44 ms for 50,257


def apply_temperature(logits, temperature):
    """logits / temperature, the largest moved to 0 first, so that a tiny temperature cannot overflow it."""
    with np.errstate(over="ignore"):  # the others may: -inf is then what their probability rounds to
        return (logits - logits.max()) / np.float32(np.clip(temperature, FLOAT32.tiny, FLOAT32.max))


def _keep_best(logits, scores, border, count):
    """Keep the `count` tokens of highest score, `border` being the last one's; of equals there the lowest ids."""
    kept = scores > border
    ties = np.flatnonzero(scores == border)
    kept[ties[: count - np.count_nonzero(kept)]] = True
    return np.where(kept, logits, NEG_INF)


def keep_top_k(logits, k):
    """Keep the k largest logits (Fan et al. 2018); of equals at the border the lowest ids. 0 and k >= V keep all."""
    if k == 0 or k >= len(logits):
        return logits
    return _keep_best(logits, logits, np.partition(logits, -k)[-k], k)


def keep_top_p(logits, p):
    """Keep each token before which, most probable first, there is less than p (Holtzman et al. 2020).

    The token that crosses p is kept, and so is the first one, even for p = 0. p >= 1 keeps all.
    """
    if p >= 1:
        return logits
    weights = _weights(logits)
    total = weights.sum(dtype=float)
    # Tokens of at most (1 - p) / V hold no more than 1 - p together, so all of them lie behind the border, and of a
    # real vocabulary most of the others need not be sorted. (0.999: rounding must not move the border.)
    candidates = weights[np.flatnonzero(weights > np.float32(0.999 * (1 - p) / len(logits) * total))]
    candidates = np.sort(candidates)[::-1]
    mass_before = (np.cumsum(candidates, dtype=float) - candidates) / total
    count = max(np.count_nonzero(mass_before < p), 1)
    return _keep_best(logits, weights, candidates[count - 1], count)


def keep_min_p(logits, p):
    """Keep what is at least p times as probable as the most probable token (Nguyen et al. 2024)."""
    return np.where(_weights(logits) >= p, logits, NEG_INF)


def keep_typical_p(logits, p):
    """Keep the tokens whose surprise, -log probability, is nearest to the entropy, until they hold p.

    The token that crosses p is kept. Source: Meister et al. 2023, "Locally Typical Sampling".
    """
    if p >= 1:
        return logits
    tokens = np.flatnonzero(logits > NEG_INF)
    log_p = log_softmax(logits[tokens])
    probabilities = np.exp(log_p)
    entropy = -(probabilities * log_p).sum()
    typicality = np.full(len(logits), -np.inf)
    typicality[tokens] = -np.abs(log_p + entropy)
    order = np.argsort(-typicality[tokens])
    mass_before = np.cumsum(probabilities[order]) - probabilities[order]
    count = max(np.count_nonzero(mass_before < p), 1)
    return _keep_best(logits, typicality, typicality[tokens[order[count - 1]]], count)


# ---------------------------------------------------------------------------------------- probabilities and the draw


def one_hot(token, V):
    """The distribution, float64 [V], that is certain of one token."""
    p = np.zeros(V)
    p[token] = 1
    return p


def probs(logits, history, config):
    """The distribution the next token is drawn from.

    logits: float32 [V], history: `History`, config: `SamplingConfig` -> float64 [V] that sums to 1. At temperature 0
    it is 1 for the most probable token, of equals the one with the lowest id. Raises ValueError where there is
    nothing to choose from.
    """
    V = len(logits)
    logits = process(logits, history, config)
    check_logits(logits, len(history.ids) - history.n_prompt)
    if config.temperature == 0:
        return one_hot(logits.argmax(), V)
    if config.temperature != 1:
        logits = apply_temperature(logits, config.temperature)
    tokens = slice(None)  # all of them
    for keep, value, neutral in (
        (keep_top_k, config.top_k, 0),
        (keep_top_p, config.top_p, 1),
        (keep_min_p, config.min_p, 0),
        (keep_typical_p, config.typical_p, 1),
    ):
        if value != neutral:
            # Each filter is handed only what the one before left: after a top-k of 50 the others cost nothing.
            left = np.flatnonzero(keep(logits, value) > NEG_INF)
            tokens = left if isinstance(tokens, slice) else tokens[left]
            logits = logits[left]
    p = np.zeros(V)
    weights = _weights(logits)
    p[tokens] = weights.astype(float) / weights.sum(dtype=float)
    return p


def draw(p, rng):
    """One token from p, float64 [V], by inverting its cumulative distribution at one uniform of `rng`.

    A certain outcome takes no uniform, so greedy decoding leaves the generator alone.
    """
    best = p.argmax()
    if p[best] == 1:
        return int(best)
    tokens = np.flatnonzero(p > 0)  # six times as fast as on p itself
    cumulative = np.cumsum(p[tokens])
    index = np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right")
    return int(tokens[index])
