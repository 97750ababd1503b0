"""From process start to the first token: import, load, first token, and peak memory.

    python -m benchmarks.startup --shape gpt2

Every figure is that of a new process, with the checkpoint in the system's file cache. "import" and "load" are timed
inside that process; "first token" is from its start to the token that it prints. "peak memory" is the most that a
process which loads the model and generates that token ever held, Python and NumPy included.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.harness import Report, checkpoint_of, config_of, name_of, parser

SECONDS = {"quick": 4, "full": 90}
PROMPT = "Once upon a time"
IMPORT = """
import time
start = time.perf_counter()
from minigen import load  # the public names are imported when the first is asked for
print(time.perf_counter() - start)
"""
LOAD = """
import sys, time
from minigen import load
start = time.perf_counter()
load(sys.argv[1])
print(time.perf_counter() - start)
"""
FIRST_TOKEN = """
import sys
import minigen
model, tokenizer = minigen.load(sys.argv[1])
print(next(minigen.stream(model, tokenizer, sys.argv[2], temperature=0, max_tokens=1)).token, flush=True)
"""
# On Linux ru_maxrss begins with the size of the parent process, so the process's own peak is read from /proc.
PEAK = f"""{FIRST_TOKEN}
import resource
try:
    lines = open("/proc/self/status").read().splitlines()
    print(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")))
except OSError:  # macOS counts bytes, other systems kilobytes
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))
"""


def run_script(script, *arguments):
    """(seconds from starting a process to its first line, its last line as a number). RuntimeError if it fails."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    with tempfile.TemporaryFile("w+") as errors:
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            first = process.stdout.readline()
            seconds = time.perf_counter() - start
            printed = first + process.stdout.read()
        errors.seek(0)
        if process.returncode or not first:
            raise RuntimeError((errors.read().strip().splitlines() or ["it printed nothing"])[-1])
    return seconds, float(printed.split()[-1])


def main(arguments=None):
    arguments = parser(__doc__, repetitions=10).parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = checkpoint_of(arguments, Path(folder))
        weights = 4 * sum(map(np.prod, config_of(checkpoint).parameter_shapes().values())) / 1e6
        report = Report(f"Start of {name_of(arguments)}, {weights:.0f} MB of float32 weights", arguments, SECONDS)
        peaks = []

        def first_token():
            seconds, peak = run_script(PEAK, checkpoint, PROMPT)
            peaks.append(peak / 1e6)
            return seconds

        cases = {
            "import": lambda: run_script(IMPORT)[1],
            "load": lambda: run_script(LOAD, checkpoint)[1],
            "first token": first_token,
        }

        def extra(case, _):
            return {"MB peak memory": float(np.median(peaks)) if case == "first token" else "-"}

        def shows(timings):
            return (
                f"The first token comes {timings['first token'].median / 1000:.2f} s after the process starts; at its "
                f"peak the process holds {np.median(peaks) / weights:.2f} times its float32 weights."
            )

        report.table("Start", cases, shows, extra=extra, idea="start")


if __name__ == "__main__":
    main()
