"""Formulas in chunks and on several threads: attention against float64, and functions of each row."""

from functools import partial

import numpy as np
import pytest

from minigen.engine.ops import attention, attention_weights
from minigen.kernels.chunked import chunked_attention, rowwise


def slow_attention(q, keys, values, scale, mask):
    """softmax(q @ k.T * scale) @ v in float64, query by query."""
    B, H, _, T = q.shape
    out = np.zeros((B, T, H, values.shape[2]))
    for b, h, t in np.ndindex(B, H, T):
        scores = keys[b, h].T.astype(float) @ q[b, h, :, t].astype(float) * scale
        if mask is not None:
            scores[~mask[b if len(mask) > 1 else 0, 0, t]] = -np.inf
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights / weights.sum() @ values[b, h].T.astype(float)
    return out


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("B", "H", "T", "S", "D"),
    [
        (1, 2, 1, 1, 4),
        (1, 3, 1, 300, 64),
        (1, 12, 1, 900, 64),
        (1, 4, 3, 2100, 64),
        (2, 4, 5, 130, 64),
        (1, 2, 40, 40, 8),
        (3, 2, 70, 200, 16),
    ],
)
def test_attention_is_the_formula(three_threads, B, H, T, S, D, masked):
    rng = np.random.default_rng(T)
    q = 3 * rng.standard_normal((B, H, D, T)).astype(np.float32)
    # Views of a longer cache, as attention gets them; what lies behind must not be read.
    keys, values = (np.full((B, H, D, S + 5), np.nan, np.float32)[..., :S] for _ in range(2))
    keys[:], values[:] = rng.standard_normal((2, B, H, D, S))
    mask = None
    if masked:
        mask = rng.random((B, 1, T, S)) < 0.3
        mask[..., S // 3] |= ~mask.any(-1)
        mask[:, :, T // 2 :, S // 2 :] = False  # whole columns that later chunks of queries do not see
        mask[..., 0] |= ~mask.any(-1)
    before = q.copy()
    formula = partial(attention, scale=np.float32(0.3))
    found = chunked_attention(formula, q, keys, values, mask)
    assert (found.shape, found.dtype) == ((B, T, H, D), np.float32)
    np.testing.assert_allclose(found, slow_attention(q, keys, values, 0.3, mask), atol=2e-5)
    np.testing.assert_array_equal(q, before)


def test_attention_weights_are_what_attention_multiplies_the_values_by():
    rng = np.random.default_rng(0)
    q, keys = (rng.standard_normal((2, 3, 16, n)).astype(np.float32) for n in (5, 40))
    mask = np.tril(np.ones((5, 40), bool), 30)[None, None] & (rng.random((2, 1, 5, 40)) < 0.5)
    mask[..., 0] = True
    one_hot = np.broadcast_to(np.eye(40), (2, 3, 40, 40))  # values that pick out each weight
    for seen in (mask, None):
        found = attention_weights(q, keys, np.float32(0.3), seen)
        np.testing.assert_allclose(found.swapaxes(1, 2), slow_attention(q, keys, one_hot, 0.3, seen), atol=1e-6)
        assert seen is None or (found[~np.broadcast_to(seen, found.shape)] == 0).all()


@pytest.mark.parametrize("columns", [slice(None), slice(3, -2)], ids=["contiguous", "a slice"])
@pytest.mark.parametrize("shape", [(2, 5, 101), (3, 700, 101)], ids=["small", "large"])
def test_rowwise_is_the_function_of_every_row(three_threads, shape, columns):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)[..., columns]
    before = x.copy()
    np.testing.assert_array_equal(rowwise(lambda rows: rows - rows[..., :1], x), x - x[..., :1])
    np.testing.assert_array_equal(x, before)
    np.testing.assert_array_equal(rowwise(lambda rows: 2 * rows + 1, x, out=x), 2 * before + 1)
