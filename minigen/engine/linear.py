"""Linear layers: x @ W + b, with a few rows at the price of one."""

import math
import os
import time
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from minigen.engine.ops import BLOCK_MAX_ROWS, PARALLEL_MIN_ELEMENTS, UNPACKED_MAX_MULTIPLIES
from minigen.engine.parallel import THREADS, share
from minigen.engine.validation import require

# From so many rows on the whole weight goes to BLAS: packing pays from 24 to 48 rows on, by the matrix; see `linear`.
DENSE_MIN_ROWS = 32
# Without blocks, fewer rows than these are quicker as single products: on a Sapphire Rapids 2 rows of 768 x 50,257 take
# 14 ms so and 30 at once, 3 rows 23 and 30, 4 rows 30 and 32.
ROWWISE_MAX_ROWS = 5


class Weight(NamedTuple):
    """A matrix [n_in, n_out] as `pack_weight` stores it for `linear`."""

    n_out: int
    blocks: np.ndarray | None  # [n_blocks, n_in, width], the last one filled up with zeros; None in order "plain"
    whole: np.ndarray | None  # [n_in, n_out], a view of the same memory; None in order "columns"


def _to_blocks(weight, order):
    """Copy a matrix into blocks of columns.

    In order "rows" all n_in weights of an output lie together, as the rows of [out, in] do, which is how other
    libraries store it; in order "columns" the block's weights of one input, as in GPT-2's files.
    """
    n_in, n_out = weight.shape
    width = next((width for width in (64, 32) if width * n_in * BLOCK_MAX_ROWS // 2 <= UNPACKED_MAX_MULTIPLIES), 16)
    n_blocks = -(-n_out // width)
    if order == "rows":
        transposed = np.empty((n_blocks * width, n_in), np.float32)
        # [n_blocks * width, n_in] -> [n_blocks, n_in, width]
        blocks = transposed.reshape(n_blocks, width, n_in).swapaxes(1, 2)
        whole = transposed[:n_out].T
    else:
        blocks = np.empty((n_blocks, n_in, width), np.float32)
        whole = None

    def fill(i):
        columns = weight[:, i * width : (i + 1) * width]
        blocks[i, :, : columns.shape[1]] = columns
        blocks[i, :, columns.shape[1] :] = 0

    share(fill, n_blocks)
    return Weight(n_out, blocks, whole)


def _blocked_matmul(x, blocks):
    """x: [rows, n_in], blocks: [n_blocks, n_in, width] -> [rows, n_blocks * width], in products that are not packed."""
    n_blocks, n_in, width = blocks.shape
    n_chunks = -(-len(x) // max(2, min(BLOCK_MAX_ROWS, UNPACKED_MAX_MULTIPLIES // (n_in * width))))
    # A block with a single row would go to gemv, for which BLAS wakes its own threads: once for each block.
    chunk = max(2, -(-len(x) // n_chunks))
    chunks = np.zeros((n_chunks * chunk, n_in), np.float32)
    chunks[: len(x)] = x
    chunks = chunks.reshape(n_chunks, chunk, n_in)
    y = np.empty((n_chunks, chunk, n_blocks, width), np.float32)
    by_block = y.transpose(2, 0, 1, 3)  # [n_chunks, chunk, n_blocks, width] -> [n_blocks, n_chunks, chunk, width]
    # One span a thread: each hand-over of Python's lock from thread to thread costs 40 microseconds.
    n_spans = min(THREADS, n_blocks) if blocks.size >= PARALLEL_MIN_ELEMENTS else 1

    def multiply(i):
        span = slice(n_blocks * i // n_spans, n_blocks * (i + 1) // n_spans)
        # NumPy takes all chunks of a block before the next block, which is so read from memory once.
        np.matmul(chunks, blocks[span, None], out=by_block[span])

    share(multiply, n_spans)
    # [n_chunks, chunk, n_blocks, width] -> [rows, n_blocks * width]
    return y.reshape(n_chunks * chunk, n_blocks * width)[: len(x)]


def _rowwise_matmul(x, weight):
    """x @ weight, each row a product of its own, which BLAS does not pack. [rows, n_in] -> [rows, n_out]"""
    return (x[:, None] @ weight)[:, 0]  # [rows, 1, n_in] @ [n_in, n_out] -> [rows, 1, n_out] -> [rows, n_out]


@cache
def _choose_layout():
    """How matrices are stored on this machine: "rows", "columns" or "plain"; MINIGEN_LINEAR, or else measured once."""
    asked = os.environ.get("MINIGEN_LINEAR", "")
    allowed = "plain (BLAS alone), rows or columns (blocks, stored so), or blocks (the faster of these two)"
    require(asked in ("", "plain", "rows", "columns", "blocks"), "MINIGEN_LINEAR", asked, allowed)
    if asked in ("plain", "rows", "columns"):
        return asked
    weight = np.full((1024, 2048), 0.5, np.float32)  # 8 MB, more than a core's own cache
    # Four rows, as beams and drafts have: with eight, plain and blocks can be within a tenth of each other while these
    # 8 MB stay in a cache that cores share, and blocks twice as fast in a model, whose weights come from memory.
    x = np.ones((4, 1024), np.float32)
    cut = {order: _to_blocks(weight, order).blocks for order in ("rows", "columns")}
    calls = {order: partial(_blocked_matmul, x, blocks) for order, blocks in cut.items()}
    calls["plain"] = partial(_rowwise_matmul, x, weight)
    seconds = dict.fromkeys(calls, math.inf)
    for _ in range(20):  # enough for a moment in which no other program has one of the cores
        for order, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[order] = min(seconds[order], time.perf_counter() - start)
    # By a clear margin, so that a tie falls the same way in the next run: each order adds up in an order of its own.
    best = "columns" if seconds["columns"] < 0.75 * seconds["rows"] else "rows"
    return "plain" if seconds["plain"] < 0.9 * seconds[best] and asked != "blocks" else best


def pack_weight(weight, order=None):
    """Store a matrix [n_in, n_out], whatever its order in memory, as a `Weight`; a copy, but for order "plain".

    order: "rows", "columns" or "plain"; None for what MINIGEN_LINEAR says, or for the fastest here, which the first
    call finds out in 0.1 s or 0.2 s. Raises ValueError where that environment variable holds none of the values it may.
    """
    order = order or _choose_layout()
    return Weight(weight.shape[1], None, weight) if order == "plain" else _to_blocks(weight, order)


def linear(x, weight, bias=None):
    """x @ weight + bias, such that a few rows share the reading of the weight.

    x: [..., n_in], weight: a `Weight` [n_in, n_out], bias: [n_out] or None -> [..., n_out].

    A product with few rows is bound by reading the weight from memory: one row and eight could take the same time. They
    do not, because for one row BLAS streams through the weight, but from two rows on it first packs it, copying all of
    it into the order that its inner loop likes. With hundreds of rows that is nothing, with four it takes three times
    as long as the product. But OpenBLAS leaves small products unpacked (up to `UNPACKED_MAX_MULTIPLIES`, on
    processors with AVX-512), so the weight is cut into blocks of 16 to 64 columns, each small enough with 8 to 16 rows,
    and the threads share the blocks out. NumPy lets go of Python's lock during a product, so plain Python threads do.

    So a single row goes to BLAS with the whole weight, 2 to 31 rows go through the blocks, and from
    `DENSE_MIN_ROWS` on, where packing begins to pay, BLAS gets the whole weight
    again. In order "columns" there is no such view of it, and all go through the blocks.

    Milliseconds by number of rows, on two cores of an Intel Xeon (Emerald Rapids), OpenBLAS 0.3.31, medians. "plain" is
    `x @ weight`, or single products for 2 to 4 rows; the figures of "blocks" beyond
    `DENSE_MIN_ROWS` show what is avoided:

                     rows     1     2     4     5     8    16    24    31    48    64
        768 x 3,072  plain  0.36  0.66  1.07  1.44  1.39  1.51  1.77  2.15  2.43  2.59
                     blocks    -  0.54  0.65  0.69  0.78  1.08  1.59  2.03  2.66  3.89
        3,072 x 768  plain  0.46  0.76  1.25  1.34  1.22  1.51  1.71  2.10  2.22  2.40
                     blocks    -  0.46  0.47  0.61  0.80  1.16  1.46  2.31  3.07  4.13
        768 x 50,257 plain   5.1   9.6  19.2  18.1  17.7  19.6  24.0  28.4  32.0  34.9
                     blocks    -   6.7   8.4   9.6  10.8  15.8  26.1  30.6  46.9  60.5

    Which order of memory is faster, or that blocks are of no use here, `pack_weight` has found out by measuring.
    """
    rows = x.reshape(-1, x.shape[-1])  # [..., n_in] -> [rows, n_in]
    if weight.blocks is None and len(rows) < ROWWISE_MAX_ROWS:
        y = _rowwise_matmul(rows, weight.whole)
    elif weight.blocks is None or (weight.whole is not None and not 1 < len(rows) < DENSE_MIN_ROWS):
        y = rows @ weight.whole
    else:
        y = _blocked_matmul(rows, weight.blocks)[:, : weight.n_out]
    if bias is not None:
        y += bias
    return y.reshape(*x.shape[:-1], weight.n_out)  # [rows, n_out] -> [..., n_out]


def embed(ids, weight):
    """The columns of a `Weight` [n_embd, V] that belong to token ids. ids: int [B, T] -> [B, T, n_embd]."""
    if weight.whole is not None:
        return weight.whole.T[ids]
    width = weight.blocks.shape[2]
    return weight.blocks[ids // width, :, ids % width]
