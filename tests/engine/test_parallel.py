"""Work shared among threads, and the linear layers that do so: results, errors, forks, exits, choice of layout."""

import os
import runpy
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

from minigen.engine import linear as linear_module
from minigen.engine import ops
from minigen.engine import parallel as threads
from minigen.engine.linear import linear, pack_weight
from minigen.engine.ops import attention, attention_weights

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def three_threads(monkeypatch):
    """Three threads whatever the machine has, and workers of this test's own."""
    monkeypatch.setattr(threads, "THREADS", 3)
    for module in (ops, linear_module):
        monkeypatch.setattr(module, "THREADS", 3)
    monkeypatch.setattr(threads, "_jobs", None)


def python(code, **environment):
    """Run code in a fresh process; its stdout. It must end by itself, without a word on stderr."""
    without = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MINIGEN_LINEAR")
    env = {name: value for name, value in os.environ.items() if name not in without} | environment
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout


# ---- parallel_for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 50])
def test_every_task_runs_once_and_all_are_done_on_return(three_threads, n):
    for _ in range(20):
        done = []

        def task(i, done=done):
            time.sleep(0.0002 * (i % 3))
            done.append(i)

        threads.parallel_for(task, n)
        assert sorted(done) == list(range(n))


def test_several_threads_work_on_one_call(three_threads):
    meeting = threading.Barrier(3)  # passed only if three tasks run at the same time
    threads.parallel_for(lambda i: meeting.wait(timeout=20), 3)


def test_one_thread_means_the_callers_own(monkeypatch):
    monkeypatch.setattr(threads, "THREADS", 1)
    monkeypatch.setattr(threads, "_jobs", None)
    names = set()
    threads.parallel_for(lambda i: names.add(threading.current_thread()), 10)
    assert names == {threading.current_thread()}
    assert threads._jobs is None


def test_workers_that_are_busy_are_not_waited_for(three_threads):
    release, started = threading.Event(), threading.Barrier(4)

    def block(i):
        started.wait(timeout=20)
        release.wait(timeout=20)

    # Three tasks that block: on the thread that called, and on both workers.
    other = threading.Thread(target=threads.parallel_for, args=(block, 3))
    other.start()
    started.wait(timeout=20)
    done = []
    threads.parallel_for(done.append, 7)  # nobody but this thread is free
    assert sorted(done) == list(range(7))
    release.set()
    other.join(timeout=20)
    assert not other.is_alive()


@pytest.mark.parametrize("where", ["caller", "worker"])
def test_an_error_is_raised_after_all_tasks_have_ended(three_threads, where):
    caller, done, meeting = threading.current_thread(), [], threading.Barrier(3)

    def task(i):
        meeting.wait(timeout=20)
        if (threading.current_thread() is caller) == (where == "caller"):
            raise MemoryError(f"task {i}")
        time.sleep(0.05)
        done.append(i)

    with pytest.raises(MemoryError, match="task"):
        threads.parallel_for(task, 3)
    assert len(done) == (2 if where == "caller" else 1)
    threads.parallel_for(done.append, 3)  # and the workers live on


