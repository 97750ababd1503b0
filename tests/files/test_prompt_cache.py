"""The prompt cache: warm runs give what cold ones give, a file that does not fit is refused, a crash loses nothing.

Warm ids are compared with those of a run without a file, which test_decode.py judges, and warm logits with the float64
reference. Files are taken apart and put together here by hand, from the description of the format.
"""

import functools
import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from minigen import GPT2, GPT2Config, Tokenizer, generate, stream
from minigen.engine.decode import PrefixCache, Run
from minigen.files import prompt_cache
from minigen.options import DecodingConfig, SamplingConfig
from tests.oracles.reference import layer_norm, reference_logits
from tests.oracles.tiny import tiny_config, tiny_params, write_byte_vocab, write_checkpoint, write_safetensors

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 257
posix_only = pytest.mark.skipif(os.name != "posix", reason="links, pipes and signals as POSIX has them")
not_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read and write all")


# ---- helpers -----------------------------------------------------------------------------------------------------


class Tiny(NamedTuple):
    config: dict
    params: dict
    model: GPT2


@functools.cache
def tiny(seed=0, **overrides):
    """A tiny model of 3 layers in which attention and position weigh enough for a wrong key to change the ids."""
    config = tiny_config(**{"vocab_size": VOCAB, "n_layer": 3, "n_positions": 32} | overrides)
    params = tiny_params(config, seed)
    params["wpe.weight"] *= np.float32(3)
    for layer in range(config["n_layer"]):
        params[f"h.{layer}.attn.c_proj.weight"] *= np.float32(4)
    return Tiny(config, params, GPT2(GPT2Config.from_dict(config), dict(params)))


@pytest.fixture(scope="module")
def tok(tmp_path_factory):
    return Tokenizer.from_folder(write_byte_vocab(tmp_path_factory.mktemp("bytes")), VOCAB)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "prompt.kv"


def random_ids(n, seed=0):
    return np.random.default_rng(seed).integers(256, size=n).tolist()


def outcome(completions):
    """What a run gave, without what it cost; sums in another order may differ in the last digits."""
    return [
        (done.token_ids, done.text, done.finish_reason, done.score and pytest.approx(done.score, rel=1e-4, abs=1e-5))
        for done in completions
    ]


