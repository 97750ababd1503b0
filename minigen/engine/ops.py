"""The arithmetic of a GPT-2 layer: activations, softmax, layer norm, attention, linear.

Arrays are float32, and what works on the last axis takes any leading shape. None of these functions knows a cache or a
checkpoint. The capitals in shapes are defined in model.py; what it means that BLAS packs a matrix, in `linear`.
"""

import numpy as np

from minigen.engine.parallel import THREADS, share

# Values that a core's cache holds several times over.
CHUNK_ELEMENTS = 2**16
# Weights, or keys and values, from which it pays to wake a second thread, which takes 40 microseconds.
PARALLEL_MIN_ELEMENTS = 2**20
# OpenBLAS does not pack a product of up to so many multiplications, and, in order "rows", of up to 1,200 results (its
# kernel/x86_64/sgemm_small_kernel_permit_skylakex.c); see `linear`.
UNPACKED_MAX_MULTIPLIES = 1_000_000
# Rows, or queries, in such a product at most; 16 times the 64 columns of a block are 1,024 results.
BLOCK_MAX_ROWS = 16
# From so many rows on the whole weight goes to BLAS: packing pays from 24 to 48 rows on, by the matrix; see `linear`.
DENSE_MIN_ROWS = 32
# Without blocks, fewer rows than these are quicker as single products: on a Sapphire Rapids 2 rows of 768 x 50,257 take
# 14 ms so and 30 at once, 3 rows 23 and 30, 4 rows 30 and 32.
ROWWISE_MAX_ROWS = 5


def relu(x):
    return np.maximum(x, 0)


def sigmoid(x):
    # Written with tanh because exp(-x) overflows for large negative x; the two are equal.
    return 0.5 * (1 + np.tanh(0.5 * x))


def silu(x):
    return x * sigmoid(x)


def quick_gelu(x):
    return x * sigmoid(1.702 * x)


def gelu_new(x):
    """GELU in the tanh form that GPT-2 was trained with (Hendrycks and Gimpel 2016, section 2).

    It differs from the exact `gelu` by up to 4.7e-4, which is enough to change greedy tokens, so each checkpoint gets
    the one its config names.
    """
    # x * x * x, because np.power costs a hundred times as much: 197 and 1.8 microseconds for 3,072 values.
    return 0.5 * x * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * (x * x * x))))


def erf(x):
    """The error function to 1.5e-7 (Abramowitz and Stegun, formula 7.1.26); NumPy has none."""
    magnitude = np.abs(x)
    t = 1 / (1 + 0.3275911 * magnitude)
    polynomial = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return np.copysign(1 - polynomial * np.exp(-magnitude * magnitude), x)


def gelu(x):
    """The exact GELU, x times the normal distribution function of x."""
    return 0.5 * x * (1 + erf(x * np.float32(np.sqrt(0.5))))


# config.json's `activation_function` -> function. The names are those of the transformers library, where several
# name one formula.
ACTIVATIONS = {
    "gelu_new": gelu_new,
    "gelu_accurate": gelu_new,
    "gelu_fast": gelu_new,
    "gelu_pytorch_tanh": gelu_new,
    "gelu_python_tanh": gelu_new,
    "gelu": gelu,
    "gelu_python": gelu,
    "quick_gelu": quick_gelu,
    "relu": relu,
    "silu": silu,
    "swish": silu,
    "tanh": np.tanh,
    "sigmoid": sigmoid,
}


def softmax(x):
    """exp(x) / sum(exp(x)) over the last axis; entries of -inf get exactly 0.

    The maximum is subtracted first, which changes nothing but keeps exp from overflowing. At least one entry of each
    row must be finite.
    """
    weights = x - x.max(axis=-1, keepdims=True)
    np.exp(weights, out=weights)
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


def layer_norm(x, weight, bias, eps):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis (Ba et al. 2016).

    x: [..., E], weight and bias: [E]; `eps` is config.json's `layer_norm_epsilon`.
    """
    # Sums, because ndarray.mean takes longer to start than to add up the values of one token.
    E = np.float32(x.shape[-1])
    x = x - x.sum(axis=-1, keepdims=True) / E
    variance = (x * x).sum(axis=-1, keepdims=True) / E
    x /= np.sqrt(variance + np.float32(eps))
    x *= weight
    x += bias
    return x


def elementwise(function, x):
    """function(x) for a function of single values; a large x is overwritten, piece by piece, on all threads."""
    if x.size <= CHUNK_ELEMENTS:
        return function(x)
    values = x.reshape(-1)

    def apply(i):
        piece = values[i * CHUNK_ELEMENTS : (i + 1) * CHUNK_ELEMENTS]
        piece[:] = function(piece)

    share(apply, -(-x.size // CHUNK_ELEMENTS))
    return values.reshape(x.shape)


def attention(q, keys, values, scale, mask=None):
    """softmax(q @ k.T * scale) @ v for each head, q, k and v having a row for each token (Vaswani et al. 2017, 3.2).

    Here the tokens come last: q: [B, H, D, T], keys and values: [B, H, D, S] -> [B, T, H, D]. mask: bool
    [B, 1, T, S], True where a query may look, which must be somewhere; None where all may look everywhere.
    """
    B, H, D, T = q.shape
    S = keys.shape[3]
    heads = np.empty((B, T, H, D), np.float32)

    def attend(span, chunk):
        """For a span of heads and a chunk of queries."""
        seen = None if mask is None else mask[:, :, chunk]
        # None of these queries sees a key from `used` on: in a long prompt, those of all later tokens.
        used = S if mask is None else np.flatnonzero(seen.any(axis=(0, 1, 2)))[-1] + 1
        queries = q[:, span, :, chunk].swapaxes(2, 3) * scale  # [B, H, D, T] -> [B, H, T, D]
        scores = queries @ keys[:, span, :, :used]  # [B, H, T, D] @ [B, H, D, S] -> [B, H, T, S]
        if mask is not None:
            scores = np.where(seen[..., :used], scores, np.float32(-np.inf))
        # [B, H, T, S] @ [B, H, S, D] -> [B, H, T, D], which is written as [B, T, H, D]
        seen_values = values[:, span, :, :used].swapaxes(2, 3)
        np.matmul(softmax(scores), seen_values, out=heads.swapaxes(1, 2)[:, span, chunk])

    # Few enough queries at a time that no product is packed and their scores stay in a core's cache.
    width = max(2, min(BLOCK_MAX_ROWS, UNPACKED_MAX_MULTIPLIES // (D * S)))
    if T > width:
        chunks = [slice(start, start + width) for start in range(0, T, width)]
        share(lambda i: attend(slice(None), chunks[i]), len(chunks))
    else:
        n = min(THREADS, H) if keys.size + values.size >= PARALLEL_MIN_ELEMENTS else 1
        spans = [slice(H * i // n, H * (i + 1) // n) for i in range(n)]
        share(lambda i: attend(spans[i], slice(None)), n)
    return heads
