"""A prompt's keys and values in a file, so that the next run that begins alike need not compute them again.

The key and the value of position p depend on the weights and on tokens 0..p, and on nothing that comes later. Two texts
with the same first n ids therefore have the same keys and values at their first n positions, and what one run has
computed another may take over as it is, however the texts go on: the longest common beginning is reused.

A file is in the safetensors format, n being the number of the prompt's ids:

    ids                  int64   [n]
    keys.0, values.0 ... float32 [H, D, n]   a pair for each layer, row 0 of the cache
    metadata: format, version, model (see `fingerprint`), embeddings (see `_embeddings`), crc32 of all tensors in order

Before any of it is trusted the checksum must be right and the fingerprints those of the model. The last known token is
run anew in any case, for the logits that follow it or along with the rest of the prompt, and its keys and values must
come out as they were saved. That catches what a fingerprint of the small parameters cannot, such as a LoRA adapter
merged into the matrices.
"""

import hashlib
import json
import math
import os
import zlib
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save as to_safetensors

from minigen.engine.linear import embed
from minigen.engine.validation import shorten
from minigen.files.atomic_write import write_atomic

FORMAT, VERSION = "minigen prompt cache", "2"
# The config's fields on which no key or value depends.
WITHOUT_EFFECT = {"bos_token_id", "eos_token_id", "reorder_and_upcast_attn"}
# How far a recomputed key or value may be from the saved one, as a part of the layer's largest: sums in another order
# differ by some 1e-6 in float32, other weights by 1e-2 and more.
TOLERANCE = 1e-4


class Restored(NamedTuple):
    """What a file knew of a prompt."""

    known: int  # how many of the prompt's first ids the file holds; all of these but the last were put into the cache
    last: list[tuple[np.ndarray, np.ndarray]]  # for each layer the saved key and value [H, D] of that last one


def _error(path, what):
    return ValueError(f"the prompt cache {path} {what}: delete it or name another file")


def fingerprint(model):
    """A SHA-256, in hexadecimal, that tells models apart without reading all of their weights.

    It covers the config, the position embedding and all biases and layer norms: a hundredth of the bytes, some of which
    any ordinary training changes.
    """
    config = model.config
    digest = hashlib.sha256()
    for field in fields(config):
        if field.name not in WITHOUT_EFFECT:
            digest.update(f"{field.name}={getattr(config, field.name)!r}\n".encode())
    for name, shape in config.parameter_shapes().items():
        if len(shape) == 1 or name == "wpe.weight":
            digest.update(f"{name} {shape}\n".encode())
            digest.update(model.params[name].tobytes())
    return digest.hexdigest()


def _embeddings(model, ids):
    """A SHA-256, in hexadecimal, of the embeddings of a text's tokens: those of its earlier ones are not run anew."""
    return hashlib.sha256(embed(np.asarray(ids), model.params["wte.weight"]).tobytes()).hexdigest()


def common_prefix_length(a, b):
    """How many ids two texts have in common at their beginning."""
    different = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(different, min(len(a), len(b)))


def _tensor(stored, path, name, dtype, shape):
    """A tensor of those in a file, in the dtype and the shape that it must have; it is taken out of them."""
    found = stored.pop(name, None)
    if found is None:
        raise _error(path, f"is damaged: it lacks {name}")
    if (found["dtype"], found["shape"]) != (dtype, shape):
        raise _error(path, f"holds {name} as {found['dtype']} {found['shape']}, but the model's are {dtype} {shape}")
    return np.frombuffer(found["data"], {"I64": "<i8", "F32": "<f4"}[dtype]).reshape(shape)