def take_apart(path):
    """(header, data) of a safetensors file: the length of the header in 8 bytes, the header in JSON, the data."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def put_together(path, header, data):
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + data)


def tensors_in(path):
    header, data = take_apart(path)
    dtypes = {"I64": "<i8", "F32": "<f4"}
    return {
        name: np.frombuffer(data[slice(*entry["data_offsets"])], dtypes[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def ids_in(path):
    return tensors_in(path)["ids"].tolist()


def saved(t, tok, path, ids):
    """The bytes of a file that a run with this prompt has written."""
    generate(t.model, tok, [ids], cache=path, max_tokens=1, seed=0)
    return path.read_bytes()


# ---- warm equals cold --------------------------------------------------------------------------------------------

DECODERS = {
    "greedy": dict(temperature=0),
    "sampled": dict(seed=3, temperature=1.2, top_p=1.0),
    "several": dict(seed=4, temperature=1.0, num_return_sequences=3),
    "penalties": dict(seed=5, repetition_penalty=1.3, no_repeat_ngram_size=2),
    "beams": dict(num_beams=3, num_return_sequences=2),
    "n-grams": dict(seed=6, temperature=0.4, prompt_lookup_num_tokens=3),
    "drafts": dict(seed=7, temperature=0.8, num_draft_tokens=3, draft_model=True),
    "shift": dict(seed=8, temperature=1.0, context_shift=True, keep=2, max_tokens=20),
    "shift with n-grams": dict(seed=9, temperature=0, context_shift=True, prompt_lookup_num_tokens=2, max_tokens=20),
}
FIRST = random_ids(20)
# The next prompt, and how many of its first ids FIRST has as well.
SECOND = {
    "identical": (FIRST, 20),
    "extended": ([*FIRST, *random_ids(7, seed=1)], 20),
    "extended by one": ([*FIRST, 5], 20),
    "shortened": (FIRST[:9], 9),
    "shortened by one": (FIRST[:19], 19),
    "one id": (FIRST[:1], 1),
    "diverging": ([*FIRST[:11], (FIRST[11] + 1) % 256, *FIRST[12:]], 11),
    "diverging at the end": ([*FIRST[:19], (FIRST[19] + 1) % 256], 19),
    "diverging at the second": ([FIRST[0], (FIRST[1] + 1) % 256, *FIRST[2:]], 1),
    "shared end only": ([(FIRST[0] + 1) % 256, *FIRST[1:]], 0),
    "nothing shared": ([(token + 1) % 256 for token in FIRST], 0),
    "as long as the context": ([*FIRST, *random_ids(12, seed=2)], 20),
}


# With each decoder but the first, these prompts are enough: what is reused does not depend on how tokens are chosen.
SOME = ["identical", "extended", "shortened by one", "diverging", "as long as the context"]


def options_of(name, tok, draft):
    options = {"max_tokens": 6, "ignore_eos": True} | DECODERS[name]
    return options | ({"draft_model": (draft.model, tok)} if "draft_model" in options else {})


@pytest.mark.slow
@pytest.mark.parametrize("decoder", DECODERS)
def test_warm_equals_cold(tok, file, watch, decoder):
    """The ids of a run without a file, and only new tokens are run; the file may be another decoder's."""
    t, draft = tiny(), tiny(1, n_layer=1)
    options = options_of(decoder, tok, draft)
    speculates = bool({"prompt_lookup_num_tokens", "draft_model"} & set(options))
    tokens = watch(t.model)
    cold = generate(t.model, tok, [FIRST], **options)
    tokens.clear()
    assert outcome(generate(t.model, tok, [FIRST], cache=file, **options)) == outcome(cold)
    assert math.prod(tokens[0]) == len(FIRST) - speculates
    assert ids_in(file) == FIRST
    file.unlink()
    other = [*DECODERS][[*DECODERS].index(decoder) - 1]
    generate(t.model, tok, [FIRST], cache=file, **options_of(other, tok, draft))
    first = file.read_bytes()
    for name in SECOND if decoder == "greedy" else SOME:
        prompt, common = SECOND[name]
        # The last token is run in any case, for its logits; by speculation together with the first drafts.
        n_run = len(prompt) - speculates
        reused = min(common, len(prompt) - 1)
        cold = generate(t.model, tok, [prompt], **options)
        assert {done.timings.reused_tokens for done in cold} == {0}
        file.write_bytes(first)
        tokens.clear()
        warm = generate(t.model, tok, [prompt], cache=file, **options)
        assert outcome(warm) == outcome(cold), name
        assert {(done.timings.prompt_tokens, done.timings.reused_tokens) for done in warm} == {(len(prompt), reused)}
        if n_run > reused:
            assert math.prod(tokens[0]) == n_run - reused, name
        if FIRST[: len(prompt)] == prompt:
            assert file.read_bytes() == first  # a longer prompt is not given up for its beginning
        else:
            assert ids_in(file) == prompt
        assert os.listdir(file.parent) == [file.name]


def prefill(model, ids, file):
    """Run a prompt with the file as its cache; the `Run`, and the logits after the prompt, [1, V]."""
    run = Run(model, SamplingConfig(), DecodingConfig(max_tokens=10))
    tokens = (run.feed([ids])[0] for _ in range(1))
    (logits,) = prompt_cache.reuse_prompt(file, run, ids, tokens)
    return run, logits


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"n_layer": 1, "n_head": 4, "scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False, "n_inner": 5},
    ],
    ids=str,
)
def test_logits_after_a_restore_are_the_references(file, overrides):
    t = tiny(4, n_positions=48, **overrides)
    ids, other = random_ids(30), random_ids(30, seed=1)
    exact = {name: p.astype(float) for name, p in t.params.items()}
    for common in (0, 1, 2, 15, 29, 30):
        file.unlink(missing_ok=True)
        prefill(t.model, [*ids[:common], *other[common:]], file)
        run, logits = prefill(t.model, ids, file)
        cache = run.cache.kv
        assert run.cache.n_reused == min(common, 29)
        assert cache.length.tolist() == [30]
        expected = reference_logits(t.config, exact, ids + other[:10])[29:]
        later = t.model.forward([other[:4]], cache, last_only=False)[0]
        steps = [t.model.forward([[token]], cache) for token in other[4:10]]
        assert np.abs(np.concatenate([logits, later, *steps]) - expected).max() < 1e-4


