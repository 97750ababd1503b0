"""Saving a prompt's K/V cache to disk, and when it can safely be reused.

The key and the value of position p depend on the weights and on tokens 0..p, and on nothing that comes later. So two
texts with a common prefix of n ids have the same keys and values at their first n positions, and a run can reuse those
of an earlier one.

A file is in the safetensors format, n being the number of the prompt's ids:

    ids                  int64   [n]
    keys.0, values.0 ... float32 [H, D, n]   a pair per layer, row 0 of the cache
    metadata: format, version, model (see `fingerprint`), crc32 of all tensors in order

It is used only if the checksum is right and the fingerprint is the model's.
"""

import hashlib
import json
import math
import os
import zlib
from dataclasses import fields
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save as to_safetensors

from minigen.engine.decode import common_prefix_length
from minigen.engine.validation import shorten
from minigen.files.atomic_write import write_atomic
from minigen.kernels.batch_invariant import BATCH_INVARIANT
from minigen.kernels.linear import Weight

FORMAT, VERSION = "minigen prompt cache", "3"
# The config's fields on which no key or value depends.
WITHOUT_EFFECT = {"bos_token_id", "eos_token_id", "reorder_and_upcast_attn"}


def reuse_prompt(path, run, prompt, tokens):
    """The generated tokens of a run with a single prompt, whose keys and values are taken from the file if it has them.

    Afterwards, the prompt in the file begins with all of this one. The first token raises OSError if the path cannot be
    read, or if the file has to be written and its folder does not allow that, and ValueError for a damaged file, or one
    of another model.
    """
    path = Path(path)
    run.cache = run.new_cache([prompt])
    model_fingerprint = fingerprint(run.model)
    n_saved = _restore(path, run.cache, prompt, model_fingerprint)
    for generated in tokens:
        if n_saved < len(prompt):  # at the first token, when the prompt has been run
            _save(path, run.cache, prompt, model_fingerprint)
            n_saved = len(prompt)
        yield generated


def fingerprint(model):
    """A SHA-256, in hexadecimal, of the config, of sums over every parameter, and of the batch invariance mode.

    The sums are of the values' bit patterns, for a matrix along both axes. Unlike sums of floats, they do not
    depend on the order of memory, and any change of a row or a column changes them.
    """
    config = model.config
    digest = hashlib.sha256(b"batch invariant" if BATCH_INVARIANT else b"")
    for field in fields(config):
        if field.name not in WITHOUT_EFFECT:
            digest.update(f"{field.name}={getattr(config, field.name)!r}\n".encode())
    for name, shape in config.parameter_shapes().items():
        digest.update(f"{name} {shape}\n".encode())
        for sums in _bit_sums(model.params[name]):
            digest.update(sums.tobytes())
    return digest.hexdigest()


def _bit_sums(param):
    """The values of a parameter as unsigned integers: a vector itself, a matrix's sums along each of its axes."""
    bits = (param.dense if isinstance(param, Weight) else param).view(np.uint32)
    if bits.ndim == 1:
        return [bits]
    return bits.sum(axis=0, dtype=np.uint64), bits.sum(axis=1, dtype=np.uint64)


def _restore(path, cache, prompt, model_fingerprint):
    """Fill an empty `PrefixCache` with the part of a prompt that a file holds; returns the length of that part."""
    n_saved = 0
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is not an ordinary file")
        n_saved = _read(path, cache, prompt, model_fingerprint)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise OSError(f"cannot read the prompt cache {path}: {error.strerror or error}; name another file") from error
    except SafetensorError as error:
        raise _error(path, f"is damaged or not a safetensors file ({shorten(str(error))})") from error
    folder = Path(os.path.realpath(path)).parent  # if the path is a link, its target is replaced, not the link
    if n_saved < len(prompt) and not os.access(folder, os.W_OK):
        raise OSError(
            f"cannot write the prompt cache {path}: {folder} is not a folder that can be written to; name another file"
        )
    return n_saved


