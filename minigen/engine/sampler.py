"""From logits to a token: penalties and filters as pure functions, the distribution they leave, and the draw.

The order is fixed. It is that of the transformers library, except that the bias comes after the penalties;
presence and frequency penalties are an addition:

    repetition penalty, presence and frequency penalty, n-gram blocking, bias, EOS suppression, the caller's processors
    -> temperature -> top-k -> top-p -> min-p -> typical-p

each applied to the output of the previous one. None of them changes the logits that it is given. What comes before
temperature takes one row of logits, [V], and returns a row in which the removed tokens are -inf. A filter takes the
logits of the tokens that are left, [n], and returns the indices of those that it keeps. Nothing here keeps state
between tokens, so a rejected draft needs no undoing, and beam search and speculation use the same functions.

To add a filter: write a function `keep_...(logits, value)`, add it to `FILTERS`, and add its option to options.py.
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


# ---------------------------------------------------------------------------------------- the distribution and the draw


def next_token_probs(logits, history, config):
    """The distribution that the next token is drawn from.

    logits: float32 [V], history: `History`, config: options.SamplingConfig -> float64 [V] that sums to 1. At
    temperature 0 it is one-hot at the most probable token (ties: lowest id). Raises ValueError if no token is left.
    """
    V = len(logits)
    logits = apply_logits_processors(logits, history, config)
    check_logits(logits, len(history.ids) - history.n_prompt)
    if config.temperature == 0:
        return one_hot(logits.argmax(), V)
    if config.temperature != 1:
        logits = apply_temperature(logits, config.temperature)
    tokens = np.arange(V)
    for name, (keep, neutral) in FILTERS.items():
        if (value := getattr(config, name)) != neutral:
            # Each filter gets only the tokens that the previous one kept: after a top-k of 50 the others cost nothing.
            kept = keep(logits, value)
            tokens, logits = tokens[kept], logits[kept]
    p = np.zeros(V)
    unnormalised = _unnormalised_probs(logits)
    p[tokens] = unnormalised.astype(float) / unnormalised.sum(dtype=float)
    return p


def sample_token(p, noise):
    """One token from p, float64 [V], by an exponential race: the token x with the smallest E[x] / p[x].

    E[x] are independent standard exponential numbers, so the winner is distributed as p (the Gumbel-max trick;
    Maddison et al. 2014). noise: a `Noise`, or a NumPy random generator. A one-hot p takes none.
    """
    tokens = np.flatnonzero(p > 0)
    if len(tokens) == 1:
        return int(tokens[0])
    if isinstance(noise, np.random.Generator):
        exponentials = noise.standard_exponential(len(tokens))
    else:
        exponentials = noise.exponentials(tokens)
    return int(tokens[np.argmin(exponentials / p[tokens])])


class Noise(NamedTuple):
    """The random numbers for one position of a text, one per candidate token: a pure function of these fields
    and the token.

    So a text depends on the model, prompt, options, seed and number: not on the rest of the batch, the cache or, under
    the coupled rule, drafts; max_tokens only cuts it. (Up to rounding: see kernels/batch_invariant.py.) No generator
    has a state that steps or rows would share.
    """

    seed: int
    number: int  # which continuation of its prompt
    position: int  # of the token in the text
    stream: int = 0  # 0 for the draw; other numbers are independent of it

    def uniforms(self, tokens):
        """A uniform random number between 0 and 1 per token: int [n] -> float64 [n].

        Token x gets output x of SplitMix64 (Steele et al. 2014), a generator that reaches each output directly, so that
        only the tokens that the filters kept cost anything.
        """
        state = np.random.SeedSequence(self).generate_state(1, np.uint64)
        z = state + np.uint64(0x9E3779B97F4A7C15) * (np.asarray(tokens).astype(np.uint64) + np.uint64(1))
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
        return ((z >> np.uint64(12)) + 0.5) * 2.0**-52  # with one bit more, the largest would be rounded to 1

    def exponentials(self, tokens):
        """A standard exponential random number per token: int [n] -> float64 [n]."""
        return -np.log(self.uniforms(tokens))


def one_hot(token, V):
    """A one-hot distribution, float64 [V]."""
    p = np.zeros(V)
    p[token] = 1
    return p


def log_softmax(logits):
    """Natural logarithms of the probabilities of one row, float64 [V]."""
    # The sum is float64; its terms need not be, and float32 exp is several times as fast.
    log_sum = float(logits.max()) + math.log(_unnormalised_probs(logits).sum(dtype=float))
    return np.subtract(logits, log_sum, dtype=float)  # one array instead of two: 0.16 instead of 0.44 ms for 50,257


def top_ids(scores, n):
    """Ids of the n highest scores, best first (ties: lowest id). scores: [V] -> int [min(n, V)]."""
    if n == 0:
        return np.arange(0)
    ids = keep_top_k(scores, n)
    return ids[np.lexsort((ids, -scores[ids]))]


# ---------------------------------------------------------------------------------------- penalties and bans


def apply_logits_processors(logits, history, config):
    """Logits processors applied before temperature: penalties, n-gram blocking, bias, EOS suppression, user processors.

    logits: one row, [V]. Sampling applies them to logits, beam search to log-probabilities.
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
        # Copies, because a processor may work in place, and these are the run's own ids and the model's own logits.
        processed = processor(history._replace(ids=list(history.ids)), logits.copy())
        ok = isinstance(processed, np.ndarray) and processed.shape == logits.shape and processed.dtype.kind in "fiu"
        if not ok:
            raise ValueError(
                f"generated token {n_generated + 1}: a logits processor returned {processed!r}; "
                f"it must return an array of {len(logits)} logits"
            )
        # Unsigned integers would wrap around below 0.
        logits = processed if processed.dtype.kind == "f" else processed.astype(np.float32)
    return logits


