"""Batch invariance: MINIGEN_BATCH_INVARIANT=1 makes a row's logits independent of what is computed along with it.

Floating-point sums depend on their order. BLAS and NumPy choose the order by the shape of an array, so a row's logits
differ in the last bits with the number of rows, of new tokens and of slots. If two tokens are almost equally likely,
that can change a text. In this mode each sum has one order, whatever the shape:

- linear: every product takes the path for a few rows, in products so small that BLAS does not pack them.
- attention: each product has at least two queries, and few enough that BLAS does not pack it. The number of slots is a
  multiple of SLOT_BLOCK, and softmax adds up one block after the other.
- forward: BLAS runs on a single thread, even for one row.

The mode costs time: a step of gpt2's shape takes 1.3 times as long, a prompt of 512 tokens 1.75 times.
"""

import os

BATCH_INVARIANT = os.environ.get("MINIGEN_BATCH_INVARIANT", "") not in ("", "0")
SLOT_BLOCK = 64

# OpenBLAS does not pack a product of at most this many multiplications. If the right-hand matrix is stored with n_in
# contiguous, the product must also have at most this many results (OpenBLAS's file
# kernel/x86_64/sgemm_small_kernel_permit_skylakex.c).
UNPACKED_MAX_MULTIPLIES = 1_000_000
UNPACKED_MAX_RESULTS = 1_200


def padded_length(n_slots):
    """The number of slots that attention reads if `n_slots` are in use."""
    return -(-n_slots // SLOT_BLOCK) * SLOT_BLOCK if BATCH_INVARIANT else n_slots


def max_queries(n_slots, d_head):
    """The most queries whose products with the keys and values of n_slots are not packed; at least 2."""
    return max(2, min(UNPACKED_MAX_MULTIPLIES // (n_slots * d_head), UNPACKED_MAX_RESULTS // d_head))


def require_unpacked(name, size, row_size):
    """Raise ValueError if BLAS would pack a product of two rows, each of size * row_size multiplications."""
    most = UNPACKED_MAX_MULTIPLIES // (2 * row_size)
    if size > most:
        raise ValueError(
            f"{name} is {size}; it must be at most {most:,} with MINIGEN_BATCH_INVARIANT; unset that to run this model"
        )
