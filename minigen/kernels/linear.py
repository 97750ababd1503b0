"""Linear layers: x @ W + b, with small batches reading W from memory only once."""

import math
import os
import time
from functools import cache
from typing import NamedTuple

import numpy as np

from minigen.kernels.batch_invariant import BATCH_INVARIANT, UNPACKED_MAX_MULTIPLIES, require_unpacked
from minigen.kernels.parallel import (
    PARALLEL_MIN_ELEMENTS,
    THREADS,
    blas_is_single_threaded,
    parallel_for,
    single_threaded_blas,
)


class Weight(NamedTuple):
    """A matrix [n_in, n_out], as `pack_weight` stores it. If there are blocks, both are views of one array."""

    dense: np.ndarray  # [n_in, n_out]
    # [n_blocks, n_in, width]; the last block may have columns that dense lacks: zeros, or those that `first_outputs`
    # left out.
    blocks: np.ndarray | None


def linear(x, weight, bias=None):
    """x @ weight + bias. x: [..., n_in], weight: a `Weight` [n_in, n_out], bias: [n_out] or None -> [..., n_out]."""
    rows = x.reshape(-1, x.shape[-1])  # [..., n_in] -> [rows, n_in]
    y = np.empty((len(rows), weight.dense.shape[1]), np.float32)
    n_slices = _number_of_slices(weight, len(rows))
    if n_slices == 1:
        _multiply(rows, weight, bias, out=y)
    else:

        def compute(index):
            outputs, part = _slice(weight, index, n_slices)
            _multiply(rows, part, None if bias is None else bias[outputs], out=y[:, outputs])

        parallel_for(compute, n_slices)
    return y.reshape(*x.shape[:-1], y.shape[1])  # [rows, n_out] -> [..., n_out]


