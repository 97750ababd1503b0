"""A stand-in for GPT-2 whose logits are looked up: no rounding depends on how its tokens are run; and its tokenizer."""

import functools

import numpy as np

from minigen.engine.model import GPT2, GPT2Config
from tests.oracles.tiny import tiny_config, tiny_params


class LookupModel(GPT2):
    """A model that keeps the ids themselves as keys in a real K/V cache, and looks its logits up by the ids it sees.

    logits_of: a tuple of ids -> float32 [V]. A cache that was rolled back, reordered or reused wrongly shows at once.
    """

    def __init__(self, logits_of, V, n_positions=512, eos_token_id=None):
        sizes = dict(vocab_size=V, n_positions=n_positions, n_embd=1, n_head=1, n_layer=1)
        config = tiny_config(**sizes, bos_token_id=0, eos_token_id=eos_token_id)
        super().__init__(GPT2Config.from_dict(config), tiny_params(config))
        self.logits_of = functools.cache(logits_of)

    def forward(self, ids, cache=None, *, pad=None, last_only=True, attention_hook=None):
        ids = np.atleast_2d(ids)
        B, T = ids.shape
        cache = self.new_cache(B, T) if cache is None else cache
        columns = np.arange(T) - (0 if pad is None else np.reshape(pad, (B, 1)))
        positions = np.where(columns < 0, -1, cache.length[:, None] + columns)
        plan = cache.allocate(positions)
        keys, _ = cache.store(0, plan, ids[:, None, None], ids[:, None, None])  # [B, T] -> [B, 1, 1, T]
        logits = np.zeros((B, T, self.config.vocab_size), np.float32)
        for row in range(B):
            slot_pos = cache.slot_pos[row, : plan.used]
            for t in [T - 1] if last_only else range(T):
                if positions[row, t] < 0:
                    continue
                seen = (slot_pos >= 0) & (slot_pos <= positions[row, t])
                if plan.mask is not None:
                    seen &= plan.mask[row, 0, t]
                slots = np.flatnonzero(seen)
                slots = slots[np.argsort(slot_pos[slots])]
                logits[row, t] = self.logits_of(tuple(keys[row, 0, 0, slots].astype(int).tolist()))
        return logits[:, -1] if last_only else logits


class Letters:
    """The tokenizer of such a model: id i is the character 'a' + i."""

    def __init__(self, n_vocab):
        self.n_vocab = n_vocab

    def token_bytes(self, token):
        return chr(ord("a") + token).encode()

    def decode(self, ids):
        return b"".join(map(self.token_bytes, ids)).decode()

    def encode(self, text):
        return [ord(letter) - ord("a") for letter in text]


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