def test_ctrl_c_after_the_last_task_is_not_lost(three_threads, monkeypatch):
    """F18: Ctrl-C in the moment in which the result of the last task is handed over."""
    threads.parallel_for(lambda i: None, 3)  # starts the workers
    caller, meeting = threading.current_thread(), threading.Barrier(2)

    class Interrupted(SimpleQueue):
        def put(self, item):
            super().put(item)
            if threading.current_thread() is caller and item is None:
                raise KeyboardInterrupt  # what the signal handler raises when the line is done

    def task(i):
        meeting.wait(timeout=20)
        if threading.current_thread() is caller:
            time.sleep(0.1)  # the worker's task has ended

    monkeypatch.setattr(threads, "SimpleQueue", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        threads.parallel_for(task, 2)


def test_where_no_thread_can_be_started_nothing_is_left_waiting_for_one(three_threads, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(OSError, match=r"can't start new thread.*OPENBLAS_NUM_THREADS=1"):
            threads.parallel_for(lambda i: None, 3)
    assert threads._jobs is None
    done = []
    threads.parallel_for(done.append, 3)
    assert sorted(done) == [0, 1, 2]


def test_a_task_may_share_in_turn(three_threads):
    done = []
    threads.parallel_for(lambda i: threads.parallel_for(lambda j: done.append((i, j)), 3), 4)
    assert sorted(done) == [(i, j) for i in range(4) for j in range(3)]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"OPENBLAS_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OPENBLAS_NUM_THREADS": "3", "OMP_NUM_THREADS": "1"}, 3),
        ({"OPENBLAS_NUM_THREADS": "100"}, 8),
        ({"OPENBLAS_NUM_THREADS": "0"}, None),
        ({"OPENBLAS_NUM_THREADS": "many"}, None),
        ({"OPENBLAS_NUM_THREADS": "²"}, None),
        ({"OMP_NUM_THREADS": "\u0663"}, None),  # a digit, but not to BLAS
        ({"OMP_NUM_THREADS": "-2"}, None),
        ({"OMP_NUM_THREADS": "3,1"}, 3),  # OpenMP's list, one number for each level
        ({"OMP_NUM_THREADS": " +03 "}, 3),
        ({"OMP_NUM_THREADS": "99999999999999999999"}, 8),
        ({"OMP_NUM_THREADS": "9" * 5000}, 8),
        ({}, None),
    ],
    ids=lambda value: str(value)[:60],
)
def test_the_number_of_threads(environment, expected, monkeypatch):
    """F18: values that are no number, or an absurd one."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert runpy.run_path(threads.__file__)["THREADS"] == (expected or min(usable, 8))


START = "import threading, minigen; assert threading.active_count() == 1;"
RUN = (
    "import numpy as np; from minigen.engine import linear, ops, parallel as threads;"
    "threads.THREADS = ops.THREADS = linear.THREADS = 2;"
    "w = np.arange(1_200_000, dtype=np.float32).reshape(1200, 1000) % 7; x = np.ones((5, 1200), np.float32);"
    "weight = linear.pack_weight(w, 'row_blocks');"
    "from minigen.engine.parallel import single_threaded_blas;"  # in which the pool shares the products
    # Small whole numbers: exact in any order.
    "right = single_threaded_blas()(lambda: np.array_equal(linear.linear(x, weight), x @ w));"
)


@pytest.mark.slow
def test_importing_starts_no_thread_and_a_run_ends_with_its_process():
    code = START + "m, t = minigen.load('distilfairytale'); print(minigen.generate(m, t, 'The', max_tokens=3)[0].text)"
    assert python(code)
    started = RUN + "import threading; assert right(); print(threading.active_count())"
    assert python(started) == "2\n"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_computes_with_threads_of_its_own():
    code = (
        "import os, sys, threading, warnings; warnings.simplefilter('ignore');"
        + RUN
        + """
assert right()
child = os.fork()
if child == 0:
    alone = threading.active_count()
    os._exit(0 if right() and (alone, threading.active_count()) == (1, 2) else 1)
print(os.waitpid(child, 0)[1], right())
"""
    )
    assert python(code) == "0 True\n"


# ---- BLAS's own threads ------------------------------------------------------------------------------------------

BLAS = (
    "import numpy as np, threadpoolctl, threading;"
    "from minigen.engine import parallel; from minigen.engine.model import GPT2, GPT2Config;"
    "counts = lambda: [library['num_threads'] for library in threadpoolctl.threadpool_info()];"
    "threadpoolctl.threadpool_limits(3, 'blas'); before = counts(); assert before and set(before) == {3};"
)


@pytest.mark.slow
def test_a_forward_pass_uses_one_blas_thread_and_restores_the_programs_number():
    code = (
        BLAS
        + """
