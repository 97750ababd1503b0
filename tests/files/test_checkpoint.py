"""From files to a model: what is found, read, refused and warned of; the float64 reference judges what was read."""

import contextlib
import itertools
import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

import minigen
from minigen.engine.model import GPT2
from minigen.files.checkpoint import load_config, load_weights
from minigen.files.hub import resolve_checkpoint
from tests.golden.make_logits import stored_params
from tests.oracles import reference
from tests.oracles.reference import reference_logits
from tests.oracles.tiny import (
    BYTE_OF_ID,
    as_stored,
    bfloat16_bits,
    parameter_shapes,
    rounded,
    tiny_config,
    tiny_params,
    to_bytes,
    write_byte_vocab,
    write_checkpoint,
    write_safetensors,
)

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = ROOT / "weights"
IDS = np.random.default_rng(7).integers(97, size=12)
N_LAYER_NAMES = 12  # parameters in a layer


# ---- helpers -----------------------------------------------------------------------------------------------------


def read(folder):
    """The model of a folder that needs no tokenizer."""
    config = load_config(folder)
    return GPT2(config, load_weights(folder, config))


def read_in_silence(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return read(folder)


def logits(model):
    return model.forward(IDS[None], last_only=False)[0]


def assert_equals_reference(model, config, params):
    """The model's parameters are these values, bit by bit, and its logits the reference's."""
    found = as_stored(model)
    assert set(found) == set(parameter_shapes(config))
    for name, value in params.items():
        assert found[name].dtype == np.float32, name
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    found, expected = logits(model), reference_logits(config, params, IDS)
    assert found.dtype == np.float32
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 1e-5  # NaN fails too


def assert_same_logits(folder, other):
    np.testing.assert_array_equal(logits(read_in_silence(folder)), logits(read_in_silence(other)))


def refused(call, *words, kind=(ValueError, OSError)):
    """The call raises an error of ours: one line that holds all of the words. Returns the line."""
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert str(word) in message
    return message


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The tiny checkpoint that most tests compare with: (folder, config, params)."""
    config = tiny_config()
    params = tiny_params(config)
    return write_checkpoint(tmp_path_factory.mktemp("plain"), config, params), config, params


def set_config(folder, **overrides):
    (folder / "config.json").write_text(json.dumps(tiny_config() | overrides))


def layout(params):
    """(header, data) of a safetensors file of float32 tensors, to be bent out of shape and written by raw_file."""
    header, data = {}, b""
    for name, value in params.items():
        part = to_bytes(value, "F32")
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    return header, data


def raw_file(folder, header, data):
    """Write model.safetensors from a header (dictionary or text) as it is, unpadded, and data."""
    header = (header if isinstance(header, str) else json.dumps(header)).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)


def move_later_tensors(header, start, by):
    """Add `by` to all offsets from `start` on."""
    for entry in header.values():
        if entry["data_offsets"][0] >= start:
            entry["data_offsets"] = [offset + by for offset in entry["data_offsets"]]


# ---- names -------------------------------------------------------------------------------------------------------


def test_the_prefix_may_be_present_or_absent(tmp_path, plain):
    """L01: names with and without `transformer.`, and the head's name, which never has it."""
    folder, config, params = plain
    with_prefix = write_checkpoint(tmp_path / "prefix", config, params, prefix="transformer.")
    with_head = write_checkpoint(
        tmp_path / "head", config, params | {"lm_head.weight": params["wte.weight"]}, prefix="transformer."
    )
    assert_equals_reference(read_in_silence(folder), config, params)
    assert_same_logits(with_prefix, folder)
    assert_same_logits(with_head, folder)


@pytest.mark.parametrize("shards", [1, 3])
def test_one_tensor_under_both_names_is_refused(tmp_path, plain, shards):
    """L01: one tensor under both names."""
    _, config, params = plain
    params = params | {"transformer.h.0.ln_1.bias": params["h.0.ln_1.bias"]}
    folder = write_checkpoint(tmp_path, config, params, shards=shards)
    refused(lambda: read(folder), "h.0.ln_1.bias", "transformer.h.0.ln_1.bias", kind=ValueError)


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_mask_buffers_are_skipped_and_the_parameter_beside_them_is_not(tmp_path, plain, prefix):
    """L02: old files carry masks, which do not make attention causal; c_attn.bias is none of them."""
    folder, config, params = plain
    mask = np.ones((1, 1, 16, 16))  # of which nothing may come: it hides no token
    kinds = {"h.0.attn.bias": bool, "h.1.attn.bias": np.uint8}
    buffers = {f"{prefix}{name}": mask.astype(kind) for name, kind in kinds.items()}
    buffers |= {f"{prefix}h.{layer}.attn.masked_bias": np.array(-1e4, np.float32) for layer in range(2)}
    with_buffers = write_checkpoint(tmp_path, config, params, prefix=prefix, extra=buffers)
    assert all(np.abs(params[f"h.{layer}.attn.c_attn.bias"]).max() > 0.5 for layer in range(2))
    assert_equals_reference(read_in_silence(with_buffers), config, params)
    assert_same_logits(with_buffers, folder)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "base_model.model.", "_orig_mod.transformer."])
def test_names_with_the_prefix_of_a_wrapper_are_refused_with_what_the_file_holds(tmp_path, plain, prefix):
    """F07: torch.compile, DataParallel and PEFT put prefixes on names."""
    _, config, params = plain
    folder = write_checkpoint(tmp_path, config, params, prefix=prefix)
    refused(lambda: read(folder), "lacks wte.weight", f"holds {prefix}", "wrapper", kind=ValueError)


# ---- the output head ---------------------------------------------------------------------------------------------


def test_a_tied_head_is_the_embedding_itself_and_no_copy(plain):
    """L03: no lm_head.weight in the file."""
    folder, config, params = plain
    assert "tie_word_embeddings" not in config
    model = read_in_silence(folder)
    assert model.head is model.params["wte.weight"]
    assert_equals_reference(model, config, params)


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_an_untied_head_is_the_files_own(tmp_path, plain, prefix):
    """L05: a head of its own that is ignored."""
    folder, _, tied = plain
    config = tiny_config(tie_word_embeddings=False)
    head = np.random.default_rng(3).standard_normal((97, 8)).astype(np.float32)
    untied = write_checkpoint(tmp_path, config, tied | {"lm_head.weight": head}, prefix=prefix)
    model = read_in_silence(untied)
    assert_equals_reference(model, config, tied | {"lm_head.weight": head})
    assert np.abs(logits(model) - logits(read(folder))).max() > 0.1


@pytest.mark.parametrize("tie", [{}, {"tie_word_embeddings": True}], ids=["by default", "by config.json"])
def test_a_needless_copy_of_a_tied_head_is_taken_in_silence(tmp_path, plain, tie):
    """L05: a tied head that is in the file as well."""
    folder, _, params = plain
    copied = write_checkpoint(tmp_path, tiny_config(**tie), params | {"lm_head.weight": params["wte.weight"]})
    model = read_in_silence(copied)
    assert model.head is model.params["wte.weight"]
    assert "lm_head.weight" not in model.params
    assert_same_logits(copied, folder)


