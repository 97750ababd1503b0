"""A slow GPT-2 in float64, written from the formulas. It shares no code with minigen, so it can judge it.

Shapes: T tokens, E n_embd, H heads, D = E / H, V vocabulary. One sequence, no cache, one head at a time.
"""

import math

import numpy as np

erf = np.vectorize(math.erf, otypes=[float])


def sigmoid(x):
    return 0.5 * (1.0 + np.tanh(0.5 * x))  # the same function as 1 / (1 + exp(-x)), without overflow


def gelu_erf(x):
    return x * 0.5 * (1.0 + erf(x / math.sqrt(2.0)))  # x times the normal distribution function


def gelu_tanh(x):
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


# Every name of transformers' ACT2CLS that is elementwise, has no parameters and could stand in a GPT-2 config.json.
# Left out: prelu and xielu (they have parameters), laplace and sqrtsoftplus (made for attention scores and routers).
ACT = {
    "gelu": gelu_erf,
    "gelu_python": gelu_erf,
    "gelu_10": lambda x: np.clip(gelu_erf(x), -10.0, 10.0),
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_accurate": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu_python_tanh": gelu_tanh,
    "quick_gelu": lambda x: x * sigmoid(1.702 * x),
    "relu": lambda x: np.maximum(x, 0.0),
    "relu2": lambda x: np.maximum(x, 0.0) ** 2,
    "relu6": lambda x: np.clip(x, 0.0, 6.0),
    "leaky_relu": lambda x: np.where(x > 0.0, x, 0.01 * x),
    "silu": lambda x: x * sigmoid(x),
    "swish": lambda x: x * sigmoid(x),
    "hardswish": lambda x: x * np.clip(x + 3.0, 0.0, 6.0) / 6.0,
    "mish": lambda x: x * np.tanh(np.logaddexp(0.0, x)),  # x * tanh(softplus(x))
    "tanh": np.tanh,
    "sigmoid": sigmoid,
    "linear": lambda x: x,
}


def layer_norm(x, weight, bias, eps):
    mean = x.mean(axis=-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + eps) * weight + bias


def reference_logits(config: dict, params: dict, ids: list[int], window: int | None = None) -> np.ndarray:
    """Logits float64 [T, V] of one sequence. With a window, query q sees only the keys in (q - window, q].

    config is a config.json dictionary; missing keys take the defaults of transformers' GPT2Config.
    params holds the checkpoint's names without `transformer.`; lm_head.weight is used only if the head is untied.
    """
    p = {name: np.asarray(value, dtype=np.float64) for name, value in params.items()}
    n_head, eps = config.get("n_head", 12), config.get("layer_norm_epsilon", 1e-5)
    activation = ACT[config.get("activation_function", "gelu_new")]
    n_tokens = len(ids)
    query_pos, key_pos = np.arange(n_tokens)[:, None], np.arange(n_tokens)[None, :]
    visible = key_pos <= query_pos
    if window is not None:
        visible &= key_pos > query_pos - window

    x = p["wte.weight"][list(ids)] + p["wpe.weight"][:n_tokens]  # [T, E]
    for layer in range(config.get("n_layer", 12)):
        w = {name.removeprefix(f"h.{layer}."): value for name, value in p.items() if name.startswith(f"h.{layer}.")}
        h = layer_norm(x, w["ln_1.weight"], w["ln_1.bias"], eps)
        q, k, v = np.split(h @ w["attn.c_attn.weight"] + w["attn.c_attn.bias"], 3, axis=-1)  # each [T, E]
        heads = []
        for qh, kh, vh in zip(*(np.split(a, n_head, axis=-1) for a in (q, k, v)), strict=True):  # each [T, D]
            scores = qh @ kh.T
            if config.get("scale_attn_weights", True):
                scores /= math.sqrt(qh.shape[-1])
            if config.get("scale_attn_by_inverse_layer_idx", False):
                scores /= layer + 1
            scores[~visible] = -math.inf
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            heads.append(weights / weights.sum(axis=-1, keepdims=True) @ vh)
        x = x + np.concatenate(heads, axis=-1) @ w["attn.c_proj.weight"] + w["attn.c_proj.bias"]
        h = layer_norm(x, w["ln_2.weight"], w["ln_2.bias"], eps)
        h = activation(h @ w["mlp.c_fc.weight"] + w["mlp.c_fc.bias"])
        x = x + h @ w["mlp.c_proj.weight"] + w["mlp.c_proj.bias"]
    x = layer_norm(x, p["ln_f.weight"], p["ln_f.bias"], eps)
    tied = config.get("tie_word_embeddings", True)
    return x @ (p["wte.weight"] if tied else p["lm_head.weight"]).T


def log_softmax(logits):
    """[..., V] float64 -> natural logarithms of the probabilities."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def reference_logprobs(config, params, prompt, ids, window=None):
    """Log-probabilities float64 [generated, V] at each place of `ids`, the tokens that follow `prompt`."""
    logits = reference_logits(config, params, [*prompt, *ids[:-1]], window)
    return log_softmax(logits[len(prompt) - 1 :])
