"""The forward pass against transformers' golden files and the float64 reference: logits, positions, batches."""

import functools
import gc
import json
from pathlib import Path

import numpy as np
import pytest

from minigen.engine.model import GPT2Config
from minigen.engine.ops import ACTIVATIONS
from tests.golden.make_logits import N_PROMPT, N_START, golden_params
from tests.oracles import reference, tiny
from tests.oracles.models import assert_unchanged, cache_state, feed, gpt2, left_padded, tiny_model
from tests.oracles.reference import reference_logits
from tests.oracles.tiny import tiny_config

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
    "token by token": [1] * 200,
    "prompt and then steps": [190] + [1] * 10,
    "growing chunks": [1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 57],
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


# ---- logits equal transformers' and the reference's --------------------------------------------------------------


def test_parameter_names_and_shapes_are_the_checkpoints():
    for extra in ({}, {"n_inner": 20}, {"tie_word_embeddings": False}):
        config = tiny_config(**extra)
        found = {name: tuple(shape) for name, shape in GPT2Config.from_dict(config).parameter_shapes().items()}
        assert found == tiny.parameter_shapes(config)


@pytest.mark.parametrize("chunks", CHUNKINGS.values(), ids=CHUNKINGS)
def test_logits_equal_transformers_however_the_prompt_is_cut(chunks):
    """K01: with a cache, in any pieces."""
    model = golden_model("default")[2]
    cache = model.new_cache()
    assert_golden("default", feed(model, GOLDEN["default/ids"][None], cache, chunks))
    assert cache.length.tolist() == [N_PROMPT]


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers_and_the_reference_with_and_without_a_cache(name):
    """L14: attention scaled by 1 / sqrt(d) whatever the flags say; each flag, activation and size has its case."""
    config, params, model = golden_model(name)
    ids = GOLDEN[f"{name}/ids"]
    expected = reference_logits(config, params, ids)
    for logits in (
        model.forward(ids[None], last_only=False),
        feed(model, ids[None], model.new_cache(), [7, 1, 50, 2, 2, 38, 16, 3, 64, 4, 13]),
    ):
        assert_golden(name, logits)
        assert_close(logits[0], expected, 1e-4)


@pytest.mark.parametrize("name", CASES)
def test_a_hundred_greedy_ids_equal_transformers(name):
    # If each golden id is the best token after those before it, the greedy loop writes them all: one pass shows it.
    start, new = GOLDEN[f"{name}/ids"][:N_START], GOLDEN[f"{name}/greedy"]
    logits = golden_model(name)[2].forward([[*start, *new[:-1]]], last_only=False)[0]
    np.testing.assert_array_equal(logits[N_START - 1 :].argmax(axis=-1), new)


@pytest.fixture(scope="class")
def big_model():
    yield gpt2(NOTES[BIG]["config"], golden_params(BIG, NOTES[BIG]))
    gc.collect()  # half a gigabyte that no other test needs


@pytest.mark.slow
class TestGPT2Shape:
    """GPT-2's own size with random weights: other matrix shapes, so other paths through `linear`."""

    def test_logits_equal_transformers_however_the_prompt_is_cut(self, big_model):
        chunks = [40, 7, 2, 25, 3, 1, 5]
        cache = big_model.new_cache(capacity=N_PROMPT)
        assert_golden(BIG, feed(big_model, GOLDEN[f"{BIG}/ids"][None, : sum(chunks)], cache, chunks))

    def test_greedy_ids_equal_transformers(self, big_model):
        # The first 6 of the golden 100, in single steps: no later one takes another path.
        cache, new = big_model.new_cache(capacity=N_PROMPT), GOLDEN[f"{BIG}/greedy"]
        found = [big_model.forward(GOLDEN[f"{BIG}/ids"][None, :N_START], cache)[0].argmax()]
        found += [big_model.forward([[token]], cache)[0].argmax() for token in new[:5]]
        assert found == new[:6].tolist()

    def test_rows_of_a_batch_equal_transformers(self, big_model):
        # 2 to 16 rows a step take other paths through BLAS than 1 row or a long prompt.
        ids = GOLDEN[f"{BIG}/ids"]
        columns, expected = GOLDEN[f"{BIG}/columns"], GOLDEN[f"{BIG}/logits"]
        lengths = 4 + np.arange(16) % 5
        prompts, pad = left_padded([ids[:n] for n in lengths])
        cache = big_model.new_cache(batch=16, capacity=24)
        logits = big_model.forward(prompts, cache, pad=pad)
        assert_close(logits[:, columns], expected[lengths - 1], 1e-4)
        for batch in (16, 5, 4, 2):
            cache.reorder(range(batch))
            lengths = lengths[:batch]
            logits = big_model.forward(ids[lengths][:, None], cache)
            assert_close(logits[:, columns], expected[lengths], 1e-4)
            lengths = lengths + 1


# ---- positions, scaling, causality -------------------------------------------------------------------------------


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
    """K03: the wrong row of the logits, or of a padded batch, or after a cached part."""
    config, params, model = larger()
    texts = [random_ids(n, seed=n).tolist() for n in (6, 2, 4)]
    expected = [reference_logits(config, params, text)[-1] for text in texts]
    ids, pad = left_padded(texts)
    cache = model.new_cache(batch=3)
    model.forward(ids[:, :-1], cache, pad=pad)
    for logits in (model.forward(ids, pad=pad), model.forward(ids[:, -1:], cache)):
        assert_close(logits, np.array(expected), 1e-5)


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
