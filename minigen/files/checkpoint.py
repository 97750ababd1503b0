"""From a name to parameters: find a checkpoint's folder, read its configuration and its tensors, and check both.

A checkpoint is a folder with config.json and model.safetensors, or several shards that model.safetensors.index.json
lists. A safetensors file is an 8-byte header length, a JSON header with dtype, shape and place of each tensor, and the
tensors' bytes. The safetensors library checks that header; the tensors are read from here because NumPy, and with it
the library's NumPy side, has no bfloat16, and to read each one straight into the array in which it stays.
"""

import json
import math
import os
import re
import stat
import warnings
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from minigen.engine.model import GPT2Config
from minigen.engine.validation import short_repr, shorten

# How each dtype is read; little-endian, as the format demands. NumPy has no bfloat16: see `_read_values`.
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
# Causal masks that old files carry along; attention makes its own. Not h.0.attn.c_attn.bias, which is a parameter.
MASK_BUFFER = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
PARAMETER = re.compile(r"(h\.\d+|wte|wpe|ln_f)\..*")


def is_file(path):
    """Whether there is a file at `path`. Raises OSError if its folder may not be searched, for example."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a name that no file can have
        return False
    except OSError as error:
        raise OSError(f"cannot read {path}: {error.strerror}") from error


def read_text(path):
    """The content of a UTF-8 file without its byte order mark, if any; raises OSError or ValueError, naming it."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise OSError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error


def read_json(path):
    """The parsed content of a JSON file; raises OSError or ValueError, naming it."""
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError) as error:  # not JSON, or nested thousands deep
        raise ValueError(str(error) if str(path) in str(error) else f"{path} is not valid JSON: {error}") from error


# ---------------------------------------------------------------------------------------- what a folder holds


def load_config(folder):
    """The `GPT2Config` of a checkpoint folder; generation_config.json, where there is one, names the end-of-text ids.

    Raises OSError where config.json is missing, ValueError where its content cannot be used.
    """
    folder = Path(folder)
    path, generation_path = folder / "config.json", folder / "generation_config.json"
    if not path.is_file():
        raise OSError(f"{folder} has no config.json; a checkpoint folder holds config.json and model.safetensors")
    raw = read_json(path)
    try:
        config = GPT2Config.from_dict(raw)
        if generation_path.is_file():
            path = generation_path
            raw = read_json(path)
            if not isinstance(raw, dict):
                raise ValueError("it is not an object of keys and values")
            if "eos_token_id" in raw:
                config = replace(config, eos_token_id=raw["eos_token_id"])
    except ValueError as error:
        raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from error
    return config