HEADS = {  # (dtype, shape, bytes) of a head that is not the embedding
    "other values": lambda wte: ("F32", wte.shape, to_bytes(wte + 1, "F32")),
    "one other value": lambda wte: ("F32", wte.shape, to_bytes(wte, "F32")[:-4] + to_bytes([9.0], "F32")),
    "rounded values": lambda wte: ("BF16", wte.shape, to_bytes(wte, "BF16")),
    "other size": lambda wte: ("F32", (98, 8), bytes(98 * 8 * 4)),
    "transposed": lambda wte: ("F32", (8, 97), to_bytes(wte.T, "F32")),
    "unreadable dtype": lambda wte: ("F8_E4M3", wte.shape, bytes(wte.size)),
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_a_head_that_contradicts_a_tied_config_is_warned_of_and_not_used(tmp_path, plain, head):
    """L05: a head that contradicts a tied config."""
    _, config, params = plain
    set_config(tmp_path)
    tensors = {name: ("F32", value.shape, to_bytes(value, "F32")) for name, value in params.items()}
    write_safetensors(tmp_path / "model.safetensors", tensors | {"lm_head.weight": head(params["wte.weight"])})
    with pytest.warns(UserWarning, match=r"lm_head\.weight.*wte\.weight") as caught:
        model = read(tmp_path)
    assert len(caught) == 1
    assert_equals_reference(model, config, params)


@pytest.mark.slow
def test_a_large_head_is_compared_to_its_last_value(tmp_path):
    config = tiny_config(vocab_size=2**17 + 1, n_layer=1)  # over a million values, which are read in two pieces
    params = tiny_params(config)
    for row in (None, 0, -1):
        head = params["wte.weight"].copy()
        if row is not None:
            head[row, row] += 1
        folder = write_checkpoint(tmp_path, config, params | {"lm_head.weight": head}, dtype="F16")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            read(folder)
        assert ["lm_head.weight" in str(warning.message) for warning in caught] == [True] * (row is not None)
    (tmp_path / "model.safetensors").unlink()  # pytest would keep it


# ---- shapes ------------------------------------------------------------------------------------------------------


def test_square_matrices_are_used_as_input_by_output(plain):
    """L06: a square matrix the wrong way round passes every check of shapes."""
    folder, config, params = plain
    turned = params | {f"h.{i}.attn.c_proj.weight": params[f"h.{i}.attn.c_proj.weight"].T for i in range(2)}
    assert_equals_reference(read(folder), config, params)
    # The test would not notice a transposed matrix otherwise.
    assert np.abs(reference_logits(config, turned, IDS) - reference_logits(config, params, IDS)).max() > 0.1


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("h.0.attn.c_attn.weight", (24, 8)),  # as a Linear layer would store it: as many numbers
        ("h.1.mlp.c_fc.weight", (32, 8)),
        ("h.1.mlp.c_proj.weight", (8, 32)),
        ("wpe.weight", (8, 16)),
        ("wte.weight", (8, 97)),
        ("h.0.attn.c_proj.weight", (64,)),
        ("h.0.attn.c_proj.weight", (1, 8, 8)),
        ("ln_f.weight", (1, 8)),
        ("ln_f.bias", (8, 1)),
        ("wte.weight", (96, 8)),
        ("wte.weight", (104, 8)),
        ("wpe.weight", (17, 8)),
        ("h.1.attn.c_attn.bias", (8,)),
        ("h.0.ln_2.bias", (0,)),
        ("h.0.ln_2.bias", ()),
    ],
    ids=str,
)
def test_a_wrong_shape_is_refused_with_name_and_both_shapes(tmp_path, plain, name, shape):
    """L06: matrices stored [out, in]."""
    _, config, params = plain
    numbers = np.resize(params[name], shape)
    folder = write_checkpoint(tmp_path, config, params | {name: numbers})
    refused(lambda: read(folder), name, shape, parameter_shapes(config)[name], kind=ValueError)


# ---- missing and superfluous tensors -----------------------------------------------------------------------------


UNTIED = tiny_config(tie_word_embeddings=False)


@pytest.mark.parametrize(
    "gone", [*([name] for name in parameter_shapes(UNTIED)), ["h.1.mlp.c_fc.bias", "wpe.weight", "ln_f.weight"]]
)
def test_every_missing_tensor_is_named(tmp_path, gone):
    """L05, L12: a missing tensor that silently becomes zeros, or an untied head that becomes the embedding."""
    present = {name: value for name, value in tiny_params(UNTIED).items() if name not in gone}
    folder = write_checkpoint(tmp_path, UNTIED, present)
    refused(lambda: read(folder), *gone, kind=ValueError)


@pytest.mark.parametrize(("n_layer", "named", "unnamed"), [(3, "h.2.", "h.1."), (1, "h.1.", "h.0.")])
def test_a_config_with_a_layer_more_or_less_than_the_file_is_refused(tmp_path, plain, n_layer, named, unnamed):
    """L12: more layers in the config than in the file, and fewer."""
    folder = write_checkpoint(tmp_path, tiny_config(n_layer=n_layer), plain[2])
    message = refused(lambda: read(folder), named, "more", kind=ValueError)
    assert unnamed not in message
    # The sentence stays one that can be read: some of the twelve are named, the rest are counted.
    assert message.count(named) + int(re.search(r"(\d+) more", message)[1]) == N_LAYER_NAMES


@pytest.mark.parametrize("name", ["h.0.crossattention.c_attn.weight", "h.1.attn.c_attn.lora_A", "wte.bias", "ln_f.x"])
def test_a_tensor_that_would_change_the_model_is_refused(tmp_path, plain, name):
    _, config, params = plain
    folder = write_checkpoint(tmp_path, config, params, extra={f"transformer.{name}": np.ones(3, np.float32)})
    refused(lambda: read(folder), name, kind=ValueError)


@pytest.mark.parametrize("name", ["score.weight", "multiple_choice_head.summary.bias", "lm_head.bias"])
def test_another_head_is_warned_of_and_not_used(tmp_path, plain, name):
    _, config, params = plain
    folder = write_checkpoint(tmp_path, config, params, extra={name: np.ones(3, np.float32)})
    with pytest.warns(UserWarning, match=re.escape(name)) as caught:
        model = read(folder)
    assert len(caught) == 1
    assert_equals_reference(model, config, params)


# ---- dtypes ------------------------------------------------------------------------------------------------------


def mixed_dtypes(config):
    kinds = {name: "F32" if ".ln_" in name or name.startswith("ln_") else "BF16" for name in parameter_shapes(config)}
    return kinds | {"wte.weight": "F16", "wpe.weight": "F64"}


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "mixed"])
def test_each_dtype_is_widened_to_exactly_its_values(tmp_path, dtype, shards):
    """L07: NumPy has no bfloat16."""
    config = tiny_config(tie_word_embeddings=False)
    rng = np.random.default_rng(1)
    # Not float32 to begin with, so that a float64 file holds what float32 has to round.
    params = {name: value + 1e-9 * rng.standard_normal(value.shape) for name, value in tiny_params(config).items()}
    kinds = mixed_dtypes(config) if dtype == "mixed" else dict.fromkeys(params, dtype)
    folder = write_checkpoint(tmp_path, config, params, dtype=kinds, shards=shards)
    stored = {name: rounded(value, kinds[name]) for name, value in params.items()}
    assert_equals_reference(read_in_silence(folder), config, stored)


def test_bfloat16_is_the_upper_half_of_a_float32(tmp_path, plain):
    """L07: bfloat16 words with known values."""
    _, config, params = plain
    folder = write_checkpoint(tmp_path, config, params, dtype="BF16")
    path = folder / "model.safetensors"
    words = bfloat16_bits(params["wte.weight"]).astype("<u2").tobytes()
    # 3F80, C000, 3DCD, then both infinities, the smallest and the largest finite number and minus zero.
    known = bytes.fromhex("803f 00c0 cd3d 807f 80ff 0100 7f7f 0080")
    data = path.read_bytes()
    assert data.count(words) == 1
    path.write_bytes(data.replace(words, known + words[len(known) :]))
    found = as_stored(read(folder))["wte.weight"][0]
    assert found.tolist() == [1.0, -2.0, 0.10009765625, np.inf, -np.inf, 2.0**-133, (2 - 2**-7) * 2.0**127, 0.0]
    assert np.signbit(found[7])


@pytest.mark.parametrize(("dtype", "size"), [("F8_E4M3", 1), ("F8_E5M2", 1), ("I32", 4), ("U8", 1), ("F31", 4)])
def test_a_dtype_that_cannot_be_read_is_refused_with_the_tensors_name(tmp_path, plain, dtype, size):
    """L07: 8-bit floats, other dtypes, and one that does not exist."""
    params = plain[2]
    set_config(tmp_path)
    tensors = {name: ("F32", value.shape, to_bytes(value, "F32")) for name, value in params.items()}
    tensors["h.1.ln_2.weight"] = (dtype, (8,), bytes(8 * size))
    write_safetensors(tmp_path / "model.safetensors", tensors)
    refused(lambda: read(tmp_path), "h.1.ln_2.weight", dtype, kind=ValueError)