# ---- what is in the file -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "max_tokens"), [({}, 20), ({"n_layer": 2, "n_head": 4, "n_embd": 12}, 1)], ids=str
)
def test_the_file_holds_the_prompts_keys_and_values_and_nothing_else(tok, file, overrides, max_tokens):
    t = tiny(5, **overrides)
    L, H, D = t.config["n_layer"], t.config["n_head"], t.config["n_embd"] // t.config["n_head"]
    ids = random_ids(13)
    generate(t.model, tok, [ids], cache=str(file), max_tokens=max_tokens, seed=0)
    header, data = take_apart(file)
    assert len(data) == 13 * 8 + 2 * L * H * D * 13 * 4
    tensors = tensors_in(file)
    assert set(tensors) == {"ids"} | {f"{kind}.{layer}" for kind in ("keys", "values") for layer in range(L)}
    assert (tensors["ids"].dtype, tensors["ids"].tolist()) == (np.int64, ids)
    assert all(tensor.shape == (H, D, 13) for name, tensor in tensors.items() if name != "ids")
    assert set(header["__metadata__"]) == {"format", "version", "model", "crc32"}
    # Those of the first layer, from the formula.
    p = {name: value.astype(float) for name, value in t.params.items()}
    x = layer_norm(p["wte.weight"][ids] + p["wpe.weight"][:13], p["h.0.ln_1.weight"], p["h.0.ln_1.bias"], 1e-5)
    _, k, v = np.split(x @ p["h.0.attn.c_attn.weight"] + p["h.0.attn.c_attn.bias"], 3, axis=-1)  # [n, E] each
    for kind, expected in (("keys.0", k), ("values.0", v)):
        assert np.abs(tensors[kind] - expected.reshape(13, H, D).transpose(1, 2, 0)).max() < 1e-4


def test_without_tokens_to_generate_nothing_is_run_or_written(tok, file):
    (done,) = generate(tiny().model, tok, [[1, 2, 3]], cache=file, max_tokens=0)
    assert (done.token_ids, done.timings.reused_tokens, file.exists()) == ([], 0, False)


def test_a_text_a_path_and_an_empty_prompt(tok, file):
    t = tiny()
    for prompt, ids in (("ab\n", tok.encode("ab\n")), ("", [VOCAB - 1])):
        cold = generate(t.model, tok, prompt, max_tokens=5, seed=1)
        for path in (file, str(file)):
            assert outcome(generate(t.model, tok, prompt, cache=path, max_tokens=5, seed=1)) == outcome(cold)
            assert ids_in(file) == ids


# ---- another model -----------------------------------------------------------------------------------------------


def assert_refused(t, tok, path, ids, *words, error=ValueError, **options):
    """One sentence that names the file, says what to do, and leaves the file as it is."""
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(error) as caught:
        generate(t.model, tok, [ids], cache=path, **{"max_tokens": 3, "seed": 0} | options)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message and "another file" in message, message
    for word in words:
        assert word in message, message
    if before is not None:
        assert path.read_bytes() == before
    if path.parent.is_dir():
        assert not [name for name in os.listdir(path.parent) if name.endswith(".tmp")]


