"""The formulas of a GPT-2 layer: activations, softmax, layer norm, attention.

Arrays are float32. Functions of the last axis accept any leading shape. model.py defines the capitals in shapes.
"""

import numpy as np

from minigen.kernels.batch_invariant import BATCH_INVARIANT, SLOT_BLOCK

# ---- activations -------------------------------------------------------------------------------------------------


def relu(x):
    return np.maximum(x, 0)


def sigmoid(x):
    # Equal to 1 / (1 + exp(-x)), whose exp overflows for large negative x.
    return 0.5 * (1 + np.tanh(0.5 * x))


def silu(x):
    return x * sigmoid(x)


def quick_gelu(x):
    return x * sigmoid(1.702 * x)


GELU_SCALE = np.float32(np.sqrt(2 / np.pi))
GELU_CUBIC = np.float32(0.044715) * GELU_SCALE


def gelu_new(x):
    """GELU in the tanh approximation that GPT-2 was trained with (Hendrycks and Gimpel 2016, section 2).

    It differs from the exact `gelu` by up to 4.7e-4, which is enough to change greedy tokens, so each checkpoint gets
    the one that its config names.
    """
    # tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)), factored: fewer passes over x, and np.power is 100 times slower.
    return 0.5 * x * (1 + np.tanh(x * (GELU_SCALE + GELU_CUBIC * (x * x))))


def erf(x):
    """The error function, which NumPy lacks, accurate to 1.5e-7 (Abramowitz and Stegun, formula 7.1.26)."""
    magnitude = np.abs(x)
    t = 1 / (1 + 0.3275911 * magnitude)
    polynomial = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return np.copysign(1 - polynomial * np.exp(-magnitude * magnitude), x)


def gelu(x):
    """The exact GELU: x times the cumulative distribution function of the normal distribution."""
    return 0.5 * x * (1 + erf(x * np.float32(np.sqrt(0.5))))


# config.json's `activation_function` -> function. The names are those of the transformers library, which has several
# for some formulas.
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


# ---- softmax and layer norm --------------------------------------------------------------------------------------


def softmax(x, out=None):
    """exp(x) / sum(exp(x)) over the last axis; entries of -inf become exactly 0. `out` may be x itself.

    The maximum is subtracted first, which changes nothing but keeps exp from overflowing. At least one entry of each
    row must be finite. (With batch invariance, the length of the axis must be a multiple of SLOT_BLOCK.)
    """
    out = np.subtract(x, x.max(axis=-1, keepdims=True), out=out)
    np.exp(out, out=out)
    if BATCH_INVARIANT:
        sums = out.reshape(*out.shape[:-1], -1, SLOT_BLOCK).sum(axis=-1)  # [..., S] -> [..., S / SLOT_BLOCK]
        out /= np.add.accumulate(sums, axis=-1)[..., -1:]  # its order, unlike that of `sum`, is the same for any length
    else:
        out /= out.sum(axis=-1, keepdims=True)
    return out


def layer_norm(x, weight, bias, eps):
    """Layer normalization: (x - mean) / sqrt(variance + eps) * weight + bias over the last axis (Ba et al. 2016).

    x: [..., E], weight and bias: [E]; `eps` is config.json's `layer_norm_epsilon`.
    """
    # Sums instead of `mean`: for one token, calling ndarray.mean costs more than the additions.
    E = np.float32(x.shape[-1])
    x = x - x.sum(axis=-1, keepdims=True) / E
    variance = np.einsum("...e,...e->...", x, x)[..., None] / E
    x /= np.sqrt(variance + np.float32(eps))
    x *= weight
    x += bias
    return x


# ---- attention ---------------------------------------------------------------------------------------------------


def attention_weights(q, keys, scale, mask=None):
    """How much each query attends to each key: softmax(q k^T * scale) per head, 0 for masked keys.

    q: [B, H, D, T], keys: [B, H, D, S] (tokens are the last axis, as in the cache), mask: bool [B, 1, T, S]
    -> [B, H, T, S], each row of which sums to 1.
    """
    scores = (q.swapaxes(2, 3) * scale) @ keys  # [B, H, T, D] @ [B, H, D, S] -> [B, H, T, S]
    if mask is not None:
        np.copyto(scores, np.float32(-np.inf), where=~mask)
    return softmax(scores, out=scores)


def attention(q, keys, values, scale, mask=None):
    """Scaled dot-product attention, softmax(q k^T * scale) v, per head (Vaswani et al. 2017, section 3.2).

    q: [B, H, D, T], keys and values: [B, H, D, S] -> [B, H, T, D]. mask: bool [B, 1, T, S], True for the
    keys that a query may attend to, at least one; None if all queries may attend to all keys.
    """
    # [B, H, T, S] @ [B, H, S, D] -> [B, H, T, D]
    return attention_weights(q, keys, scale, mask) @ values.swapaxes(2, 3)