def first_outputs(weight, n):
    """A `Weight` of the first n outputs of another, without copying."""
    blocks = None if weight.blocks is None else weight.blocks[: -(-n // weight.blocks.shape[2])]
    return Weight(weight.dense[:, :n], blocks)


def embed(ids, weight):
    """Look up token embeddings: columns of a `Weight` [n_embd, V]. ids: int [B, T] -> [B, T, n_embd]."""
    return weight.dense.T[ids]


# ---- how a few rows cost less than two --------------------------------------------------------------------------
#
# In short: a weight is cut into blocks that are small enough for BLAS to multiply a few rows with them without copying
# them first, so four rows read the weight once, as one row does.
#
# A product with few rows is memory-bandwidth bound: reading the weight takes longer than the arithmetic, so one row and
# eight could take the same time. With BLAS they do not. For one row it streams through the weight (gemv), but from two
# rows on (gemm) it first packs the weight: it copies all of it into the order that its inner loop needs. Next to a
# product with hundreds of rows that costs little, but next to one with four rows it costs more than the product. On
# processors with AVX-512, OpenBLAS does not pack small products. So the weight is cut into blocks of 16 to 64 columns,
# each small enough for that path with 8 to 16 rows (fewer if n_in is above 7,800), and the threads share the blocks.
#
# Milliseconds by number of rows, on two cores of an Intel Xeon (Emerald Rapids), OpenBLAS 0.3.31, medians. "dense" is
# x @ W, or one product per row for 2 to 4 rows:
#
#                  rows     1     2     4     5     8    16    24    31    48    64
#     768 x 3,072  dense  0.36  0.66  1.07  1.44  1.39  1.51  1.77  2.15  2.43  2.59
#                  blocks    -  0.54  0.65  0.69  0.78  1.08  1.59  2.03  2.66  3.89
#     3,072 x 768  dense  0.46  0.76  1.25  1.34  1.22  1.51  1.71  2.10  2.22  2.40
#                  blocks    -  0.46  0.47  0.61  0.80  1.16  1.46  2.31  3.07  4.13
#     768 x 50,257 dense   5.1   9.6  19.2  18.1  17.7  19.6  24.0  28.4  32.0  34.9
#                  blocks    -   6.7   8.4   9.6  10.8  15.8  26.1  30.6  46.9  60.5

# Maximum rows per small product: 16 rows x 64 columns = 1,024 results, less than UNPACKED_MAX_RESULTS.
BLOCK_MAX_ROWS = 16
# Packing pays off from about 24 to 48 rows, depending on the matrix shape.
DENSE_MIN_ROWS = 32
# Without blocks, one product per row is faster below this many rows: on a Sapphire Rapids 2 rows of 768 x 50,257 take
# 14 ms instead of 30, 3 rows 23 instead of 30, 4 rows 30 instead of 32.
PACKED_MIN_ROWS = 5
# The threads share the outputs of a weight without blocks in multiples of this; for one row, the rest after the last
# multiple is a product of its own.
SPAN = 64


def _number_of_slices(weight, n_rows):
    """The number of slices into which a weight's outputs are divided, to share a product among the threads."""
    # With few rows, the time goes into reading the weight, so its size counts; with many rows, the arithmetic does.
    is_small = weight.dense.size * max(1, n_rows // BLOCK_MAX_ROWS) < PARALLEL_MIN_ELEMENTS
    # A small product stays on this thread. Outside `single_threaded_blas`, BLAS's own threads share the product.
    if is_small or not blas_is_single_threaded():
        return 1
    # One slice per thread, because each handover of the GIL costs 40 microseconds. Two per thread if that is little
    # next to the product: if another program uses one of the cores, the thread on the other core computes more slices.
    return THREADS if n_rows < DENSE_MIN_ROWS or THREADS == 1 else 2 * THREADS


def _slice(weight, index, n_slices):
    """One of n_slices of a weight's outputs: (slice of the outputs, `Weight` of these)."""
    n_out = weight.dense.shape[1]
    width = SPAN if weight.blocks is None else weight.blocks.shape[2]
    n_blocks = -(-n_out // width)
    first, last = n_blocks * index // n_slices, n_blocks * (index + 1) // n_slices
    outputs = slice(first * width, min(last * width, n_out))
    return outputs, Weight(weight.dense[:, outputs], None if weight.blocks is None else weight.blocks[first:last])


def _multiply(rows, weight, bias, out):
    """rows @ weight + bias, written to `out`, by the fastest path for this number of rows."""
    (dense, blocks), n_rows = weight, len(rows)
    n_out = dense.shape[1]
    if BATCH_INVARIANT or (blocks is not None and 1 < n_rows < DENSE_MIN_ROWS):
        out[:] = _blocked_matmul(rows, blocks)[:, :n_out]
    elif n_rows == 1 and n_out % SPAN:
        # If the number of a thread's outputs is not a multiple of 4, BLAS adds up the last ones in another order. A
        # second product for the last few keeps the digits the same, however many threads share the first.
        end = n_out - n_out % SPAN
        np.matmul(rows, dense[:, :end], out=out[:, :end])
        np.matmul(rows, dense[:, end:], out=out[:, end:])
    elif 1 < n_rows < PACKED_MIN_ROWS:
        # One matrix-vector product per row, which BLAS does not pack: [rows, 1, n_in] @ [n_in, n_out]
        np.matmul(rows[:, None], dense, out=out[:, None])
    else:
        np.matmul(rows, dense, out=out)
    if bias is not None:
        out += bias


def _blocked_matmul(rows, blocks):
    """Unpacked products of chunks of rows and blocks of columns.

    rows: [rows, n_in], blocks: [n_blocks, n_in, width] -> [rows, n_blocks * width]
    """
    n_blocks, n_in, width = blocks.shape
    n_chunks = -(-len(rows) // max(2, min(BLOCK_MAX_ROWS, UNPACKED_MAX_MULTIPLIES // (n_in * width))))
    chunk = max(2, -(-len(rows) // n_chunks))  # a chunk of one row would be a matrix-vector product
    chunks = np.zeros((n_chunks * chunk, n_in), np.float32)
    chunks[: len(rows)] = rows
    chunks = chunks.reshape(n_chunks, chunk, n_in)  # [n_chunks * chunk, n_in] -> [n_chunks, chunk, n_in]
    y = np.empty((n_chunks, chunk, n_blocks, width), np.float32)
    by_block = y.transpose(2, 0, 1, 3)  # [n_chunks, chunk, n_blocks, width] -> [n_blocks, n_chunks, chunk, width]
    # NumPy multiplies all chunks by one block before the next, so each block is read from memory once.
    np.matmul(chunks, blocks[:, None], out=by_block)
    # [n_chunks, chunk, n_blocks, width] -> [rows, n_blocks * width]
    return y.reshape(n_chunks * chunk, n_blocks * width)[: len(rows)]


# ---- the layout in memory ----------------------------------------------------------------------------------------

# Rows of a weight per task when it is copied into its layout: few enough to stay in a core's cache.
COPY_ROWS = 128


def pack_weight(weight, blocked=None):
    """Store a matrix [n_in, n_out], whatever its order in memory, as a `Weight`.

    blocked: whether to copy it, so that the n_in weights of each output are contiguous, and cut it into blocks of
    outputs; None for what `weights_are_blocked` says. Without blocks nothing is copied.
    """
    if not (weights_are_blocked() if blocked is None else blocked):
        return Weight(weight, None)
    n_in, n_out = weight.shape
    width = next((width for width in (64, 32) if width * n_in * BLOCK_MAX_ROWS // 2 <= UNPACKED_MAX_MULTIPLIES), 16)
    if BATCH_INVARIANT:
        require_unpacked("the number of inputs of a layer", n_in, width)
    n_blocks = -(-n_out // width)
    # Not np.zeros, whose memory does not get huge pages: products with it take 5 % longer.
    outputs = np.empty((n_blocks * width, n_in), np.float32)
    outputs[n_out:] = 0

    # A copy that transposes reads whole cache lines if it takes a few rows at a time: 1.7 ns per value instead of 5.
    def copy(index):
        rows = slice(index * COPY_ROWS, (index + 1) * COPY_ROWS)
        outputs[:n_out, rows] = weight[rows].T

    parallel_for(copy, -(-n_in // COPY_ROWS))
    # [n_blocks * width, n_in] -> [n_blocks, n_in, width]
    return Weight(outputs[:n_out].T, outputs.reshape(n_blocks, width, n_in).swapaxes(1, 2))


@cache
def weights_are_blocked():
    """Whether weights are stored in blocks: what MINIGEN_LINEAR says or, if it is unset, whether that is faster here.

    Raises ValueError if MINIGEN_LINEAR has an invalid value, or if this machine cannot do MINIGEN_BATCH_INVARIANT.
    """
    asked = os.environ.get("MINIGEN_LINEAR", "")
    if asked not in ("", "blocks", "plain"):
        raise ValueError(f"MINIGEN_LINEAR is {asked!r}; it must be blocks, plain (BLAS alone), or unset")
    if BATCH_INVARIANT:
        if asked == "plain":
            raise ValueError("MINIGEN_LINEAR is 'plain'; it must be blocks or unset with MINIGEN_BATCH_INVARIANT")
        _check_batch_invariance()
        return True
    if asked:
        return asked == "blocks"
    # The test weight takes 8 MB, more than a core's own cache; four rows are typical of beam search and speculation.
    # With eight rows, dense products and blocks can be within 10 % of each other if the weight stays in a shared cache,
    # although blocks are twice as fast in a model, whose weights come from memory.
    weight, rows = np.full((1024, 2048), 0.5, np.float32), np.ones((4, 1024), np.float32)
    y = np.empty((4, 2048), np.float32)
    packed = [pack_weight(weight, blocked) for blocked in (False, True)]
    seconds = [math.inf, math.inf]
    with single_threaded_blas():
        for _ in range(6):
            for blocked in (False, True):
                start = time.thread_time()  # this thread's processor time, whatever other programs run
                _multiply(rows, packed[blocked], None, y)
                seconds[blocked] = min(seconds[blocked], time.thread_time() - start)
    # Dense products must take 10 % less time to be chosen, so that near-ties go to blocks in every run: the two add up
    # in different orders, so their results differ in the last bits.
    return seconds[True] * 0.9 < seconds[False]


def _check_batch_invariance():
    """Raise ValueError if BLAS's small products give a row other bits in the company of other rows."""
    rng = np.random.default_rng(0)
    rows, weight = rng.standard_normal((BLOCK_MAX_ROWS, 768), np.float32), rng.standard_normal((768, 64), np.float32)
    blocks = pack_weight(weight, blocked=True).blocks
    expected = _blocked_matmul(rows, blocks)
    for n in range(1, len(rows)):
        if (_blocked_matmul(rows[:n], blocks) != expected[:n]).any():
            raise ValueError(
                "MINIGEN_BATCH_INVARIANT is set, but with this machine's BLAS the last bits of a product depend on the "
                "number of rows: unset it"
            )