def test_half_precision_files_run_in_float32_and_never_leak_the_future(tmp_path):
    """L16: float16 all the way, and masks by finite constants."""
    config = tiny_config()
    params = tiny_params(config)
    for layer in range(2):  # queries and keys, not values
        params[f"h.{layer}.attn.c_attn.weight"][:, :16] *= 300
    params = {name: rounded(value, "F16") for name, value in params.items()}
    x = params["wte.weight"][IDS] + params["wpe.weight"][:12]
    h = reference.layer_norm(x.astype(float), params["h.0.ln_1.weight"], params["h.0.ln_1.bias"], 1e-5)
    qkv = h @ params["h.0.attn.c_attn.weight"] + params["h.0.attn.c_attn.bias"]
    scores = qkv[:, :4] @ qkv[:, 8:12].T / 2  # the first head: too low for float16 mask constants
    assert scores[np.tril_indices(12)].min() < -2e4

    model = read(write_checkpoint(tmp_path, config, params, dtype="F16"))
    assert {value.dtype for value in as_stored(model).values()} == {np.dtype(np.float32)}
    found = logits(model)
    assert found.dtype == np.float32
    assert np.isfinite(found).all()
    for changed in range(1, 12):
        ids = IDS.copy()
        ids[changed:] = (ids[changed:] + 1) % 97
        other = model.forward(ids[None], last_only=False)[0]
        np.testing.assert_array_equal(other[:changed], found[:changed])
        assert (other[changed] != found[changed]).any()


# ---- damaged safetensors files -----------------------------------------------------------------------------------


def end_of_tensor(data, number):
    """Where in the bytes of a file the data of its n-th tensor ends."""
    size = int.from_bytes(data[:8], "little")
    offsets = sorted(
        entry["data_offsets"][1] for name, entry in json.loads(data[8 : 8 + size]).items() if name[0] != "_"
    )
    return 8 + size + offsets[number]