def _read(path, model, cache, ids):
    """`restore` from a file that is there. Raises SafetensorError or ValueError."""
    config = model.config
    data = path.read_bytes()  # not mapped: where another program rewrites the file meanwhile, the checksum will tell
    stored = dict(deserialize(data))
    metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__") or {}
    del data  # `stored` has copies, which go one by one
    if metadata.get("format") != FORMAT:
        raise _error(path, "is a safetensors file, but holds no prompt")
    if metadata.get("version") != VERSION:
        raise _error(path, f"has version {metadata.get('version')} of the format; only {VERSION} can be read")
    if metadata.get("model") != fingerprint(model):
        raise _error(path, "was made with another model")

    n = math.prod(stored["ids"]["shape"]) if "ids" in stored else 0
    saved_ids = _tensor(stored, path, "ids", "I64", [n])
    if not ((saved_ids >= 0) & (saved_ids < config.vocab_size)).all():
        raise _error(path, "is damaged: it holds ids outside the vocabulary")
    if metadata.get("embeddings") != _embeddings(model, saved_ids):
        raise _error(path, "was made with other weights: its tokens have other embeddings")
    checksum = zlib.crc32(saved_ids)
    known = common_prefix_length(saved_ids.tolist(), ids)
    plan = cache.allocate(np.arange(known - 1)[None]) if known > 1 else None
    last = []
    for layer in range(config.n_layer):
        shape = [config.n_head, config.d_head, n]
        pair = [_tensor(stored, path, f"{kind}.{layer}", "F32", shape) for kind in ("keys", "values")]
        for tensor in pair:
            checksum = zlib.crc32(tensor, checksum)
        if known > 1:  # [H, D, n] -> [1, H, D, known - 1]
            cache.store(layer, plan, *(tensor[None, ..., : known - 1] for tensor in pair))
        if known:
            last.append(tuple(tensor[..., known - 1].copy() for tensor in pair))  # [H, D, n] -> [H, D]
    if metadata.get("crc32") != f"{checksum:08x}":
        raise _error(path, "is damaged: its checksum is wrong")
    return Restored(known, last)


def restore(path, model, cache, ids):
    """Fill an empty cache of one row with what a file knows of a prompt, and return `Restored`.

    ids: the prompt's. Where there is no file yet, nothing is known. Raises OSError where the path cannot be read, or
    its folder not be written to though that will be needed, and ValueError for a file of another model or format or a
    damaged one; the cache is then of no further use.
    """
    path = Path(path)
    restored = Restored(0, [])
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is not an ordinary file")
        restored = _read(path, model, cache, ids)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise OSError(f"cannot read the prompt cache {path}: {error.strerror or error}; name another file") from error
    except SafetensorError as error:
        raise _error(path, f"is damaged or not a safetensors file ({shorten(str(error))})") from error
    folder = Path(os.path.realpath(path)).parent  # where it is a link, the file is replaced and not the link
    if restored.known < len(ids) and not os.access(folder, os.W_OK):
        raise OSError(
            f"cannot write the prompt cache {path}: {folder} is no folder that can be written to; name another file"
        )
    return restored


def verify_last_token(path, cache, restored):
    """After the prompt has run, compare the last known token's keys and values with the saved ones.

    Raises ValueError where they differ by more than rounding: other weights have made the file.
    """
    for layer, pair in enumerate(restored.last):
        for saved, rows in zip(pair, cache.prefix(layer, restored.known), strict=True):
            computed = rows[0, ..., -1]  # [1, H, D, known] -> [H, D]
            if not np.abs(computed - saved).max() <= TOLERANCE * np.abs(saved).max():
                raise _error(path, "was made with other weights: running its last known token gives something else")


def save(path, model, cache, ids):
    """Write a prompt's ids and the cache's keys and values of them, for `restore`.

    The cache is one of one row that begins with `ids`. Where its keys or values are not finite nothing is written: the
    weights are broken, which the logits will say, and the next run should not take the file for what is wrong. Raises
    OSError where the file cannot be written; the old one is there then.
    """
    tensors = {"ids": np.array(ids, np.int64)}
    for layer in range(model.config.n_layer):
        keys, values = cache.prefix(layer, len(ids))
        tensors[f"keys.{layer}"] = np.ascontiguousarray(keys[0])  # [1, H, D, n] -> [H, D, n]
        tensors[f"values.{layer}"] = np.ascontiguousarray(values[0])
    if not all(np.isfinite(tensor).all() for tensor in tensors.values()):
        return
    checksum = 0
    for tensor in tensors.values():
        checksum = zlib.crc32(tensor, checksum)
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "model": fingerprint(model),
        "embeddings": _embeddings(model, ids),
        "crc32": f"{checksum:08x}",
    }
    try:
        write_atomic(path, to_safetensors(tensors, metadata))
    except OSError as error:
        raise OSError(f"cannot write the prompt cache {path}: {error.strerror or error}; name another file") from error
