"""The forward pass and the K/V cache, against transformers' golden files and against the float64 reference."""

import functools
import gc
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minigen.engine.cache import KVCache
from minigen.engine.linear import embed, linear, pack_weight
from minigen.engine.model import GPT2, GPT2Config
from minigen.engine.ops import ACTIVATIONS, layer_norm, softmax
from tests import tiny
from tests.golden.make_logits import N_GREEDY, N_PROMPT, N_START, fingerprint, stored_params
from tests.oracles import reference
from tests.oracles.reference import reference_logits
from tests.tiny import random_params, tiny_config, tiny_params

# Overflow, NaN and the like are faults even where nobody reads the number.
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

HERE = Path(__file__).parents[1]
WEIGHTS = HERE.parent / "weights"
NOTES = json.loads((HERE / "golden" / "logits.json").read_text())
GOLDEN = np.load(HERE / "golden" / "logits.npz")

BIG = "gpt2-124m"
CASES = [
    name
    for name, note in NOTES.items()
    if name != BIG and note["config"].get("activation_function", "gelu_new") in ACTIVATIONS
]
CHUNKINGS = {
    "the whole prompt at once": [200],
    "token by token": [1] * 200,
    "prompt and then steps": [190] + [1] * 10,
    "growing chunks": [1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 57],
    "irregular chunks": [7, 1, 50, 2, 2, 38, 16, 3, 64, 4, 13],
}


# ---- helpers -----------------------------------------------------------------------------------------------------


def golden_model(name):
    """The model of a golden case: (config.json dictionary, params, GPT2)."""
    note = NOTES[name]
    if note["seed"] is None:
        params = stored_params(WEIGHTS / name)
    else:
        params = random_params(note["config"], note["seed"], note["std"])
    assert fingerprint(params) == pytest.approx(note["fingerprint"], rel=1e-9, abs=1e-6), (
        "these are not the weights that the golden file was made with: make the golden files anew"
    )
    return note["config"], params, GPT2(GPT2Config.from_dict(note["config"]), dict(params))


@functools.cache
def small_model(name):
    return golden_model(name)


@functools.cache
def small_reference(name):
    config, params, _ = small_model(name)
    return reference_logits(config, params, GOLDEN[f"{name}/ids"])


def model_and_params(seed=0, std=0.5, **overrides):
    """A tiny model with 3 layers and room for 64 positions: (config, params, GPT2)."""
    config = tiny_config(**{"n_positions": 64, "n_layer": 3} | overrides)
    params = tiny_params(config, seed, std)
    return config, params, GPT2(GPT2Config.from_dict(config), dict(params))


def random_ids(*shape, seed=0):
    return np.random.default_rng(seed).integers(97, size=shape)


def feed(model, ids, cache, chunks):
    """Logits [B, T, V] of ids [B, T], fed to the cache in chunks of the given sizes."""
    assert sum(chunks) == ids.shape[1]
    parts = np.split(ids, np.cumsum(chunks)[:-1], axis=1)
    return np.concatenate([model.forward(part, cache, last_only=False) for part in parts], axis=1)


def state(cache):
    """A copy of all that a cache holds."""
    return [a.copy() for a in (cache.length, cache.slot_pos, *cache.keys, *cache.values)]


def assert_unchanged(cache, before):
    for old, new in zip(before, state(cache), strict=True):
        np.testing.assert_array_equal(old, new)


def assert_close(found, expected, tolerance):
    assert found.shape == expected.shape
    assert found.dtype == np.float32
    assert np.abs(found - expected).max() < tolerance  # NaN fails too


def assert_golden(name, logits):
    """logits [1, T, V] of the golden prompt are transformers'."""
    golden = {key: GOLDEN[f"{name}/{key}"] for key in ("columns", "logits", "logsumexp", "argmax")}
    assert logits.shape == (1, N_PROMPT, NOTES[name]["config"].get("vocab_size", 50257))
    logits = logits[0]
    assert_close(logits[:, golden["columns"]], golden["logits"], 1e-4)
    best = logits.max(axis=-1)
    logsumexp = best + np.log(np.exp(logits - best[:, None], dtype=np.float64).sum(axis=-1))
    assert np.abs(logsumexp - golden["logsumexp"]).max() < 1e-4
    # The best token is the same one, or ties with it as far as rounding goes.
    assert (logits[np.arange(N_PROMPT), golden["argmax"]] > best - 2e-4).all()


def greedy(model, ids, n_new):
    """The plain cached loop, written out: prompt once, then one token at a time."""
    cache = model.new_cache()
    logits = model.forward(ids[None], cache)
    new = []
    for _ in range(n_new):
        new.append(int(logits[0].argmax()))
        logits = model.forward(np.array([new[-1:]]), cache)
    return new


# ---- the arithmetic ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_each_activation_is_its_formula(name):
    """L13: two forms of GELU that differ by too little for a loose test."""
    near = np.linspace(-6, 6, 4001, dtype=np.float32)
    found = ACTIVATIONS[name](near)
    assert_close(found, reference.ACT[name](near.astype(float)), 1e-6)
    far = np.array([-1e4, -700, -89, -30, -11, 11, 30, 89, 700, 1e4], dtype=np.float32)
    with np.errstate(over="raise", invalid="raise"):
        found = ACTIVATIONS[name](far)
    np.testing.assert_allclose(found, reference.ACT[name](far.astype(float)), rtol=1e-6, atol=2e-6)


def test_activations_have_the_values_known_from_elsewhere():
    """L13: known values of activations."""
    known = {  # name -> {x: value}, six decimals
        "gelu_new": {1: 0.841192, -3: -0.003637},
        "gelu_pytorch_tanh": {1: 0.841192, -3: -0.003637},
        "gelu": {1: 0.841345, -3: -0.004050},
        "quick_gelu": {1: 0.845796},
        "silu": {1: 0.731059},
        "relu": {1: 1.0, -3: 0.0},
        "tanh": {1: 0.761594},
    }
    for name, values in known.items():
        x = np.array(list(values), dtype=np.float32)
        np.testing.assert_allclose(ACTIVATIONS[name](x), list(values.values()), atol=1e-6)


def test_activations_leave_their_input_alone():
    x = np.linspace(-3, 3, 50, dtype=np.float32)
    for name, function in ACTIVATIONS.items():
        function(x)
        assert (x == np.linspace(-3, 3, 50, dtype=np.float32)).all(), name


@pytest.mark.parametrize("name", ["foo", "GELU", "", None, 3, *sorted(reference.ACT.keys() - ACTIVATIONS.keys())])
def test_an_unknown_activation_is_refused_by_name(name):
    """L13: an unknown activation."""
    with pytest.raises(ValueError, match=f"activation_function.*{name}"):
        GPT2Config.from_dict(tiny_config(activation_function=name))


def test_softmax_sums_to_one_and_gives_masked_entries_exactly_zero():
    x = np.array([[3.0, 2.0, 1.0, 0.5], [1e4, 1e4, -1e4, -np.inf], [-3e38, -np.inf, -np.inf, -np.inf]], np.float32)
    expected = [[0.631, 0.232, 0.085, 0.052], [0.5, 0.5, 0, 0], [1, 0, 0, 0]]
    p = softmax(x.copy())
    np.testing.assert_allclose(p, expected, atol=5e-4)
    np.testing.assert_allclose(p.sum(axis=-1), 1, rtol=1e-6)
    assert (p[1:] == np.array(expected[1:], np.float32)).all()


def test_layer_norm_is_its_formula_and_uses_its_epsilon():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 24)).astype(np.float32) * 3 + 50  # far from 0: the mean must go before the squares
    weight, bias = rng.standard_normal((2, 24)).astype(np.float32)
    before = x.copy()
    for eps in (0.0, 1e-5, 0.5):
        expected = reference.layer_norm(*(a.astype(float) for a in (x, weight, bias)), eps)
        assert_close(layer_norm(x, weight, bias, eps), expected, 2e-5)
    np.testing.assert_array_equal(x, before)