DAMAGES = {
    "the last tensor gone": lambda data: data[: end_of_tensor(data, -2)],
    "only the first tensor": lambda data: data[: end_of_tensor(data, 0)],
    "no data": lambda data: data[: 8 + int.from_bytes(data[:8], "little")],
    "half a header": lambda data: data[:600],
    "nothing but the header's length": lambda data: data[:8],
    "half the header's length": lambda data: data[:5],
    "empty": lambda data: b"",
    "a second copy behind": lambda data: data + data,
    "a header longer than the file": lambda data: (len(data) + 1).to_bytes(8, "little") + data[8:],
    "a header of 2**63 bytes": lambda data: (2**63).to_bytes(8, "little") + data[8:],
    "a header of 2**64 - 8 bytes": lambda data: (2**64 - 8).to_bytes(8, "little") + data[8:],
    "a header of 0 bytes": lambda data: bytes(8) + data[8:],
    "a header cut by a byte": lambda data: (int.from_bytes(data[:8], "little") - 200).to_bytes(8, "little") + data[8:],
    "a header in UTF-16": lambda data: (44).to_bytes(8, "little") + "{'a': 1}".ljust(22).encode("utf-16-le"),
    "zeros": lambda data: bytes(len(data)),
    "a web page": lambda data: b"<!DOCTYPE html><html><head><title>404 Not Found</title></head></html>",
    "the text that large file storage leaves": lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0",
    "a pickle": lambda data: b"PK\x03\x04" + data[4:],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_refused_by_name(tmp_path, plain, damage):
    """L09: cut off, or with bytes behind its end."""
    folder, _, _ = plain
    set_config(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(damage((folder / "model.safetensors").read_bytes()))
    refused(lambda: read(tmp_path), tmp_path / "model.safetensors")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 548105171\n"


@pytest.mark.parametrize("shards", [1, 3])
def test_a_pointer_of_git_lfs_is_called_one(tmp_path, plain, shards):
    """F26: a repository that was cloned without its large files."""
    folder = write_checkpoint(tmp_path, plain[1], plain[2], shards=shards)
    path = max(folder.glob("*.safetensors"))
    path.write_text(POINTER)
    refused(lambda: read(folder), path, "Git LFS pointer", "git lfs pull")


def test_a_damaged_file_of_the_hubs_cache_is_to_be_deleted_where_it_really_is(tmp_path, plain):
    """F28: a downloaded file with other bytes is a link to them, and deleting the link alone changes nothing."""
    folder = write_checkpoint(tmp_path / "snapshot", plain[1], plain[2])
    link, blob = folder / "model.safetensors", tmp_path / "blob"
    link.rename(blob)
    link.symlink_to(blob)
    blob.write_bytes(bytes(blob.stat().st_size))
    refused(lambda: read(folder), link, f"delete {blob.resolve()} and download")


@pytest.mark.parametrize("change", [-4, -1, 4])
def test_a_file_of_another_size_is_refused_with_both_sizes(tmp_path, plain, change):
    """L09: expected and found size."""
    data = (plain[0] / "model.safetensors").read_bytes()
    set_config(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(data[:change] if change < 0 else data + bytes(change))
    refused(lambda: read(tmp_path), f" {len(data)}", f" {len(data) + change} bytes")


def test_a_file_that_becomes_shorter_while_it_is_read_is_refused(tmp_path, plain):
    """L09: cut off after its header was read."""
    shutil.copytree(plain[0], tmp_path, dirs_exist_ok=True)
    tensors = load_weights(tmp_path, load_config(tmp_path))
    os.truncate(tmp_path / "model.safetensors", 3000)
    refused(lambda: dict(tensors), tmp_path / "model.safetensors", "truncated")


F32 = {"dtype": "F32"}
LYING_HEADERS = {  # one- and two-tensor files: header, bytes of data
    "a shape beyond its bytes": ({"a": F32 | {"shape": [1000, 1000], "data_offsets": [0, 16]}}, 16),
    "a shape smaller than its bytes": ({"a": F32 | {"shape": [2], "data_offsets": [0, 16]}}, 16),
    "one range for two": ({n: F32 | {"shape": [4], "data_offsets": [0, 16]} for n in "ab"}, 16),
    "a hole": (
        {"a": F32 | {"shape": [1], "data_offsets": [0, 4]}, "b": F32 | {"shape": [1], "data_offsets": [8, 12]}},
        12,
    ),
    "an overlap": (
        {"a": F32 | {"shape": [2], "data_offsets": [0, 8]}, "b": F32 | {"shape": [2], "data_offsets": [4, 12]}},
        12,
    ),
    "not from the start": ({"a": F32 | {"shape": [1], "data_offsets": [4, 8]}}, 8),
    "reversed offsets": ({"a": F32 | {"shape": [4], "data_offsets": [16, 0]}}, 16),
    "negative offsets": ({"a": F32 | {"shape": [4], "data_offsets": [-16, 0]}}, 16),
    "offsets beyond the file": ({"a": F32 | {"shape": [4], "data_offsets": [0, 16]}}, 12),
    "offsets of 2**64": ({"a": F32 | {"shape": [4], "data_offsets": [2**64, 2**64 + 16]}}, 16),
    "a negative shape": ({"a": F32 | {"shape": [-4], "data_offsets": [0, 16]}}, 16),
    "two negative dimensions": ({"a": F32 | {"shape": [-2, -2], "data_offsets": [0, 16]}}, 16),
    "a shape that overflows": ({"a": F32 | {"shape": [2**32, 2**32, 4], "data_offsets": [0, 0]}}, 0),
    "a fraction in the shape": ({"a": F32 | {"shape": [4.0], "data_offsets": [0, 16]}}, 16),
    "no shape": ({"a": F32 | {"data_offsets": [0, 16]}}, 16),
    "no offsets": ({"a": F32 | {"shape": [4]}}, 16),
    "no dtype": ({"a": {"shape": [4], "data_offsets": [0, 16]}}, 16),
    "one offset": ({"a": F32 | {"shape": [4], "data_offsets": [16]}}, 16),
    "a tensor that is a number": ({"a": 3}, 16),
    "a list": ("[1,2]", 16),
    "a number": ("3", 16),
    "nothing": ("", 16),
    "one name twice": (
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        8,
    ),
    "one name twice for one range": (
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        4,
    ),
}


@pytest.mark.parametrize(("header", "n_bytes"), LYING_HEADERS.values(), ids=LYING_HEADERS)
def test_a_header_that_lies_is_refused(tmp_path, header, n_bytes):
    """L10: offsets and shapes that do not fit each other or the file, and names that come twice."""
    set_config(tmp_path)
    raw_file(tmp_path, header, bytes(n_bytes))
    message = refused(lambda: read(tmp_path), tmp_path / "model.safetensors")
    sizes = "bytes, its header declares" in message
    if isinstance(header, dict):  # with the tensor's name, or with sizes that say where the file ends
        assert re.search("[`'][ab][`']", message) or sizes


def test_unusual_but_correct_headers_are_read(tmp_path, plain):
    """L10: rare but right headers must not be refused, nor data that is not aligned."""
    _, config, params = plain
    set_config(tmp_path)
    header, data = layout(params)

    def check(header, data=data):
        raw_file(tmp_path, header, data)
        assert_equals_reference(read_in_silence(tmp_path), config, params)

    check(dict(reversed(header.items())))
    shuffled = list(header)
    random.Random(0).shuffle(shuffled)
    check({name: header[name] for name in shuffled})
    check({"__metadata__": {"format": "pt", "step": "3"}} | header)
    check(header | {"__metadata__": {}})
    for key_order in (("data_offsets", "shape", "dtype"), ("shape", "dtype", "data_offsets")):
        check({name: {key: entry[key] for key in key_order} for name, entry in header.items()})
    check(json.dumps(header, indent=3))
    for pad in range(8):  # whatever the length of the header, the data begins right behind it, aligned or not
        check(json.dumps(header) + " " * pad)
    nothing = {"h.0.attn.masked_bias": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}
    check(nothing | header)
    number = {"h.0.attn.masked_bias": {"dtype": "F16", "shape": [], "data_offsets": [len(data), len(data) + 2]}}
    check(header | number, data + b"\x00\x3c")  # an even length of 2, so nothing is aligned to 4
    move_later_tensors(header, 0, 3)  # nor to 2
    check({"h.0.attn.bias": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}} | header, b"abc" + data)


@pytest.mark.slow
def test_a_header_of_many_names_takes_no_time(tmp_path, plain):
    _, config, params = plain
    extra = {f"h.0.extra.{i}": np.float32(0) for i in range(15_000)}
    folder = write_checkpoint(tmp_path, config, params, extra=extra)
    start = time.process_time()
    refused(lambda: read(folder), "h.0.extra.0", "14994 more", kind=ValueError)
    assert time.process_time() - start < 1


# ---- shards ------------------------------------------------------------------------------------------------------

INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(("shards", "prefix"), [(2, ""), (3, "transformer."), (28, "")])
def test_shards_are_one_checkpoint(tmp_path, plain, shards, prefix):
    folder, config, params = plain
    sharded = write_checkpoint(tmp_path, config, params, shards=shards, prefix=prefix)
    assert len(list(sharded.glob("*.safetensors"))) == shards
    assert_equals_reference(read_in_silence(sharded), config, params)
    assert_same_logits(sharded, folder)


def test_shards_may_have_any_name(tmp_path, plain):
    folder, config, params = plain
    sharded = write_checkpoint(tmp_path, config, params, shards=2)
    text = (sharded / INDEX).read_text()
    for old, new in (("model-00001-of-00002", "b"), ("model-00002-of-00002", "ä c")):
        (sharded / f"{old}.safetensors").rename(sharded / f"{new}.safetensors")
        text = text.replace(old, new)
    (sharded / INDEX).write_text(text, encoding="utf-8")
    assert_same_logits(sharded, folder)


def test_a_missing_shard_is_named(tmp_path, plain):
    folder = write_checkpoint(tmp_path, plain[1], plain[2], shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    refused(lambda: read(folder), "model-00002-of-00003.safetensors", kind=OSError)


def edit_map(folder, **moved):
    """Let the index name other shards for some tensors."""
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= moved
    (folder / INDEX).write_text(json.dumps(index))


def shard(number, of=2):
    return f"model-{number:05d}-of-{of:05d}.safetensors"


def test_a_tensor_is_read_from_the_shard_that_the_index_names_or_not_at_all(tmp_path, plain):
    """F08: a stale copy of a tensor in another shard than the one that the index names."""
    folder, config, params = plain
    stale = {"h.0.attn.c_attn.bias": params["h.0.attn.c_attn.bias"] + 1}
    sharded = write_checkpoint(tmp_path, config, params | stale, shards=2)
    edit_map(sharded, **{"h.0.attn.c_attn.bias": shard(2)})
    refused(lambda: read(sharded), "h.0.attn.c_attn.bias", shard(2), INDEX, kind=ValueError)
    # The shard that the index names now has the tensor, and the stale copy is still there.
    names = json.loads((sharded / INDEX).read_text())["weight_map"]
    second = {name: params[name] for name, file in names.items() if file == shard(2)}
    write_safetensors(
        sharded / shard(2), {name: ("F32", value.shape, to_bytes(value, "F32")) for name, value in second.items()}
    )
    assert_same_logits(sharded, folder)


def test_a_single_file_goes_before_shards(tmp_path, plain):
    folder, config, params = plain
    both = write_checkpoint(tmp_path, config, tiny_params(config, seed=1), shards=2)
    write_checkpoint(both, config, params)
    assert_same_logits(both, folder)
    (both / "model-00001-of-00002.safetensors").unlink()
    assert_same_logits(both, folder)


@pytest.mark.parametrize(
    "name", ["../outside", "sub/../../outside", "sub/inside", "ABSOLUTE", "..", ".", "", "a\0b", "9" * 5000]
)
def test_an_index_that_leaves_the_folder_is_refused(tmp_path, plain, name):
    _, config, params = plain
    folder = write_checkpoint(tmp_path / "checkpoint", config, params, shards=2)
    (folder / "sub").mkdir()
    first = folder / "model-00001-of-00002.safetensors"
    for path in (tmp_path / "outside", folder / "sub" / "inside"):  # the files are there: only the name is wrong
        path.write_bytes(first.read_bytes())
    name = name.replace("ABSOLUTE", str(tmp_path / "outside"))
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {key: name if value == first.name else value for key, value in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index))
    first.unlink()
    assert len(refused(lambda: read(folder), INDEX)) < 1000


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        '{"metadata": {"total_size": 3}}',
        '{"weight_map": {}}',
        '{"weight_map": null}',
        '{"weight_map": ["model-00001-of-00002.safetensors"]}',
        '{"weight_map": {"wte.weight": 3}}',
        '{"weight_map": {"wte.weight": ["model-00001-of-00002.safetensors"]}}',
        "[]",
        "null",
        '"weight_map"',
        "{",
        "",
        "[" * 100_000,
    ],
    ids=lambda text: text[:40] or "empty",
)
def test_an_index_that_is_no_index_is_refused_by_name(tmp_path, plain, content):
    folder = write_checkpoint(tmp_path, plain[1], plain[2], shards=2)
    (folder / INDEX).write_text(content)
    refused(lambda: read(folder), folder / INDEX, kind=ValueError)


# ---- config.json -------------------------------------------------------------------------------------------------


