"""Tiny GPT-2 configs, random weights and checkpoint folders for the tests. Nothing here imports minigen."""

import json
import math
from pathlib import Path

import numpy as np

DEFAULTS = {  # transformers' GPT2Config, the values that a config.json may leave out
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "tie_word_embeddings": True,
}


def tiny_config(**overrides) -> dict:
    """A config.json dictionary: 2 layers, 2 heads, 8 wide, 16 positions, 97 tokens; the last id is end-of-text."""
    vocab_size = overrides.get("vocab_size", 97)
    n_positions = overrides.get("n_positions", 16)
    config = {
        "model_type": "gpt2",
        "vocab_size": vocab_size,
        "n_positions": n_positions,
        "n_ctx": n_positions,
        "n_embd": 8,
        "n_layer": 2,
        "n_head": 2,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "bos_token_id": vocab_size - 1,
        "eos_token_id": vocab_size - 1,
    }
    return config | overrides


def parameter_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Checkpoint names (without `transformer.`) and shapes, in name order. Matrices are stored [in, out]."""
    c = DEFAULTS | config
    n_embd, n_inner = c["n_embd"], c["n_inner"] or 4 * c["n_embd"]
    shapes = {"wte.weight": (c["vocab_size"], n_embd), "wpe.weight": (c["n_positions"], n_embd)}
    for layer in range(c["n_layer"]):
        shapes |= {
            f"h.{layer}.attn.c_attn.weight": (n_embd, 3 * n_embd),
            f"h.{layer}.attn.c_attn.bias": (3 * n_embd,),
            f"h.{layer}.attn.c_proj.weight": (n_embd, n_embd),
            f"h.{layer}.attn.c_proj.bias": (n_embd,),
            f"h.{layer}.mlp.c_fc.weight": (n_embd, n_inner),
            f"h.{layer}.mlp.c_fc.bias": (n_inner,),
            f"h.{layer}.mlp.c_proj.weight": (n_inner, n_embd),
            f"h.{layer}.mlp.c_proj.bias": (n_embd,),
        }
    norms = ["ln_f"] + [f"h.{layer}.ln_{i}" for layer in range(c["n_layer"]) for i in (1, 2)]
    shapes |= {f"{norm}.{part}": (n_embd,) for norm in norms for part in ("weight", "bias")}
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (c["vocab_size"], n_embd)
    return dict(sorted(shapes.items()))


def random_params(config: dict, seed: int, std: float) -> dict[str, np.ndarray]:
    """Float32 weights with the given standard deviation, drawn tensor by tensor in name order; about 1 s for 124M.

    LayerNorm weights lie around 1, and no bias is zero, so that leaving any of them out shows in the logits.
    """
    rng = np.random.default_rng(seed)
    params = {}
    for name, shape in parameter_shapes(config).items():
        params[name] = rng.standard_normal(shape, dtype=np.float32)
        params[name] *= np.float32(std)
        if name.split(".")[-2].startswith("ln_") and name.endswith(".weight"):
            params[name] += np.float32(1.0)
    return params


def tiny_params(config: dict, seed: int = 0, std: float = 0.5) -> dict[str, np.ndarray]:
    """random_params with a spread for tiny models: at GPT-2's own 0.02 the logits are too flat to show faults."""
    return random_params(config, seed, std)


def as_stored(model) -> dict[str, np.ndarray]:
    """A GPT2's parameters in the shapes of a checkpoint's file."""
    params = {}
    for name, value in model.params.items():
        if not isinstance(value, np.ndarray):
            value = value.dense.T if name in ("wte.weight", "lm_head.weight") else value.dense
        params[name] = value
    return params


# ---- checkpoint folders ------------------------------------------------------------------------------------------


def bfloat16_bits(x: np.ndarray) -> np.ndarray:
    """float32 -> uint16 [same shape]: the upper half of the float32, rounded to nearest even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def to_bytes(x: np.ndarray, dtype: str) -> bytes:
    """Little-endian bytes of an array stored as safetensors dtype F64, F32, F16 or BF16."""
    if dtype == "BF16":
        return bfloat16_bits(x).astype("<u2").tobytes()
    return np.asarray(x).astype({"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype]).tobytes()


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """The float32 values that a reader must see after x went through a file of this dtype."""
    if dtype == "BF16":
        return (bfloat16_bits(x).astype(np.uint32) << 16).view(np.float32)
    return (
        np.frombuffer(to_bytes(x, dtype), {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype])
        .astype(np.float32)
        .reshape(np.shape(x))
    )


def write_safetensors(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    """Write name -> (dtype, shape, bytes) by hand: length of the header (8 bytes, little-endian), JSON header, data."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    Path(path).write_bytes(len(head).to_bytes(8, "little") + head + b"".join(data for _, _, data in tensors.values()))


def write_checkpoint(
    folder: Path,
    config: dict,
    params: dict[str, np.ndarray],
    *,
    prefix: str = "",
    dtype: str | dict[str, str] = "F32",
    shards: int = 1,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write config.json and model.safetensors (or `shards` files and their index) into folder; returns the folder.

    prefix goes before every name but lm_head.weight. dtype is one for all or a dictionary from unprefixed names
    (what it leaves out is F32). extra tensors keep their names and their own dtype (bool, uint8, float16/32/64).
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    tensors = {}
    for name, value in params.items():
        kind = dtype if isinstance(dtype, str) else dtype.get(name, "F32")
        tensors[name if name == "lm_head.weight" else prefix + name] = (kind, np.shape(value), to_bytes(value, kind))
    kinds = {"bool": "BOOL", "uint8": "U8", "float16": "F16", "float32": "F32", "float64": "F64"}
    for name, value in (extra or {}).items():
        value = np.asarray(value)
        tensors[name] = (kinds[value.dtype.name], value.shape, value.tobytes())
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    names, weight_map = list(tensors), {}
    per_shard = math.ceil(len(names) / shards)
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i * per_shard : (i + 1) * per_shard]}
        write_safetensors(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    total = sum(len(data) for _, _, data in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


# ---- a vocabulary of bytes ---------------------------------------------------------------------------------------

PRINTABLE_BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
# Position i is the byte that id i stands for, in the order of GPT-2's own vocabulary.
BYTE_OF_ID = PRINTABLE_BYTES + [b for b in range(256) if b not in PRINTABLE_BYTES]


def write_byte_vocab(folder: Path) -> Path:
    """Write vocab.json and merges.txt of a tokenizer with no merges: id i is byte BYTE_OF_ID[i], 256 is end-of-text.

    Every character outside ASCII is then several tokens, which shows streaming faults at once.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # GPT-2's byte alphabet: printable bytes stand for themselves, the n-th of the others is the character 256 + n.
    symbols = [chr(b) for b in PRINTABLE_BYTES] + [chr(256 + n) for n in range(256 - len(PRINTABLE_BYTES))]
    vocab = {symbol: i for i, symbol in enumerate([*symbols, "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    return folder
