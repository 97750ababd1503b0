"""Formulas on large arrays: applied to chunks that stay in a core's own cache, on all threads.

Both functions take the formula as an argument (engine/ops.py has them all). For small arrays they just call it.
"""

import numpy as np

from minigen.kernels.batch_invariant import BATCH_INVARIANT, max_queries, padded_length
from minigen.kernels.parallel import PARALLEL_MIN_ELEMENTS, THREADS, parallel_for

# 256 KB of values, so that a few arrays of this size fit in a core's own cache.
CHUNK_ELEMENTS = 2**16
# Queries per product in attention: enough for BLAS's full rate, but few enough that their scores stay in the cache.
QUERY_CHUNK = 64


def rowwise(function, x, out=None):
    """function(x) for a function that treats each row of x alone, [..., E] -> [..., E].

    A large x is processed in chunks that stay in a core's cache, on all threads. Use the return value: `out`, which may
    be x itself, is only memory for the results of a large x.
    """
    if x.size <= CHUNK_ELEMENTS:
        return function(x)
    out = np.empty_like(x) if out is None else out
    rows, out_rows = x.reshape(-1, x.shape[-1]), out.reshape(-1, x.shape[-1])  # [..., E] -> [rows, E]
    n_chunks = -(-x.size // CHUNK_ELEMENTS)

    def apply(index):
        chunk = slice(len(rows) * index // n_chunks, len(rows) * (index + 1) // n_chunks)
        out_rows[chunk] = function(rows[chunk])

    parallel_for(apply, n_chunks)
    return out_rows.reshape(x.shape)


def chunked_attention(attention, q, keys, values, mask=None):
    """attention(q, keys, values, mask=mask), in chunks of queries and groups of heads.

    q: [B, H, D, T], keys and values: [B, H, D, S], mask: bool [B, 1, T, S] or None -> [B, T, H, D]
    """
    B, H, D, T = q.shape
    S = keys.shape[3]
    n_queries = QUERY_CHUNK
    if BATCH_INVARIANT:
        n_queries = min(QUERY_CHUNK, max_queries(S, D))
        if T % n_queries == 1:  # the last product would have a single query: repeat it
            q = np.concatenate([q, q[..., -1:]], axis=3)
            mask = mask if mask is None else np.concatenate([mask, mask[:, :, -1:]], axis=2)
            return chunked_attention(attention, q, keys, values, mask)[:, :T]
    # Groups of heads: small enough that their scores stay in the CPU cache; one per thread if there are many keys.
    n_groups = max(
        -(-B * H * min(T, n_queries) * S // CHUNK_ELEMENTS),
        THREADS if keys.size + values.size >= PARALLEL_MIN_ELEMENTS else 1,
    )
    n_groups = min(n_groups, H)
    if T <= n_queries and n_groups == 1:
        return attention(q, keys, values, mask=mask).swapaxes(1, 2)  # [B, H, T, D] -> [B, T, H, D]
    tasks = []
    for start in reversed(range(0, T, n_queries)):  # the last queries see the most keys, so they come first
        chunk = slice(start, start + n_queries)
        visible, used = None, S
        if mask is not None:
            visible = mask[:, :, chunk]
            # No query of this chunk sees a key from `used` on: in a prompt, the keys of all later tokens.
            used = padded_length(np.flatnonzero(visible.any(axis=(0, 1, 2)))[-1] + 1)
            visible = visible[..., :used]
        for i in range(n_groups):
            tasks.append((chunk, slice(H * i // n_groups, H * (i + 1) // n_groups), used, visible))
    result = np.empty((B, T, H, D), np.float32)

    def attend(index):
        chunk, heads, used, visible = tasks[index]
        k, v = keys[:, heads, :, :used], values[:, heads, :, :used]
        # [B, H, T, D] -> [B, T, H, D]
        result[:, chunk, heads] = attention(q[:, heads, :, chunk], k, v, mask=visible).swapaxes(1, 2)

    parallel_for(attend, len(tasks))
    return result