def test_a_missing_config_is_named(tmp_path, plain):
    folder = write_checkpoint(tmp_path, plain[1], plain[2])
    (folder / "config.json").unlink()
    refused(lambda: load_config(folder), "config.json", folder, kind=OSError)
    refused(lambda: minigen.load(folder), "config.json", folder, kind=OSError)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b'{"n_layer": 2,}', b"\xff\xfe{}", b'{"a": "\xff"}', b"[" * 100_000, b"1" * 5000, b"gpt2", b"\0"),
        *(b"[1]", b'["model_type"]', b'"gpt2"', b"3", b"null", b"NaN", b"[]"),
    ],
    ids=lambda content: repr(content[:20]),
)
def test_a_config_that_is_not_json_or_not_an_object_is_refused_by_name(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    refused(lambda: load_config(tmp_path), tmp_path / "config.json", kind=ValueError)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_value_nested_as_deep_as_the_parser_allows_is_refused(tmp_path, plain, name):
    """F18: what can just be parsed may be too deep to be printed in the message."""
    folder = shutil.copytree(plain[0], tmp_path / "deep")
    limit = sys.getrecursionlimit()
    for depth in (*range(limit - 250, limit), 100_000):
        text = json.dumps(tiny_config() | {"eos_token_id": "deep"}).replace('"deep"', "[" * depth + "]" * depth)
        (folder / name).write_text(text)
        refused(lambda: load_config(folder), folder / name, kind=ValueError)


def test_the_defaults_are_those_of_the_transformers_library(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    config = load_config(tmp_path)
    expected = {
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": None,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "tie_word_embeddings": True,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    }
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.eos_ids == (50256,)


def test_end_of_text_ids_outside_the_vocabulary_are_left_out():
    for stated, kept in (([-1, 5, 299, 300], (5, 299)), (-1, ()), (300, ()), (None, ())):
        assert minigen.GPT2Config(vocab_size=300, eos_token_id=stated).eos_ids == kept


@pytest.mark.parametrize(("vocab_size", "expected"), [(97, None), (50256, None), (50257, 50256), (60000, 50256)])
def test_the_default_ids_are_those_of_a_vocabulary_that_has_them(tmp_path, vocab_size, expected):
    """F04: GPT-2's own end-of-text is no reason to refuse a smaller vocabulary whose config.json names no ids."""
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = load_config(tmp_path)
    assert (config.bos_token_id, config.eos_token_id) == (expected, expected)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "eos_ids", "bos_id"),
    [
        ({"bos_token_id": 50256, "eos_token_id": 50256}, {}, (), None),  # what transformers writes for 257 tokens
        ({"eos_token_id": 257}, {}, (), 256),
        ({"eos_token_id": -1}, {}, (), 256),
        ({"eos_token_id": 10**30}, {}, (), 256),
        ({"eos_token_id": [256, 50256]}, {}, (256,), 256),
        ({"eos_token_id": [0, -1, 3]}, {}, (0, 3), 256),
        ({}, {"eos_token_id": [256, 50256], "bos_token_id": 50256}, (256,), None),
        ({"bos_token_id": -1}, {}, (256,), None),
    ],
    ids=str,
)
def test_an_id_outside_the_vocabulary_is_dropped_with_a_warning(tmp_path, in_config, in_generation, eos_ids, bos_id):
    """F04: an end-of-text id that cannot be sampled ends no text; a begin-of-text id is for an empty prompt."""
    config = tiny_config(vocab_size=257) | in_config
    folder = write_byte_vocab(write_checkpoint(tmp_path, config, tiny_params(config)))
    (folder / "generation_config.json").write_text(json.dumps(in_generation))
    named = in_generation or in_config
    with pytest.warns(UserWarning, match=".*".join(sorted(named)[-1:])) as caught:
        model, tokenizer = minigen.load(folder)
    assert len(caught) == len(named)
    assert (model.config.eos_ids, model.config.bos_token_id) == (eos_ids, bos_id)
    assert len(minigen.generate(model, tokenizer, "ab", max_tokens=3, ignore_eos=True)[0].token_ids) == 3
    if bos_id is None:
        refused(lambda: minigen.generate(model, tokenizer, "", max_tokens=1), "empty", "begin-of-text", kind=ValueError)


def test_an_id_that_generation_config_overrides_is_not_warned_of(tmp_path):
    """F04: what a config says and the model never uses."""
    set_config(tmp_path, eos_token_id=50256)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3}')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_config(tmp_path).eos_ids == (3,)


def test_an_empty_prompt_begins_with_the_id_of_generation_config(tmp_path):
    """F05: the begin-of-text id of generation_config.json."""
    config = tiny_config(vocab_size=257)
    folder = write_byte_vocab(write_checkpoint(tmp_path, config, tiny_params(config)))
    (folder / "generation_config.json").write_text('{"bos_token_id": 65}')
    model, tokenizer = minigen.load(folder)
    empty, begun = (minigen.generate(model, tokenizer, [prompt], max_tokens=5, seed=1) for prompt in ("", [65]))
    assert empty[0].token_ids == begun[0].token_ids
    assert empty[0].token_ids != minigen.generate(model, tokenizer, [[256]], max_tokens=5, seed=1)[0].token_ids


def test_a_begin_of_text_token_that_the_tokenizer_adds_begins_a_session_and_nothing_else(tmp_path):
    """F03: add_bos_token, with texts that are only a part of a text."""
    config = tiny_config(vocab_size=257)
    folder = write_byte_vocab(write_checkpoint(tmp_path, config, tiny_params(config)))
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    model, tokenizer = minigen.load(folder)
    session = minigen.Session(model, tokenizer, max_tokens=1, ignore_eos=True, logit_bias={"a": 100})
    for _ in range(2):
        list(session.turn("b"))
    a, b, newline = byte_ids("ab\n")
    assert session.context == [256, b, a, newline, b, a]


ALIASES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}


def test_sizes_may_have_their_names_of_other_architectures(tmp_path, plain):
    """F06: hidden_size, num_hidden_layers, num_attention_heads and max_position_embeddings."""
    folder, config, params = plain
    renamed = {ALIASES.get(name, name): value for name, value in config.items()}
    assert_same_logits(write_checkpoint(tmp_path / "renamed", renamed, params), folder)
    assert_same_logits(write_checkpoint(tmp_path / "both", config | renamed, params), folder)


@pytest.mark.parametrize("name", ALIASES)
def test_two_names_of_one_size_that_differ_are_refused(tmp_path, name):
    """F06: n_embd and hidden_size that contradict each other."""
    set_config(tmp_path, **{ALIASES[name]: 4096})
    refused(lambda: load_config(tmp_path), name, ALIASES[name], 4096, tiny_config()[name], "config.json")


def test_a_byte_order_mark_is_no_part_of_a_config(tmp_path, plain):
    folder, _, _ = plain
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert_same_logits(tmp_path, folder)


@pytest.mark.parametrize("key", ["model_type", "activation_function", "n_embd", "eos_token_id"])
def test_a_long_value_is_not_repeated_in_full(tmp_path, key):
    set_config(tmp_path, **{key: "x" * 10_000})
    assert len(refused(lambda: load_config(tmp_path), key, "xxx ... xxx")) < 1000


@pytest.mark.parametrize("model_type", ["gpt_neo", "gptj", "GPT2", "llama", None, 2, ["gpt2"], ""], ids=str)
def test_another_architecture_is_refused_by_name(tmp_path, plain, model_type):
    """L12: another architecture, run as if it were GPT-2."""
    folder = write_checkpoint(tmp_path, tiny_config(model_type=model_type), plain[2])
    refused(lambda: load_config(folder), "model_type", repr(model_type), "config.json", kind=ValueError)


def test_a_config_without_model_type_is_taken_for_gpt2(tmp_path, plain):
    _, config, params = plain
    del (config := dict(config))["model_type"]
    assert_equals_reference(read_in_silence(write_checkpoint(tmp_path, config, params)), config, params)


def test_keys_that_do_not_change_the_numbers_are_ignored(tmp_path, plain):
    folder, config, params = plain
    more = {
        "architectures": ["GPT2Model"],
        "attn_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "resid_pdrop": "x",
        "n_ctx": 3,
        "use_cache": False,
        "torch_dtype": "float16",
        "dtype": "bfloat16",
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "pad_token_id": -7,
        "params": 3,
        "self": 3,
        "d_head": 3,
        "eos_ids": 3,
        "add_cross_attention": False,
    }
    assert_same_logits(write_checkpoint(tmp_path, config | more, params), folder)