@pytest.mark.parametrize(
    "overrides",
    [
        {"n_head": 4},
        {"n_head": 1},
        {"layer_norm_epsilon": 1e-6},
        {"activation_function": "gelu"},
        {"scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True},
        {"n_layer": 2},
        {"n_embd": 16},
        {"n_positions": 31},
        {"n_inner": 31},
    ],
    ids=str,
)
def test_a_config_that_computes_something_else_makes_another_model(tok, file, overrides):
    saved(tiny(), tok, file, FIRST)
    assert_refused(tiny(**overrides), tok, file, FIRST, "another model")


def test_what_keys_and_values_do_not_depend_on_makes_no_other_model(tok, file):
    saved(tiny(), tok, file, FIRST)
    for overrides in ({"eos_token_id": 3}, {"bos_token_id": None}, {"reorder_and_upcast_attn": True}):
        other = tiny(**overrides)
        cold, warm = (generate(other.model, tok, [FIRST], cache=f, max_tokens=9, seed=0) for f in (None, file))
        assert outcome(warm) == outcome(cold) and warm[0].timings.reused_tokens == 19


def plus_one_bit(value):
    value.flat[value.size // 2] = np.nextafter(value.flat[value.size // 2], np.float32(9))


def exchange_rows(value):
    value[[0, -1]] = value[[-1, 0]]


def exchange_columns(value):
    value[..., [0, -1]] = value[..., [-1, 0]]


@pytest.mark.parametrize("edit", [plus_one_bit, exchange_rows, exchange_columns])
def test_edited_weights_make_another_model(tok, file, watch, edit):
    """F14: a prompt cache that trusted weights some of which had changed."""
    t = tiny()
    saved(t, tok, file, FIRST)
    for name, value in t.params.items():
        params = t.params | {name: value.copy()}
        edit(params[name])
        other = Tiny(t.config, params, GPT2(t.model.config, params))
        tokens = watch(other.model)
        assert_refused(other, tok, file, FIRST, "other weights")
        assert tokens == []  # before anything is run


@pytest.mark.skipif(os.name != "posix", reason="needs file modes")
def test_a_replaced_file_keeps_its_mode(tok, file):
    t = tiny()
    saved(t, tok, file, FIRST)
    file.chmod(0o600)
    saved(t, tok, file, [*FIRST, 1])
    assert ids_in(file) == [*FIRST, 1] and file.stat().st_mode & 0o777 == 0o600


def test_a_name_as_long_as_names_can_be_is_written(tok, tmp_path):
    file = tmp_path / ("n" * 250)
    saved(tiny(), tok, file, FIRST)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


# ---- files that are damaged or something else --------------------------------------------------------------------


def test_a_truncated_file_is_refused(tok, file):
    t = tiny(n_layer=1, n_positions=8)
    whole = saved(t, tok, file, [1, 2, 3])
    for n in [*range(0, len(whole), 11), len(whole) - 1]:
        file.write_bytes(whole[:n])
        with pytest.raises(ValueError, match="damaged or not a safetensors file"):
            prompt_cache._restore(file, PrefixCache(t.model), [1, 2, 3], prompt_cache.fingerprint(t.model))
    assert_refused(t, tok, file, [1, 2, 3], "damaged")
    file.write_bytes(whole + b"\0")
    assert_refused(t, tok, file, [1, 2, 3], "damaged")


def test_a_file_with_one_other_byte_is_refused(tok, file):
    t = tiny(n_layer=1, n_positions=8)
    whole = saved(t, tok, file, [1, 2, 3])
    rng = np.random.default_rng(0)
    for at in [*range(len(whole) - 250), *range(len(whole) - 250, len(whole), 7)]:  # the header, and some numbers
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << int(rng.integers(8))]) + whole[at + 1 :])
        with pytest.raises(ValueError, match="name another file"):
            prompt_cache._restore(file, PrefixCache(t.model), [1, 2, 3], prompt_cache.fingerprint(t.model))


@pytest.mark.parametrize("content", [b"", b"Once upon a time", bytes(8), bytes(5000), b"\x02" + bytes(7) + b"{}"])
def test_what_is_no_safetensors_file_or_an_empty_one(tok, file, content):
    file.write_bytes(content)
    assert_refused(tiny(), tok, file, FIRST, "safetensors file")


