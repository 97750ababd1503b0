"""Inputs in batches, each batch in a worker process, which may crash or hang.

Input `index` of a kind depends on the seed, the kind and the index alone, so any of them can be run again by itself.
"""

import multiprocessing
import random
import shutil
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from typing import NamedTuple

SECONDS = 20  # the most that one input may take; an ordinary one takes some milliseconds
STARTUP_SECONDS = 120  # the most that a worker may take to start and to prepare its kind
ADDRESS_SPACE = 2**30  # bytes that a worker may map beyond what it has when it starts


class Found(NamedTuple):
    """An input that did what it must not do."""

    kind: str
    seed: int
    index: int
    what: str
    folder: Path  # a copy of the input, and the traceback if there is one

    def __str__(self):
        again = f"python -m tests.fuzz --only {self.kind} --seed {self.seed} --first {self.index} --count 1"
        return f"{self.kind} {self.index}: {self.what}\n    input  {self.folder}\n    again  {again}"


def _limit_memory():
    import resource  # POSIX has it

    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ADDRESS_SPACE, resource.RLIM_INFINITY))


def _work(connection, kind, seed, first, count, folder):
    """The worker: sends (index, None) before an input and (index, (word, fault)) after it."""
    import os

    # Before NumPy and the hub library look: one thread a worker, and no network.
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MINIGEN_LINEAR": "plain"}
    from tests.fuzz.kinds import KINDS

    maker = KINDS[kind](folder)
    with_limit = Path("/proc/self/statm").exists()
    if with_limit:
        _limit_memory()
    for index in range(first, first + count):
        connection.send((index, None))
        try:
            word, fault = maker.run(random.Random(f"{seed} {kind} {index}")), None
        except BaseException as error:
            word, fault = "fault", (f"{type(error).__name__}: {error}"[:500], traceback.format_exc())
        connection.send((index, (word, fault)))
        if fault:
            connection.recv()  # the next input would overwrite this one, which is being copied
    connection.close()


def run_batch(kind, seed, first, count, keep):
    """(Counter of what came of the inputs, list of Found); a worker that dies is replaced by another."""
    words, found, retried = Counter(), [], None
    context = multiprocessing.get_context("spawn")  # a fork would copy locks of threads that are not there any more
    end = first + count
    while first < end:
        with tempfile.TemporaryDirectory(prefix="minigen-fuzz-", ignore_cleanup_errors=True) as folder:
            folder = Path(folder)

            def blame(index, what, details="", folder=folder):
                to = Path(keep) / f"{kind}-{seed}-{index}"
                shutil.rmtree(to, ignore_errors=True)
                to.mkdir(parents=True)
                if (folder / "input").is_dir():
                    shutil.copytree(folder / "input", to / "input", symlinks=True)
                (to / "what.txt").write_text(f"{what}\n{details}", encoding="utf-8", errors="backslashreplace")
                found.append(Found(kind, seed, index, what, to))

            ours, theirs = context.Pipe()
            worker = context.Process(target=_work, args=(theirs, kind, seed, first, end - first, folder), daemon=True)
            worker.start()
            theirs.close()
            index, running = first, False
            while True:
                try:
                    if not ours.poll(SECONDS if running else STARTUP_SECONDS):
                        worker.kill()
                        if retried != index:  # a machine that had other things to do is no fault: once more
                            retried, index = index, index - 1
                        else:
                            blame(index, f"not done after {SECONDS if running else STARTUP_SECONDS} s, twice")
                        break
                    index, result = ours.recv()
                except EOFError:
                    worker.join()
                    if running or worker.exitcode:
                        blame(index, f"the process ended with {worker.exitcode}")
                    break
                running = result is None
                if result:
                    words[result[0]] += 1
                    if result[1]:
                        blame(index, *result[1])
                        ours.send("go on")
            worker.join()
            first = index + 1
    return words, found