LAYOUTS = ("unblocked", "row_blocks", "column_blocks")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("n_in", "n_out"), [(8, 1), (24, 24), (96, 257), (257, 96), (64, 1000), (4096, 33), (7000, 50)]
)
def test_linear_is_a_matrix_product_for_every_number_of_rows(n_in, n_out, layout):
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((n_in, n_out)).astype(np.float32)
    tied = np.ascontiguousarray(matrix.T).T  # as the head lies in memory: [V, E] seen as [E, V]
    bias = rng.standard_normal(n_out).astype(np.float32)
    weights = [pack_weight(matrix, layout), pack_weight(tied, layout)]
    tolerance = 2e-6 * n_in**0.5 * 24
    for n_rows in [*range(1, 20), 31, 32, 33, 47, 64, 100]:
        x = rng.standard_normal((n_rows, n_in)).astype(np.float32)
        product = x.astype(float) @ matrix.astype(float)
        for weight in weights:
            before = x.copy()
            assert_close(linear(x, weight, bias), product + bias, tolerance)
            assert_close(linear(x, weight), product, tolerance)
            np.testing.assert_array_equal(x, before)
    x = rng.standard_normal((3, 2, n_in)).astype(np.float32)
    expected = x.astype(float) @ matrix.astype(float) + bias
    assert_close(linear(x, weights[0], bias), expected, tolerance)
    assert_close(linear(x[:, -1], weights[0], bias), expected[:, -1], tolerance)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_embed_picks_the_columns_of_a_laid_out_matrix(layout):
    wte = np.random.default_rng(0).standard_normal((257, 24)).astype(np.float32)
    weight = pack_weight(wte.T, layout)
    ids = np.array([[0, 1, 31, 32], [63, 64, 255, 256]])
    np.testing.assert_array_equal(embed(ids, weight), wte[ids])


def test_parameter_names_and_shapes_are_the_checkpoints():
    for extra in ({}, {"n_inner": 20}, {"tie_word_embeddings": False}):
        config = tiny_config(**extra)
        found = {name: tuple(shape) for name, shape in GPT2Config.from_dict(config).parameter_shapes().items()}
        assert found == tiny.parameter_shapes(config)


def test_the_repr_of_a_model_says_what_it_is():
    _, params, model = model_and_params()
    count = sum(value.size for value in params.values())
    assert repr(model) == f"GPT2(3 layers, 2 heads, width 8, vocabulary 97, {count:,} parameters)"


# ---- logits equal transformers' and the reference's --------------------------------------------------------------


@pytest.mark.parametrize("chunks", CHUNKINGS.values(), ids=CHUNKINGS)
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers_and_the_reference_however_the_prompt_is_cut(name, chunks):
    """K01: with and without cache, in any pieces."""
    _, _, model = small_model(name)
    cache = model.new_cache()
    logits = feed(model, GOLDEN[f"{name}/ids"][None], cache, chunks)
    assert_golden(name, logits)
    assert_close(logits[0], small_reference(name), 1e-4)
    assert cache.length.tolist() == [N_PROMPT]


@pytest.mark.parametrize("name", CASES)
def test_logits_without_a_cache_equal_transformers(name):
    assert_golden(name, small_model(name)[2].forward(GOLDEN[f"{name}/ids"][None], last_only=False))


@pytest.mark.parametrize("name", CASES)
def test_a_hundred_greedy_ids_equal_transformers(name):
    new = greedy(small_model(name)[2], GOLDEN[f"{name}/ids"][:N_START], N_GREEDY)
    assert new == GOLDEN[f"{name}/greedy"].tolist()


@pytest.fixture(scope="class")
def big_model():
    yield golden_model(BIG)[2]
    gc.collect()  # half a gigabyte that no other test needs


class TestGPT2Shape:
    """GPT-2's own size with random weights: other matrix shapes, so other paths through `linear`."""

    @pytest.mark.parametrize(
        "chunks",
        [[200], [1] * 200, [60, 7, 2, 50, 3, 38, 1, 16, 4, 5, 14]],
        ids=["at once", "token by token", "irregular chunks"],
    )
    def test_logits_equal_transformers_however_the_prompt_is_cut(self, big_model, chunks):
        cache = big_model.new_cache(capacity=N_PROMPT)
        assert_golden(BIG, feed(big_model, GOLDEN[f"{BIG}/ids"][None], cache, chunks))

    def test_a_hundred_greedy_ids_equal_transformers(self, big_model):
        assert greedy(big_model, GOLDEN[f"{BIG}/ids"][:N_START], N_GREEDY) == GOLDEN[f"{BIG}/greedy"].tolist()

    def test_rows_of_a_batch_equal_transformers(self, big_model):
        # 2 to 16 rows a step take other paths through BLAS than 1 row or a long prompt.
        ids = GOLDEN[f"{BIG}/ids"]
        columns, expected = GOLDEN[f"{BIG}/columns"], GOLDEN[f"{BIG}/logits"]
        lengths = 8 + np.arange(16) % 5
        prompts, pad = ragged([ids[:n] for n in lengths])
        cache = big_model.new_cache(batch=16, capacity=24)
        logits = big_model.forward(prompts, cache, pad=pad)
        assert_close(logits[:, columns], expected[lengths - 1], 1e-4)
        for batch in (16, 13, 8, 5, 4, 3, 2):
            cache.reorder(range(batch))
            lengths = lengths[:batch]
            logits = big_model.forward(ids[lengths][:, None], cache)
            assert_close(logits[:, columns], expected[lengths], 1e-4)
            lengths = lengths + 1


# ---- positions, scaling, causality -------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [[10], [1] * 10, [4, 6], [9, 1], [1, 9], [3, 3, 4]], ids=str)
def test_cached_steps_use_their_own_position_embedding(chunks):
    """K01: every cached step at position 0."""
    config = tiny_config()
    params = tiny_params(config)
    params["wpe.weight"] = np.random.default_rng(1).standard_normal((16, 8)).astype(np.float32)  # std 1
    model = GPT2(GPT2Config.from_dict(config), dict(params))
    ids = random_ids(1, 10)
    logits = feed(model, ids, model.new_cache(), chunks)
    assert_close(logits[0], reference_logits(config, params, ids[0]), 1e-5)


def test_every_position_can_be_used_and_none_beyond():
    config, params, model = model_and_params(n_positions=16)
    ids = random_ids(1, 16)
    expected = reference_logits(config, params, ids[0])
    cache = model.new_cache()
    assert_close(feed(model, ids, cache, [15, 1])[0], expected, 1e-5)
    before = state(cache)
    for cached in (cache, None):
        with pytest.raises(ValueError, match="16"):
            model.forward(random_ids(1, 17 if cached is None else 1), cached)
    assert_unchanged(cache, before)


def test_last_only_gives_the_last_row_of_the_logits():
    """K03: the wrong row of the logits."""
    config, params, model = model_and_params()
    ids = random_ids(3, 5)
    logits = model.forward(ids)
    assert logits.shape == (3, 97)
    for row in range(3):
        expected = reference_logits(config, params, ids[row])[-1]
        assert_close(logits[row], expected, 1e-5)
        assert logits[row].argmax() == expected.argmax()
    assert_close(logits, model.forward(ids, last_only=False)[:, -1], 1e-5)
    # and after a cached part, where T is not the row's length
    cache = model.new_cache(batch=3)
    model.forward(ids[:, :2], cache)
    assert_close(model.forward(ids[:, 2:], cache), logits, 1e-5)


@pytest.mark.parametrize("bits", range(8))
def test_attention_scaling_flags(bits):
    """L14: 1 / sqrt(d) whatever the flags say."""
    names = ("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn")
    flags = dict(zip(names, (bool(bits & 1), bool(bits & 2), bool(bits & 4)), strict=True))
    config, params, model = model_and_params(n_layer=2, **flags)
    ids = random_ids(1, 12)
    logits = feed(model, ids, model.new_cache(), [5, 1, 6])[0]
    assert_close(logits, reference_logits(config, params, ids[0]), 1e-5)
    # The first two change the numbers: the test would not notice a flag that is ignored otherwise.
    for name in names[:2]:
        other = reference_logits(config | {name: not flags[name]}, params, ids[0])
        assert np.abs(logits - other).max() > 1e-2


