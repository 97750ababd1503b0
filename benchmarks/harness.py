"""What all benchmarks share: options, models, interleaved timing, the machine's description, tables, JSON, pictures."""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import sys
import time
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import save_file

import minigen

# No benchmark downloads anything; the hub's client reads this when it is imported.
os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).resolve().parents[1]
# OpenBLAS's threads go on spinning after their work, for 0.12 s as measured on two cores, where minigen could not tell
# them otherwise (see its __init__). What uses other threads is measured so many seconds after what used theirs.
PAUSE = 0.2
# What the sizes of GPT-2 differ in; random weights of a shape take the time that trained ones take.
SHAPES = {
    "distilgpt2": {"n_embd": 768, "n_layer": 6, "n_head": 12},
    "gpt2": {"n_embd": 768, "n_layer": 12, "n_head": 12},
    "gpt2-medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16},
    "gpt2-large": {"n_embd": 1280, "n_layer": 36, "n_head": 20},
    "gpt2-xl": {"n_embd": 1600, "n_layer": 48, "n_head": 25},
}

# ---------------------------------------------------------------------------------------- options


class Timing(NamedTuple):
    """Milliseconds of one call."""

    median: float
    min: float
    max: float


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence, without the usage."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message}\n")


def count(text):
    """The type of `--repetitions`."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 1 or more")
    return int(text)


def output(name):
    """The type of a file to write: refuses before anything is measured what could not be written afterwards."""
    if not os.access(Path(name).parent, os.W_OK) or Path(name).is_dir():
        raise argparse.ArgumentTypeError(f"{name} cannot be written: name a file in a folder that is there")
    return name


def picture(name):
    """The type of `--plot`: refuses before anything is measured what could not be drawn afterwards."""
    if Path(name).suffix not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"{name} ends neither in .png nor in .svg")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("matplotlib is not installed: pip install 'minigen[bench]'")
    return output(name)


def parser(description, repetitions=30, model=False, plot=False):
    """The options that every benchmark has, and on request those that choose a model and draw a picture."""
    arguments = Parser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    arguments.add_argument(
        "--repetitions", type=count, default=repetitions, metavar="N", help="timed calls of each case"
    )
    quick = "the bundled model and few repetitions" if model else "few repetitions"
    arguments.add_argument("--quick", action="store_true", help=f"{quick}: shows that it runs, not how fast")
    arguments.add_argument("--json", type=output, metavar="FILE", help="also write the figures to this file")
    if plot:
        arguments.add_argument("--plot", type=picture, metavar="FILE", help="also draw them, as .png or .svg")
    if model:
        which = arguments.add_mutually_exclusive_group()
        which.add_argument("--model", metavar="NAME", help="a checkpoint on disk: folder, bundled name or hub id")
        which.add_argument("--shape", choices=SHAPES, help="random weights of this shape; gpt2 where nothing is said")
    return arguments


# ---------------------------------------------------------------------------------------- models


def shape_of(arguments):
    """The shape that random weights are asked for, or None where a checkpoint is to be read."""
    return arguments.shape or (None if arguments.model or arguments.quick else "gpt2")


def name_of(arguments):
    """The model that was asked for, in words, for a table's title."""
    shape = shape_of(arguments)
    return f"random weights of {shape}'s shape" if shape else arguments.model or "the bundled model"


def random_parameters(config):
    """Weights as they are before training: normal with deviation 0.02, norms 1, biases 0.

    Pairs of name and float32 array, one at a time, so that a model can lay out each and drop it.
    """
    rng = np.random.default_rng(0)
    for name, shape in config.parameter_shapes().items():
        if len(shape) == 1:
            yield name, np.full(shape, name.endswith("weight"), np.float32)  # norms are the only such weights
        else:
            values = rng.standard_normal(shape, np.float32)
            values *= np.float32(0.02)
            yield name, values


def refuse(sentence):
    """End with one sentence on stderr, as `Parser` does."""
    print(sentence, file=sys.stderr)
    sys.exit(2)


def gpt2_tokenizer():
    return minigen.Tokenizer.from_folder(ROOT / "tests" / "data" / "gpt2-bpe", minigen.GPT2Config().vocab_size)


def model_and_tokenizer_of(arguments):
    """What `minigen.load` returns, for the model that the options ask for; random weights get GPT-2's vocabulary."""
    shape = shape_of(arguments)
    if shape is None:
        try:
            return minigen.load(arguments.model)
        except (OSError, ValueError) as error:
            refuse(error)
    config = minigen.GPT2Config(**SHAPES[shape])
    return minigen.GPT2(config, random_parameters(config)), gpt2_tokenizer()


