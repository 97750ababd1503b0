"""Linear layers: products of every shape, layout and number of threads, and the choice of the layout."""

import threading
import time

import numpy as np
import pytest

from minigen.kernels import linear as linear_module
from minigen.kernels import parallel as threads
from minigen.kernels.linear import embed, linear, pack_weight
from tests.engine.test_ops import assert_close


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


# ---- on several threads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocked", [True, False])
@pytest.mark.parametrize("shape", [(256, 4500), (500, 2103), (100, 37), (1024, 1026)])
def test_one_row_has_the_same_digits_on_all_threads(shape, blocked):
    rng = np.random.default_rng(0)
    weight = pack_weight(rng.standard_normal(shape, np.float32), blocked)
    x = rng.standard_normal((1, shape[0]), np.float32)
    expected = linear(x, weight)
    with threads.single_threaded_blas():
        np.testing.assert_array_equal(linear(x, weight), expected)


@pytest.mark.parametrize("blocked", [True, False])
def test_linear_on_several_threads_is_the_same_product(three_threads, blocked):
    rng = np.random.default_rng(0)
    matrix, bias = rng.standard_normal((768, 1403)).astype(np.float32), rng.standard_normal(1403).astype(np.float32)
    weight = pack_weight(matrix, blocked)
    for n_rows in (1, 2, 5, 16, 17, 31, 40):
        x = rng.standard_normal((n_rows, 768)).astype(np.float32)
        with threads.single_threaded_blas():  # otherwise BLAS's threads share the product
            found = linear(x, weight, bias)
        np.testing.assert_allclose(found, x.astype(float) @ matrix.astype(float) + bias, atol=5e-4)


def test_several_threads_may_use_one_weight_at_once(three_threads):
    rng = np.random.default_rng(0)
    matrix = rng.integers(-3, 4, (512, 2050)).astype(np.float32)  # exact in any order
    weight = pack_weight(matrix, blocked=True)
    wrong = []

    def run(seed):
        own = np.random.default_rng(seed)
        for _ in range(30):
            x = own.integers(-3, 4, (own.integers(1, 12), 512)).astype(np.float32)
            if not np.array_equal(linear(x, weight), x @ matrix):
                wrong.append(seed)

    runners = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    with threads.single_threaded_blas():
        for runner in runners:
            runner.start()
        for runner in runners:
            runner.join()
    assert not wrong


# ---- the choice of layout ----------------------------------------------------------------------------------------


def compute_for(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("blocked", [True, False])
def test_the_layout_that_is_slower_is_not_taken(monkeypatch, blocked):
    real = linear_module._multiply

    def slowed(rows, weight, bias, out):
        if (weight.blocks is None) == blocked:
            compute_for(0.02)
        real(rows, weight, bias, out)

    monkeypatch.delenv("MINIGEN_LINEAR", raising=False)
    monkeypatch.setattr(linear_module, "_multiply", slowed)
    assert linear_module.weights_are_blocked.__wrapped__() is blocked


def test_minigen_linear_forces_a_layout_or_is_refused(monkeypatch):
    chosen = linear_module.weights_are_blocked.__wrapped__
    for asked, blocked in (("plain", False), ("blocks", True)):
        monkeypatch.setenv("MINIGEN_LINEAR", asked)
        assert chosen() is blocked
    for asked, in_mode, allowed in (("fast", False, "blocks, plain"), ("plain", True, "with MINIGEN_BATCH_INVARIANT")):
        monkeypatch.setenv("MINIGEN_LINEAR", asked)
        monkeypatch.setattr(linear_module, "BATCH_INVARIANT", in_mode)
        with pytest.raises(ValueError, match=f"MINIGEN_LINEAR is '{asked}';.*{allowed}"):
            chosen()


@pytest.mark.parametrize("n_in", [8, 100, 768, 1024, 1280, 1600, 3072, 4096, 6400, 20000])
def test_no_product_of_a_block_is_large_enough_to_be_packed(monkeypatch, n_in):
    sizes, real = [], np.matmul

    def matmul(a, b, out=None):
        rows, inner, columns = *a.shape[-2:], b.shape[-1]
        sizes.append((rows, rows * inner * columns, rows * columns))
        return real(a, b, out=out)

    weight = pack_weight(np.ones((n_in, 70), np.float32), blocked=True)
    monkeypatch.setattr(np, "matmul", matmul)
    for n_rows in (2, 3, 8, 9, 16, 17, 31):  # one row takes the dense weight
        linear(np.ones((n_rows, n_in), np.float32), weight)
    assert sizes
    assert all(rows >= 2 and multiplies <= 1_000_000 and results <= 1_200 for rows, multiplies, results in sizes)