def test_the_inverse_layer_flag_leaves_the_first_layer_alone():
    """L14: layers counted from 1."""
    for n_layer, same in ((1, True), (2, False)):
        _, _, plain = model_and_params(n_layer=n_layer)
        _, _, scaled = model_and_params(n_layer=n_layer, scale_attn_by_inverse_layer_idx=True)
        ids = random_ids(1, 12)
        assert (plain.forward(ids) == scaled.forward(ids)).all() == same


def test_the_epsilon_of_the_config_is_used_in_every_layer_norm():
    ids = random_ids(1, 12)
    for eps in (1e-5, 1e-2, 1.0):
        config, params, model = model_and_params(layer_norm_epsilon=eps)
        assert_close(model.forward(ids, last_only=False)[0], reference_logits(config, params, ids[0]), 1e-5)


@pytest.mark.parametrize("scale", [1, 300])
def test_later_tokens_leave_earlier_logits_bit_identical(scale):
    """L16: mask constants that leak the future."""
    config, params, _ = model_and_params()
    params = dict(params)
    for name in [n for n in params if n.endswith("c_attn.weight")]:
        params[name] = params[name].copy()
        params[name][:, :16] *= scale  # queries and keys, not values
    ids = random_ids(1, 12)
    if scale > 1:  # some scores that a query may look at are so low that a finite mask constant would not hide the rest
        x = params["wte.weight"][ids[0]] + params["wpe.weight"][:12]
        h = reference.layer_norm(x, params["h.0.ln_1.weight"], params["h.0.ln_1.bias"], 1e-5)
        qkv = h @ params["h.0.attn.c_attn.weight"] + params["h.0.attn.c_attn.bias"]
        scores = qkv[:, :4] @ qkv[:, 8:12].T / 2  # the first head
        assert scores[np.tril_indices(12)].min() < -2e4
    model = GPT2(GPT2Config.from_dict(config), params)
    logits = model.forward(ids, last_only=False)
    assert np.isfinite(logits).all()
    for changed in range(1, 12):
        other = ids.copy()
        other[0, changed:] = (other[0, changed:] + 1 + np.arange(12 - changed)) % 97
        found = model.forward(other, last_only=False)
        np.testing.assert_array_equal(found[:, :changed], logits[:, :changed])
        assert (found[:, changed] != logits[:, changed]).any()


def test_running_a_model_changes_neither_its_weights_nor_its_input():
    config, params, _ = model_and_params()
    mine = {name: p.copy() for name, p in params.items()}
    model = GPT2(GPT2Config.from_dict(config), mine)
    ids = random_ids(2, 9)
    pad = np.array([0, 3])
    cache = model.new_cache(batch=2)
    first = model.forward(ids, cache, pad=pad)
    np.testing.assert_array_equal(ids, random_ids(2, 9))
    assert pad.tolist() == [0, 3]
    for name, p in params.items():
        np.testing.assert_array_equal(mine[name], p)
    model.forward(ids[:, :1], cache)
    assert_close(model.forward(ids, pad=pad), first, 1e-5)  # nor does it remember anything


def test_caches_of_one_model_do_not_touch_each_other():
    config, params, model = model_and_params()
    a, b = random_ids(1, 10, seed=1), random_ids(1, 10, seed=2)
    cache_a, cache_b = model.new_cache(), model.new_cache(capacity=10)
    logits_a, logits_b = [], []
    for i in range(10):
        logits_a.append(model.forward(a[:, i : i + 1], cache_a)[0])
        logits_b.append(model.forward(b[:, i : i + 1], cache_b)[0])
    assert_close(np.stack(logits_a), reference_logits(config, params, a[0]), 1e-5)
    assert_close(np.stack(logits_b), reference_logits(config, params, b[0]), 1e-5)


@pytest.mark.parametrize(
    "ids",
    [[[]], [[97]], [[0, -1]], [[3, 4, 5, 6, 7, 8]]],
    ids=["no ids", "beyond the vocabulary", "negative", "more than the cache takes"],
)
def test_a_refused_call_leaves_the_cache_as_it_was(ids):
    config, params, model = model_and_params()
    cache = model.new_cache(capacity=8)
    start = [1, 2, 3]
    model.forward([start], cache)
    before = state(cache)
    with pytest.raises(ValueError):
        model.forward(np.array(ids, int), cache)
    assert_unchanged(cache, before)
    assert_close(model.forward([[9]], cache)[0], reference_logits(config, params, [*start, 9])[-1], 1e-5)


# ---- ragged batches ----------------------------------------------------------------------------------------------


def ragged(texts):
    """Left-padded ids [B, T] and pad [B]; the padding is any id, here another one for each place."""
    width = max(len(text) for text in texts)
    pad = np.array([width - len(text) for text in texts])
    filler = random_ids(len(texts), width, seed=99)
    return np.array([[*f[:p], *text] for f, p, text in zip(filler, pad, texts, strict=True)], int), pad


@pytest.mark.parametrize("window", [None, 4], ids=["full", "window 4"])
@pytest.mark.parametrize("lengths", [(9, 1, 5, 9), (1, 2, 3, 4), (2, 9, 9, 1)], ids=str)
def test_each_row_of_a_ragged_batch_equals_the_row_alone(lengths, window):
    config, params, model = model_and_params()
    rows = [random_ids(40, seed=row).tolist() for row in range(4)]
    expected = [reference_logits(config, params, row, window) for row in rows]
    cache = model.new_cache(batch=4, capacity=40 if window is None else 12, window=window)
    alone = [model.new_cache(capacity=40 if window is None else 12, window=window) for _ in rows]
    done = [0] * 4
    # The prompts; then rows of unlike length take ragged chunks; then single tokens; then one more ragged chunk, in
    # which a row may get nothing at all.
    for counts in (lengths, (3, 1, 5, 2), (1, 1, 1, 1), (1, 1, 1, 1), (2, 2, 2, 2), (0, 4, 1, 6), (1, 1, 1, 1)):
        texts = [row[at : at + n] for row, at, n in zip(rows, done, counts, strict=True)]
        ids, pad = ragged(texts)
        logits = model.forward(ids, cache, pad=pad, last_only=False)
        assert logits.shape == (*ids.shape, 97)
        for b, n in enumerate(counts):
            if n:
                assert_close(logits[b, pad[b] :], expected[b][done[b] : done[b] + n], 1e-5)
                single = model.forward([texts[b]], alone[b], last_only=False)[0]
                assert_close(logits[b, pad[b] :], single, 1e-5)
        done = [at + n for at, n in zip(done, counts, strict=True)]
        assert cache.length.tolist() == done


@pytest.mark.parametrize("batch", [1, 2])
def test_padding_that_all_rows_have_changes_nothing(batch):
    config, params, model = model_and_params()
    text = random_ids(batch, 12)
    expected = np.stack([reference_logits(config, params, row) for row in text])
    for capacity in (12, 13, 20):
        for chunk in (1, 2, 3, 6):
            for padding in (1, 2, 5):
                cache = model.new_cache(batch=batch, capacity=capacity)
                for at in range(0, 12, chunk):
                    ids = np.concatenate([np.full((batch, padding), 50), text[:, at : at + chunk]], axis=1)
                    logits = model.forward(ids, cache, pad=[padding] * batch, last_only=False)[:, padding:]
                    assert_close(logits, expected[:, at : at + chunk], 1e-5)
                assert (cache.length == 12).all()


def test_last_only_of_a_ragged_batch_is_each_rows_last_token():
    """K03: the wrong row of a padded batch."""
    config, params, model = model_and_params()
    texts = [random_ids(n, seed=n).tolist() for n in (6, 1, 4)]
    ids, pad = ragged(texts)
    for cache in (None, model.new_cache(batch=3)):
        logits = model.forward(ids, cache, pad=pad)
        for row, text in enumerate(texts):
            assert_close(logits[row], reference_logits(config, params, text)[-1], 1e-5)