def test_a_file_that_another_program_rewrites_in_place_does_not_end_the_run(tok, file, monkeypatch):
    """A file that is mapped and then cut off would end the process with SIGBUS."""
    t, common_prefix_length = tiny(), prompt_cache.common_prefix_length
    saved(t, tok, file, FIRST)

    def rewritten_meanwhile(a, b):
        os.truncate(file, 0)
        return common_prefix_length(a, b)

    monkeypatch.setattr(prompt_cache, "common_prefix_length", rewritten_meanwhile)
    (done,) = generate(t.model, tok, [FIRST], cache=file, max_tokens=1)
    assert done.timings.reused_tokens == 19


def test_weights_that_are_not_numbers_are_blamed_themselves_every_time(tok, file):
    t = tiny()
    params = {name: value.copy() for name, value in t.params.items()}
    params["h.1.attn.c_attn.bias"][3] = np.nan
    broken = GPT2(t.model.config, params)
    for _ in range(2):
        with pytest.raises(ValueError, match="logit is nan"), np.errstate(all="ignore"):
            generate(broken, tok, [FIRST], cache=file, max_tokens=1)
        assert not file.exists()


def test_a_checkpoint_is_no_prompt(tok, tmp_path):
    t = tiny()
    folder = write_checkpoint(tmp_path / "model", t.config, t.params)
    assert_refused(t, tok, folder / "model.safetensors", FIRST, "not a prompt cache")
    write_safetensors(tmp_path / "ids", {"ids": ("I64", (1,), bytes(8))})
    assert_refused(t, tok, tmp_path / "ids", FIRST, "not a prompt cache")


def rewritten(t, tok, file, change):
    """A saved file whose header went through `change`."""
    saved(t, tok, file, FIRST)
    header, data = take_apart(file)
    change(header)
    put_together(file, header, data)


