"""The forward pass against transformers' golden files and the float64 reference: logits, positions, batches."""

import functools
import gc
import json
from pathlib import Path

import numpy as np
import pytest

from minigen.engine.model import GPT2Config
from minigen.engine.ops import ACTIVATIONS
from tests.golden.make_logits import N_GREEDY, N_PROMPT, N_START, golden_params
from tests.oracles import reference, tiny
from tests.oracles.models import assert_unchanged, cache_state, feed, gpt2, left_padded, tiny_model
from tests.oracles.reference import reference_logits
from tests.oracles.tiny import tiny_config, tiny_params

# Overflow, NaN and the like are faults even if nobody reads the number.
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

GOLDEN_FOLDER = Path(__file__).parents[1] / "golden"
NOTES = json.loads((GOLDEN_FOLDER / "logits.json").read_text())
GOLDEN = np.load(GOLDEN_FOLDER / "logits.npz")

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


@functools.cache
def golden_model(name):
    """The model of a golden case: (config.json dictionary, params, GPT2)."""
    config, params = NOTES[name]["config"], golden_params(name, NOTES[name])
    return config, params, gpt2(config, params)


def larger(**overrides):
    """A tiny model with 3 layers and room for 64 positions: (config, params, GPT2)."""
    return tiny_model(**{"n_positions": 64, "n_layer": 3} | overrides)


def random_ids(*shape, seed=0):
    return np.random.default_rng(seed).integers(97, size=shape)


def assert_close(found, expected, tolerance):
    assert found.shape == expected.shape
    assert found.dtype == np.float32
    assert np.abs(found - expected).max() < tolerance  # NaN fails too


def assert_golden(name, logits):
    """logits [1, T, V] of the first T tokens of the golden prompt are transformers'."""
    columns, T = GOLDEN[f"{name}/columns"], logits.shape[1]
    golden = {key: GOLDEN[f"{name}/{key}"][:T] for key in ("logits", "logsumexp", "argmax")}
    assert logits.shape == (1, T, NOTES[name]["config"].get("vocab_size", 50257))
    logits = logits[0]
    assert_close(logits[:, columns], golden["logits"], 1e-4)
    best = logits.max(axis=-1)
    logsumexp = best + np.log(np.exp(logits - best[:, None], dtype=np.float64).sum(axis=-1))
    assert np.abs(logsumexp - golden["logsumexp"]).max() < 1e-4
    # The best token is the same one, or ties with it as far as rounding goes.
    assert (logits[np.arange(T), golden["argmax"]] > best - 2e-4).all()


def greedy(model, ids, n_new):
    """The plain cached loop, written out: prompt once, then one token at a time."""
    cache = model.new_cache()
    logits = model.forward(ids[None], cache)
    new = []
    for _ in range(n_new):
        new.append(int(logits[0].argmax()))
        logits = model.forward(np.array([new[-1:]]), cache)
    return new


# ---- logits equal transformers' and the reference's --------------------------------------------------------------


def test_parameter_names_and_shapes_are_the_checkpoints():
    for extra in ({}, {"n_inner": 20}, {"tie_word_embeddings": False}):
        config = tiny_config(**extra)
        found = {name: tuple(shape) for name, shape in GPT2Config.from_dict(config).parameter_shapes().items()}
        assert found == tiny.parameter_shapes(config)