import minigen.api
assert counts() == before
config = GPT2Config(5, 8, 4, 1, 1, bos_token_id=None, eos_token_id=None)
model = GPT2(config, {name: np.zeros(shape, np.float32) for name, shape in config.parameter_shapes().items()})
assert counts() == before
during = []
model.forward([[1, 2]], attention_hook=lambda *_: during.extend(counts()))
try:
    model.forward([[9]])
except ValueError:
    print(set(during), counts() == before)
"""
    )
    assert python(code) == "{1} True\n"


def test_users_of_single_threaded_blas_that_overlap_restore_the_number_together():
    code = (
        BLAS
        + """
first, second = parallel.single_threaded_blas(), parallel.single_threaded_blas()
first.__enter__(), second.__enter__(), first.__exit__(None, None, None)
print(set(counts()), end=" ")
second.__exit__(None, None, None)
print(counts() == before)
"""
    )
    assert python(code) == "{1} True\n"


# ---- who shares the products of one row -------------------------------------------------------------------------


def ways(monkeypatch, blas_seconds, n_passes=300, pool_seconds=1.2):
    """Which threads `OneRowThreads` gives each pass to; blas_seconds: number of the pass -> seconds on BLAS's."""
    now, taken, choice = [0.0], [], threads.OneRowThreads()
    monkeypatch.setattr(threads.time, "perf_counter", lambda: now[0])
    for index in range(n_passes):
        with choice.share():
            taken.append("pool" if threads.blas_is_single_threaded() else "blas")
            now[0] += pool_seconds if taken[-1] == "pool" else blas_seconds(index)
    return taken


def test_one_row_stays_on_blas_threads_while_they_are_faster(monkeypatch):
    """The slower way is tried now and then, but more and more seldom: it costs less than 1 % of the passes' time."""
    taken = ways(monkeypatch, lambda index: 1.0)
    assert taken.count("pool") <= 7
    assert ways(monkeypatch, lambda index: 1.19).count("blas") <= 7  # for a gain of 1 %, no core should spin
    taken = ways(monkeypatch, lambda index: 9.0)  # another program has a core from the beginning
    assert taken.count("blas") <= 7


def test_one_row_changes_its_threads_when_another_program_comes_and_when_it_goes(monkeypatch):
    taken = ways(monkeypatch, lambda index: 9.0 if 50 <= index < 150 else 1.0, n_passes=400)
    assert taken[60:150].count("blas") <= 5
    assert taken[-50:].count("pool") <= 2
    # A single slow pass is forgotten soon.
    taken = ways(monkeypatch, lambda index: 9.0 if index == 50 else 1.0, n_passes=100)
    assert taken[70:].count("pool") <= 3


@pytest.mark.parametrize("blocked", [True, False])
@pytest.mark.parametrize("shape", [(256, 4500), (500, 2103), (100, 37), (1024, 1026)])
def test_one_row_has_the_same_digits_on_all_threads(shape, blocked):
    rng = np.random.default_rng(0)
    weight = pack_weight(rng.standard_normal(shape, np.float32), blocked)
    x = rng.standard_normal((1, shape[0]), np.float32)
    expected = linear(x, weight)
    with threads.single_threaded_blas():
        np.testing.assert_array_equal(linear(x, weight), expected)


# ---- linear layers and attention on several threads --------------------------------------------------------------


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