def swap(header):
    header["keys.0"], header["values.0"] = header["values.0"], header["keys.0"]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda header: header["__metadata__"].update(version="2"), "version 2"),
        (lambda header: header["__metadata__"].pop("version"), "version None"),
        (lambda header: header["__metadata__"].update(format="pt"), "not a prompt cache"),
        (lambda header: header.pop("__metadata__"), "not a prompt cache"),
        (lambda header: header["__metadata__"].update(model="0" * 64), "another model"),
        (lambda header: header["__metadata__"].pop("model"), "another model"),
        (lambda header: header["__metadata__"].update(crc32="00000000"), "checksum"),
        (lambda header: header["__metadata__"].pop("crc32"), "checksum"),
        (swap, "checksum"),
        (lambda header: header["keys.1"].update(shape=[2, 20, 4]), "keys.1"),
        (lambda header: header["keys.0"].update(shape=[20, 2, 4]), "keys.0"),
        (lambda header: header["values.2"].update(dtype="I32"), "values.2"),
        (lambda header: header["values.2"].update(dtype="BF16", shape=[2, 40, 4]), "values.2"),
        (lambda header: header["ids"].update(dtype="F64"), "ids"),
        (lambda header: header["ids"].update(dtype="F8_E4M3", shape=[160]), "ids"),
        (lambda header: header["ids"].update(shape=[4, 5]), "ids"),
        (lambda header: header.update({"keys.9": header.pop("keys.2")}), "keys.2"),
        (lambda header: header.update(tokens=header.pop("ids")), "ids"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(tok, file, change, word):
    t = tiny()
    rewritten(t, tok, file, change)
    assert_refused(t, tok, file, FIRST, word)


def test_a_file_put_together_anew_is_accepted(tok, file):
    t = tiny()
    rewritten(t, tok, file, lambda header: None)  # what the test above relies on
    (done,) = generate(t.model, tok, [FIRST], cache=file, max_tokens=3, seed=0)
    assert done.timings.reused_tokens == 19


# ---- paths -------------------------------------------------------------------------------------------------------


def test_paths_that_cannot_hold_a_file_are_refused_before_anything_is_run(tok, tmp_path, watch):
    t = tiny()
    (tmp_path / "file").write_bytes(b"")
    paths = [tmp_path, tmp_path / "missing" / "x", tmp_path / "file" / "x", tmp_path / ("x" * 300)]
    if os.name == "posix":
        os.mkfifo(tmp_path / "pipe")  # and no waiting for somebody to write to it
        paths += [tmp_path / "pipe", Path(os.devnull)]
    tokens = watch(t.model)
    for path in paths:
        with pytest.raises(OSError) as caught:
            generate(t.model, tok, [FIRST], cache=path, max_tokens=3)
        assert str(path) in str(caught.value) and "[Errno" not in str(caught.value)
    assert tokens == []
    assert os.name != "posix" or not Path(os.devnull).is_file()


@not_root
def test_what_may_not_be_read_or_written(tok, tmp_path, watch):
    t = tiny()
    folder = tmp_path / "folder"
    folder.mkdir()
    file = folder / "x"
    saved(t, tok, file, FIRST)
    tokens = watch(t.model)
    try:
        folder.chmod(0o500)
        (done,) = generate(t.model, tok, [FIRST[:9]], cache=file, max_tokens=3)  # nothing needs to be written
        assert done.timings.reused_tokens == 8
        tokens.clear()
        assert_refused(t, tok, folder / "new", FIRST, "written", error=OSError)
        assert tokens == []
        file.chmod(0)
        with pytest.raises(OSError, match=r"cannot read the prompt cache .*denied; name another file"):
            generate(t.model, tok, [FIRST], cache=file, max_tokens=3)
        assert tokens == []
    finally:
        folder.chmod(0o700)
        file.chmod(0o600)


@posix_only
def test_a_link_stays_a_link(tok, tmp_path):
    t = tiny()
    link, target = tmp_path / "link", tmp_path / "elsewhere" / "target"
    target.parent.mkdir()
    link.symlink_to(target)
    for ids in (FIRST, SECOND["extended"][0]):  # a file that is not there yet, and one that is
        saved(t, tok, link, ids)
        assert link.is_symlink() and not target.is_symlink() and ids_in(target) == ids
    assert os.listdir(target.parent) == ["target"]


# ---- crashes and other runs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("replace", OSError(28, "No space left on device")),
        ("fsync", OSError(5, "Input/output error")),
        ("replace", KeyboardInterrupt()),
        ("fsync", SystemExit(143)),  # as SIGTERM raises it
    ],
    ids=str,
)
def test_a_failure_while_saving_leaves_the_old_file(tok, file, monkeypatch, where, error, exists):
    t = tiny()
    before = saved(t, tok, file, FIRST) if exists else None
    sizes = []

    def fail(*args):
        sizes.append(max(path.stat().st_size for path in file.parent.iterdir()))
        raise error

    monkeypatch.setattr(os, where, fail)
    kind = OSError if isinstance(error, OSError) else type(error)
    with pytest.raises(kind) as caught:
        generate(t.model, tok, [SECOND["extended"][0]], cache=file, max_tokens=3)
    if kind is OSError:
        assert str(file) in str(caught.value) and error.strerror in str(caught.value)
        assert "[Errno" not in str(caught.value)
    assert sizes[0] > 27 * 8 + 2 * 3 * 8 * 27 * 4  # all bytes had been written by then
    assert os.listdir(file.parent) == [file.name] * exists
    assert not exists or file.read_bytes() == before


@posix_only
def test_a_full_disk_leaves_the_old_file(tok, file):
    t = tiny()
    before = saved(t, tok, file, FIRST)
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before), hard))  # too little for a longer prompt
        assert_refused(t, tok, file, SECOND["extended"][0], "cannot write", error=OSError)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert os.listdir(file.parent) == [file.name]


