"""Inputs of the sampler's golden cases, made anew from a seed (numpy only).

make_sampler.py feeds them to transformers and stores what comes out; test_sampler.py makes the same inputs again and
compares minigen's outcome. Nothing but the outcome needs a place in the golden file.

All numbers come from PCG64's raw 64-bit words (a stream numpy promises never to change) through exact operations on
dyadic fractions, so every platform and numpy version makes the same bits.
"""

from typing import NamedTuple

import numpy as np

VOCABULARIES = (7, 1000, 50257)
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size", "logit_bias")
WARPERS = ("temperature", "top_k", "top_p", "min_p", "typical_p")  # in the order of the chain
OPTIONS = PENALTIES + WARPERS
COLUMNS = 64  # how many columns of a wide outcome are stored


class Case(NamedTuple):
    """logits float32 [V]; ids = prompt + output, of which the first n_prompt are the prompt; options that are on."""

    logits: np.ndarray
    ids: list[int]
    n_prompt: int
    options: dict


class Words:
    """A stream of uniform numbers out of PCG64's raw words."""

    def __init__(self, seed):
        self.bits = np.random.PCG64(seed)

    def uniform(self, n):
        """float64 [n], multiples of 2**-24 in [0, 1)."""
        return (self.bits.random_raw(n) >> np.uint64(40)).astype(np.float64) * 2.0**-24

    def below(self, n):
        return int(self.uniform(1)[0] * n)

    def pick(self, choices):
        return choices[self.below(len(choices))]


def best_ids(logits, n):
    """The first n of np.argsort(-logits, kind="stable")."""
    candidates = np.flatnonzero(logits >= np.partition(logits, -min(n, len(logits)))[-min(n, len(logits))])
    return candidates[np.argsort(-logits[candidates], kind="stable")][:n]


def make_case(vocab, seed, only=None):
    """The case of a seed: with `only` that one option is on, else a random combination of at least two."""
    words = Words([seed, vocab, 0 if only is None else 1 + OPTIONS.index(only)])
    # A sum of three uniforms is nearly normal; a large factor and a few raised tokens give the peaked rows of a
    # language model, a small factor the flat rows of an untrained one.
    spread = words.pick((2.0, 4.0, 8.0)) * (1.0 if vocab < 1000 else 1.5)
    logits = (words.uniform(3 * vocab).reshape(3, vocab).sum(axis=0) - 1.5) * spread
    if vocab > 7:
        for _ in range(words.below(6)):
            logits[words.below(vocab)] += 2.0 + 4.0 * words.uniform(1)[0]
    shape = words.pick(("plain", "plain", "ties", "banned", "ties and banned"))
    if "ties" in shape:  # whole steps: many equal values
        step = words.pick((0.25, 0.5, 1.0)) * (2.0 if vocab == 7 else 1.0)
        logits = np.round(logits / step) * step
    if "banned" in shape:  # at least one token stays
        banned = words.uniform(vocab) < words.pick((0.1, 0.5))
        banned[words.below(vocab)] = False
        logits[banned] = -np.inf
    # A history of few distinct tokens, so that counts and n-grams repeat; half of them are among the likeliest.
    best = best_ids(logits, 8)
    pool = [int(words.pick(best)) if words.below(2) else words.below(vocab) for _ in range(1 + words.below(6))]
    ids = [words.pick(pool) for _ in range(words.below(24))]
    n_prompt = words.below(len(ids) + 1)
    tokens = [words.pick(pool) if words.below(2) else words.below(vocab) for _ in range(1 + words.below(4))]
    values = {
        "repetition_penalty": words.pick((0.75, 1.1, 1.3, 1.5, 2.0)),
        "presence_penalty": words.pick((-1.0, 0.25, 0.6, 1.5)),
        "frequency_penalty": words.pick((-0.5, 0.125, 0.3, 1.0)),
        "no_repeat_ngram_size": words.pick((1, 2, 3, 4)),
        "logit_bias": {token: words.pick((-np.inf, -4.5, -0.75, 0.5, 3.25)) for token in tokens},
        "temperature": words.pick((0.5, 0.7, 0.9, 1.25, 2.0)),
        "top_k": words.pick((1, 2, 3, 5, 6) if vocab == 7 else (1, 5, 40, 200, vocab + 1)),
        "top_p": words.pick((0.05, 0.3, 0.6, 0.8, 0.9, 0.95, 0.99)),
        "min_p": words.pick((0.01, 0.05, 0.1, 0.3, 1.0)),
        "typical_p": words.pick((0.1, 0.2, 0.5, 0.8, 0.9, 0.95)),
    }
    if only is None:
        chosen = ()
        while len(chosen) < 2:
            chosen = [name for name in OPTIONS if words.below(2)]
    else:
        chosen = [only]
    options = {name: values[name] for name in OPTIONS if name in chosen}
    return Case(logits.astype(np.float32), ids, n_prompt, options)


def columns(vocab):
    """The columns of a wide outcome that are stored one by one: 64 of them, spread over the vocabulary."""
    return np.arange(COLUMNS, dtype=np.int64) * vocab // COLUMNS


def moments(p):
    """Three sums that pin down a wide outcome as a whole: sum p^2, the entropy, the mean id over V. p: float64 [V]."""
    kept = p[p > 0]
    return np.array([np.sum(kept**2), -np.sum(kept * np.log(kept)), np.sum(p * np.arange(len(p))) / len(p)])