def _weight_files(folder):
    """The safetensors file or shards of a checkpoint folder."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        pickles = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
        advice = (
            f"; {pickles[0]} is a pickle, which can run code when opened and is never read: convert it once with "
            "transformers, AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)"
            if pickles
            else ""
        )
        raise OSError(f"{folder} has neither model.safetensors nor model.safetensors.index.json{advice}")
    weight_map = read_json(index)
    weight_map = weight_map.get("weight_map") if isinstance(weight_map, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(n, str) for n in weight_map.values()):
        raise ValueError(f"{index} has no weight_map from tensor names to file names")
    files = [folder / name for name in sorted(set(weight_map.values()))]
    for path in files:
        if path.parent != folder:
            raise ValueError(f"{index} names {short_repr(str(path))}, which lies outside the checkpoint's folder")
        if not os.path.isfile(path):  # unlike Path's, it takes names that no file can have
            raise OSError(f"{index} names {short_repr(path.name)}, which is not there: the checkpoint is incomplete")
    return files


# ---------------------------------------------------------------------------------------- tensors


class StoredTensor(NamedTuple):
    """Where a safetensors file holds a tensor."""

    path: Path
    name: str  # as the file spells it
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file

    @property
    def size(self):
        return int(np.prod(self.shape))


def _describe_damage(path):
    """Of a file that the library refuses, what its words leave out: the tensor at fault, or the two sizes."""
    name = None
    try:
        with path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_size if header_size < 10**8 else 0))  # the format allows no more
        header.pop("__metadata__", None)
        expected = 8 + header_size
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            itemsize = np.dtype(DTYPES[entry["dtype"]]).itemsize if entry["dtype"] in DTYPES else None
            if min(entry["shape"], default=0) < 0 or (itemsize and math.prod(entry["shape"]) * itemsize != end - begin):
                return f"; look at {short_repr(name)}"
            expected = max(expected, 8 + header_size + end)
        return f"; it has {path.stat().st_size} bytes, its header speaks of {expected}"
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError, OSError):
        return f"; look at {short_repr(name)}" if name else ""


def _read_header(path):
    """The tensors of a safetensors file, after the library has checked that header and file fit each other."""

    def refuse_duplicates(pairs):
        seen = {}
        for name, value in pairs:
            if name in seen:
                raise ValueError(f"{path} names {short_repr(name)} twice")
            seen[name] = value
        return seen

    try:
        with safe_open(path, framework="numpy"):
            pass
        with path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_size), object_pairs_hook=refuse_duplicates)
    except SafetensorError as error:
        raise ValueError(
            f"{path} is damaged or not a safetensors file: {shorten(str(error))}{_describe_damage(path)}"
        ) from error
    except OSError as error:
        raise OSError(f"cannot read {path}: {error.strerror or error}") from error
    header.pop("__metadata__", None)
    return [
        StoredTensor(path, name, entry["dtype"], tuple(entry["shape"]), 8 + header_size + entry["data_offsets"][0])
        for name, entry in header.items()
    ]


def _read_values(stored, start=0, count=None):
    """`count` values of a tensor from the `start`th on, by default all, as float32 in one dimension."""
    # fromfile reads into an array that NumPy allocates, without a second copy, and NumPy asks for huge pages for large
    # arrays; a buffer handed over by a reader has none.
    dtype = np.dtype(DTYPES[stored.dtype])
    count = stored.size if count is None else count
    raw = np.fromfile(stored.path, dtype, count, offset=stored.offset + start * dtype.itemsize)
    if len(raw) < count:
        raise ValueError(f"{stored.path} has become shorter while it was read")
    if stored.dtype == "BF16":
        # bfloat16 is the upper half of a float32.
        raw = raw.astype(np.uint32)
        raw <<= 16
        return raw.view(np.float32)
    return raw.astype(np.float32, copy=False)


def _same_values(a, b, piece=2**20):
    """Whether two stored tensors have the same shape and values; read piece by piece, to hold neither of them whole."""
    if a.shape != b.shape or a.dtype not in DTYPES:
        return False
    pieces = ((start, min(piece, a.size - start)) for start in range(0, a.size, piece))
    return all(np.array_equal(_read_values(a, at, n), _read_values(b, at, n)) for at, n in pieces)


def _join_names(names, most=6):
    return ", ".join(map(shorten, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def load_weights(folder, config):
    """All parameters of a checkpoint: pairs of name and float32 array, in the shapes the configuration asks for.

    Everything is checked before this returns, but each tensor is read only when its pair is asked for, so that `GPT2`
    can lay it out and drop it before the next. Names may carry the prefix `transformer.`, as most fine-tunes' do.

    Raises OSError where files are missing. Raises ValueError, naming the tensors, where one is missing, left over,
    there twice, or of another shape or dtype. Warns of other models' heads and of an output head that a tied
    configuration makes useless.
    """
    folder = Path(folder)
    tensors = {}
    for path in _weight_files(folder):
        for stored in _read_header(path):
            name = stored.name.removeprefix("transformer.")
            if MASK_BUFFER.fullmatch(name):
                continue
            if name in tensors:
                raise ValueError(
                    f"{folder} holds {shorten(name)} twice: {shorten(tensors[name].name)} and {shorten(stored.name)}"
                )
            tensors[name] = stored

    if config.n_layer > len(tensors):
        raise ValueError(
            f"{folder} holds {len(tensors)} tensors, too few for the n_layer of {config.n_layer} in its config.json"
        )
    shapes = config.parameter_shapes()
    head = tensors.pop("lm_head.weight", None) if config.tie_word_embeddings else None
    missing = [name for name in shapes if name not in tensors]
    if missing:
        raise ValueError(f"{folder} lacks {_join_names(missing)}, which its config.json asks for")
    left_over = [name for name in tensors if name not in shapes]
    unknown = [name for name in left_over if PARAMETER.fullmatch(name)]
    if unknown:
        raise ValueError(f"{folder} holds {_join_names(unknown)}, for which its config.json has no place")
    if left_over:
        warnings.warn(f"{folder}: {_join_names(left_over)} is no part of GPT-2 and was not read", stacklevel=2)
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise ValueError(f"{folder}: {name} has shape {tensors[name].shape}; config.json makes it {shape}")
        if tensors[name].dtype not in DTYPES:
            raise ValueError(
                f"{folder}: {name} is stored as {tensors[name].dtype}; only {', '.join(DTYPES)} can be read"
            )

    if head is not None and not _same_values(head, tensors["wte.weight"]):
        warnings.warn(
            f"{folder}: lm_head.weight differs from wte.weight, but config.json ties the two: wte.weight is used "
            "(set tie_word_embeddings to false to use the file's head)",
            stacklevel=2,
        )
    # Largest first: what is held beside a tensor while it is read and laid out is then never on top of all the others.
    largest_first = sorted(shapes, key=lambda name: -tensors[name].size)
    return ((name, _read_values(tensors[name]).reshape(shapes[name])) for name in largest_first)