KILLED_SCRIPT = """
import os, signal, sys
from minigen.command.main import main

for moment in ("fsync", "replace"):
    if not (child := os.fork()):
        setattr(os, moment, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        main(["-m", sys.argv[1], "Once upon a hill", "--prompt-cache", sys.argv[2]])
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
@posix_only
def test_a_killed_process_leaves_the_old_file(tok, tmp_path):
    t, file = tiny(), tmp_path / "prompt.kv"
    folder = write_byte_vocab(write_checkpoint(tmp_path / "model", t.config, t.params))
    before = saved(t, tok, file, tok.encode("Once upon a time"))
    command = [sys.executable, "-c", KILLED_SCRIPT, folder, file]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == f"{-signal.SIGKILL}\n" * 2, done.stderr
    assert file.read_bytes() == before


def test_the_bytes_are_on_disk_before_the_file_has_its_name(tok, file, monkeypatch):
    calls, names = [], []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(fd):
        calls.append(("fsync", os.fstat(fd).st_size))
        fsync(fd)

    def watched_replace(source, target):
        calls.append(("replace", os.stat(source).st_size))
        names.append(Path(source))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    t = tiny()
    for ids in ([7], FIRST, SECOND["nothing shared"][0]):  # the first is smaller than a buffer
        size = len(saved(t, tok, file, ids))
        assert calls[-2:] == [("fsync", size), ("replace", size)]
    assert len(set(names)) == 3 and {name.parent for name in names} == {file.parent}  # no two runs share one
    saved(t, tok, file, SECOND["nothing shared"][0][:-2])
    assert len(calls) == 6  # what holds the whole prompt is not written again


@pytest.mark.slow
def test_runs_at_the_same_time_never_leave_a_broken_file(tok, file):
    t, errors = tiny(), []
    prompts = [FIRST[:n] + random_ids(30 - n, seed=n) for n in range(0, 30, 5)]
    cold = [outcome(generate(t.model, tok, [ids], max_tokens=4, seed=0)) for ids in prompts]

    def run(first):
        try:
            for i in range(first, first + 8):
                i %= len(prompts)
                warm = outcome(generate(t.model, tok, [prompts[i]], cache=file, max_tokens=4, seed=0))
                assert warm == cold[i]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert ids_in(file) in prompts
    assert os.listdir(file.parent) == [file.name]


# ---- options -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(prompts=["a", "b"]), ["number of prompts is 2", "prompt cache"]),
        (dict(prompts=["a", "b"], num_beams=2), ["number of prompts is 2", "prompt cache"]),
        (dict(cache=7), ["cache is 7", "path"]),
        (dict(cache=True), ["cache is True", "path"]),
        (dict(cache=b"x"), ["cache is b'x'", "path"]),
        (dict(cache="a\0b"), ["cache is", "a file"]),
    ],
    ids=str,
)
def test_what_does_not_go_with_a_prompt_cache(tok, file, options, words):
    options = {"cache": file, "prompts": "a"} | options
    prompts = options.pop("prompts")
    with pytest.raises(ValueError) as caught:
        stream(tiny().model, tok, prompts, **options)  # before the first step
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not file.exists()


# ---- the command line --------------------------------------------------------------------------------------------


@pytest.fixture
def command(cli, tmp_path):
    t = tiny()
    folder = write_byte_vocab(write_checkpoint(tmp_path / "model", t.config, t.params))
    return lambda *args: cli("--model", folder, *args)


def test_command_line(command, tmp_path):
    file = tmp_path / "a prompt.kv"
    options = ("-n", 8, "--seed", 3, "--ignore-eos")
    code, text, err = command("once upon a time", *options)
    assert code == 0
    for cache, closing in [
        (("--prompt-cache", file), "prompt 16 tokens in "),
        (("--prompt-cache", file), f"prompt 16 tokens (15 from {file}) in "),
        ((f"--prompt-cache={file}", "--num-beams", 2), None),
    ]:
        code, out, err = command("once upon a time", *options, *cache)
        assert code == 0 and len(err.splitlines()) == 2
        if closing:
            assert out == text
            assert err.splitlines()[1].startswith(closing)
    code, out, _ = command("once upon a hill", *options, "--prompt-cache", file, "--json")
    timings = json.loads(out)["timings"]
    assert (timings["prompt_tokens"], timings["reused_tokens"]) == (16, 12)
    assert timings["prompt_seconds"] > 0
    code, out, _ = command("once upon a hill", *options, "--json")
    assert json.loads(out)["timings"]["reused_tokens"] == 0


def test_command_line_refuses_files(command, tmp_path):
    file = tmp_path / "x"
    file.write_bytes(b"a text")
    for path in (file, tmp_path, tmp_path / "missing" / "x"):
        code, out, err = command("abc", "--prompt-cache", path, "--quiet")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("minigen: ") and str(path) in err
    assert file.read_bytes() == b"a text"