def model_of(arguments):
    """The `GPT2` that the options ask for, in memory."""
    return model_and_tokenizer_of(arguments)[0]


def checkpoint_of(arguments, folder):
    """The folder of the checkpoint that the options ask for; random weights are written into `folder`."""
    shape = shape_of(arguments)
    if shape is None:
        name = arguments.model or "fairytale"
        for path in (Path(name).expanduser(), ROOT / "weights" / name):
            if path.is_dir():
                return path
        from huggingface_hub import snapshot_download

        if name in SHAPES:
            name = f"{'distilbert' if name == 'distilgpt2' else 'openai-community'}/{name}"
        try:
            return Path(snapshot_download(name))
        except (OSError, ValueError):
            refuse(f"{name} is neither a checkpoint's folder nor in the hub's local cache: nothing is downloaded here")
    config = minigen.GPT2Config(**SHAPES[shape])
    described = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **SHAPES[shape]}
    (folder / "config.json").write_text(json.dumps(described))
    save_file(dict(random_parameters(config)), folder / "model.safetensors", {"format": "pt"})
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(ROOT / "tests" / "data" / "gpt2-bpe" / name, folder)
    return folder


def config_of(folder):
    """The `GPT2Config` of a checkpoint's folder."""
    return minigen.GPT2Config.from_dict(json.loads((folder / "config.json").read_text()))


# ---------------------------------------------------------------------------------------- timing


def measure(cases, repetitions, warm_up=3):
    """Time callables against each other: one call of each in turn, so that a noisy moment hits all alike.

    cases: name -> callable without arguments; one that returns a float has timed itself, and returns seconds. Returns
    name -> `Timing`.
    """
    for _ in range(warm_up):
        for call in cases.values():
            call()
    seconds = {name: [] for name in cases}
    for _ in range(repetitions):
        for name, call in cases.items():
            start = time.perf_counter()
            own = call()
            seconds[name].append(own if isinstance(own, float) else time.perf_counter() - start)
    return {
        name: Timing(*(1000 * float(statistic(times)) for statistic in (np.median, np.min, np.max)))
        for name, times in seconds.items()
    }


def gemv_rate(megabytes=400, repetitions=10):
    """Billions of bytes a second that one large matrix-vector product reads: the memory's speed, as BLAS gets it.

    The matrix is far larger than the caches of most processors. Both orientations are timed, because which is faster
    depends on the BLAS, and the better median counts.
    """
    rows = megabytes * 10**6 // (4 * 4096)
    matrix = np.ones((rows, 4096), np.float32)  # not zeros: untouched ones all lie in the same page of memory
    cases = {"gemv": lambda: matrix @ matrix[0], "transposed": lambda: matrix[:, 0] @ matrix}
    timings = measure(cases, repetitions, warm_up=1)
    return matrix.nbytes / 1e6 / min(timing.median for timing in timings.values())


# ---------------------------------------------------------------------------------------- results


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


def columns(timing, unit="ms", scale=1.0):
    """A `Timing` as columns of a row; scale: how many of the unit a millisecond is."""
    return {f"{unit} {statistic}": value * scale for statistic, value in timing._asdict().items()}


def report(title, rows, arguments, notes=()):
    """Print rows (dicts) as tables under the machine's description; write all in one JSON file if asked.

    notes: sentences that belong to the figures; printed above. A new table begins where the keys of the rows change.
    """
    described = machine()
    print(title)
    print(", ".join(f"{key} {value}" for key, value in described.items()), *notes, sep="\n")
    for table, (names, alike) in enumerate(groupby(rows, key=list)):
        cells = [names] + [[f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()] for row in alike]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        print(end="\n" if table else "")
        for line in cells:
            print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    if arguments.json:
        figures = {"title": title, "machine": described, "notes": list(notes), "rows": rows}
        Path(arguments.json).write_text(json.dumps(figures, indent=1))


@contextmanager
def plot(file, title, panels=1):
    """Gives matplotlib axes to draw on, a list of `panels` side by side, and then writes them to `file`."""
    # Imported here because no other part of a benchmark needs it, and drawing without a screen needs this backend.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, panels, figsize=(1.5 + 3 * panels, 4), layout="constrained", squeeze=False)
    figure.suptitle(title)
    yield list(axes[0])
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