def test_padding_is_never_stored_and_takes_no_room():
    _, _, model = model_and_params()
    ids, pad = ragged([[1, 2, 3, 4, 5, 6], [7], [8, 9]])
    cache = model.new_cache(batch=3, capacity=6)
    model.forward(ids, cache, pad=pad)
    assert cache.length.tolist() == [6, 1, 2]
    assert [sorted(row[row >= 0]) for row in cache.slot_pos] == [[0, 1, 2, 3, 4, 5], [0], [0, 1]]
    for slots in cache.keys + cache.values:
        assert (slots[1, ..., 1:] == 0).all()
    # Row 0 is full; the others may still grow, and row 0 keeps what it has.
    model.forward([[0, 0], [1, 2], [3, 4]], cache, pad=[2, 0, 0])
    assert cache.length.tolist() == [6, 3, 4]
    with pytest.raises(ValueError):
        model.forward([[0], [1], [2]], cache)


def test_rows_of_a_batch_do_not_see_each_other():
    _, _, model = model_and_params()
    ids = random_ids(3, 8)
    logits = model.forward(ids, model.new_cache(batch=3), last_only=False)
    other = ids.copy()
    other[1] = (other[1] + 5) % 97
    found = model.forward(other, model.new_cache(batch=3), last_only=False)
    np.testing.assert_array_equal(found[[0, 2]], logits[[0, 2]])
    assert (found[1] != logits[1]).any()


# ---- windows and the ring ----------------------------------------------------------------------------------------


def shorten(total, largest, rng):
    """Random chunk sizes of at most `largest` that add up to total."""
    chunks = []
    while sum(chunks) < total:
        chunks.append(min(int(rng.integers(1, largest + 1)), total - sum(chunks)))
    return chunks


