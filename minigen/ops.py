"""The arithmetic of a GPT-2 layer: activations, softmax, layer norm, linear.

Every function takes and returns float32 arrays of any leading shape and works on the last axis. None of them knows
what a token, a cache or a checkpoint is.
"""

import numpy as np

# From this many rows on, one matrix-matrix product is faster than one matrix-vector product a row; see `linear`.
GEMM_ROWS = 5


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
    x = x - x.mean(axis=-1, keepdims=True)
    variance = np.square(x).mean(axis=-1, keepdims=True)
    x /= np.sqrt(variance + np.float32(eps))
    x *= weight
    x += bias
    return x


def linear(x, weight, bias=None):
    """x @ weight + bias.

    x: [..., n_in], weight: [n_in, n_out], bias: [n_out] or None -> [..., n_out]. GPT-2's files store their weights in
    this orientation.

    One row is a matrix-vector product, which BLAS streams through the weight at the memory's speed. From two rows on
    BLAS packs (copies) the whole weight first, which costs about three or four such products: up to four rows are
    therefore run as single ones, which is quicker for two and three, about even for four, and gives each row the very
    bits it gets alone. Measured at 768 x 50,257 with two threads of OpenBLAS 0.3.31, milliseconds as single products
    and as one: 1 row 7.5; 2 rows 14.4 and 30.1; 3 rows 22.8 and 30.2; 4 rows 30.2 and 32.2; 8 rows 62.3 and 31.3.
    """
    rows = x.reshape(-1, x.shape[-1])  # [..., n_in] -> [rows, n_in]
    if len(rows) < GEMM_ROWS:
        y = (rows[:, None] @ weight)[:, 0]  # [rows, 1, n_in] @ [n_in, n_out] -> [rows, n_out]
    else:
        y = rows @ weight
    if bias is not None:
        y += bias
    return y.reshape(*x.shape[:-1], weight.shape[-1])  # [rows, n_out] -> [..., n_out]