def slow_attention(q, keys, values, scale, mask):
    """softmax(q @ k.T * scale) @ v in float64, query by query."""
    B, H, _, T = q.shape
    out = np.zeros((B, T, H, values.shape[2]))
    for b, h, t in np.ndindex(B, H, T):
        scores = keys[b, h].T.astype(float) @ q[b, h, :, t].astype(float) * scale
        if mask is not None:
            scores[~mask[b if len(mask) > 1 else 0, 0, t]] = -np.inf
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights / weights.sum() @ values[b, h].T.astype(float)
    return out


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("B", "H", "T", "S", "D"),
    [
        (1, 2, 1, 1, 4),
        (1, 3, 1, 300, 64),
        (1, 12, 1, 900, 64),
        (1, 4, 3, 2100, 64),
        (2, 4, 5, 130, 64),
        (1, 2, 40, 40, 8),
        (3, 2, 70, 200, 16),
    ],
)
def test_attention_is_the_formula(three_threads, B, H, T, S, D, masked):
    rng = np.random.default_rng(T)
    q = 3 * rng.standard_normal((B, H, D, T)).astype(np.float32)
    # Views of a longer cache, as attention gets them; what lies behind must not be read.
    keys, values = (np.full((B, H, D, S + 5), np.nan, np.float32)[..., :S] for _ in range(2))
    keys[:], values[:] = rng.standard_normal((2, B, H, D, S))
    mask = None
    if masked:
        mask = rng.random((B, 1, T, S)) < 0.3
        mask[..., S // 3] |= ~mask.any(-1)
        mask[:, :, T // 2 :, S // 2 :] = False  # whole columns that later chunks of queries do not see
        mask[..., 0] |= ~mask.any(-1)
    before = q.copy()
    found = attention(q, keys, values, np.float32(0.3), mask)
    assert (found.shape, found.dtype) == ((B, T, H, D), np.float32)
    np.testing.assert_allclose(found, slow_attention(q, keys, values, 0.3, mask), atol=2e-5)
    np.testing.assert_array_equal(q, before)


def test_attention_weights_are_what_attention_multiplies_the_values_by():
    rng = np.random.default_rng(0)
    q, keys = (rng.standard_normal((2, 3, 16, n)).astype(np.float32) for n in (5, 40))
    mask = np.tril(np.ones((5, 40), bool), 30)[None, None] & (rng.random((2, 1, 5, 40)) < 0.5)
    mask[..., 0] = True
    one_hot = np.broadcast_to(np.eye(40), (2, 3, 40, 40))  # values that pick out each weight
    for seen in (mask, None):
        found = attention_weights(q, keys, np.float32(0.3), seen)
        np.testing.assert_allclose(found.swapaxes(1, 2), slow_attention(q, keys, one_hot, 0.3, seen), atol=1e-6)
        assert seen is None or (found[~np.broadcast_to(seen, found.shape)] == 0).all()


@pytest.mark.parametrize("columns", [slice(None), slice(3, -2)], ids=["contiguous", "a slice"])
@pytest.mark.parametrize("shape", [(2, 5, 101), (3, 700, 101)], ids=["small", "large"])
def test_rowwise_is_the_function_of_every_row(three_threads, shape, columns):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)[..., columns]
    before = x.copy()
    np.testing.assert_array_equal(ops.rowwise(lambda rows: rows - rows[..., :1], x), x - x[..., :1])
    np.testing.assert_array_equal(x, before)
    np.testing.assert_array_equal(ops.rowwise(lambda rows: 2 * rows + 1, x, out=x), 2 * before + 1)


# ---- the choice of layout ----------------------------------------------------------------------------------------


def compute_for(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("blocked", [True, False])
def test_the_layout_that_is_slower_is_not_taken(monkeypatch, blocked):
    slow = "_rowwise_matmul" if blocked else "_blocked_matmul"
    real = getattr(linear_module, slow)

    def slowed(*args):
        compute_for(0.02)
        return real(*args)

    monkeypatch.delenv("MINIGEN_LINEAR", raising=False)
    monkeypatch.setattr(linear_module, slow, slowed)
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
    monkeypatch.setattr(ops.np, "matmul", matmul)
    for n_rows in (2, 3, 8, 9, 16, 17, 31):  # one row takes the dense weight
        linear(np.ones((n_rows, n_in), np.float32), weight)
    assert sizes
    assert all(rows >= 2 and multiplies <= 1_000_000 and results <= 1_200 for rows, multiplies, results in sizes)