@pytest.mark.parametrize("chunks", CHUNKINGS.values(), ids=CHUNKINGS)
@pytest.mark.parametrize("name", ["default", "flags-7", pytest.param("fairytale", marks=pytest.mark.slow)])
def test_logits_equal_transformers_however_the_prompt_is_cut(name, chunks):
    """K01: with a cache, in any pieces."""
    model = golden_model(name)[2]
    cache = model.new_cache()
    assert_golden(name, feed(model, GOLDEN[f"{name}/ids"][None], cache, chunks))
    assert cache.length.tolist() == [N_PROMPT]


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers_and_the_reference_with_and_without_a_cache(name):
    config, params, model = golden_model(name)
    ids = GOLDEN[f"{name}/ids"]
    expected = reference_logits(config, params, ids)
    for logits in (
        model.forward(ids[None], last_only=False),
        feed(model, ids[None], model.new_cache(), CHUNKINGS["irregular chunks"]),
    ):
        assert_golden(name, logits)
        assert_close(logits[0], expected, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_hundred_greedy_ids_equal_transformers(name):
    new = greedy(golden_model(name)[2], GOLDEN[f"{name}/ids"][:N_START], N_GREEDY)
    assert new == GOLDEN[f"{name}/greedy"].tolist()


@pytest.fixture(scope="class")
def big_model():
    yield gpt2(NOTES[BIG]["config"], golden_params(BIG, NOTES[BIG]))
    gc.collect()  # half a gigabyte that no other test needs


@pytest.mark.slow
class TestGPT2Shape:
    """GPT-2's own size with random weights: other matrix shapes, so other paths through `linear`."""

    @pytest.mark.parametrize("chunks", [[100], [30, 7, 2, 25, 3, 1, 16, 4, 5, 7]], ids=["at once", "irregular chunks"])
    def test_logits_equal_transformers_however_the_prompt_is_cut(self, big_model, chunks):
        cache = big_model.new_cache(capacity=N_PROMPT)
        assert_golden(BIG, feed(big_model, GOLDEN[f"{BIG}/ids"][None, : sum(chunks)], cache, chunks))

    def test_greedy_ids_equal_transformers(self, big_model):
        # The first 12 of the golden 100: no later step takes another path.
        assert greedy(big_model, GOLDEN[f"{BIG}/ids"][:N_START], 12) == GOLDEN[f"{BIG}/greedy"][:12].tolist()

    def test_rows_of_a_batch_equal_transformers(self, big_model):
        # 2 to 16 rows a step take other paths through BLAS than 1 row or a long prompt.
        ids = GOLDEN[f"{BIG}/ids"]
        columns, expected = GOLDEN[f"{BIG}/columns"], GOLDEN[f"{BIG}/logits"]
        lengths = 8 + np.arange(16) % 5
        prompts, pad = left_padded([ids[:n] for n in lengths])
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
    model = gpt2(config, params)
    ids = random_ids(1, 10)
    logits = feed(model, ids, model.new_cache(), chunks)
    assert_close(logits[0], reference_logits(config, params, ids[0]), 1e-5)


def test_every_position_can_be_used_and_none_beyond():
    config, params, model = larger(n_positions=16)
    ids = random_ids(1, 16)
    expected = reference_logits(config, params, ids[0])
    cache = model.new_cache()
    assert_close(feed(model, ids, cache, [15, 1])[0], expected, 1e-5)
    before = cache_state(cache)
    for cached in (cache, None):
        with pytest.raises(ValueError, match="16"):
            model.forward(random_ids(1, 17 if cached is None else 1), cached)
    assert_unchanged(cache, before)


def test_last_only_gives_the_last_row_of_the_logits():
    """K03: the wrong row of the logits."""
    config, params, model = larger()
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
    config, params, model = larger(n_layer=2, **flags)
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
        _, _, plain = larger(n_layer=n_layer)
        _, _, scaled = larger(n_layer=n_layer, scale_attn_by_inverse_layer_idx=True)
        ids = random_ids(1, 12)
        assert (plain.forward(ids) == scaled.forward(ids)).all() == same


def test_the_epsilon_of_the_config_is_used_in_every_layer_norm():
    ids = random_ids(1, 12)
    for eps in (1e-5, 1e-2, 1.0):
        config, params, model = larger(layer_norm_epsilon=eps)
        assert_close(model.forward(ids, last_only=False)[0], reference_logits(config, params, ids[0]), 1e-5)


@pytest.mark.parametrize("scale", [1, 300])
def test_later_tokens_leave_earlier_logits_bit_identical(scale):
    """L16: mask constants that leak the future."""
    config, params, _ = larger()
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
    model = gpt2(config, params)
    logits = model.forward(ids, last_only=False)
    assert np.isfinite(logits).all()
    for changed in range(1, 12):
        other = ids.copy()
        other[0, changed:] = (other[0, changed:] + 1 + np.arange(12 - changed)) % 97
        found = model.forward(other, last_only=False)
        np.testing.assert_array_equal(found[:, :changed], logits[:, :changed])
        assert (found[:, changed] != logits[:, changed]).any()


def test_running_a_model_changes_neither_its_weights_nor_its_input():
    config, params, _ = larger()
    mine = {name: p.copy() for name, p in params.items()}
    model = gpt2(config, mine)
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
    config, params, model = larger()
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
    config, params, model = larger()
    cache = model.new_cache(capacity=8)
    start = [1, 2, 3]
    model.forward([start], cache)
    before = cache_state(cache)
    with pytest.raises(ValueError):
        model.forward(np.array(ids, int), cache)
    assert_unchanged(cache, before)
    assert_close(model.forward([[9]], cache)[0], reference_logits(config, params, [*start, 9])[-1], 1e-5)


# ---- ragged batches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 4], ids=["full", "window 4"])
@pytest.mark.parametrize("lengths", [(9, 1, 5, 9), (1, 2, 3, 4)], ids=str)
def test_each_row_of_a_ragged_batch_equals_the_reference(lengths, window):
    config, params, model = larger()
    rows = [random_ids(40, seed=row).tolist() for row in range(4)]
    expected = [reference_logits(config, params, row, window) for row in rows]
    cache = model.new_cache(batch=4, capacity=40 if window is None else 12, window=window)
    done = [0] * 4
    # The prompts; then rows of unlike length take ragged chunks; then single tokens; then one more ragged chunk, in
    # which a row may get nothing at all.
    for counts in (lengths, (3, 1, 5, 2), (1, 1, 1, 1), (1, 1, 1, 1), (2, 2, 2, 2), (0, 4, 1, 6), (1, 1, 1, 1)):
        ids, pad = left_padded([row[at : at + n] for row, at, n in zip(rows, done, counts, strict=True)])
        logits = model.forward(ids, cache, pad=pad, last_only=False)
        assert logits.shape == (*ids.shape, 97)
        for b, n in enumerate(counts):
            if n:
                assert_close(logits[b, pad[b] :], expected[b][done[b] : done[b] + n], 1e-5)
        done = [at + n for at, n in zip(done, counts, strict=True)]
        assert cache.length.tolist() == done


def test_last_only_of_a_ragged_batch_is_each_rows_last_token():
    """K03: the wrong row of a padded batch."""
    config, params, model = larger()
    texts = [random_ids(n, seed=n).tolist() for n in (6, 1, 4)]
    ids, pad = left_padded(texts)
    for cache in (None, model.new_cache(batch=3)):
        logits = model.forward(ids, cache, pad=pad)
        for row, text in enumerate(texts):
            assert_close(logits[row], reference_logits(config, params, text)[-1], 1e-5)


def test_what_does_not_fit_a_cache_is_refused():
    model, other = larger().model, larger(n_layer=2).model
    cache = model.new_cache(2, 10)
    model.forward([[1, 2], [3, 4]], cache)
    before = cache_state(cache)
    for pad in ([2, 2], [0.5, 0], [-1, 0], [0], [3, 0]):
        with pytest.raises(ValueError, match="pad"):
            model.forward([[1, 2], [3, 4]], cache, pad=pad)
    with pytest.raises(ValueError, match="another model"):
        other.forward([[1], [2]], cache)
    with pytest.raises(ValueError, match="1 rows, the cache 2"):
        model.forward([[1]], cache)
    assert_unchanged(cache, before)
