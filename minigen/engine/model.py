"""GPT-2: the forward pass, from ids to logits, and the configuration.

One set of capitals names the dimensions here and in every shape comment of the package:

    B rows · T new tokens in this call · S slots attended to · C cache capacity · E n_embd · H heads · D head size ·
    L layers · V vocabulary · W window

The architecture is that of Radford et al. 2019, "Language Models are Unsupervised Multitask Learners": learned
positions, layer norm before each half of a block, and a final layer norm. Parameters keep their names in the
checkpoint (wte.weight, h.0.attn.c_attn.weight ...); `linear.pack_weight` chooses the layout of matrices in memory.
"""

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, fields
from functools import partial

import numpy as np

from minigen.engine.cache import KVCache
from minigen.engine.ops import ACTIVATIONS, attention, layer_norm
from minigen.engine.validation import is_int, is_number, require, short_repr
from minigen.kernels.batch_invariant import BATCH_INVARIANT, require_unpacked
from minigen.kernels.chunked import chunked_attention, rowwise
from minigen.kernels.linear import embed, first_outputs, linear, pack_weight
from minigen.kernels.parallel import OneRowThreads, single_threaded_blas


class Block:
    """A transformer block: multi-head causal self-attention and an MLP, each on a layer-normalized input.

    params: the parameters of this layer by their names in the checkpoint without "h.<layer>.".
    """

    def __init__(self, config, layer, params):
        self.layer, self.params = layer, params
        self.H, self.D, self.eps = config.n_head, config.d_head, config.layer_norm_epsilon
        self.activation = ACTIVATIONS[config.activation_function]
        scale = 1 / math.sqrt(self.D) if config.scale_attn_weights else 1.0
        self.scale = np.float32(scale / (layer + 1) if config.scale_attn_by_inverse_layer_idx else scale)

    def norm(self, name, x):
        weight, bias = self.params[f"{name}.weight"], self.params[f"{name}.bias"]
        return rowwise(lambda rows: layer_norm(rows, weight, bias, self.eps), x)

    def linear(self, name, x):
        return linear(x, self.params[f"{name}.weight"], self.params[f"{name}.bias"])

    def attention(self, x, cache, plan, attention_hook, n_out):
        """Multi-head causal self-attention, with its QKV and output projections. [B, T, E] -> [B, n_out, E]

        n_out: the number of tokens, counted from the end, whose output is computed.
        """
        B, T, E = x.shape
        qkv = self.linear("attn.c_attn", self.norm("ln_1", x))  # [B, T, E] -> [B, T, 3 * E]
        q, k, v = qkv.reshape(B, T, 3, self.H, self.D).transpose(2, 0, 3, 4, 1)  # [B, T, 3 * E] -> 3 x [B, H, D, T]
        keys, values = cache.store(self.layer, plan, k, v)  # [B, H, D, T] -> [B, H, D, S]
        if attention_hook is not None:
            attention_hook(self.layer, q, keys, self.scale, plan.mask)
        mask = None if plan.mask is None else plan.mask[:, :, -n_out:]  # [B, 1, T, S] -> [B, 1, n_out, S]
        formula = partial(attention, scale=self.scale)
        heads = chunked_attention(formula, q[..., -n_out:], keys, values, mask)  # [B, H, D, n_out] -> [B, n_out, H, D]
        return self.linear("attn.c_proj", heads.reshape(B, n_out, E))  # [B, n_out, H, D] -> [B, n_out, E]

    def mlp(self, x):
        """Two linear layers with the activation in between. [B, T, E] -> [B, T, E]"""
        hidden = self.linear("mlp.c_fc", self.norm("ln_2", x))  # [B, T, E] -> [B, T, n_inner]
        hidden = rowwise(self.activation, hidden, out=hidden)
        return self.linear("mlp.c_proj", hidden)  # [B, T, n_inner] -> [B, T, E]


