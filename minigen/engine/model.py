"""GPT-2: the configuration and the forward pass, ids in, logits out.

One set of capitals names the dimensions here and in every shape comment of the package:

    B rows · T new tokens in this call · S slots attended to · C cache capacity · E n_embd · H heads · D head size ·
    L layers · V vocabulary · W window

Parameters keep the names of the checkpoint's file (wte.weight, h.0.attn.c_attn.weight ...), so that each can be found
here by its name; matrices are stored as `ops.pack_weight` likes them. The architecture is that of Radford et al. 2019,
"Language Models are Unsupervised Multitask Learners": learned positions, layer norm before each half of a block, and
one last layer norm.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from minigen.engine.cache import KVCache
from minigen.engine.linear import embed, linear, pack_weight
from minigen.engine.ops import ACTIVATIONS, attention, elementwise, layer_norm
from minigen.engine.validation import is_int, is_number, require, short_repr

# The names of sizes in other architectures' config.json, which transformers takes for GPT-2's as well.
ALIASES = {
    "n_positions": "max_position_embeddings",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
}


@dataclass(frozen=True)
class GPT2Config:
    """The keys of config.json that change what the model computes, with the transformers library's defaults.

    Raises ValueError, naming the key and its value, for what no GPT-2 can have.
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
    reorder_and_upcast_attn: bool = False  # guards float16 attention against overflow; in float32 it changes nothing
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256

    def __post_init__(self):
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"):
            require(is_int(getattr(self, name), 1), name, getattr(self, name), "a whole number of 1 or more")
        ok = self.n_inner is None or is_int(self.n_inner, 1)
        require(ok, "n_inner", self.n_inner, "null or a whole number of 1 or more")
        require(self.n_embd % self.n_head == 0, "n_embd", self.n_embd, f"a multiple of n_head, {self.n_head}")
        eps = self.layer_norm_epsilon
        require(is_number(eps) and eps >= 0, "layer_norm_epsilon", eps, "a number of 0 or more")
        ok = isinstance(self.activation_function, str) and self.activation_function in ACTIVATIONS
        require(ok, "activation_function", self.activation_function, f"one of {', '.join(ACTIVATIONS)}")
        for field in fields(self):
            if field.type is bool:
                require(
                    isinstance(getattr(self, field.name), bool), field.name, getattr(self, field.name), "true or false"
                )
        for name in ("bos_token_id", "eos_token_id"):  # one outside the vocabulary does no harm: it is never sampled
            value = getattr(self, name)
            listed = value if isinstance(value, list) and name == "eos_token_id" else [value]
            ok = value is None or all(map(is_int, listed))
            require(ok, name, value, "null or a token id (eos_token_id: or a list of them)")

    @classmethod
    def from_dict(cls, config):
        """From a parsed config.json, whose other keys change nothing. Raises ValueError for another architecture."""
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
                given.setdefault(name, None)  # the default is GPT-2's own token, which a smaller vocabulary lacks
        return cls(**given)

    @property
    def d_head(self):
        return self.n_embd // self.n_head

    @property
    def eos_ids(self):
        """The ids that end a text, as a tuple; empty where the config names none."""
        if self.eos_token_id is None:
            return ()
        return tuple(self.eos_token_id) if isinstance(self.eos_token_id, list) else (self.eos_token_id,)

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


