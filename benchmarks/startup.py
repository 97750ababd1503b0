"""From process start to the first token: import, load, first token, and peak memory.

    python -m benchmarks.startup --shape gpt2

Each figure is that of a new process, with the checkpoint in the system's file cache. "first token" is from the start of
the process to the token it prints, "peak" the most memory that it ever held, Python and NumPy included.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.harness import Report, checkpoint_of, config_of, model_of, name_of, parser

SECONDS = {"quick": 2, "full": 30}
PROMPT = "Once upon a time"
# On Linux ru_maxrss begins with the size of the parent process, so the process's own peak is read from /proc.
FIRST_TOKEN = """
import resource, sys, time
start = time.perf_counter()
from minigen import load, stream
imported = time.perf_counter()
model, tokenizer = load(sys.argv[1])
loaded = time.perf_counter()
print(next(stream(model, tokenizer, sys.argv[2], temperature=0, max_tokens=1)).token, flush=True)
try:
    lines = open("/proc/self/status").read().splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
except OSError:  # macOS counts bytes, other systems kilobytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(imported - start, loaded - imported, peak / 1e6)
"""


def run_script(script, *arguments):
    """(all that a new process prints, split; seconds from its start to its first line). RuntimeError if it fails."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    with tempfile.TemporaryFile("w+") as errors:
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            first = process.stdout.readline()
            seconds = time.perf_counter() - start
            printed = (first + process.stdout.read()).split()
        errors.seek(0)
        if process.returncode or not printed:
            raise RuntimeError((errors.read().strip().splitlines() or ["it printed nothing"])[-1])
    return printed, seconds


def main(arguments=None):
    arguments = parser(__doc__, repetitions=10).parse_args(arguments)
    model = model_of(arguments)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = checkpoint_of(model, Path(folder))
        weights = 4 * sum(map(np.prod, config_of(checkpoint).parameter_shapes().values())) / 1e6
        report = Report(f"Start of {name_of(model)}, {weights:.0f} MB of float32 weights", arguments, SECONDS)
        inside = []

        def first_token():
            (_, *figures), seconds = run_script(FIRST_TOKEN, checkpoint, PROMPT)
            inside.append([*map(float, figures)])
            return seconds

        def median():
            return map(float, np.median(inside, axis=0))

        def extra(*_):
            imported, loaded, peak = median()
            return {"import ms": 1000 * imported, "load ms": 1000 * loaded, "peak MB": peak}

        def shows(timings):
            seconds, (*_, peak) = timings["first token"].median / 1000, median()
            return f"The first token comes after {seconds:.2f} s; the peak is {peak / weights:.2f} times the weights."

        report.table("Start of a process", {"first token": first_token}, shows, extra, idea="start")


if __name__ == "__main__":
    main()
