"""What it costs to begin: importing minigen, loading a model, the first token of a fresh process, and peak memory.

    python -m benchmarks.startup --shape gpt2

Every figure is of a process of its own, and the checkpoint in the system's file cache. "load" and "import" are timed
inside that process; "first token" is from starting it to the token it prints. "peak memory" is the most that a process
which loads the model and generates that token ever held, with Python and NumPy; as a ratio to the float32 weights
where it says so. The targets are for the shape of gpt2 on two cores.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.engines import FIRST_TOKEN
from benchmarks.harness import checkpoint_of, config_of, name_of, parser, report

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
# Linux counts into a process's ru_maxrss what the process that started it held then, so its own peak is read elsewhere.
PEAK = (
    FIRST_TOKEN["minigen"]
    + """
from pathlib import Path
import resource
status = Path("/proc/self/status")
if status.is_file():
    print(next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM")))
else:  # macOS counts bytes, others kilobytes
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))
"""
)


def run(script, *arguments):
    """(seconds from starting a process to its first line, the number on its last line)."""
    start = time.perf_counter()
    command = [sys.executable, "-c", script, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        first = process.stdout.readline()
        seconds = time.perf_counter() - start
        printed = first + process.stdout.read()
    if process.returncode:
        raise SystemExit(process.returncode)
    return seconds, float(printed.split()[-1])


def main():
    arguments = parser(__doc__.splitlines()[0], repetitions=10, model=True).parse_args()
    repetitions = 2 if arguments.quick else arguments.repetitions
    prompt = "Once upon a time"
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = checkpoint_of(arguments, Path(folder))
        weights = 4 * sum(map(np.prod, config_of(checkpoint).parameter_shapes().values()))
        asked = checkpoint, prompt, 0
        run(FIRST_TOKEN["minigen"], *asked)  # the first one warms the disk
        figures = {"import": [], "load": [], "first token": [], "peak memory": []}
        for _ in range(repetitions):
            figures["import"].append(1000 * run(IMPORT)[1])
            figures["load"].append(1000 * run(LOAD, checkpoint)[1])
            figures["first token"].append(1000 * run(FIRST_TOKEN["minigen"], *asked)[0])
            figures["peak memory"].append(run(PEAK, *asked)[1] / 1e6)
    figures["peak memory / weights"] = [peak * 1e6 / weights for peak in figures["peak memory"]]

    units = {"peak memory": "MB", "peak memory / weights": "1"}
    targets = {"import": "250", "first token": "1000", "peak memory / weights": "1.15"}
    rows = [
        {
            "what": name,
            "unit": units.get(name, "ms"),
            **{statistic.__name__: float(statistic(values)) for statistic in (np.median, np.min, np.max)},
            "target": targets.get(name, "-"),
        }
        for name, values in figures.items()
    ]
    report(f"{name_of(arguments)}: {weights / 1e6:.1f} MB of float32 weights", rows, arguments)


if __name__ == "__main__":
    main()