class GPT2:
    """A configuration and its parameters. It holds no state of a run: several caches can share one model.

    params: float32 arrays by checkpoint name, of the shapes `config.parameter_shapes()` gives: a dict, or an iterable
    of pairs, which need not be in memory all at once. `self.params` has each matrix as an `ops.Weight`.
    """

    def __init__(self, config, params):
        self.config = config
        self.params = {}
        for name, value in params.items() if isinstance(params, Mapping) else params:
            if name in ("wte.weight", "lm_head.weight"):
                value = pack_weight(value.T)  # [V, E] -> [E, V], as the head uses it; `embed` picks its columns
            elif value.ndim == 2 and name != "wpe.weight":
                value = pack_weight(value)
            self.params[name] = value
        self.activation = ACTIVATIONS[config.activation_function]
        # The head that turns the last layer into logits is the input embedding itself, unless the config unties them.
        self.head = self.params["wte.weight" if config.tie_word_embeddings else "lm_head.weight"]
        # blocks[0]["attn.c_attn.weight"] is params["h.0.attn.c_attn.weight"].
        self.blocks = [
            {name.removeprefix(f"h.{layer}."): p for name, p in self.params.items() if name.startswith(f"h.{layer}.")}
            for layer in range(config.n_layer)
        ]

    def new_cache(self, batch=1, capacity=None, window=None):
        """An empty `KVCache` of `batch` rows that holds `capacity` tokens a row, by default n_positions."""
        config = self.config
        capacity = config.n_positions if capacity is None else capacity
        return KVCache(config.n_layer, config.n_head, config.d_head, capacity, batch, window)

    def _norm(self, x, block, name):
        return layer_norm(x, block[f"{name}.weight"], block[f"{name}.bias"], self.config.layer_norm_epsilon)

    def _attention_scale(self, layer):
        scale = 1 / math.sqrt(self.config.d_head) if self.config.scale_attn_weights else 1.0
        return np.float32(scale / (layer + 1) if self.config.scale_attn_by_inverse_layer_idx else scale)

    def _attention(self, x, block, layer, cache, plan, attention_hook):
        """Every token gathers from those it may see, between two linear layers."""
        B, T, E = x.shape
        H, D = self.config.n_head, self.config.d_head
        qkv = linear(x, block["attn.c_attn.weight"], block["attn.c_attn.bias"])  # [B, T, E] -> [B, T, 3 * E]
        q, k, v = qkv.reshape(B, T, 3, H, D).transpose(2, 0, 3, 4, 1)  # [B, T, 3 * E] -> 3 x [B, H, D, T]
        keys, values = cache.store(layer, plan, k, v)  # [B, H, D, T] -> [B, H, D, S]

        scale = self._attention_scale(layer)
        if attention_hook is not None:
            attention_hook(layer, q, keys, scale, plan.mask)
        heads = attention(q, keys, values, scale, plan.mask)  # [B, H, D, T] -> [B, T, H, D]
        merged = heads.reshape(B, T, E)  # [B, T, H, D] -> [B, T, E]
        return linear(merged, block["attn.c_proj.weight"], block["attn.c_proj.bias"])

    def _mlp(self, x, block):
        hidden = linear(x, block["mlp.c_fc.weight"], block["mlp.c_fc.bias"])  # [B, T, E] -> [B, T, n_inner]
        hidden = elementwise(self.activation, hidden)
        return linear(hidden, block["mlp.c_proj.weight"], block["mlp.c_proj.bias"])  # [B, T, n_inner] -> [B, T, E]

    def _check_ids(self, ids):
        if ids.size == 0 or ids.ndim != 2 or ids.dtype.kind not in "iu":
            raise ValueError(
                f"ids are {ids.dtype} {list(ids.shape)}; a forward pass needs whole numbers [B, T], T >= 1"
            )
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            bad = ids[(ids < 0) | (ids >= self.config.vocab_size)][0]
            raise ValueError(f"token id {bad} is outside the vocabulary, 0 to {self.config.vocab_size - 1}")

    def _check_cache(self, cache, B):
        if cache.batch != B:
            raise ValueError(f"ids has {B} rows, the cache {cache.batch}")
        made_for = len(cache.keys), *cache.keys[0].shape[1:3]
        ours = self.config.n_layer, self.config.n_head, self.config.d_head
        if made_for != ours:
            raise ValueError(f"the cache is another model's: layers, heads and head size {made_for} instead of {ours}")

    def forward(self, ids, cache=None, *, pad=None, last_only=True, attention_hook=None):
        """The logits of the token that follows each given one.

        ids: int [B, T], the next T tokens of each row; the cache holds all before them and takes these in. Without a
        cache, `ids` are the whole text. pad: int [B], how many ids at the left of each row are padding (any valid
        id, computed and thrown away). Returns float32 [B, V], the logits at the last position, or [B, T, V] with
        last_only=False. attention_hook: a function that each layer calls with all that its attention weights
        follow from: layer, q [B, H, D, T], keys [B, H, D, S], scale, and mask, bool [B, 1, T, S] or None; see
        `ops.attention`.

        Raises ValueError for empty or fractional `ids`, an id outside the vocabulary, positions beyond n_positions, or
        more tokens than the cache takes; the cache is unchanged then.
        """
        ids = np.atleast_2d(ids)
        self._check_ids(ids)
        B, T = ids.shape
        cache = self.new_cache(B, T) if cache is None else cache
        self._check_cache(cache, B)
        pad = np.zeros(B, int) if pad is None else np.asarray(pad)
        ok = pad.shape == (B,) and pad.dtype.kind in "iu" and ((pad >= 0) & (pad <= T)).all() and pad.min() < T
        require(ok, "pad", pad, f"{B} whole numbers from 0 to {T}, not all of them {T}")

        columns = np.arange(T) - pad[:, None]  # [B, T], negative on padding
        positions = np.where(columns < 0, -1, cache.length[:, None] + columns)
        if positions.max() >= self.config.n_positions:
            raise ValueError(f"{positions.max() + 1} tokens are too many: the model takes {self.config.n_positions}")
        plan = cache.allocate(positions)

        # [B, T] -> [B, T, E]
        x = embed(ids, self.params["wte.weight"]) + self.params["wpe.weight"][np.maximum(positions, 0)]
        for layer, block in enumerate(self.blocks):
            x += self._attention(self._norm(x, block, "ln_1"), block, layer, cache, plan, attention_hook)
            x += self._mlp(self._norm(x, block, "ln_2"), block)
        if last_only:
            x = x[:, -1]  # [B, T, E] -> [B, E]: the head costs as much as several layers, and one position is asked
        return linear(self._norm(x, self.params, "ln_f"), self.head)  # [..., E] -> [..., V]
