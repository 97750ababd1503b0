"""Models for tests: tiny GPT-2s with random weights, and one whose answers are looked up."""

import functools
from itertools import product
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


class Letters:
    """A tokenizer in which token i is pieces[i], a text or bytes; by default every id is one letter."""

    def __init__(self, pieces=300):
        self.pieces = [chr(ord("a") + i) for i in range(pieces)] if isinstance(pieces, int) else pieces
        self.n_vocab = len(self.pieces)

    def encode(self, text):
        return [self.pieces.index(letter) for letter in text]

    def token_bytes(self, token):
        piece = self.pieces[token]
        return piece if isinstance(piece, bytes) else piece.encode()

    def decode(self, ids):
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")


class StandIn(GPT2):
    """A model whose logits after the ids it has seen, a tuple, are logits_of(ids), float32 [V].

    Its cache is a real `KVCache` that holds the ids where other models' hold keys, and their positions as values. So
    what was stored, taken back, reordered or overwritten wrongly shows in the ids. passes: the [B, T] of each forward
    pass.
    """

    def __init__(self, logits_of, V, n_positions=1000, eos_token_id=None):
        size = dict(n_embd=1, n_layer=1, n_head=1, n_inner=1)
        config = GPT2Config(V, n_positions, **size, bos_token_id=None, eos_token_id=eos_token_id)
        super().__init__(config, {name: np.zeros(n, np.float32) for name, n in config.parameter_shapes().items()})
        self.logits_of = functools.cache(logits_of)
        self.passes = []

    def forward(self, ids, cache=None, *, pad=None, last_only=True, **_):
        ids = np.atleast_2d(ids)
        B, T = ids.shape
        self.passes.append((B, T))
        cache = self.new_cache(B, T) if cache is None else cache
        columns = np.arange(T) - (0 if pad is None else np.asarray(pad)[:, None])
        positions = np.broadcast_to(np.where(columns < 0, -1, cache.length[:, None] + columns), (B, T))
        assert positions.max() < self.config.n_positions
        plan = cache.allocate(positions)
        new = (x[:, None, None].astype(np.float32) for x in (ids, positions))  # [B, T] -> [B, 1, 1, T]
        held, places = (x[:, 0, 0] for x in cache.store(0, plan, *new))  # [B, 1, 1, S] -> [B, S]
        logits = np.zeros((B, T, self.config.vocab_size), np.float32)
        for row, t in product(range(B), range(T - 1 if last_only else 0, T)):
            last = positions[row, t]
            if last >= 0:
                seen = slice(None) if plan.mask is None else plan.mask[row, 0, t]
                order = places[row, seen].argsort()
                assert (np.diff(places[row, seen][order], append=last + 1) == 1).all()
                logits[row, t] = self.logits_of(tuple(held[row, seen][order].astype(int).tolist()))
        return logits[:, -1] if last_only else logits


def as_logits(probabilities_of):
    """A function from ids to logits, float32, made of one to probabilities."""

    def logits(ids):
        with np.errstate(divide="ignore"):
            return np.log(np.asarray(probabilities_of(ids), float)).astype(np.float32)

    return logits


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
