"""The arithmetic: activations, softmax and layer norm, against their formulas in float64."""

import numpy as np
import pytest

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