class GPT2:
    """The model: a configuration and its parameters. It holds nothing of a text, so several caches can share it.

    params: float32 arrays of the shapes `config.parameter_shapes()` gives, by name in the checkpoint: a dict, or an
    iterable of pairs, which need not be in memory all at once. In `self.params`, each matrix except wpe.weight is a
    `Weight`.
    """

    def __init__(self, config, params):
        if BATCH_INVARIANT:
            require_unpacked("n_positions", config.n_positions, config.d_head)
        self.config = config
        self.params = {}
        for name, value in params.items() if isinstance(params, Mapping) else params:
            if name in ("wte.weight", "lm_head.weight"):
                value = pack_weight(value.T)  # [V, E] -> [E, V], the head's order; `embed` looks up its columns
            elif value.ndim == 2 and name != "wpe.weight":
                value = pack_weight(value)
            self.params[name] = value
        # Weight tying: the output head is the token embedding, unless tie_word_embeddings is false.
        self.head = self.params["wte.weight" if config.tie_word_embeddings else "lm_head.weight"]
        self.one_row_threads = OneRowThreads()
        self.blocks = []
        for layer in range(config.n_layer):
            prefix = f"h.{layer}."
            own = {name.removeprefix(prefix): x for name, x in self.params.items() if name.startswith(prefix)}
            self.blocks.append(Block(config, layer, own))

    def __repr__(self):
        config = self.config
        n_params = sum(math.prod(shape) for shape in config.parameter_shapes().values())
        return (
            f"GPT2({config.n_layer} layers, {config.n_head} heads, width {config.n_embd}, "
            f"vocabulary {config.vocab_size:,}, {n_params:,} parameters)"
        )

    def with_first_logits(self, n):
        """A model with the same parameters that computes logits of the first n ids only, which is faster.

        GPT-2 numbers its tokens in the order in which they were merged, so the first ones are the frequent ones. Its
        EOS token is the last one, so such a model never generates it.
        """
        other = copy(self)
        other.head, other.one_row_threads = first_outputs(self.head, n), OneRowThreads()
        return other

    def new_cache(self, batch=1, capacity=None, window=None):
        """An empty `KVCache` with `batch` rows of `capacity` tokens each, by default n_positions."""
        config = self.config
        capacity = config.n_positions if capacity is None else capacity
        return KVCache(config.n_layer, config.n_head, config.d_head, capacity, batch, window)

    def forward(self, ids, cache=None, *, pad=None, last_only=True, attention_hook=None):
        """Next-token logits, at the last position or at every one.

        ids: int [B, T], the next T tokens of each row, which are added to the cache; it holds all tokens before them.
        Without a cache, `ids` are the whole text. pad: int [B], the number of padding ids on the left of each row
        (any valid id; their results are discarded). Returns float32 [B, V], the logits at the last position, or
        [B, T, V] with last_only=False; after `with_first_logits`, V is n. attention_hook: called by each layer with
        everything needed to recompute its attention weights by `ops.attention_weights`: layer, q [B, H, D, T], keys
        [B, H, D, S], scale, and mask, bool [B, 1, T, S] or None.

        Raises ValueError for empty or fractional `ids`, an id outside the vocabulary, positions beyond n_positions, or
        more tokens than fit the cache; the cache is unchanged then.
        """
        ids, cache, positions = self._checked(ids, cache, pad)
        with single_threaded_blas() if ids.size > 1 or BATCH_INVARIANT else self.one_row_threads.share():
            return self._logits(ids, cache, positions, last_only, attention_hook)

    def _logits(self, ids, cache, positions, last_only, attention_hook):
        """The transformer. ids and positions: int [B, T] -> [B, V], or [B, T, V] with last_only=False."""
        plan = cache.allocate(positions)
        # [B, T] -> [B, T, E]; -1 is the position of padding
        x = embed(ids, self.params["wte.weight"]) + self.params["wpe.weight"][np.maximum(positions, 0)]
        for block in self.blocks:
            # For the logits at the last position, only that position needs the output of the last layer.
            n_out = 1 if last_only and block is self.blocks[-1] else x.shape[1]
            x = x[:, -n_out:] + block.attention(x, cache, plan, attention_hook, n_out)  # [B, T, E] -> [B, n_out, E]
            x += block.mlp(x)
        if last_only:
            x = x[:, 0]  # [B, 1, E] -> [B, E]
        x = layer_norm(x, self.params["ln_f.weight"], self.params["ln_f.bias"], self.config.layer_norm_epsilon)
        return linear(x, self.head)  # [..., E] -> [..., V]

    def _checked(self, ids, cache, pad):
        """The arguments of `forward` as arrays, checked: ids [B, T], a cache, and positions [B, T], -1 for padding."""
        config = self.config
        ids = np.atleast_2d(ids)
        if ids.size == 0 or ids.ndim != 2 or ids.dtype.kind not in "iu":
            raise ValueError(
                f"ids are {ids.dtype} {list(ids.shape)}; a forward pass needs whole numbers [B, T], T >= 1"
            )
        if ids.min() < 0 or ids.max() >= config.vocab_size:
            bad = ids[(ids < 0) | (ids >= config.vocab_size)][0]
            raise ValueError(f"token id {bad} is outside the vocabulary, 0 to {config.vocab_size - 1}")

        B, T = ids.shape
        cache = self.new_cache(B, T) if cache is None else cache
        if cache.batch != B:
            raise ValueError(f"ids has {B} rows, the cache {cache.batch}")
        made_for = len(cache.keys), *cache.keys[0].shape[1:3]
        ours = config.n_layer, config.n_head, config.d_head
        if made_for != ours:
            raise ValueError(f"the cache is another model's: layers, heads and head size {made_for} instead of {ours}")

        pad = np.zeros(B, int) if pad is None else np.asarray(pad)
        ok = pad.shape == (B,) and pad.dtype.kind in "iu" and ((pad >= 0) & (pad <= T)).all() and pad.min() < T
        require(ok, "pad", pad, f"{B} whole numbers from 0 to {T}, not all of them {T}")
        columns = np.arange(T) - pad[:, None]  # [B, T], negative on padding
        positions = np.where(columns < 0, -1, cache.length[:, None] + columns)
        if positions.max() >= config.n_positions:
            # A learned position enters every key: after dropping old tokens, the others would have to be run again.
            raise ValueError(f"{positions.max() + 1} tokens are too many: the model takes {config.n_positions}")
        return ids, cache, positions


