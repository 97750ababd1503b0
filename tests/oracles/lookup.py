"""A stand-in for GPT-2 whose logits are looked up: no rounding depends on how its tokens are run; and its tokenizer."""

import functools
from itertools import product

import numpy as np

from minigen.engine.model import GPT2, GPT2Config


class LookupModel(GPT2):
    """A model whose logits after the ids it has seen, a tuple, are logits_of(ids), float32 [V].

    Its cache is a real `KVCache` that holds the ids where other models' hold keys, and their positions as values. So
    what was stored, rolled back, reordered or overwritten wrongly shows in the ids. passes: the [B, T] of each pass.
    """

    def __init__(self, logits_of, V, n_positions=512, eos_token_id=None):
        size = dict(n_embd=1, n_layer=1, n_head=1, n_inner=1)
        config = GPT2Config(V, n_positions, **size, bos_token_id=0, eos_token_id=eos_token_id)
        super().__init__(config, {name: np.zeros(n, np.float32) for name, n in config.parameter_shapes().items()})
        self.logits_of = functools.cache(logits_of)
        self.passes = []

    def forward(self, ids, cache=None, *, pad=None, last_only=True, attention_hook=None):
        ids = np.atleast_2d(ids)
        B, T = ids.shape
        self.passes.append((B, T))
        cache = self.new_cache(B, T) if cache is None else cache
        columns = np.arange(T) - (0 if pad is None else np.reshape(pad, (B, 1)))
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
                assert (places[row, seen][order] == np.arange(last + 1 - len(order), last + 1)).all()
                logits[row, t] = self.logits_of(tuple(held[row, seen][order].astype(int).tolist()))
        return logits[:, -1] if last_only else logits


class Letters:
    """A tokenizer in which token i is pieces[i], a text or bytes; by default the character 'a' + i."""

    def __init__(self, pieces=300):
        self.pieces = [chr(ord("a") + i) for i in range(pieces)] if isinstance(pieces, int) else pieces
        self.n_vocab = len(self.pieces)

    def encode(self, text, **_):
        return [self.pieces.index(letter) for letter in text]

    def first_difference(self, other):
        return None

    def token_bytes(self, token):
        piece = self.pieces[token]
        return piece if isinstance(piece, bytes) else piece.encode()

    def decode(self, ids):
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")


def as_logits(probabilities_of):
    """A function from ids to logits, float32, made of one to probabilities."""

    def logits(ids):
        with np.errstate(divide="ignore"):
            return np.log(np.asarray(probabilities_of(ids), float)).astype(np.float32)

    return logits


def table_logits(V, seed, spread=2.8):
    """Random logits that depend on the last two ids."""
    table = np.random.default_rng(seed).normal(0, spread, (V + 8, V + 8, V)).astype(np.float32)
    return lambda ids: table[ids[-2] if len(ids) > 1 else 0, ids[-1]]


def text_logits(V, seed, spread=2.0):
    """Random logits that depend on all the ids."""
    return lambda ids: np.random.default_rng([seed, *ids]).normal(0, spread, V).astype(np.float32)


def near(logits_of, V, seed, noise=1.0):
    """The logits of a draft for a target: the target's and noise, [V]; noise alone for ids that the target lacks."""
    other = table_logits(V, seed, noise)

    def logits(ids):
        result = other(ids).copy()
        ours = logits_of(ids)[:V]
        result[: len(ours)] += ours
        return result

    return logits


def lookup_pair(seed, V=4, V_draft=None, spread=2.8, **options):
    """A target, and a draft that agrees with it in part."""
    target = LookupModel(table_logits(V, seed, spread), V, **options)
    V_draft = V_draft or V
    return target, LookupModel(near(target.logits_of, V_draft, seed + 1000), V_draft, **options)