def _read(path, cache, prompt, model_fingerprint):
    """`_restore` from an existing file. Raises SafetensorError or ValueError."""
    config = cache.model.config
    if path.stat().st_size > 2**20 + config.n_positions * (8 * config.n_layer * config.n_embd + 8):
        raise _error(path, "is larger than any prompt cache of this model")
    data = path.read_bytes()  # read, not mapped: if another program changes the file meanwhile, the checksum shows it
    stored = dict(deserialize(data))
    metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__") or {}
    del data  # `stored` has copies, which are freed one by one
    if metadata.get("format") != FORMAT:
        raise _error(path, "is a safetensors file, but not a prompt cache")
    if metadata.get("version") != VERSION:
        raise _error(path, f"has version {metadata.get('version')} of the format; only {VERSION} can be read")
    if metadata.get("model") != model_fingerprint:
        raise _error(path, "was made with another model, other weights or another MINIGEN_BATCH_INVARIANT")

    n = math.prod(stored["ids"]["shape"]) if "ids" in stored else 0
    ids = _tensor(stored, path, "ids", "I64", [n])
    if not ((ids >= 0) & (ids < config.vocab_size)).all():
        raise _error(path, "is damaged: it holds ids outside the vocabulary")
    checksum = zlib.crc32(ids)
    n_matched = common_prefix_length(ids.tolist(), prompt)
    plan = cache.kv.allocate(np.arange(n_matched)[None]) if n_matched else None
    for layer in range(config.n_layer):
        shape = [config.n_head, config.d_head, n]
        pair = [_tensor(stored, path, f"{kind}.{layer}", "F32", shape) for kind in ("keys", "values")]
        for tensor in pair:
            checksum = zlib.crc32(tensor, checksum)
        if n_matched:  # [H, D, n] -> [1, H, D, n_matched]
            cache.kv.store(layer, plan, *(tensor[None, ..., :n_matched] for tensor in pair))
    if metadata.get("crc32") != f"{checksum:08x}":
        raise _error(path, "is damaged: its checksum is wrong")
    cache.ids = [prompt[:n_matched]]
    return n_matched


def _tensor(stored, path, name, dtype, shape):
    """Remove a tensor from those of a file and return it, after checking its dtype and shape."""
    tensor = stored.pop(name, None)
    if tensor is None:
        raise _error(path, f"is damaged: it lacks {name}")
    if (tensor["dtype"], tensor["shape"]) != (dtype, shape):
        raise _error(path, f"holds {name} as {tensor['dtype']} {tensor['shape']}, but the model's are {dtype} {shape}")
    return np.frombuffer(tensor["data"], {"I64": "<i8", "F32": "<f4"}[dtype]).reshape(shape)


def _save(path, cache, prompt, model_fingerprint):
    """Write a prompt's ids and the cache's keys and values of them, for `_restore`.

    Writes nothing if keys or values are not finite: then the weights are broken, as the error about the logits says,
    and a later run should not report the file as damaged. Raises OSError if the file cannot be written; the old one is
    kept.
    """
    tensors = {"ids": np.array(prompt, np.int64)}
    for layer in range(cache.model.config.n_layer):
        keys, values = cache.kv.prefix(layer, len(prompt))
        tensors[f"keys.{layer}"] = np.ascontiguousarray(keys[0])  # [B, H, D, n] -> [H, D, n]
        tensors[f"values.{layer}"] = np.ascontiguousarray(values[0])
    if not all(np.isfinite(tensor).all() for tensor in tensors.values()):
        return
    checksum = 0
    for tensor in tensors.values():
        checksum = zlib.crc32(tensor, checksum)
    metadata = {"format": FORMAT, "version": VERSION, "model": model_fingerprint, "crc32": f"{checksum:08x}"}
    try:
        write_atomic(path, to_safetensors(tensors, metadata))
    except OSError as error:
        raise OSError(f"cannot write the prompt cache {path}: {error.strerror or error}; name another file") from error


def _error(path, what):
    return ValueError(f"the prompt cache {path} {what}: name another file")
