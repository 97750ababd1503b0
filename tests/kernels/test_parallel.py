"""The thread pool and BLAS's own threads: every task once, errors, forks, exits, who shares a product of one row."""

import os
import runpy
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue

import pytest

from minigen.kernels import parallel as threads

ROOT = Path(__file__).resolve().parents[2]


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
    "import numpy as np; from minigen.kernels import linear, parallel as threads;"
    "threads.THREADS = linear.THREADS = 2;"
    "w = np.arange(1_200_000, dtype=np.float32).reshape(1200, 1000) % 7; x = np.ones((5, 1200), np.float32);"
    "weight = linear.pack_weight(w, 'row_blocks');"
    "from minigen.kernels.parallel import single_threaded_blas;"  # in which the pool shares the products
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
    "from minigen.kernels import parallel; from minigen.engine.model import GPT2, GPT2Config;"
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_child_forked_while_blas_has_one_thread_starts_with_the_programs_number():
    code = (
        "import os, warnings; warnings.simplefilter('ignore');"
        + BLAS
        + """
with parallel.single_threaded_blas():
    child = os.fork()
    if child == 0:
        os._exit(counts() != before or parallel.blas_is_single_threaded())
    print(os.waitpid(child, 0)[1], set(counts()), end=" ")
print(counts() == before)
"""
    )
    assert python(code) == "0 {1} True\n"


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


def test_a_pass_inside_another_that_set_blas_to_one_thread_is_not_counted_as_blas():
    with threads.single_threaded_blas():
        choice = threads.OneRowThreads()
        with choice.share():
            pass
    assert choice.seconds == {"blas": 0, "pool": 0}