NAN, INF = float("nan"), float("inf")
WRONG_VALUES = {  # keys of config.json, divided by spaces: values that they cannot have
    "vocab_size n_positions n_embd n_layer n_head": [0, -1, "2", 2.0, 2.5, True, None, [2], {}, NAN],
    "n_head": [3, 16, 10**9],  # no divisors of n_embd
    "n_inner": [0, -4, "32", 32.0, False, [32]],
    "layer_norm_epsilon": [NAN, INF, -INF, -1e-5, "1e-5", True, None, [1e-5], 10**400],
    "activation_function": ["foo", "GELU", "", None, 3, ["gelu"], {}, True],
    "scale_attn_weights scale_attn_by_inverse_layer_idx": ["yes", "false", 1, 0, None, [True]],
    "reorder_and_upcast_attn tie_word_embeddings": ["yes", "false", 1, 0, None, [True]],
    "bos_token_id eos_token_id": [96.0, "96", True, {}],
    "bos_token_id": [[1]],
    "eos_token_id": [["1"], [1, None], [[1]], [True]],
    "add_cross_attention": [True],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for names, values in WRONG_VALUES.items() for name in names.split() for value in values],
    ids=lambda x: str(x)[:20],
)
def test_a_value_that_cannot_be_is_refused_with_key_and_file(tmp_path, name, value):
    set_config(tmp_path, **{name: value})
    refused(lambda: load_config(tmp_path), name, "config.json", kind=ValueError)


ACTIVATIONS = ("gelu_new", "gelu", "gelu_pytorch_tanh", "relu", "silu", "tanh", "quick_gelu")
FLAGS = ("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn")
SCALINGS = [dict(zip(FLAGS, values, strict=True)) for values in itertools.product([False, True], repeat=3)]
FORWARD_OPTIONS = [
    {},  # without any activation named
    *[{"activation_function": name} for name in ACTIVATIONS],
    *SCALINGS,
    *[{"layer_norm_epsilon": value} for value in (0, 0.5)],
    *[{"n_inner": value} for value in (20, None)],
    *[{"n_head": value} for value in (1, 4, 8)],
    {"n_layer": 1},
]


@pytest.mark.parametrize("options", FORWARD_OPTIONS, ids=str)
def test_activations_scaling_flags_and_sizes_come_from_config_json(tmp_path, options):
    """L13, L14: activation and scaling flags of the config are ignored."""
    config = tiny_config(**options)
    if not options:
        del config["activation_function"]
    params = tiny_params(config)
    assert_equals_reference(read_in_silence(write_checkpoint(tmp_path, config, params)), config, params)


def test_the_comparisons_tell_activations_and_flags_apart():
    # Those above would pass for any activation if the tolerance were wider than what lies between them.
    config = tiny_config()
    params = tiny_params(config)
    options = [{"activation_function": name} for name in ACTIVATIONS if name != "gelu_pytorch_tanh"]  # is gelu_new
    options += [{FLAGS[0]: False}, {FLAGS[1]: True}, {FLAGS[0]: False, FLAGS[1]: True}]
    found = [reference_logits(config | option, params, IDS) for option in options]
    for i, a in enumerate(found):
        for b in found[:i]:
            assert np.abs(a - b).max() > 1e-4


SIZES_SCRIPT = """
import json, resource, sys, time
from pathlib import Path
from minigen.files.checkpoint import load_config, load_weights

folder, sizes = Path(sys.argv[1]), json.loads(sys.argv[2])
memory = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + 2**28
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_CPU, (5, 5))
good = json.loads((folder / "config.json").read_text())
for size in sizes:
    print(json.dumps(size), flush=True)
    (folder / "config.json").write_text(json.dumps(good | size))
    start = time.process_time()
    try:
        load_weights(folder, load_config(folder))
    except ValueError:
        assert time.process_time() - start < 0.5, "slow"
    else:
        raise AssertionError("accepted")
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="memory is limited with Linux's /proc")
def test_huge_sizes_are_refused_without_taking_time_or_memory(tmp_path, plain):
    folder = write_checkpoint(tmp_path, plain[1], plain[2])
    names = ["vocab_size", "n_positions", "n_embd", "n_inner", "n_layer"]
    sizes = [{name: size} for name in names for size in (10**9, 10**30)]
    command = [sys.executable, "-c", SIZES_SCRIPT, folder, json.dumps(sizes)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, f"the last of {run.stdout} gave {run.stderr}"


# ---- generation_config.json --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (96, None, (96,)),
        (96, {}, (96,)),
        (96, {"max_length": 20, "pad_token_id": 3}, (96,)),
        (96, {"eos_token_id": 5}, (5,)),
        (96, {"eos_token_id": 0}, (0,)),
        (96, {"eos_token_id": [7, 8]}, (7, 8)),
        (96, {"eos_token_id": [0]}, (0,)),
        (96, {"eos_token_id": []}, ()),
        (96, {"eos_token_id": None}, ()),
        ([1, 2], {"eos_token_id": 3}, (3,)),
        ([1, 2], None, (1, 2)),
        (0, None, (0,)),
        (None, None, ()),
        (None, {"eos_token_id": 4}, (4,)),
    ],
    ids=str,
)
def test_generation_config_decides_what_ends_a_text(tmp_path, plain, in_config, in_generation, expected):
    folder = write_checkpoint(tmp_path, tiny_config(eos_token_id=in_config), plain[2])
    if in_generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(in_generation))
    config = load_config(folder)
    assert config.eos_ids == expected
    assert all(type(token) is int for token in config.eos_ids)
    assert config.bos_token_id == 96
    assert_equals_reference(read_in_silence(folder), plain[1], plain[2])


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "[1]", "3", "null", '"eos_token_id"', '["eos_token_id"]']
    + [f'{{"eos_token_id": {value}}}' for value in ('"96"', "1.0", "true", "[null]", "{}", "NaN")],
)
def test_a_generation_config_that_cannot_be_is_refused_by_name(tmp_path, content):
    set_config(tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    message = refused(lambda: load_config(tmp_path), tmp_path / "generation_config.json", kind=ValueError)
    assert str(tmp_path / "config.json") not in message  # which is in order


# ---- finding the folder ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def byte_checkpoint(tmp_path_factory):
    """A checkpoint with a tokenizer, as `load` wants it: (folder, config, params)."""
    config = tiny_config(vocab_size=257)
    params = tiny_params(config)
    folder = tmp_path_factory.mktemp("bytes") / "check point"
    return write_byte_vocab(write_checkpoint(folder, config, params)), config, params


def byte_ids(text):
    return [BYTE_OF_ID.index(byte) for byte in text.encode()]


def test_a_folder_is_loaded_by_any_spelling_of_its_path(byte_checkpoint, monkeypatch):
    folder, config, params = byte_checkpoint
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HOME", str(folder.parent))
    spellings = [folder, str(folder), f"{folder}/", Path(folder.name), folder.name, f"./{folder.name}", "~/check point"]
    for name in spellings:
        model, tokenizer = minigen.load(name)
        assert_equals_reference(model, config, params)
        assert tokenizer.encode("dé\n") == byte_ids("dé\n")
    monkeypatch.chdir(folder)
    assert_equals_reference(minigen.load(".")[0], config, params)


@pytest.mark.parametrize("name", ["fairytale", "distilfairytale"])
def test_a_bundled_model_is_loaded_by_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint(name) == WEIGHTS / name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, tokenizer = minigen.load(name)
    params = stored_params(WEIGHTS / name)
    found = as_stored(model)
    assert found.keys() == params.keys()
    for key, value in params.items():
        np.testing.assert_array_equal(found[key], value)
    text = "Once upon a time, a naïve king —\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    config = json.loads((WEIGHTS / name / "config.json").read_text())
    ids = tokenizer.encode(text)
    found = model.forward([ids], last_only=False)[0]
    assert np.abs(found - reference_logits(config, params, ids)).max() < 1e-4


@pytest.mark.parametrize("name", [None, "fairytale"])
def test_the_default_is_the_bundled_fairytale_and_not_the_working_directorys(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    if name:
        Path(name).mkdir()
    model, _ = minigen.load()
    assert resolve_checkpoint() == resolve_checkpoint(None) == WEIGHTS / "fairytale"
    np.testing.assert_array_equal(model.params["wpe.weight"], stored_params(WEIGHTS / "fairytale")["wpe.weight"])


@pytest.mark.parametrize("name", ["gpt2", "distilgpt2", "fairytale", "openai-community/gpt2"])
def test_an_existing_local_folder_wins(byte_checkpoint, tmp_path, monkeypatch, name):
    _, config, params = byte_checkpoint
    monkeypatch.chdir(tmp_path)
    write_byte_vocab(write_checkpoint(Path(name), config, params))
    assert resolve_checkpoint(name).resolve() == tmp_path / name
    assert_equals_reference(minigen.load(name)[0], config, params)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "vocab.json"])
def test_a_file_in_place_of_a_folder_is_refused(byte_checkpoint, file):
    path = byte_checkpoint[0] / file
    for name in (path, str(path)):
        refused(lambda name=name: resolve_checkpoint(name), path, "folder", kind=OSError)


NO_NAMES = ["nosuch", "fairytales", "./nosuch", "../nosuch", "/no/such/folder", "~/nosuch", "~nosuchuser", "/x"]
NO_NAMES += ["a/b/c", "-x/y", "owner/", "owner/na me", "ownér/name", "gpt 2", "gpt2\n", "https://huggingface.co/gpt2"]
NO_NAMES += ["a\0b", "\ud800", "x" * 5000]


@pytest.mark.parametrize("name", NO_NAMES, ids=lambda name: repr(name[:20]))
def test_a_name_that_is_nothing_is_refused_at_once(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # to import it is an ImportError
    refused(lambda: resolve_checkpoint(name), kind=OSError)


def test_an_unknown_name_is_answered_with_the_known_ones():
    known = ("fairytale", "distilfairytale", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2")
    refused(lambda: minigen.load("nosuch"), "nosuch", *known, kind=OSError)


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.write_text, (self.path, "boom")


def test_a_folder_with_only_a_pickle_is_told_how_to_convert_it(byte_checkpoint, tmp_path):
    """C08: no weights in safetensors form; a pickle is not opened, and other files with its ending are not named."""
    (tmp_path / "config.json").write_text(json.dumps(byte_checkpoint[1]))
    write_byte_vocab(tmp_path)
    for name in ("pytorch_model.bin", "optimizer.bin", "z.bin"):
        (tmp_path / name).write_bytes(pickle.dumps(Bomb(tmp_path / "boom")))
    words = ("model.safetensors", "pytorch_model.bin", "pickle", "convert", "transformers", "save_pretrained", tmp_path)
    refused(lambda: minigen.load(tmp_path), *words, kind=OSError)
    assert not (tmp_path / "boom").exists()


def test_a_folder_without_weights_names_what_was_looked_for(byte_checkpoint, tmp_path):
    """C08: a message that names the wrong files."""
    (tmp_path / "config.json").write_text(json.dumps(byte_checkpoint[1]))
    write_byte_vocab(tmp_path)
    message = refused(lambda: minigen.load(tmp_path), "model.safetensors", INDEX, tmp_path, kind=OSError)
    assert "pickle" not in message


@contextlib.contextmanager
def without_privileges():
    """Run as an ordinary user: the superuser may read everything."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.skipif(os.name != "posix", reason="permissions as POSIX has them")