@pytest.mark.parametrize("slack", [0, 1, 2, 5, 60])
@pytest.mark.parametrize("window", [1, 2, 3, 7, 8, 16])
def test_a_window_equals_the_reference_with_that_band_wrapped_or_not(window, slack):
    config, params, model = model_and_params()
    ids = random_ids(2, 50, seed=window)
    expected = np.stack([reference_logits(config, params, row, window) for row in ids])
    capacity = window + slack  # a slack of 60 never wraps within 50 tokens
    largest = slack + 1
    rng = np.random.default_rng(0)
    full_chunks = [largest] * (50 // largest) + [50 % largest] * bool(50 % largest)
    for chunks in ([1] * 50, full_chunks, shorten(50, largest, rng), shorten(50, largest, rng)):
        cache = model.new_cache(batch=2, capacity=capacity, window=window)
        assert_close(feed(model, ids, cache, chunks), expected, 1e-5)


def test_a_window_as_long_as_the_text_is_full_attention():
    config, params, model = model_and_params()
    ids = random_ids(1, 30)
    cache = model.new_cache(capacity=30, window=30)
    assert_close(feed(model, ids, cache, [11, 1, 18])[0], reference_logits(config, params, ids[0]), 1e-5)


def test_a_first_chunk_may_fill_the_ring_and_later_ones_only_the_slack():
    config, params, model = model_and_params()
    ids = random_ids(1, 40)
    expected = reference_logits(config, params, ids[0], 6)
    cache = model.new_cache(capacity=10, window=6)
    logits = feed(model, ids[:, :10], cache, [10])
    for _ in range(4):
        at = int(cache.length[0])
        before = state(cache)
        with pytest.raises(ValueError):
            model.forward(ids[:, at : at + 6], cache)
        assert_unchanged(cache, before)
        logits = np.concatenate([logits, model.forward(ids[:, at : at + 5], cache, last_only=False)], axis=1)
    assert_close(logits[0], expected[:30], 1e-5)


def test_a_full_cache_raises_instead_of_overwriting():
    """K05: a ring that wraps in place keeps keys of other positions."""
    _, _, model = model_and_params()
    cache = model.new_cache(capacity=8)
    model.forward(random_ids(1, 7), cache)
    before = state(cache)
    with pytest.raises(ValueError, match="8"):
        model.forward(random_ids(1, 2), cache)
    assert_unchanged(cache, before)
    model.forward(random_ids(1, 1), cache)
    with pytest.raises(ValueError, match="8"):
        model.forward(random_ids(1, 1), cache)


def test_a_cache_is_float32_zeros_of_the_stated_size():
    cache = KVCache(n_layer=3, n_head=2, d_head=4, capacity=10, batch=5)
    assert len(cache.keys) == len(cache.values) == 3
    for slots in cache.keys + cache.values:
        assert slots.shape == (5, 2, 4, 10) and slots.dtype == np.float32 and not slots.any()
    assert cache.nbytes == 2 * 3 * 2 * 4 * 10 * 4 * 5
    assert (cache.capacity, cache.window, cache.batch, cache.max_chunk) == (10, None, 5, 10)
    assert cache.length.tolist() == [0] * 5 and (cache.slot_pos == -1).all() and cache.slot_pos.shape == (5, 10)


@pytest.mark.parametrize(("batch", "capacity", "window"), [(1, 5, None), (3, 7, None), (2, 64, None), (4, 9, 3)])
def test_bytes_follow_from_the_capacity_that_was_asked_for(batch, capacity, window):
    config, _, model = model_and_params()
    cache = model.new_cache(batch, capacity, window)
    a_slot = 2 * config["n_layer"] * config["n_head"] * (config["n_embd"] // config["n_head"]) * 4
    assert cache.nbytes == sum(slots.nbytes for slots in cache.keys + cache.values) == a_slot * capacity * batch
    model.forward(random_ids(batch, 4), cache)
    assert cache.nbytes == a_slot * capacity * batch
    cache.reorder([0])
    assert cache.nbytes == a_slot * capacity


def test_the_slots_in_use_are_handed_out_as_views():
    cache = KVCache(n_layer=2, n_head=2, d_head=4, capacity=10, batch=3, window=4)
    for _ in range(12):
        plan = cache.allocate(cache.length[:, None] + np.arange(2))
        for layer in range(2):
            new = np.ones((3, 2, 4, 2), np.float32)
            keys, values = cache.store(layer, plan, new, new)
            assert np.shares_memory(keys, cache.keys[layer]) and np.shares_memory(values, cache.values[layer])
            assert keys.shape == values.shape == (3, 2, 4, min(cache.length[0], 10))


class ListModel:
    """The cache as plain lists: per row, the stamp of every position fed and the last position put in each slot."""

    def __init__(self, batch, capacity, window):
        self.capacity, self.window = capacity, window
        self.stamps = [[] for _ in range(batch)]
        self.in_slot = [{} for _ in range(batch)]

    def seen_by(self, row, query):
        """(position, stamp) of what a query at this position sees, in time order."""
        first = 0 if self.window is None else max(0, query - self.window + 1)
        return [(p, self.stamps[row][p]) for p in range(first, query + 1)]

    def fits(self, counts):
        """Whether so many new tokens a row leave every query what it has to see."""
        for stamps, count in zip(self.stamps, counts, strict=True):
            end = len(stamps) + count
            oldest_seen = 0 if self.window is None else max(0, len(stamps) - self.window + 1)
            if count and end - self.capacity > oldest_seen:
                return False
        return True

    def extend(self, row, stamps):
        for stamp in stamps:
            self.in_slot[row][len(self.stamps[row]) % self.capacity] = len(self.stamps[row])
            self.stamps[row].append(stamp)

    def can_truncate(self, row, length):
        if not 0 <= length <= len(self.stamps[row]):
            return False
        first = 0 if self.window is None else max(0, length - self.window + 1)
        return all(self.in_slot[row].get(p % self.capacity) == p for p in range(first, length))

    def truncate(self, row, length):
        del self.stamps[row][length:]
        self.in_slot[row] = {slot: p for slot, p in self.in_slot[row].items() if p < length}

    def select(self, rows):
        self.stamps = [list(self.stamps[r]) for r in rows]
        self.in_slot = [dict(self.in_slot[r]) for r in rows]


def write_and_check(cache, lists, counts, stamp, more_padding=0):
    """Feed counts[b] tokens to row b (left-padded); every query must see exactly the list's entries, in all layers."""
    width = max(counts) + more_padding
    pad = width - np.array(counts)
    columns = np.arange(width) - pad[:, None]
    positions = np.where(columns < 0, -1, cache.length[:, None] + columns)
    stamps = stamp + np.arange(len(counts) * width).reshape(len(counts), width)
    starts = [len(row) for row in lists.stamps]
    for row, count in enumerate(counts):
        lists.extend(row, stamps[row, pad[row] :].tolist())
        assert len(lists.stamps[row]) == starts[row] + count
    plan = cache.allocate(positions)
    assert cache.length.tolist() == [len(row) for row in lists.stamps]
    for layer in range(len(cache.keys)):
        # [B, 2, 1, T]: heads are told apart by the sign, keys from values by a factor, layers by what is added.
        new = np.stack([stamps, -stamps], axis=1)[:, :, None].astype(np.float32)
        keys, values = cache.store(layer, plan, new + layer, new * 2 + layer)
        used = keys.shape[3]
        mask = np.ones((len(counts), 1, width, used), bool) if plan.mask is None else plan.mask
        mask = np.broadcast_to(mask, (len(counts), 1, width, used))
        for row, count in enumerate(counts):
            for t in range(pad[row], width):
                visible = np.flatnonzero(mask[row, 0, t])
                order = visible[np.argsort(cache.slot_pos[row, visible])]
                expected = lists.seen_by(row, starts[row] + t - pad[row])
                assert cache.slot_pos[row, order].tolist() == [p for p, _ in expected]
                wanted = np.array([s for _, s in expected])
                for slots, factor in ((keys, 1), (values, 2)):
                    assert (slots[row, 0, 0, order] == factor * wanted + layer).all()
                    assert (slots[row, 1, 0, order] == -factor * wanted + layer).all()
            assert count == 0 or len(visible)
    return stamp + stamps.size


@pytest.mark.parametrize(
    ("window", "chunks"),
    [(4, (5, 5)), (8, (8, 1)), (7, (7, 2)), (6, (3, 3, 3)), (8, (1,) * 20), (1, (8,) * 4), (5, (4,) * 7)],
    ids=str,
)
def test_a_ring_of_eight_equals_a_plain_list_at_its_boundary(window, chunks):
    """K06: a piece that straddles the end of the ring."""
    cache, lists = KVCache(2, 2, 1, 8, window=window), ListModel(1, 8, window)
    stamp = 1
    for count in chunks:
        stamp = write_and_check(cache, lists, [count], stamp)
    # Read in time order the ring holds the last 8 stamps, and each in the slot of its position.
    order = np.argsort(cache.slot_pos[0])[-min(sum(chunks), 8) :]
    assert cache.keys[1][0, 0, 0, order].tolist() == [s + 1 for s in lists.stamps[0][-8:]]
    assert cache.slot_pos[0, order].tolist() == list(range(sum(chunks)))[-8:]
    assert (cache.slot_pos[0, order] % 8 == order).all()


@pytest.mark.parametrize("window", [None, 1, 5, 8])
def test_a_chunk_larger_than_the_ring_is_refused(window):
    """K06: a piece larger than the ring."""
    cache = KVCache(2, 2, 1, 8, window=window)
    before = state(cache)
    with pytest.raises(ValueError):
        cache.allocate(np.arange(9)[None])
    assert_unchanged(cache, before)


@pytest.mark.parametrize("window", [None, 1, 3, 6, 9])
@pytest.mark.parametrize("seed", range(6))
def test_any_series_of_extend_truncate_and_select_equals_a_plain_list(seed, window):
    """K06: capacity, write index and length confused."""
    rng = np.random.default_rng([seed, window or 0])
    capacity = 9
    cache, lists = KVCache(2, 2, 1, capacity, batch=3, window=window), ListModel(3, capacity, window)
    stamp, refused = 1, 0
    for _ in range(150):
        batch = cache.batch
        action = rng.choice(["extend", "truncate", "select"], p=[0.6, 0.25, 0.15])
        if action == "extend":
            counts = rng.integers(0, 4 if rng.random() < 0.7 else capacity + 2, size=batch).tolist()
            counts[rng.integers(batch)] += 1
            if rng.random() < 0.3:
                counts = [max(1, min(counts))] * batch
            if lists.fits(counts):
                stamp = write_and_check(cache, lists, counts, stamp, more_padding=int(rng.integers(0, 3)))
            else:
                refused += 1
                before = state(cache)
                columns = np.arange(max(counts)) - (max(counts) - np.array(counts))[:, None]
                with pytest.raises(ValueError):
                    cache.allocate(np.where(columns < 0, -1, cache.length[:, None] + columns))
                assert_unchanged(cache, before)
        elif action == "truncate":
            lengths = [len(row) for row in lists.stamps]
            target = [max(0, n - int(rng.integers(0, 5))) for n in lengths]
            if rng.random() < 0.15:
                target = [0] * batch
            if rng.random() < 0.1:
                target[rng.integers(batch)] += 10
            if all(lists.can_truncate(row, n) for row, n in enumerate(target)):
                for row, n in enumerate(target):
                    lists.truncate(row, n)
                cache.truncate(np.array(target))
                assert cache.length.tolist() == target
            else:
                refused += 1
                before = state(cache)
                with pytest.raises(ValueError):
                    cache.truncate(np.array(target))
                assert_unchanged(cache, before)
        else:
            same_size = rng.random() < 0.7
            rows = rng.integers(batch, size=batch if same_size else rng.integers(1, 5)).tolist()
            cache.reorder(rows)
            lists.select(rows)
            assert cache.batch == len(rows)
        # What the cache says it holds is what the lists hold.
        for row, held in enumerate(lists.in_slot):
            found = {slot: p for slot, p in enumerate(cache.slot_pos[row].tolist()) if p >= 0}
            assert found == held
    assert refused >= 3  # the limits were met


@pytest.mark.parametrize(
    ("capacity", "window", "said"),
    [
        (0, None, ["capacity is 0;", "1 or more"]),
        (-1, None, ["capacity is -1;", "1 or more"]),
        (2.5, None, ["capacity is 2.5;", "1 or more"]),
        (8, 0, ["window is 0;", "from 1 to", " 8"]),
        (8, 9, ["window is 9;", "from 1 to", " 8"]),
        (8, -2, ["window is -2;", "from 1 to", " 8"]),
        (8, 2.5, ["window is 2.5;", "from 1 to", " 8"]),
    ],
)
def test_a_cache_of_no_use_is_refused(capacity, window, said):
    with pytest.raises(ValueError) as error:
        KVCache(2, 2, 4, capacity, window=window)
    assert all(part in str(error.value) for part in said), error.value


@pytest.mark.parametrize("window", [None, 1])
def test_the_smallest_cache_holds_one_token(window):
    cache = KVCache(1, 1, 1, capacity=1, window=window)
    assert cache.allocate(np.array([[0]])).used == 1 and cache.length.tolist() == [1]
    assert cache.max_chunk == (0 if window is None else 1)


def test_what_a_cache_refuses_is_named():
    """The row at fault, what it holds and what would fit."""
    cache = KVCache(1, 1, 1, capacity=6, batch=3)
    cache.allocate(np.array([[-1, -1, 0], [0, 1, 2], [-1, 0, 1]]))
    with pytest.raises(ValueError, match=r"\b4 more tokens after 3\b.*\bcache of 6 slots"):
        cache.allocate(np.array([[1, 2, 3, 4], [3, 4, 5, 6], [2, 3, 4, 5]]))
    with pytest.raises(ValueError, match=r"\[1, 3, 3\].*\[1, 3, 2\]"):
        cache.truncate([1, 3, 3])
    with pytest.raises(ValueError, match=r"first 2 positions.*\[1, 3, 2\]"):
        cache.prefix(0, 2)
    for length in (1.0, [1.0, 1.0, 1.0], "1", True):
        with pytest.raises(ValueError) as error:
            cache.truncate(length)
        assert str(error.value).startswith(f"length is {length!r};") and "whole number" in str(error.value)
    for rows in ([0, 3], [-1], [0.0], [True]):
        with pytest.raises(ValueError) as error:
            cache.reorder(rows)
        assert str(error.value).startswith(f"rows is {rows};") and "from 0 to 2" in str(error.value)
    cache.reorder(np.array([2, 0], np.uint8))
    cache.truncate(np.uint8(1))
    assert cache.length.tolist() == [1, 1]
    cache.reorder([])
    assert cache.batch == 0 and cache.keys[0].shape == cache.values[0].shape == (0, 1, 1, 6)
    cache.reorder([])  # no rows of none

    ring = KVCache(1, 1, 1, capacity=5, batch=2, window=4)
    for at in range(8):
        ring.allocate(np.array([[-1], [at]]))
    with pytest.raises(ValueError, match=r"\b3 more tokens after 8\b.*window of 4 of 5 slots"):
        ring.allocate(np.array([[-1, -1, 0], [8, 9, 10]]))
    with pytest.raises(ValueError, match=r"row 1 from 8 to 5 tokens.* 5 slots.* window of 4\b"):
        ring.truncate([0, 5])


# ---- rubbish in the buffers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("window", [None, 5])
def test_slots_not_yet_written_are_never_read(batch, window):
    """K07: NaN in slots that were never written."""
    _, _, model = model_and_params()
    ids = random_ids(batch, 30)
    capacity = 40 if window is None else 9
    clean = model.new_cache(batch=batch, capacity=capacity, window=window)
    dirty = model.new_cache(batch=batch, capacity=capacity, window=window)
    for slots in dirty.keys + dirty.values:
        slots[...] = np.nan
    chunks = [5, 1, 1, 3, 5, 5, 5, 1, 4]
    expected = feed(model, ids, clean, chunks)
    np.testing.assert_array_equal(feed(model, ids, dirty, chunks), expected)
    assert np.isfinite(expected).all()


@pytest.mark.parametrize("window", [None, 5])
def test_a_cache_reused_after_a_longer_text_gives_the_same_bits_as_a_new_one(window):
    """K07: what a longer text left behind."""
    _, _, model = model_and_params()
    capacity = 40 if window is None else 9
    used, new = (model.new_cache(batch=2, capacity=capacity, window=window) for _ in range(2))
    feed(model, random_ids(2, 30, seed=5), used, [5] * 6)
    used.truncate(0)  # nothing is needed before position 0, so this is legal even after the ring has wrapped
    assert used.length.tolist() == [0, 0] and (used.slot_pos == -1).all()
    ids = random_ids(2, 20, seed=6)
    chunks = [5, 1, 1, 3, 5, 5]
    np.testing.assert_array_equal(feed(model, ids, used, chunks), feed(model, ids, new, chunks))


def test_short_rows_are_not_disturbed_by_what_lies_behind_their_end():
    # Slots behind the end of a short row are in the view, since another row is longer: they must have weight exactly 0.
    config, params, model = model_and_params()
    long, short = random_ids(20, seed=1).tolist(), random_ids(12, seed=2).tolist()
    cache = model.new_cache(batch=2, capacity=24)
    ids, pad = ragged([long, short[:4]])
    model.forward(ids, cache, pad=pad)
    for slots in cache.keys + cache.values:
        slots[1, ..., 4:] = 1e30
    for at in range(4, 12):
        logits = model.forward([[0], [short[at]]], cache, pad=[1, 0])
        assert_close(logits[1], reference_logits(config, params, short[: at + 1])[-1], 1e-5)
    logits = model.forward([[7], [8]], cache)
    assert_close(logits[0], reference_logits(config, params, [*long, 7])[-1], 1e-5)


# ---- truncate ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(13))
def test_truncate_and_go_on_equals_never_having_written(length):
    config, params, model = model_and_params()
    first, second = random_ids(1, 12, seed=1), random_ids(1, 9, seed=2)
    text = [*first[0, :length], *second[0]]
    expected = reference_logits(config, params, text)[length:]
    for chunks in ([9], [1] * 9, [2, 3, 4]):
        cache = model.new_cache(capacity=24)
        feed(model, first, cache, [7, 5])
        cache.truncate(length)
        cache.truncate(length)  # absolute, so a second time changes nothing
        assert cache.length.tolist() == [length]
        assert cache.slot_pos.max() == length - 1
        assert_close(feed(model, second, cache, chunks)[0], expected, 1e-5)


@pytest.mark.parametrize(("capacity", "window"), [(12, 4), (12, 12), (9, 8), (6, 1)])
def test_truncate_in_a_wrapped_ring_works_within_the_slack_and_raises_beyond(capacity, window):
    config, params, model = model_and_params()
    first, second = random_ids(1, 30, seed=1), random_ids(1, 20, seed=2)
    slack = capacity - window + 1
    for back in range(0, 31):
        cache = model.new_cache(capacity=capacity, window=window)
        feed(model, first, cache, [1] * 30)
        length = 30 - back
        # The ring holds the last `capacity` positions; a token at `length` needs the window - 1 before it, if any.
        if back <= slack or (window == 1) or length == 0:
            cache.truncate(length)
            text = [*first[0, :length], *second[0]]
            expected = reference_logits(config, params, text, window)[length:]
            chunks = [slack] * (20 // slack) + [1] * (20 % slack)
            assert_close(feed(model, second, cache, chunks)[0], expected, 1e-5)
        else:
            before = state(cache)
            with pytest.raises(ValueError):
                cache.truncate(length)
            assert_unchanged(cache, before)


def test_truncate_takes_a_length_for_each_row():
    config, params, model = model_and_params()
    first, second = random_ids(3, 12, seed=1), random_ids(3, 5, seed=2)
    cache = model.new_cache(batch=3)
    model.forward(first, cache)
    lengths = np.array([12, 0, 5])
    cache.truncate(lengths)
    lengths[:] = 1  # the cache keeps its own copy
    assert cache.length.tolist() == [12, 0, 5]
    logits = feed(model, second, cache, [1, 3, 1])
    for row, length in enumerate((12, 0, 5)):
        expected = reference_logits(config, params, [*first[row, :length], *second[row]])
        assert_close(logits[row], expected[length:], 1e-5)


@pytest.mark.parametrize("length", [13, 100, -1])
def test_truncate_beyond_what_is_held_raises(length):
    _, _, model = model_and_params()
    cache = model.new_cache()
    model.forward(random_ids(1, 12), cache)
    before = state(cache)
    with pytest.raises(ValueError, match=str(length)):
        cache.truncate(length)
    assert_unchanged(cache, before)


def test_truncating_a_row_beyond_its_own_length_raises_though_another_is_longer():
    _, _, model = model_and_params()
    cache = model.new_cache(batch=2)
    ids, pad = ragged([[1, 2, 3, 4, 5], [6, 7]])
    model.forward(ids, cache, pad=pad)
    for length in (3, [5, 3]):
        with pytest.raises(ValueError):
            cache.truncate(length)
    cache.truncate([3, 2])
    assert cache.length.tolist() == [3, 2]


# ---- select ------------------------------------------------------------------------------------------------------

SELECTIONS = [[1, 0, 0, 2], [3, 3, 0, 1], [1, 2, 3, 0], [0, 1, 2, 3], [3, 2, 1, 0], [2, 2, 2, 2], [0, 1, 1, 3]]
RESIZES = [[2], [0, 3], [3, 1, 0], [0, 0, 1, 1, 2, 3], [3] * 8]


@pytest.mark.parametrize("shared", [0, 4])
@pytest.mark.parametrize("rows", SELECTIONS + RESIZES, ids=str)
def test_select_equals_computing_the_chosen_rows_anew(rows, shared):
    config, params, model = model_and_params()
    first = random_ids(4, 9, seed=1)
    first[:, :4] = first[0, :4]  # four ids that all rows share
    second, third = random_ids(len(rows), 4, seed=2), random_ids(len(rows), 3, seed=3)
    cache = model.new_cache(batch=4, capacity=20)
    model.forward(first, cache)
    cache.reorder(rows, shared=shared)
    assert cache.batch == len(rows) and cache.length.tolist() == [9] * len(rows)
    texts = np.concatenate([first[rows], second], axis=1)
    expected = np.stack([reference_logits(config, params, text)[9:] for text in texts])
    assert_close(feed(model, second, cache, [1, 3]), expected, 1e-5)
    # Rows that were copied from one parent go their own ways, and can be chosen from again.
    again = np.arange(len(rows))[::-1]
    cache.reorder(again, shared=shared)
    texts = np.concatenate([texts[again], third], axis=1)
    expected = np.stack([reference_logits(config, params, text)[13:] for text in texts])
    assert_close(feed(model, third, cache, [2, 1]), expected, 1e-5)


def test_one_prompt_is_spread_over_many_rows():
    config, params, model = model_and_params()
    prompt = random_ids(7)
    cache = model.new_cache(capacity=12)
    model.forward(prompt[None], cache)
    cache.reorder([0] * 5, shared=7)
    assert cache.batch == 5 and cache.nbytes == 5 * model.new_cache(capacity=12).nbytes
    second = random_ids(5, 5, seed=2)
    logits = feed(model, second, cache, [1] * 5)
    for row in range(5):
        expected = reference_logits(config, params, [*prompt, *second[row]])[7:]
        assert_close(logits[row], expected, 1e-5)


@pytest.mark.parametrize("rows", [[1, 0, 0, 2], [3, 3, 0, 1], [2, 0], [1] * 6], ids=str)
def test_select_keeps_each_rows_own_length(rows):
    config, params, model = model_and_params()
    texts = [random_ids(n, seed=n).tolist() for n in (9, 2, 5, 7)]
    cache = model.new_cache(batch=4, capacity=20)
    ids, pad = ragged(texts)
    model.forward(ids, cache, pad=pad)
    cache.reorder(rows)
    assert cache.length.tolist() == [len(texts[r]) for r in rows]
    second = random_ids(len(rows), 5, seed=2)
    logits = feed(model, second, cache, [1, 4])
    for i, r in enumerate(rows):
        expected = reference_logits(config, params, [*texts[r], *second[i]])[len(texts[r]) :]
        assert_close(logits[i], expected, 1e-5)


@pytest.mark.parametrize("shared", [0, 4])
@pytest.mark.parametrize("written", [5, 8, 11, 25])
@pytest.mark.parametrize("rows", [[1, 0, 0, 2], [3, 3, 0, 1], [2, 0]], ids=str)
def test_select_in_a_ring_wrapped_or_not(rows, written, shared):
    config, params, model = model_and_params()
    first = random_ids(4, written, seed=1)
    first[:, :4] = first[0, :4]
    cache = model.new_cache(batch=4, capacity=8, window=5)
    feed(model, first, cache, [4] * (written // 4) + [1] * (written % 4))
    cache.reorder(rows, shared=shared)
    second = random_ids(len(rows), 9, seed=2)
    logits = feed(model, second, cache, [4, 1, 4])
    texts = np.concatenate([first[rows], second], axis=1)
    expected = np.stack([reference_logits(config, params, text, 5)[written:] for text in texts])
    assert_close(logits, expected, 1e-5)


def test_select_copies_shared_positions_to_a_row_that_has_lost_them():
    # Row 0 has wrapped over the shared positions and was then taken back; row 1 still holds and needs them.
    config, params, model = model_and_params()
    long, short = random_ids(12, seed=1).tolist(), random_ids(4, seed=2).tolist()
    short[:3] = long[:3]
    cache = model.new_cache(batch=2, capacity=9, window=5)
    ids, pad = ragged([long[:4], short])
    model.forward(ids, cache, pad=pad)
    for token in long[4:]:
        model.forward([[token], [0]], cache, pad=[0, 1])
    cache.truncate([9, 4])
    cache.reorder([1, 1], shared=3)
    logits = model.forward([[20], [21]], cache)
    for row, token in enumerate((20, 21)):
        assert_close(logits[row], reference_logits(config, params, [*short, token], 5)[-1], 1e-5)


def test_select_and_truncate_together():
    # As beams and drafts use them: wrap, take back, choose again, go on.
    config, params, model = model_and_params()
    first = random_ids(3, 20, seed=1)
    cache = model.new_cache(batch=3, capacity=9, window=5)
    feed(model, first, cache, [5] * 4)
    cache.reorder([2, 0, 0])
    cache.truncate([18, 20, 16])
    cache.reorder([1, 2, 0])
    second = random_ids(3, 7, seed=2)
    logits = feed(model, second, cache, [3, 4])
    for i, (row, length) in enumerate([(0, 20), (0, 16), (2, 18)]):
        expected = reference_logits(config, params, [*first[row, :length], *second[i]], 5)[length:]
        assert_close(logits[i], expected, 1e-5)


@pytest.mark.parametrize("window", [None, 1, 3, 8])
def test_max_chunk_is_the_most_that_fits(window):
    cache, rng = KVCache(1, 1, 1, capacity=8, batch=2, window=window), np.random.default_rng(window or 0)

    def positions(counts):
        """The next counts[row] positions of each row, padded at the left."""
        T = max(counts)
        return np.array([[-1] * (T - n) + list(range(at, at + n)) for at, n in zip(cache.length, counts, strict=True)])

    for _ in range(30):
        most = cache.max_chunk
        before = cache.length.copy()
        with pytest.raises(ValueError, match="slots"):
            cache.allocate(positions([most + 1, most + 1]))
        assert (cache.length == before).all()
        if most == 0:
            break  # without a window a full cache stays full
        cache.allocate(positions([int(rng.integers(1, most + 1)), int(rng.integers(1, most + 1))]))
    assert (most == 0) == (window is None)


# ---- the first positions -----------------------------------------------------------------------------------------


def test_a_prefix_is_what_was_stored_at_the_first_positions():
    cache = KVCache(n_layer=2, n_head=2, d_head=3, capacity=8, batch=2)
    # layer, K or V, [B, H, D, T]
    stored = np.random.default_rng(0).standard_normal((2, 2, 2, 2, 3, 6)).astype(np.float32)
    for at in (0, 4):
        plan = cache.allocate(np.arange(at, min(at + 4, 6))[None].repeat(2, axis=0))
        for layer in range(2):
            cache.store(layer, plan, *stored[layer, ..., at : at + 4])
    for layer in range(2):
        for length in (0, 1, 4, 6):
            keys, values = cache.prefix(layer, length)
            np.testing.assert_array_equal(keys, stored[layer, 0, ..., :length])
            np.testing.assert_array_equal(values, stored[layer, 1, ..., :length])
            assert length == 0 or np.shares_memory(keys, cache.keys[layer])
    cache.truncate([6, 3])
    assert cache.prefix(0, 3)[0].shape == (2, 2, 3, 3)
    for length in (4, 7, 8, 9):
        with pytest.raises(ValueError, match=f"first {length} positions"):
            cache.prefix(0, length)


def test_a_prefix_that_the_ring_has_overwritten_is_refused():
    cache = KVCache(1, 1, 1, capacity=5, window=3)
    cache.allocate(np.arange(5)[None])
    assert cache.prefix(0, 5)[0].shape == (1, 1, 1, 5)
    cache.allocate(np.array([[5]]))
    for length in (1, 5, 6):
        with pytest.raises(ValueError, match="positions"):
            cache.prefix(0, length)


# ---- any series of calls -----------------------------------------------------------------------------------------


class Rows:
    """What a cache has to be, without slots: per row the tokens fed, and of which of them the keys are still there.

    A new key costs the row the key `capacity` positions before it, for good.
    """

    def __init__(self, batch, capacity, window):
        self.capacity, self.window = capacity, window
        self.tokens = [[] for _ in range(batch)]
        self.kept = [set() for _ in range(batch)]

    def visible(self, query):
        """The positions that a query at this position sees."""
        return [p for p in range(query + 1) if self.window is None or query - p < self.window]

    def may_extend(self, row, count):
        at = len(self.tokens[row])
        new = range(at, at + count)
        lost = {q - self.capacity for q in new}
        return not any(p in lost for query in new for p in self.visible(query))

    def may_truncate(self, row, length):
        if not 0 <= length <= len(self.tokens[row]):
            return False
        # The next token is a query at `length`; its own key will be new.
        return set(self.visible(length)) - {length} <= self.kept[row]

    def extend(self, row, tokens):
        for token in tokens:
            self.kept[row].discard(len(self.tokens[row]) - self.capacity)
            self.kept[row].add(len(self.tokens[row]))
            self.tokens[row].append(token)

    def truncate(self, row, length):
        del self.tokens[row][length:]
        self.kept[row] = {p for p in self.kept[row] if p < length}

    def select(self, rows):
        self.tokens = [list(self.tokens[row]) for row in rows]
        self.kept = [set(self.kept[row]) for row in rows]

    def same(self):
        return all(tokens == self.tokens[0] for tokens in self.tokens)

    def shared(self):
        """How many first positions are the same in all rows."""
        columns = zip(*self.tokens, strict=False)
        return next((i for i, column in enumerate(columns) if len(set(column)) > 1), min(map(len, self.tokens)))


class CacheMachine(RuleBasedStateMachine):
    """Drives a cache and `Rows` through the same random calls. Subclasses say how tokens are made and compared."""

    MOST_ROWS = 3
    LONGEST = 10**6

    def begin(self, batch, capacity, window):
        self.rows = Rows(batch, capacity, window)

    @initialize(batch=st.integers(1, 3), capacity=st.integers(1, 7), window=st.sampled_from([None, 1, 2, 3, 4, 5, 7]))
    def start(self, batch, capacity, window):
        self.begin(batch, capacity, window and min(window, capacity))

    @property
    def lengths(self):
        return [len(tokens) for tokens in self.rows.tokens]

    def feed(self, counts, padding):
        """Feed counts[row] new tokens to each row, or see that the cache refuses them and stays as it was."""
        counts = [min(count, self.LONGEST - length) for count, length in zip(counts, self.lengths, strict=True)]
        if not any(counts):
            return
        if all(self.rows.may_extend(row, count) for row, count in enumerate(counts)):
            self.extend(counts, max(counts) + padding)
            return
        before = state(self.cache)
        with pytest.raises(ValueError, match="do not fit"):
            self.extend(counts, max(counts) + padding)
        assert_unchanged(self.cache, before)

    # One rule for all calls: hypothesis leaves rules out at random, and a run without one of them shows little.
    @rule(data=st.data(), name=st.sampled_from(["extend", "extend", "extend", "take back", "take back", "select"]))
    def call(self, data, name):
        {"extend": self.extend_rows, "take back": self.take_tokens_back, "select": self.select_rows}[name](data)

    def extend_rows(self, data):
        manner = data.draw(st.sampled_from(["each row its own", "each row its own", "alike", "the most", "too many"]))
        n, most = len(self.rows.tokens), self.cache.max_chunk
        if manner == "each row its own":
            limit = data.draw(st.sampled_from([2, 2, 4, 9]))
            self.feed(data.draw(st.lists(st.integers(0, limit), min_size=n, max_size=n)), data.draw(st.integers(0, 2)))
        else:
            alike = data.draw(st.integers(1, 3))
            self.feed([{"alike": alike, "the most": most, "too many": most + 1}[manner]] * n, 0)

    def take_tokens_back(self, data):
        manner = data.draw(st.sampled_from(["a few", "a few", "any", "all alike"]))
        if manner == "all alike":
            length = data.draw(st.integers(0, max(self.lengths)))
            self.truncate([length] * len(self.lengths), length)
        else:
            least = 2 if manner == "a few" else 8
            more = 0 if manner == "a few" else 1
            lengths = [data.draw(st.integers(max(n - least, -more), n + more)) for n in self.lengths]
            self.truncate(lengths, np.array(lengths))

    def truncate(self, lengths, argument):
        if all(self.rows.may_truncate(row, length) for row, length in enumerate(lengths)):
            self.cache.truncate(argument)
            for row, length in enumerate(lengths):
                self.rows.truncate(row, length)
            return
        before = state(self.cache)
        with pytest.raises(ValueError, match="cannot truncate"):
            self.cache.truncate(argument)
        assert_unchanged(self.cache, before)

    def select_rows(self, data):
        batch, shares, stays = len(self.rows.tokens), data.draw(st.booleans()), data.draw(st.booleans())
        size = batch if stays else data.draw(st.integers(1, self.MOST_ROWS))
        rows = data.draw(st.lists(st.integers(0, batch - 1), min_size=size, max_size=size))
        self.cache.reorder(rows, shared=self.rows.shared() if shares else 0)
        self.rows.select(rows)

    @precondition(lambda self: hasattr(self, "rows"))
    @invariant()
    def sizes_agree(self):
        assert self.cache.batch == len(self.rows.tokens)
        assert self.cache.length.tolist() == self.lengths
        fits = [n for n in range(10) if all(self.rows.may_extend(row, n) for row in range(self.cache.batch))]
        assert self.cache.max_chunk == max(fits)


class KeysAndValues(CacheMachine):
    """Every token is a number of its own, and its keys and values say which one it is, in which layer and head."""

    def begin(self, batch, capacity, window):
        super().begin(batch, capacity, window)
        self.cache = KVCache(2, 2, 1, capacity, batch, window)
        self.n_tokens = 0

    def extend(self, counts, width):
        new = [[0] * (width - count) + list(range(self.n_tokens + 1, self.n_tokens + 1 + count)) for count in counts]
        # Rows that are the same may stay so, and have a prompt to share; otherwise the row can be seen in a token.
        alike = self.rows.same() and self.n_tokens % 2 == 0
        new = np.array(new) * 10 + (0 if alike else np.arange(len(counts))[:, None])
        self.n_tokens += width
        columns = np.arange(width) - (width - np.array(counts))[:, None]
        starts = self.lengths
        positions = np.where(columns < 0, -1, np.array(starts)[:, None] + columns)
        plan = self.cache.allocate(positions)
        for row, count in enumerate(counts):
            self.rows.extend(row, new[row, width - count :].tolist())
        for layer in range(2):
            heads = np.stack([new, -new], axis=1)[:, :, None].astype(np.float32)  # [B, T] -> [B, 2, 1, T]
            keys, values = self.cache.store(layer, plan, heads + layer / 4, heads * 2 + layer / 4)
            S = keys.shape[3]
            assert keys.shape == values.shape == (len(counts), 2, 1, S)
            assert S <= min(self.cache.capacity, max(self.lengths))  # no more than is in use
            mask = np.broadcast_to(True if plan.mask is None else plan.mask, (len(counts), 1, width, S))[:, 0]
            assert mask.any(axis=2).all()  # a softmax over nothing is NaN, of padding too
            for row, t in zip(*np.nonzero(positions >= 0), strict=True):
                expected = [self.rows.tokens[row][p] for p in self.rows.visible(positions[row, t])]
                for head, sign in enumerate((1, -1)):
                    for slots, factor in ((keys, 1), (values, 2)):
                        seen = (slots[row, head, 0, mask[row, t]] - layer / 4) / (sign * factor)
                        assert sorted(seen) == sorted(expected)
                    # And each value stands beside its key.
                    key, value = (slots[row, head, 0, mask[row, t]] - layer / 4 for slots in (keys, values))
                    assert (value == 2 * key).all()


class Logits(CacheMachine):
    """Tokens are ids; after every call the tiny model's logits are the float64 reference's under the same band."""

    LONGEST = 24  # the model's positions

    def begin(self, batch, capacity, window):
        super().begin(batch, capacity, window)
        self.config, self.params, self.model = states_model()
        self.cache = self.model.new_cache(batch, capacity, window)
        self.rng = np.random.default_rng(0)

    def extend(self, counts, width):
        ids = self.rng.integers(97, size=(len(counts), width))
        if self.rows.same() and self.rng.random() < 0.5:
            ids[:] = ids[0]  # rows that are the same may stay so, and have a prompt to share
        pad = width - np.array(counts)
        logits = self.model.forward(ids, self.cache, pad=pad, last_only=False)
        assert np.isfinite(logits).all()
        for row, count in enumerate(counts):
            self.rows.extend(row, ids[row, pad[row] :].tolist())
            if count:
                expected = reference_logits(self.config, self.params, self.rows.tokens[row], self.rows.window)
                assert_close(logits[row, pad[row] :], expected[-count:], 1e-4)


@functools.cache
def states_model():
    return model_and_params(n_layer=2, n_positions=Logits.LONGEST)


TestKeysAndValues = KeysAndValues.TestCase
TestKeysAndValues.settings = settings(
    max_examples=100, stateful_step_count=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestLogits = Logits.TestCase
TestLogits.settings = settings(
    max_examples=40, stateful_step_count=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
