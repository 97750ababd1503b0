"""A small thread pool: parallel_for over a shared work queue, and BLAS without threads of its own."""

import os
import threading
import time
from collections import deque
from contextlib import contextmanager, nullcontext
from functools import cache
from queue import SimpleQueue


def _number_of_threads():
    """The number of threads that the user allows BLAS, or else of the cores that this process may use."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        value = os.environ.get(name, "").split(",")[0].strip().removeprefix("+").lstrip("0")  # OpenMP has lists, "4,2"
        if value.isascii() and value.isdigit():
            return int(value[:9])  # Python refuses to convert more than 4,300 digits
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Reading weights is memory-bandwidth bound, and a few cores use all the bandwidth.
THREADS = min(_number_of_threads(), 8)
# Fewer weights, or keys and values, than this are read sooner than a second thread wakes (about 40 microseconds).
PARALLEL_MIN_ELEMENTS = 2**20
_lock = threading.Lock()  # for the variables below
_jobs = None  # the queue that the workers wait on; None until first use
_blas_users, _blas_threads = 0, []  # how many `single_threaded_blas` are active; each library's threads before them


def _start_over():
    """In a forked child, which inherits this module's variables but no threads, put them back to their first values."""
    global _lock, _jobs, _blas_users
    _lock, _jobs = threading.Lock(), None
    if _blas_users:
        _blas_users = 0
        _restore_blas()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_over)


def _worker_loop(jobs):
    while True:
        jobs.get()()


def _start_workers():
    """Start the workers and return the queue that they wait on. Raises OSError if the system refuses a thread."""
    jobs = SimpleQueue()
    for _ in range(THREADS - 1):
        try:
            threading.Thread(target=_worker_loop, args=(jobs,), name="minigen", daemon=True).start()
        except RuntimeError as error:
            raise OSError(f"{error}: set OPENBLAS_NUM_THREADS=1 to use a single thread") from error
    return jobs


def parallel_for(task, n):
    """Call task(0), ..., task(n - 1) on all threads and return when the last call has ended.

    This helps if the calls spend their time in NumPy functions that release the GIL, such as np.matmul. The calling
    thread runs tasks too and waits only for those that a worker has begun, so if the other cores are busy, it runs
    most of them itself. Several threads may call this at once, and a task may call it. Raises what a task raised, and
    OSError if a worker thread cannot be started.
    """
    global _jobs
    helpers = min(THREADS, n) - 1
    if helpers < 1:
        for index in range(n):
            task(index)
        return
    with _lock:
        if _jobs is None:
            _jobs = _start_workers()  # assigned only if all started: without workers, jobs would stay on the queue
    indices, finished = deque(range(n)), SimpleQueue()

    def work():
        while True:
            try:
                index = indices.popleft()
            except IndexError:
                return
            error = None
            try:
                task(index)
            except BaseException as caught:
                error = caught
            # Outside the `try`, so that each task puts one entry: if Ctrl-C came during a `put` inside it, the handler
            # would put a second one, and the last would not be read.
            finished.put(error)

    for _ in range(helpers):
        _jobs.put(work)
    work()
    for error in [finished.get() for _ in range(n)]:
        if error is not None:
            raise error


@cache
def _blas_libraries():
    """The BLAS libraries of this process, as threadpoolctl's controllers."""
    from threadpoolctl import ThreadpoolController  # 20 ms that no import of minigen should take

    return ThreadpoolController().select(user_api="blas").lib_controllers


def blas_is_single_threaded():
    """Whether a `single_threaded_blas` is active in any thread of this process."""
    return _blas_users > 0


class OneRowThreads:
    """Lets BLAS's threads or the pool's share the products of single-row passes, whichever were faster lately.

    BLAS's threads spin between two products, so they begin sooner: a step of gpt2's shape takes 29 ms instead of 35 on
    two idle cores. But in each product they wait for each other, and so for any other program that has one of the
    cores: with another two programs, 780 ms instead of 100. Both give the same digits; see `linear._multiply`.
    """

    MIN_RETRY, MAX_RETRY = 8, 256

    def __init__(self):
        self.seconds = {"blas": 0.0, "pool": 0.0}  # of the last pass that went this way; 0: not tried yet
        self.retry_after = self.passes_until_retry = self.MIN_RETRY  # passes until the slower way is tried again

    def _cost(self, way):
        return self.seconds[way] * (1.05 if way == "blas" else 1)  # for a small gain, no core should spin

    @contextmanager
    def share(self):
        """A context for one pass."""
        if blas_is_single_threaded():  # for another pass, so there is no choice
            yield
            return
        faster, slower = sorted(self.seconds, key=self._cost)
        self.passes_until_retry -= 1
        way = faster if self.passes_until_retry > 0 else slower
        start = time.perf_counter()
        with single_threaded_blas() if way == "pool" else nullcontext():
            yield
        self.seconds[way] = time.perf_counter() - start
        if self._cost(faster) > self._cost(slower):
            self.retry_after = self.passes_until_retry = self.MIN_RETRY
        elif way == slower:
            self.retry_after = self.passes_until_retry = min(2 * self.retry_after, self.MAX_RETRY)


@contextmanager
def single_threaded_blas():
    """Within this context, BLAS runs each product on the calling thread; the pool above has a thread per core.

    BLAS's own threads wait for each other in every product, and so for any other program that has one of the cores.
    The setting is the whole process's: the last of several users that overlap restores what the first one found.
    """
    global _blas_users
    with _lock:
        if _blas_users == 0:
            _blas_threads[:] = [library.get_num_threads() for library in _blas_libraries()]
            for library in _blas_libraries():
                library.set_num_threads(1)
        _blas_users += 1
    try:
        yield
    finally:
        with _lock:
            _blas_users = max(_blas_users - 1, 0)  # 0 already in a child that was forked within the context
            if _blas_users == 0:
                _restore_blas()


def _restore_blas():
    for library, n_threads in zip(_blas_libraries(), _blas_threads, strict=True):
        library.set_num_threads(n_threads)