# ---- configuration -----------------------------------------------------------------------------------------------


# The names of sizes in other architectures' config.json, which transformers also accepts for GPT-2.
ALIASES = {
    "n_positions": "max_position_embeddings",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
}


@dataclass(frozen=True)
class GPT2Config:
    """The keys of config.json that matter to GPT-2, with the transformers library's defaults.

    Raises ValueError, naming the key and its value, for a value that is not valid for GPT-2.
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None  # width of the MLP; None is 4 * n_embd
    layer_norm_epsilon: float = 1e-5
    activation_function: str = "gelu_new"
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    reorder_and_upcast_attn: bool = False  # prevents overflow in float16 attention; no effect in float32
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256

    def __post_init__(self):
        for name, is_valid, allowed in self._checks():
            value = getattr(self, name)
            if isinstance(value, np.generic):  # a uint8 would overflow in later arithmetic
                object.__setattr__(self, name, value := value.item())
            require(is_valid(value), name, value, allowed)

    def _checks(self):
        """(key, function that says whether a value is valid, what is allowed) for each key, in order of dependence."""
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"):
            yield name, lambda n: is_int(n, 1), "a whole number of 1 or more"
        yield "n_inner", lambda n: n is None or is_int(n, 1), "null or a whole number of 1 or more"
        yield "n_embd", lambda n: n % self.n_head == 0, f"a multiple of n_head, {self.n_head}"
        yield "layer_norm_epsilon", lambda eps: is_number(eps) and eps >= 0, "a number of 0 or more"
        known = f"one of {', '.join(ACTIVATIONS)}"
        yield "activation_function", lambda name: isinstance(name, str) and name in ACTIVATIONS, known
        for field in fields(self):
            if field.type is bool:
                yield field.name, lambda flag: isinstance(flag, bool), "true or false"
        # An id outside the vocabulary does no harm: it is never generated, and `eos_ids` leaves it out.
        yield "bos_token_id", lambda id: id is None or is_int(id), "null or a token id"
        yield (
            "eos_token_id",
            lambda ids: ids is None or all(map(is_int, ids if isinstance(ids, list) else [ids])),
            "null, a token id, or a list of token ids",
        )

    @classmethod
    def from_dict(cls, config):
        """From a parsed config.json; other keys are ignored. Raises ValueError for another architecture."""
        if not isinstance(config, dict):
            raise ValueError(f"the configuration is a {type(config).__name__}, not an object of keys and values")
        model_type = config.get("model_type", "gpt2")
        if model_type != "gpt2":
            raise ValueError(f"model_type is {short_repr(model_type)}; only 'gpt2' can be run")
        if config.get("add_cross_attention"):
            raise ValueError("add_cross_attention is true; only a plain decoder can be run")
        given = {field.name: config[field.name] for field in fields(cls) if field.name in config}
        for name, alias in ALIASES.items():
            if alias in config and given.setdefault(name, config[alias]) != config[alias]:
                values = f"{short_repr(given[name])} and {short_repr(config[alias])}"
                raise ValueError(f"{name} and {alias} are two names of one size, but they are {values}")
        V = given.get("vocab_size", cls.vocab_size)
        for name in ("bos_token_id", "eos_token_id"):
            if is_int(V) and V <= getattr(cls, name):
                given.setdefault(name, None)  # the default is GPT-2's own token, outside a smaller vocabulary
        return cls(**given)

    @property
    def d_head(self):
        return self.n_embd // self.n_head

    @property
    def eos_ids(self):
        """The ids of the vocabulary that end a text, as a tuple; empty if the config names none."""
        ids = self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]
        return tuple(id for id in ids if id is not None and 0 <= id < self.vocab_size)

    def parameter_shapes(self):
        """Name and shape of every parameter, in the order of use."""
        E, V, inner = self.n_embd, self.vocab_size, self.n_inner or 4 * self.n_embd
        shapes = {"wte.weight": (V, E), "wpe.weight": (self.n_positions, E)}
        for layer in range(self.n_layer):
            for name, shape in {
                "ln_1.weight": (E,),
                "ln_1.bias": (E,),
                "attn.c_attn.weight": (E, 3 * E),
                "attn.c_attn.bias": (3 * E,),
                "attn.c_proj.weight": (E, E),
                "attn.c_proj.bias": (E,),
                "ln_2.weight": (E,),
                "ln_2.bias": (E,),
                "mlp.c_fc.weight": (E, inner),
                "mlp.c_fc.bias": (inner,),
                "mlp.c_proj.weight": (inner, E),
                "mlp.c_proj.bias": (E,),
            }.items():
                shapes[f"h.{layer}.{name}"] = shape
        shapes |= {"ln_f.weight": (E,), "ln_f.bias": (E,)}
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (V, E)
        return shapes
