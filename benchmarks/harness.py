"""What all benchmarks share: options, interleaved timing, the machine's description, tables and JSON."""

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

import minigen


class Timing(NamedTuple):
    """Milliseconds of one call."""

    median: float
    min: float
    max: float


def parser(description):
    """The options that every benchmark has."""
    arguments = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    arguments.add_argument("--repetitions", type=int, default=30, metavar="N", help="timed calls of each case")
    arguments.add_argument("--quick", action="store_true", help="few repetitions: shows that it runs, not how fast")
    arguments.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    return arguments


def measure(cases, repetitions, warm_up=3):
    """Time callables against each other: one call of each in turn, so that a noisy moment hits all alike.

    cases: name -> callable without arguments. Returns name -> `Timing`.
    """
    for _ in range(warm_up):
        for call in cases.values():
            call()
    seconds = {name: [] for name in cases}
    for _ in range(repetitions):
        for name, call in cases.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {
        name: Timing(*(1000 * float(statistic(times)) for statistic in (np.median, np.min, np.max)))
        for name, times in seconds.items()
    }


def machine():
    """What the figures depend on: processor, cores, NumPy and its BLAS."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        models = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        cpu = models[0] if models else cpu
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": f"{blas.get('name')} {blas.get('version')}",
        "blas_threads": os.environ.get("OPENBLAS_NUM_THREADS", "default"),
        "minigen": minigen.__version__,
    }


def report(title, rows, arguments):
    """Print a table of rows (dicts with the same keys) under the machine's description; write it as JSON if asked."""
    described = machine()
    print(title)
    print(", ".join(f"{key} {value}" for key, value in described.items()))
    cells = [list(rows[0])] + [[f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"title": title, "machine": described, "rows": rows}, indent=1))
