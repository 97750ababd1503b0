"""Tiny GPT-2s with random weights, and how to feed them."""

from typing import NamedTuple

import numpy as np

from minigen.engine.model import GPT2, GPT2Config
from tests.oracles.tiny import tiny_config, tiny_params


def gpt2(config, params):
    return GPT2(GPT2Config.from_dict(config), dict(params))


class Tiny(NamedTuple):
    config: dict  # config.json's
    params: dict  # by checkpoint name; these two are what the float64 reference takes
    model: GPT2


def tiny_model(seed=0, std=0.5, **overrides):
    """A `Tiny` of `tiny_config`'s size with random weights."""
    config = tiny_config(**overrides)
    params = tiny_params(config, seed, std)
    return Tiny(config, params, gpt2(config, params))


def feed(model, ids, cache, chunks):
    """Logits [B, T, V] of ids [B, T], fed to the cache in chunks of the given sizes."""
    assert sum(chunks) == ids.shape[1]
    parts = np.split(ids, np.cumsum(chunks)[:-1], axis=1)
    return np.concatenate([model.forward(part, cache, last_only=False) for part in parts], axis=1)


def left_padded(texts):
    """Ids [B, T] and pad [B] of lists of ids; the padding is another id at each place."""
    width = max(map(len, texts))
    pad = np.array([width - len(text) for text in texts])
    return np.array(
        [[*range(7 * row, 7 * row + p), *text] for row, (p, text) in enumerate(zip(pad, texts, strict=True))], int
    ), pad


def cache_state(cache):
    """A copy of all that a cache holds."""
    return [a.copy() for a in (cache.length, cache.slot_pos, *cache.keys, *cache.values)]


def assert_unchanged(cache, before):
    """Assert that a cache holds what `cache_state` copied before."""
    for old, new in zip(before, cache_state(cache), strict=True):
        np.testing.assert_array_equal(old, new)
