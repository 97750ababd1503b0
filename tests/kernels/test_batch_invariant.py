"""MINIGEN_BATCH_INVARIANT=1: a row's logits are the same to the last bit, whatever is computed along with it."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from minigen.engine.model import GPT2, GPT2Config

ROOT = Path(__file__).resolve().parents[2]
# n_embd, n_head, n_layer, vocab_size: heads of 64, 32 and 128; a head matrix wide enough for several threads
SHAPES = [(768, 12, 1, 1500), (64, 2, 2, 77), (256, 2, 1, 300)]
CHUNKS = [1, 1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 64, 65, 130]


def differing_passes():
    """(passes, those whose logits differ): a text in chunks, among other rows, against the same text in one pass."""
    rng = np.random.default_rng(0)
    n_passes = n_differing = 0
    for n_embd, n_head, n_layer, vocab_size in SHAPES:
        config = GPT2Config(vocab_size=vocab_size, n_positions=220, n_embd=n_embd, n_head=n_head, n_layer=n_layer)
        shapes = config.parameter_shapes().items()
        model = GPT2(config, {name: 0.1 * rng.standard_normal(shape, np.float32) for name, shape in shapes})
        text = rng.integers(0, vocab_size, 200)
        expected = model.forward(text, last_only=False)[0]
        for _ in range(10):
            batch = int(rng.integers(1, 4))
            row, end, start = int(rng.integers(batch)), int(rng.integers(20, 200)), 0
            cache = model.new_cache(batch, capacity=int(rng.integers(200, 221)))
            while start < end:
                stop = min(start + int(rng.choice(CHUNKS)), end)
                ids = rng.integers(0, vocab_size, (batch, stop - start))
                pad = rng.integers(0, stop - start, batch)  # the other rows have other lengths
                ids[row], pad[row] = text[start:stop], 0
                logits = model.forward(ids, cache, pad=pad, last_only=False)[row]
                n_passes += 1
                n_differing += not np.array_equal(logits, expected[start:stop])
                start = stop
    return n_passes, n_differing


def in_mode(value, code):
    env = os.environ | {"MINIGEN_BATCH_INVARIANT": value, "OPENBLAS_NUM_THREADS": "2"}
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    if "depend on the number of rows" in run.stderr:
        pytest.skip("this machine's BLAS has no order of sums that is the same for every number of rows")
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.slow
def test_logits_do_not_depend_on_the_pass():
    """Misses: nothing that changes a bit. Slices, chunks, padding, capacity and other rows all vary."""
    code = "from tests.kernels.test_batch_invariant import differing_passes; print(*differing_passes())"
    n_passes, n_differing = map(int, in_mode("1", code).split())
    assert n_passes > 100
    assert n_differing == 0


def test_prompt_caches_of_the_two_modes_are_not_exchanged():
    code = "import minigen; from minigen.files.prompt_cache import fingerprint; print(fingerprint(minigen.load()[0]))"
    assert in_mode("1", code) != in_mode("0", code)


def test_a_model_whose_smallest_products_are_packed_is_refused():
    code = """
import numpy as np
from minigen.kernels.linear import pack_weight
from minigen.engine.model import GPT2, GPT2Config
for make in (lambda: GPT2(GPT2Config(n_positions=8192), {}), lambda: pack_weight(np.zeros((40_000, 8), np.float32))):
    try:
        make()
    except ValueError as error:
        print(error)
"""
    first, second = in_mode("1", code).splitlines()
    assert "n_positions is 8192; it must be at most 7,812" in first and "unset" in first
    assert "is 40000; it must be at most 31,250" in second and "unset" in second


def test_products_that_depend_on_the_number_of_rows_are_refused():
    code = """
import numpy as np
from minigen.kernels import linear
real = linear._blocked_matmul
linear._blocked_matmul = lambda rows, blocks: real(rows, blocks) * np.float32(1 + 1e-6 * (len(rows) > 4))
try:
    linear.weights_are_blocked()
except ValueError as error:
    print(error)
"""
    assert "MINIGEN_BATCH_INVARIANT" in in_mode("1", code)
