"""What is right for a checkpoint folder, by a second reader that shares no code with minigen or safetensors.

It is slow and strict: a file is right only if its header says in plain terms what every byte of it is.
"""

import json
import math
import os
import re
from pathlib import Path

import numpy as np

from tests.oracles.tiny import DEFAULTS, parameter_shapes

SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "U8": 1, "I8": 1, "BOOL": 1, "U16": 2}


class Wrong(Exception):
    """The files are not those of a checkpoint."""


def _unique(pairs):
    if len(dict(pairs)) < len(pairs):
        raise Wrong("a key twice")
    return dict(pairs)


def _is_size(value):
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64


def read_safetensors(data):
    """({name: (dtype, shape, bytes)}, whether the file is unclear). Raises Wrong.

    Unclear is what JSON readers disagree on; it may be refused, or read as what it says.
    """
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or 8 + size > len(data) or size > 10**8:
        raise Wrong("no room for the header")
    try:
        header = json.loads(data[8 : 8 + size].decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise Wrong(str(error)) from error
    if not isinstance(header, dict):
        raise Wrong("the header is no object")
    # What JSON readers disagree on: NaN, lone surrogates, deep nesting, huge numbers, keys that nobody knows.
    metadata = header.pop("__metadata__", None)
    unclear = data[8:9] != b"{" or bool(re.search(rb"NaN|Infinity|\\u[dD]|\[{100}|\d{16}|-0", data[8 : 8 + size]))
    unclear |= not isinstance(metadata, dict | type(None)) or not all(
        isinstance(value, str) for value in (metadata or {}).values()
    )
    tensors, places = {}, []
    for name, entry in header.items():
        if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
            raise Wrong(f"no tensor: {name}")
        unclear |= len(entry) > 3
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(shape, list) or not all(map(_is_size, shape)):
            raise Wrong(f"no shape: {name}")
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
            raise Wrong(f"no offsets: {name}")
        begin, end = offsets
        if not isinstance(dtype, str):
            raise Wrong(f"no dtype: {name}")
        if dtype not in SIZES:
            unclear = True
        elif math.prod(shape) * SIZES[dtype] != end - begin:
            raise Wrong(f"another size than its shape: {name}")
        places.append((begin, end))
        tensors[name] = dtype, tuple(shape), data[8 + size + begin : 8 + size + end]
    at = 0
    for begin, end in sorted(places):
        if begin != at or end < begin:
            raise Wrong("a hole or an overlap")
        at = end
    if at != len(data) - 8 - size:
        raise Wrong("bytes too many or too few")
    return tensors, unclear


def as_float32(dtype, shape, data):
    """The values of a stored tensor."""
    if dtype == "BF16":
        words = np.frombuffer(data, "<u2").astype(np.uint32) << 16
        return words.view(np.float32).reshape(shape)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.frombuffer(data, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float32).reshape(shape)


def _weight_files(folder):
    """{file: names of the tensors that are to be read from it, None for all}."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return {single: None}
    if not index.is_file():
        raise Wrong("no weights")
    try:
        weight_map = json.loads(index.read_bytes().decode("utf-8-sig"))["weight_map"]
        names = sorted(set(weight_map.values()))
        inside = all(
            isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\0") for name in names
        )
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise Wrong("no index") from error
    if not names or not inside or not all(os.path.isfile(folder / name) for name in names):
        raise Wrong("an index of other files")
    return {folder / name: [tensor for tensor, file in weight_map.items() if file == name] for name in names}


def parameters(folder, config):
    """({name: float32 array} of a right checkpoint with this config.json, whether refusing it is right too).

    Raises Wrong for any other.
    """
    stored, unclear = {}, False
    for path, wanted in _weight_files(Path(folder)).items():
        tensors, odd = read_safetensors(path.read_bytes())
        unclear |= odd
        for spelled in tensors if wanted is None else wanted:
            name = spelled.removeprefix("transformer.")
            if re.fullmatch(r"h\.[0-9]+\.attn\.(bias|masked_bias)", name):
                continue
            if name in stored:
                raise Wrong(f"{name} twice")
            if spelled not in tensors:
                raise Wrong(f"{name} is not where the index says")
            stored[name] = tensors[spelled]
    shapes = parameter_shapes(DEFAULTS | config)
    if not shapes.keys() <= stored.keys():
        raise Wrong("tensors are missing")
    if any(re.match(r"(h\.\d+|wte|wpe|ln_f)\.", name) for name in stored.keys() - shapes.keys()):
        raise Wrong("tensors that the config has no place for")
    for name, shape in shapes.items():
        if stored[name][1] != shape or stored[name][0] not in ("F64", "F32", "F16", "BF16"):
            raise Wrong(f"{name} has another shape or dtype")
    return {name: as_float32(*stored[name]) for name in shapes}, unclear