def test_what_may_not_be_read_is_named(plain):
    """F17: a file or the folder without permission."""
    _, config, params = plain
    with tempfile.TemporaryDirectory() as top:  # pytest's own folders are closed to other users
        os.chmod(top, 0o755)
        folder = write_byte_vocab(write_checkpoint(Path(top) / "model", config, params, shards=2))
        for name in ("generation_config.json", "special_tokens_map.json", "tokenizer_config.json"):
            (folder / name).write_text("{}")
        minigen.load(folder)  # imports all that it needs before files of the installation become unreadable
        for path in [*folder.iterdir(), folder]:
            mode = path.stat().st_mode
            path.chmod(0)
            with without_privileges():
                refused(lambda: minigen.load(folder), f"cannot read {path}", "Permission denied", kind=OSError)
            path.chmod(mode)


# ---- the hub -----------------------------------------------------------------------------------------------------

SHA = "0123456789abcdef0123456789abcdef01234567"
HUB_SCRIPT = """
import json, socket, sys
calls = []

class Refused(socket.socket):
    def __init__(self, *args, **kwargs):
        calls.append("socket")
        raise ConnectionRefusedError("there is no network in this test")

def refuse(*args, **kwargs):
    calls.append("address")
    raise ConnectionRefusedError("there is no network in this test")

socket.socket = Refused
socket.getaddrinfo = socket.gethostbyname = socket.create_connection = socket.create_server = refuse

import minigen
assert "huggingface_hub" not in sys.modules
results = {}
for name in json.loads(sys.argv[1]):
    calls.clear()
    try:
        model, tokenizer = minigen.load(name)
        result = {
            "mark": float(model.params["wpe.weight"][0, 0]),
            "logits": model.forward([[1, 2, 3]])[0].tolist(),
            "eos": model.config.eos_ids,
            "ids": tokenizer.encode("d\\xe9\\n"),
            "error": None,
        }
    except Exception as error:
        result = {"error": str(error), "kind": [c.__name__ for c in type(error).__mro__]}
    results[name] = result | {"calls": len(calls), "hub": "huggingface_hub" in sys.modules}
print(json.dumps(results))
"""

# name given to load -> (repository, what is wrong with its cache)
CACHED = {
    "gpt2": ("openai-community/gpt2", None),
    "openai-community/gpt2": ("openai-community/gpt2", None),
    "gpt2-medium": ("openai-community/gpt2-medium", "refs/main ends in a newline"),
    "someone/copied": ("someone/copied", "no refs"),
    "distilgpt2": ("distilbert/distilgpt2", "no generation_config.json"),
    "some.one/a_model-1.0": ("some.one/a_model-1.0", "shards and nothing but a tokenizer.json"),
    "someone/listed": ("someone/listed", "a listing of the repository names a file that the cache lacks"),
}
INCOMPLETE = {
    "gpt2-large": ("openai-community/gpt2-large", "no folder"),
    "gpt2-xl": ("openai-community/gpt2-xl", "config.json only"),
    "someone/half": ("someone/half", "a shard is missing"),
    "someone/wordless": ("someone/wordless", "no tokenizer"),
    "someone/broken": ("someone/broken", "the weights are a link to nothing"),
}


