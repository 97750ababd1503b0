"""The arithmetic: activations, softmax, layer norm and linear layers, against their formulas in float64."""

import numpy as np
import pytest

from minigen.engine.linear import embed, linear, pack_weight
from minigen.engine.model import GPT2Config
from minigen.engine.ops import ACTIVATIONS, layer_norm, softmax
from tests.oracles import reference
from tests.oracles.tiny import tiny_config

# Overflow, NaN and the like are faults even if nobody reads the number.
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def assert_close(found, expected, tolerance):
    assert found.shape == expected.shape
    assert found.dtype == np.float32
    assert np.abs(found - expected).max() < tolerance  # NaN fails too


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_each_activation_is_its_formula(name):
    """L13: two forms of GELU that differ by too little for a loose test."""
    near = np.linspace(-6, 6, 4001, dtype=np.float32)
    near.setflags(write=False)
    found = ACTIVATIONS[name](near)
    assert_close(found, reference.ACT[name](near.astype(float)), 1e-6)
    far = np.array([-1e4, -700, -89, -30, -11, 11, 30, 89, 700, 1e4], dtype=np.float32)
    with np.errstate(over="raise", invalid="raise"):
        found = ACTIVATIONS[name](far)
    np.testing.assert_allclose(found, reference.ACT[name](far.astype(float)), rtol=1e-6, atol=2e-6)


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


@pytest.mark.parametrize("blocked", [True, False])
@pytest.mark.parametrize(
    ("n_in", "n_out"), [(8, 1), (24, 24), (96, 257), (257, 96), (64, 1000), (4096, 33), (7000, 50)]
)
def test_linear_is_a_matrix_product_for_every_number_of_rows(n_in, n_out, blocked):
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((n_in, n_out)).astype(np.float32)
    tied = np.ascontiguousarray(matrix.T).T  # as the head lies in memory: [V, E] seen as [E, V]
    bias = rng.standard_normal(n_out).astype(np.float32)
    weights = [pack_weight(matrix, blocked), pack_weight(tied, blocked)]
    tolerance = 2e-6 * n_in**0.5 * 24
    for n_rows in (1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 47, 100):
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


@pytest.mark.parametrize("blocked", [True, False])
def test_embed_picks_the_columns_of_a_packed_matrix(blocked):
    wte = np.random.default_rng(0).standard_normal((257, 24)).astype(np.float32)
    weight = pack_weight(wte.T, blocked)
    ids = np.array([[0, 1, 31, 32], [63, 64, 255, 256]])
    np.testing.assert_array_equal(embed(ids, weight), wte[ids])
