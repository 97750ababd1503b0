"""Reading a checkpoint: its configuration and its tensors, and validation of both.

A checkpoint is a folder with config.json and model.safetensors, or several shards that model.safetensors.index.json
lists. A safetensors file is an 8-byte header length, a JSON header with dtype, shape and place of each tensor, and the
tensors' bytes. It is read here rather than by the safetensors library for two reasons: NumPy, and so the library's
NumPy interface, has no bfloat16; and here each tensor is read straight into its final array.
"""

import errno
import json
import math
import os
import re
import stat
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from minigen.engine.model import GPT2Config
from minigen.engine.validation import is_int, short_repr, shorten

# How each dtype is read; little-endian, as the format demands. NumPy has no bfloat16: see `_read_values`.
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
ITEM_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1}
ITEM_SIZES |= {"U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}
# Causal masks that old files hold; attention makes its own. Not h.0.attn.c_attn.bias, which is a parameter.
MASK_BUFFER = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
PARAMETER = re.compile(r"(h\.\d+|wte|wpe|ln_f)\..*")


def is_file(path):
    """Whether there is a file at `path`. Raises OSError if that is unknown, as in a folder without permission."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except ValueError:  # a name that no file can have
        return False
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            return False
        raise OSError(f"cannot read {path}: {error.strerror}") from error


def read_text(path):
    """The content of a UTF-8 file, without a byte order mark. Raises OSError or ValueError, naming the file."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise OSError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error


def read_json(path):
    """The parsed content of a JSON file. Raises OSError or ValueError, naming the file."""
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # not JSON, or nested thousands deep
        raise ValueError(f"{path} is not valid JSON: {error}") from error


# ---------------------------------------------------------------------------------------- config.json


def load_config(folder):
    """The `GPT2Config` of a checkpoint's folder; generation_config.json, if any, decides begin- and end-of-text ids.

    Warns of ids outside the vocabulary, which are dropped. Raises OSError if config.json is missing, ValueError if its
    content cannot be used.
    """
    path, generation_path = Path(folder) / "config.json", Path(folder) / "generation_config.json"
    if not is_file(path):
        raise OSError(f"{folder} has no config.json; a checkpoint folder holds config.json and model.safetensors")
    content, token_ids = read_json(path), {}
    try:
        if is_file(generation_path):
            generation = read_json(generation_path)
            if not isinstance(generation, dict):
                raise ValueError(f"{generation_path} is not an object of keys and values")
            token_ids = {name: generation[name] for name in ("bos_token_id", "eos_token_id") if name in generation}
        if isinstance(content, dict):
            content |= dict.fromkeys(token_ids)  # what generation_config.json overrides is not checked
        config = GPT2Config.from_dict(content)
        path = generation_path
        config = replace(config, **token_ids)
    except (
        RecursionError
    ) as error:  # an error message that shows a value nested nearly as deeply as JSON's parser allows
        raise ValueError(f"{path}: {error}") from error
    except ValueError as error:
        raise ValueError(str(error) if str(folder) in str(error) else f"{path}: {error}") from error
    for name in ("bos_token_id", "eos_token_id"):
        value = getattr(config, name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        known = [id for id in ids if 0 <= id < config.vocab_size]
        if known != ids:
            warnings.warn(
                f"{folder}: {name} is {short_repr(value)}, but the vocabulary is 0 to {config.vocab_size - 1}: ids "
                "outside it are ignored",
                stacklevel=2,
            )
            config = replace(config, **{name: known or None})
    return config


# ---------------------------------------------------------------------------------------- safetensors files


def weight_files(folder):
    """{safetensors file of a checkpoint's folder: names of the tensors to read from it, or None for all}."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if is_file(single):
        return {single: None}
    if not is_file(index):
        pickles = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
        advice = (
            f"; {pickles[0]} is a pickle, which can run code when opened and is never read: convert it once with "
            "transformers, AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)"
            if pickles
            else ""
        )
        raise OSError(f"{folder} has neither model.safetensors nor model.safetensors.index.json{advice}")
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(n, str) for n in weight_map.values()):
        raise ValueError(f"{index} has no weight_map from tensor names to file names")
    files = {}
    for name, file in weight_map.items():
        files.setdefault(file, []).append(name)
    for file in files:
        if Path(file).name != file:
            raise ValueError(f"{index} names {short_repr(file)}, which is not a file of the checkpoint's folder")
        if not is_file(folder / file):
            raise OSError(f"{index} names {short_repr(file)}, which does not exist: the checkpoint is incomplete")
    return {folder / file: names for file, names in files.items()}


class StoredTensor(NamedTuple):
    """The place of a tensor in a safetensors file."""

    path: Path
    name: str  # as the file spells it
    dtype: str
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file
    end: int


def _unique(pairs):
    """An object of a JSON file as a dict. Raises ValueError if it has a key twice."""
    parsed = {}
    for name, value in pairs:
        if name in parsed:
            raise ValueError(f"it names {short_repr(name)} twice")
        parsed[name] = value
    return parsed


def _parse_header(path, header, data, size):
    """The `StoredTensor`s of a header. They must cover the file exactly, from byte `data` to its end at `size`."""
    tensors, end = [], data
    for name, entry in header.items():
        try:
            dtype, shape, (begin, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            ok = isinstance(dtype, str) and all(is_int(n, 0) and n < 2**63 for n in (*shape, begin, stop))
            ok = ok and math.prod(shape) * ITEM_SIZES.get(dtype, 0) == (stop - begin if dtype in ITEM_SIZES else 0)
        except (TypeError, LookupError, ValueError):
            ok = False
        if not ok:
            raise ValueError(f"dtype, shape and data_offsets of {short_repr(name)} do not fit together")
        tensors.append(StoredTensor(path, name, dtype, shape, data + begin, data + stop))
    for tensor in sorted(tensors, key=lambda tensor: tensor[-2:]):
        if tensor.begin != end:
            raise ValueError(f"{short_repr(tensor.name)} begins at byte {tensor.begin} instead of {end}")
        end = tensor.end
    if end != size:
        raise ValueError(f"it has {size} bytes, its header declares {end}")
    return tensors


def _read_header(path):
    """{name: StoredTensor} of a safetensors file, after checking that header and file agree."""
    try:
        with path.open("rb") as file:
            size, first = os.fstat(file.fileno()).st_size, file.read(8)
            data = 8 + int.from_bytes(first, "little")
            if first == b"version ":
                raise OSError(
                    f"it is a Git LFS pointer: run `git lfs pull` in {path.parent}, or download the file itself"
                )
            if data > min(size, 8 + 10**8):  # the format does not allow longer headers
                raise ValueError(f"it has {size} bytes, its header declares {data} or more")
            header = json.loads(file.read(data - 8).decode(), object_pairs_hook=_unique)
        header.pop("__metadata__", None)
        return {tensor.name: tensor for tensor in _parse_header(path, header, data, size)}
    except OSError as error:
        raise OSError(f"cannot read {path}: {error.strerror or error}") from error
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
        why, real = shorten(str(error)), os.path.realpath(path)
        raise ValueError(
            f"{path} is damaged or not a safetensors file: {why}; delete {real} and download or copy it again"
        ) from error


# ---------------------------------------------------------------------------------------- tensors


def _read_values(stored, start=0, count=None):
    """`count` values of a tensor, beginning with value `start`, by default all: float32 [count]."""
    # fromfile reads straight into an array that NumPy allocates, and NumPy asks for huge pages for large
    # arrays; a buffer that a reader provides has none.
    dtype = np.dtype(DTYPES[stored.dtype])
    count = math.prod(stored.shape) if count is None else count
    try:
        raw = np.fromfile(stored.path, dtype, count, offset=stored.begin + start * dtype.itemsize)
    except OSError as error:
        raise OSError(f"cannot read {stored.path}: {error.strerror or error}") from error
    if len(raw) < count:
        raise ValueError(f"{stored.path} was truncated while being read")
    if stored.dtype == "BF16":
        # bfloat16 is the upper half of a float32.
        raw = raw.astype(np.uint32)
        raw <<= 16
        return raw.view(np.float32)
    return raw.astype(np.float32, copy=False)


def _same_values(a, b, piece=2**20):
    """Whether two stored tensors have the same shape and values; read piece by piece, to keep peak memory low."""
    if a.shape != b.shape or a.dtype not in DTYPES:
        return False
    size = math.prod(a.shape)
    pieces = ((start, min(piece, size - start)) for start in range(0, size, piece))
    return all(np.array_equal(_read_values(a, start, n), _read_values(b, start, n)) for start, n in pieces)


def _join_names(names, most=6):
    return ", ".join(map(shorten, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


class StoredWeights(Mapping):
    """Parameter name -> float32 array. Each array is read from its file when it is accessed, from any thread.

    Largest first, to keep peak memory low: the temporaries of large tensors are freed before the rest is read.
    """

    def __init__(self, tensors):
        self._tensors = dict(sorted(tensors.items(), key=lambda item: -math.prod(item[1].shape)))

    def __getitem__(self, name):
        return _read_values(self._tensors[name]).reshape(self._tensors[name].shape)

    def __iter__(self):
        return iter(self._tensors)

    def __len__(self):
        return len(self._tensors)


def _find_tensors(folder):
    """{parameter name: StoredTensor} of all files of a folder; names may have the prefix `transformer.`."""
    tensors = {}
    for path, wanted in weight_files(folder).items():
        stored = _read_header(path)
        for spelled in stored if wanted is None else wanted:
            name = spelled.removeprefix("transformer.")
            if MASK_BUFFER.fullmatch(name):
                continue
            if spelled not in stored:
                raise ValueError(
                    f"{folder / 'model.safetensors.index.json'} says that {shorten(spelled)} is in {path.name}, but it "
                    "is not: the files belong to different checkpoints"
                )
            if name in tensors:
                raise ValueError(
                    f"{folder} holds {shorten(name)} twice: {shorten(tensors[name].name)} and {shorten(spelled)}"
                )
            tensors[name] = stored[spelled]
    return tensors


def load_weights(folder, config):
    """All parameters of a checkpoint as `StoredWeights`, in the shapes of the configuration.

    Raises OSError if files are missing. Raises ValueError, naming the tensors, if one is missing, unexpected or
    duplicated, or has the wrong shape or dtype. Warns of tensors of other models' heads, and of an output head that a
    tied configuration ignores.
    """
    folder = Path(folder)
    tensors = _find_tensors(folder)
    if config.n_layer > len(tensors):
        raise ValueError(
            f"{folder} holds {len(tensors)} tensors, too few for the n_layer of {config.n_layer} in its config.json"
        )
    shapes = config.parameter_shapes()
    head = tensors.pop("lm_head.weight", None) if config.tie_word_embeddings else None
    missing = [name for name in shapes if name not in tensors]
    left_over = [name for name in tensors if name not in shapes]
    if missing:
        instead = f"; it holds {_join_names(left_over)} instead" if left_over else ""
        if any(name.endswith(f".{missing[0]}") for name in left_over):
            instead += ", names with the prefix of a wrapper: save the model that it wraps"
        raise ValueError(f"{folder} lacks {_join_names(missing)}, which its config.json asks for{instead}")
    unknown = [name for name in left_over if PARAMETER.fullmatch(name)]
    if unknown:
        raise ValueError(f"{folder} holds {_join_names(unknown)}, which do not match its config.json")
    if left_over:
        warnings.warn(f"{folder}: not part of GPT-2 and ignored: {_join_names(left_over)}", stacklevel=2)
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise ValueError(f"{folder}: {name} has shape {tensors[name].shape}; config.json makes it {shape}")
        if tensors[name].dtype not in DTYPES:
            raise ValueError(
                f"{folder}: {name} is stored as {shorten(tensors[name].dtype)}; only {', '.join(DTYPES)} can be read"
            )
    if head is not None and not _same_values(head, tensors["wte.weight"]):
        warnings.warn(
            f"{folder}: lm_head.weight differs from wte.weight, but config.json ties the two: wte.weight is used "
            "(set tie_word_embeddings to false to use the file's head)",
            stacklevel=2,
        )
    return StoredWeights({name: tensors[name] for name in shapes})
