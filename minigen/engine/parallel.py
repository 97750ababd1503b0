"""A small thread pool: parallel_for over a shared work queue."""

import os
import threading
from collections import deque
from queue import SimpleQueue


def _number_of_threads():
    """The number of threads that the user allows BLAS, or else of the cores that this process may use."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        value = os.environ.get(name, "")
        if value.isascii() and value.isdigit() and int(value) > 0:
            return int(value)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Reading weights is memory-bandwidth bound, and a few cores use all the bandwidth.
THREADS = min(_number_of_threads(), 8)
# Fewer weights, or keys and values, than this are read sooner than a second thread wakes (about 40 microseconds).
PARALLEL_MIN_ELEMENTS = 2**20
_jobs = None  # the queue that the workers wait on; None until first use, and again in a forked child


def _forget_workers():
    """Start over in a forked child, which inherits this module's variables but no threads."""
    global _jobs
    _jobs = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_workers)


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
    OSError if no thread can be started.
    """
    global _jobs
    helpers = min(THREADS, n) - 1
    if helpers < 1:
        for index in range(n):
            task(index)
        return
    if _jobs is None:
        _jobs = _start_workers()  # only assigned if all started: jobs put on a queue without workers would stay there
    indices, finished = deque(range(n)), SimpleQueue()

    def work():
        while True:
            try:
                index = indices.popleft()
            except IndexError:
                return
            try:
                task(index)
                finished.put(None)
            except BaseException as error:
                finished.put(error)

    for _ in range(helpers):
        _jobs.put(work)
    work()
    for error in [finished.get() for _ in range(n)]:
        if error is not None:
            raise error