def write_tokenizer_json(folder):
    """The tokenizer.json of write_byte_vocab's vocabulary, in place of its two files."""
    vocab = json.loads((write_byte_vocab(folder) / "vocab.json").read_text(encoding="utf-8"))
    (folder / "vocab.json").unlink()
    (folder / "merges.txt").unlink()
    content = {
        "version": "1.0",
        "added_tokens": [{"id": 256, "content": "<|endoftext|>", "special": True}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")


def hub_params(repo):
    return tiny_params(tiny_config(vocab_size=257), seed=sum(repo.encode()))


def write_cache(cache):
    """Fill a folder as huggingface_hub does: models--owner--name/{refs/main,snapshots/<commit>/files}."""
    for repo, state in {**CACHED, **INCOMPLETE}.values():
        if state == "no folder":
            continue
        top = cache / f"models--{repo.replace('/', '--')}"
        folder = top / "snapshots" / SHA
        if state != "no refs":
            (top / "refs").mkdir(parents=True, exist_ok=True)
            (top / "refs" / "main").write_text(SHA + "\n" * (state == "refs/main ends in a newline"))
        shards = 3 if "shard" in str(state) else 1
        write_checkpoint(folder, tiny_config(vocab_size=257), hub_params(repo), prefix="transformer.", shards=shards)
        if shards > 1:
            write_tokenizer_json(folder)
        elif state != "no tokenizer":
            write_byte_vocab(folder)
        if state is None:
            (folder / "generation_config.json").write_text('{"eos_token_id": [5, 256]}')
        if state == "config.json only":
            (folder / "model.safetensors").unlink()
        if state == "a shard is missing":
            (folder / "model-00002-of-00003.safetensors").unlink()
        if state == "the weights are a link to nothing":
            (folder / "model.safetensors").unlink()
            (folder / "model.safetensors").symlink_to(top / "blobs" / "nothing")
        if state == "a listing of the repository names a file that the cache lacks":
            names = [path.name for path in folder.iterdir()] + ["generation_config.json", "tokenizer.json"]
            listing = {name: {"size": 3, "blob_id": "0" * 40} for name in names}
            (top / "trees").mkdir()
            (top / "trees" / f"{SHA}.json").write_text(json.dumps({"format_version": 1, "files": listing}))


@pytest.fixture(scope="module")
def hub_run(tmp_path_factory, byte_checkpoint):
    """What loading each name gave in a process without network: (name -> result, cache folder)."""
    home = tmp_path_factory.mktemp("hub")
    cache = home / "hub"
    write_cache(cache)
    neo = cache / "models--someone--neo"
    config = tiny_config(vocab_size=257, model_type="gpt_neo")
    write_byte_vocab(write_checkpoint(neo / "snapshots" / SHA, config, hub_params("neo")))
    (neo / "refs").mkdir()
    (neo / "refs" / "main").write_text(SHA)
    only_json = write_checkpoint(home / "only-json", *byte_checkpoint[1:])
    write_tokenizer_json(only_json)
    ours = re.compile(r"HF_.*|HUGGING.*|TIKTOKEN.*|XDG_.*|.*_PROXY|PYTHONPATH", re.IGNORECASE)
    env = {key: value for key, value in os.environ.items() if not ours.fullmatch(key)}
    env |= {"HOME": str(home), "HF_HOME": str(home), "PYTHONPATH": str(ROOT)}
    env |= {"TIKTOKEN_CACHE_DIR": str(home / "tiktoken")}
    (home / "tiktoken").mkdir()
    local = [str(byte_checkpoint[0]), str(only_json)]
    names = [*local, "fairytale", "nosuch", *CACHED, *INCOMPLETE, "a..b/c--d", "someone/neo"]
    command = [sys.executable, "-c", HUB_SCRIPT, json.dumps(names)]
    run = subprocess.run(command, cwd=home, env=env, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    results = json.loads(run.stdout)
    results["a folder"], results["tokenizer.json"] = (results[name] for name in local)
    assert run.stderr == ""
    return results, cache


@pytest.mark.slow
@pytest.mark.parametrize("name", CACHED)
def test_a_cached_model_is_loaded_without_the_network(hub_run, name):
    """C01: also where the cache was copied by hand, or an optional file is not in it."""
    result, (repo, state) = hub_run[0][name], CACHED[name]
    assert result["error"] is None
    assert result["calls"] == 0
    params = hub_params(repo)
    assert result["mark"] == params["wpe.weight"][0, 0]
    expected = reference_logits(tiny_config(vocab_size=257), params, [1, 2, 3])[-1]
    assert np.abs(np.array(result["logits"]) - expected).max() < 1e-5
    assert result["eos"] == ([5, 256] if state is None else [256])
    assert result["ids"] == byte_ids("dé\n")


@pytest.mark.slow
@pytest.mark.parametrize("name", INCOMPLETE)
def test_a_model_that_is_not_all_in_the_cache_is_refused_in_one_line(hub_run, name, monkeypatch):
    """C01: it is asked for, unless HF_HUB_OFFLINE is set, as it is in these tests' own process."""
    results, cache = hub_run
    result, (repo, _) = results[name], INCOMPLETE[name]
    assert "OSError" in result["kind"] and "\n" not in result["error"]
    assert repo in result["error"] and str(cache) in result["error"]
    assert "HF_HUB_OFFLINE is set" not in result["error"] and result["calls"] > 0
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("socket.socket", None)
    monkeypatch.setattr("socket.getaddrinfo", None)
    refused(lambda: resolve_checkpoint(name), repo, cache, "HF_HUB_OFFLINE is set", kind=OSError)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a folder", "tokenizer.json", "fairytale", "nosuch"])
def test_what_lies_on_disk_needs_neither_network_nor_hub_library(hub_run, byte_checkpoint, name):
    result = hub_run[0][name]
    assert result["calls"] == 0
    assert result["hub"] is False
    assert (result["error"] is None) == (name != "nosuch")
    if name in ("a folder", "tokenizer.json"):
        assert result["ids"] == byte_ids("dé\n")
        assert result["mark"] == byte_checkpoint[2]["wpe.weight"][0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "named"), [("a..b/c--d", "a..b/c--d"), ("someone/neo", "gpt_neo")])
def test_a_name_that_the_hub_cannot_have_and_another_kind_of_model_are_refused(hub_run, name, named):
    result = hub_run[0][name]
    assert {"OSError", "ValueError"} & set(result["kind"])
    assert named in result["error"] and "\n" not in result["error"]
    assert result["calls"] == 0


# ---- memory ------------------------------------------------------------------------------------------------------

# Not getrusage: ru_maxrss of a process that was started by a larger one is the larger one's.
MEMORY_SCRIPT = """
import sys
from pathlib import Path
import minigen

def kilobytes(key):
    return int(Path("/proc/self/status").read_text().split(key + ":")[1].split()[0])

minigen.load(sys.argv[1])  # what is imported and allocated once
before = kilobytes("VmRSS")
model, tokenizer = minigen.load(sys.argv[2])
print((kilobytes("VmHWM") - before) * 1024)
"""


@pytest.fixture(scope="module")
def heavy():
    """About 40 MB in float32, a third of it the embedding, as in gpt2: (config, params)."""
    config = tiny_config(vocab_size=13_000, n_embd=256, n_layer=8)
    return config, tiny_params(config)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="memory is measured with Linux's /proc")
@pytest.mark.parametrize("kind", ["F16", "BF16", "F32 in shards with a copy of the head"])
def test_loading_takes_no_more_memory_than_the_model(tmp_path, byte_checkpoint, heavy, kind):
    config, params = heavy
    size = sum(value.nbytes for value in params.values())
    assert 35e6 < size < 45e6
    if "head" in kind:
        params = params | {"lm_head.weight": params["wte.weight"]}
    folder = write_checkpoint(tmp_path, config, params, dtype=kind.split()[0], shards=3 if "shards" in kind else 1)
    write_byte_vocab(folder)
    command = [sys.executable, "-c", MEMORY_SCRIPT, byte_checkpoint[0], folder]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    for path in folder.glob("*.safetensors"):
        path.unlink()  # pytest would keep it
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert 0.95 < int(run.stdout) / size < 1.15  # below: nothing would have been measured


# ---- anything at all ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_any_value_of_any_key_of_config_json_gives_a_model_or_a_refusal(tmp_path):
    config = tiny_config(vocab_size=5, n_positions=3, n_embd=2, n_layer=1, n_head=1)
    folder = write_checkpoint(tmp_path, config, tiny_params(config))
    keys = [*config, *FLAGS, "n_inner", "tie_word_embeddings", "add_cross_attention"]
    numbers = [0, 1, -1, 2, 3, 10**3, -(10**18), 10**400, 0.0, -0.0, 0.5, 1e300, NAN, INF]
    values = [*numbers, None, True, False, "", "gpt2", "gelu", "\ud800", "a\n", [], [0], [[]], [10**400], {}, {"a": 1}]
    outcomes = set()
    for key, value in itertools.product(keys, values):
        if key == "n_layer" and value == 10**400:
            continue  # the test of huge sizes tries such, within limits
        (folder / "config.json").write_text(json.dumps(config | {key: value}))
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore", UserWarning)
                model = read(folder)
                assert model.forward([[0]]).shape == (1, model.config.vocab_size)
            outcomes.add("loaded")
        except (ValueError, OSError) as error:
            assert str(error), (key, value)
            outcomes.add("refused")
    assert outcomes == {"loaded", "refused"}
