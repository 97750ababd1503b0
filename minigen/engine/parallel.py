"""Worker threads that share the pieces of one computation with the thread that asks for it."""

import os
import threading
from collections import deque
from queue import SimpleQueue


def _number_of_threads():
    """What the user allows BLAS, or the cores this process may use."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        value = os.environ.get(name, "")
        if value.isascii() and value.isdigit() and int(value) > 0:
            return int(value)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Reading weights is bound by the memory, which a few cores keep busy; more would only wait for each other.
THREADS = min(_number_of_threads(), 8)
_jobs = None  # the queue that the workers wait at; None until it is needed, and again in a forked child


def _forget_workers():
    """A forked child has this module's variables but none of its threads."""
    global _jobs
    _jobs = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_workers)


def _worker_loop(jobs):
    while True:
        jobs.get()()


def share(task, n):
    """Run task(0), ..., task(n - 1), each once, on as many threads as there are; back when all are done.

    It pays where the tasks spend their time in NumPy functions that release Python's lock, as np.matmul does. The
    calling thread takes pieces itself and waits only for those that a worker has begun: if the other cores are busy
    with something else, it simply does more. Any number of threads may call this at once. Raises what a task raised,
    and OSError where no thread can be started.
    """
    global _jobs
    helpers = min(THREADS, n) - 1
    if helpers < 1:
        for piece in range(n):
            task(piece)
        return
    if _jobs is None:
        jobs = SimpleQueue()
        for _ in range(THREADS - 1):
            try:
                threading.Thread(target=_worker_loop, args=(jobs,), name="minigen", daemon=True).start()
            except RuntimeError as error:
                raise OSError(f"{error}: set OPENBLAS_NUM_THREADS=1 to do without more threads") from error
        _jobs = jobs  # only now: without workers behind it, what is put there would be kept for ever
    pieces, finished = deque(range(n)), SimpleQueue()

    def work():
        while True:
            try:
                piece = pieces.popleft()
            except IndexError:
                return
            try:
                task(piece)
                finished.put(None)
            except BaseException as error:
                finished.put(error)

    for _ in range(helpers):
        _jobs.put(work)
    work()
    for error in [finished.get() for _ in range(n)]:
        if error is not None:
            raise error