def apply_repetition_penalty(logits, ids, penalty):
    """Divide the positive and multiply the negative logits of every token in `ids`, each once (Keskar et al. 2019)."""
    logits = logits.copy()
    seen = np.unique(np.asarray(ids, int))
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / np.float32(penalty), logits[seen] * np.float32(penalty))
    return logits


def apply_presence_frequency(logits, output_ids, presence, frequency):
    """Subtract `presence` once from each output token's logit, and `frequency` for each of its occurrences."""
    logits = logits.copy()
    for token, count in Counter(output_ids).items():
        logits[token] -= presence + frequency * count
    return logits


def ban_repeated_ngrams(logits, ids, size):
    """Remove each token that would complete an n-gram of `size` tokens that `ids` already holds; 0 removes none."""
    logits = logits.copy()
    if size == 0:
        return logits
    last = ids[len(ids) - size + 1 :]  # the size - 1 tokens that the next one would complete
    for end in range(size - 1, len(ids)):
        if ids[end - size + 1 : end] == last:
            logits[ids[end]] = NEG_INF
    return logits


def apply_logit_bias(logits, bias):
    """Add to each token's logit its bias. Raises ValueError for an id beyond the vocabulary."""
    logits = logits.copy()
    for token, value in bias.items():
        if token >= len(logits):
            raise ValueError(f"logit_bias names token id {token}, outside the vocabulary, 0 to {len(logits) - 1}")
        logits[token] += value
    return logits


def check_logits(logits, n_generated):
    """Raise ValueError, naming the step, if the best logit is NaN or infinite, or no token is left to choose."""
    best = logits.max(initial=-np.inf)  # NaN if any of them is
    if not np.isfinite(best):
        fault = "every token is ruled out (all logits are -inf)" if best == -np.inf else f"the best logit is {best}"
        raise ValueError(f"generated token {n_generated + 1} cannot be chosen: {fault}")


# ---------------------------------------------------------------------------------------- temperature and filters


def apply_temperature(logits, temperature):
    """logits / temperature, after subtracting the largest logit, so that a tiny temperature cannot overflow it."""
    with np.errstate(over="ignore"):  # the other logits may overflow: their probability then rounds to 0
        return (logits - logits.max()) / np.float32(np.clip(temperature, FLOAT32.tiny, FLOAT32.max))


def keep_top_k(logits, k):
    """Top-k: keep the k largest logits (Fan et al. 2018; ties: lowest id). 0 and k >= V keep all."""
    if k == 0 or k >= len(logits):
        return np.arange(len(logits))
    return _highest(logits, np.partition(logits, -k)[-k], k)


def keep_top_p(logits, p):
    """Top-p, nucleus sampling: keep the smallest set of most probable tokens with total probability >= p.

    A token is kept if the tokens more probable than it have less than p together, so the first one always is; p >= 1
    keeps all. Source: Holtzman et al. 2020. Probabilities are float32 here, so differences below 1e-7 are rounding.
    """
    if p >= 1:
        return np.arange(len(logits))
    unnormalised = _unnormalised_probs(logits)
    total = unnormalised.sum(dtype=float)
    # Tokens of at most (1 - p) / V hold no more than 1 - p together, so all of them lie beyond the threshold, and few
    # tokens of a real vocabulary are left to sort. (0.999: rounding must not move the threshold.)
    candidates = unnormalised[np.flatnonzero(unnormalised > np.float32(0.999 * (1 - p) / len(logits) * total))]
    candidates = np.sort(candidates)[::-1]
    mass_before = (np.cumsum(candidates, dtype=float) - candidates) / total
    count = max(np.count_nonzero(mass_before < p), 1)
    return _highest(unnormalised, candidates[count - 1], count)


def keep_min_p(logits, p):
    """Min-p: keep the tokens that are at least p times as probable as the most probable one (Nguyen et al. 2024)."""
    return np.flatnonzero(_unnormalised_probs(logits) >= p)


def keep_typical_p(logits, p):
    """Locally typical sampling: keep the tokens whose surprise, -log probability, is nearest to the entropy.

    As in top-p, the smallest such set with total probability >= p. Source: Meister et al. 2023.
    """
    if p >= 1:
        return np.arange(len(logits))
    tokens = np.flatnonzero(logits > NEG_INF)
    log_p = log_softmax(logits[tokens])
    probabilities = np.exp(log_p)
    entropy = -(probabilities * log_p).sum()
    typicality = -np.abs(log_p + entropy)  # 0 for the most typical token, negative for the others
    order = np.argsort(-typicality)
    mass_before = np.cumsum(probabilities[order]) - probabilities[order]
    count = max(np.count_nonzero(mass_before < p), 1)
    return tokens[_highest(typicality, typicality[order[count - 1]], count)]


FILTERS = {  # option -> (function, the value at which it keeps every token), in the order in which they are applied
    "top_k": (keep_top_k, 0),
    "top_p": (keep_top_p, 1),
    "min_p": (keep_min_p, 0),
    "typical_p": (keep_typical_p, 1),
}


def _unnormalised_probs(logits):
    """exp(logits), scaled so that the largest is 1: probabilities up to a common factor; -inf becomes 0."""
    return np.exp(logits - logits.max())


def _highest(scores, threshold, count):
    """Indices of the `count` highest scores, in order; `threshold` is the lowest of these scores (ties: lowest ids)."""
    above = np.flatnonzero(scores > threshold)
    ties = np.flatnonzero(scores == threshold)
    return np.sort(np.concatenate([above, ties[: count - len(above)]]))
