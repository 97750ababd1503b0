"""What all benchmarks share: options, models, timing in turns, tables, JSON, plots, the machine they run on."""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import save_file

import minigen

os.environ["HF_HUB_OFFLINE"] = "1"  # no benchmark downloads anything
ROOT = Path(__file__).resolve().parents[1]
GPT2_VOCABULARY = ROOT / "tests" / "data" / "gpt2-bpe"
# A model of random weights takes the same time as a trained one of the same shape.
SHAPES = {
    "distilgpt2": {"n_embd": 768, "n_layer": 6, "n_head": 12},
    "gpt2": {"n_embd": 768, "n_layer": 12, "n_head": 12},
    "gpt2-medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16},
    "gpt2-large": {"n_embd": 1280, "n_layer": 36, "n_head": 20},
    "gpt2-xl": {"n_embd": 1600, "n_layer": 48, "n_head": 25},
}

# ---------------------------------------------------------------------------------------- options


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence, without the usage."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message}\n")


def count(text):
    """The type of a whole number of 1 or more."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 1 or more")
    return int(text)


def checkpoint(name):
    """The type of `--model`: a checkpoint's folder."""
    for path in (Path(name).expanduser(), ROOT / "weights" / name):
        if (path / "config.json").is_file():
            return path
    raise argparse.ArgumentTypeError(f"{name} is neither a checkpoint's folder nor the name of a bundled model")


def output(name):
    """The type of an output file: refuses, before anything is measured, one that cannot be written."""
    file = Path(name)
    if not os.access(file.parent, os.W_OK) or file.is_dir() or file.suffix not in (".json", ".png", ".svg"):
        raise argparse.ArgumentTypeError(f"{name} cannot be written: name a .json, .png or .svg in an existing folder")
    if file.suffix != ".json" and importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("matplotlib is not installed: pip install 'minigen[bench]'")
    return file


def parser(description, repetitions, model=True, plot=False):
    """The options that every benchmark has, and those that choose a model and draw a plot."""
    raw = argparse.RawDescriptionHelpFormatter
    options = Parser(description=description, formatter_class=raw, allow_abbrev=False)
    add = options.add_argument
    add("--quick", action="store_true", help="small model, short texts, few repetitions: shows that it runs")
    add("--repetitions", type=count, metavar="N", help=f"timed calls of each case, {repetitions} by default")
    add("--json", type=output, metavar="FILE", help="also write the figures to this file")
    if plot:
        add("--plot", type=output, metavar="FILE", help="also draw them, as .png or .svg")
    if model:
        add = options.add_mutually_exclusive_group().add_argument
        add("--model", type=checkpoint, metavar="FOLDER", help="a checkpoint's folder, or the name of a bundled model")
        add("--shape", choices=SHAPES, help="random weights of this shape; the default is gpt2")
    options.set_defaults(default_repetitions=repetitions)
    return options


# ---------------------------------------------------------------------------------------- models


def model_of(arguments):
    """The model that the options ask for: a shape of random weights or a checkpoint's folder."""
    return arguments.shape or arguments.model or (checkpoint("fairytale") if arguments.quick else "gpt2")


def name_of(model):
    """A shape or a checkpoint's folder in words, for a title."""
    return f"random weights of {model}'s shape" if model in SHAPES else model.name


def random_parameters(config):
    """Weights before training, one after the other: normal with standard deviation 0.02, layer norms 1, biases 0."""
    rng = np.random.default_rng(0)
    for name, shape in config.parameter_shapes().items():
        if len(shape) == 1:
            yield name, np.full(shape, name.endswith("weight"), np.float32)  # only layer norms have such weights
        else:
            yield name, rng.standard_normal(shape, np.float32) * np.float32(0.02)


def load_model(name):
    """(model, tokenizer): of random weights and GPT-2's tokenizer if it names a shape, else as `minigen.load`."""
    if name not in SHAPES:
        return minigen.load(name)
    config = minigen.GPT2Config(**SHAPES[name])
    tokenizer = minigen.Tokenizer.from_folder(GPT2_VOCABULARY, config.vocab_size)
    return minigen.GPT2(config, random_parameters(config)), tokenizer


def checkpoint_of(model, folder):
    """The folder of a checkpoint, which for a shape of random weights is written to `folder`."""
    if model not in SHAPES:
        return model
    described = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **SHAPES[model]}
    (folder / "config.json").write_text(json.dumps(described))
    parameters = dict(random_parameters(minigen.GPT2Config(**SHAPES[model])))
    save_file(parameters, folder / "model.safetensors", {"format": "pt"})
    return shutil.copytree(GPT2_VOCABULARY, folder, dirs_exist_ok=True)


def config_of(folder):
    """The `GPT2Config` of a checkpoint's folder."""
    return minigen.GPT2Config.from_dict(json.loads((folder / "config.json").read_text()))


def random_ids(config, *shape):
    return np.random.default_rng(0).integers(0, config.vocab_size, shape)


# ---------------------------------------------------------------------------------------- timing


class Timing(NamedTuple):
    """Milliseconds of one call; cpu is this process's processor time, None if the call did not measure it."""

    median: float
    min: float
    max: float
    cpu: float | None


def timed(call, times=1):
    """Seconds per call, the mean of `times` calls: (wall time, processor time)."""
    start = time.perf_counter(), time.process_time()
    for _ in range(times):
        call()
    return (time.perf_counter() - start[0]) / times, (time.process_time() - start[1]) / times


def measure(cases, repetitions, warm_up=1, progress=lambda *_: None):
    """Time callables in turn, one call of each per round, so that a noisy moment hits all of them alike.

    cases: name -> callable without arguments; one that returns a float, or a pair like `timed`, has timed itself.
    progress: called with (name, number of calls made, number of all calls). Returns name -> `Timing`.
    """
    seconds = {name: [] for name in cases}
    names = [*cases] * (warm_up + repetitions)
    for i, name in enumerate(names):
        progress(name, i, len(names))
        start = time.perf_counter(), time.process_time()
        own = cases[name]()
        pair = time.perf_counter() - start[0], time.process_time() - start[1]
        seconds[name].append(own if isinstance(own, tuple) else (own, None) if isinstance(own, float) else pair)
    timings = {}
    for name, pairs in seconds.items():
        wall, cpu = zip(*pairs[warm_up:], strict=True)
        cpu = None if None in cpu else 1000 * float(np.median(cpu))
        timings[name] = Timing(*(1000 * float(f(wall)) for f in (np.median, np.min, np.max)), cpu)
    return timings


def ratio(timings, name, base):
    """The median of one case as a multiple of another's."""
    return timings[name].median / timings[base].median


# ---------------------------------------------------------------------------------------- results


def machine():
    """What the figures depend on, in words: processor, cores, NumPy and its BLAS."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    cpus = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    cpu = cpus[0] if cpus else platform.processor() or platform.machine()
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    versions = f"Python {platform.python_version()}, NumPy {np.__version__}, {blas.get('name')} {blas.get('version')}"
    return f"{os.cpu_count()} cores of {cpu}, {versions}, minigen {minigen.__version__}"


def duration(seconds):
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def cell(value):
    """Three significant digits or so."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3}f}"


class Report:
    """The tables of one benchmark: each is printed as soon as it is measured, and saved with `--json`."""

    def __init__(self, title, arguments, seconds):
        """seconds: {"quick": ..., "full": ...}, what it takes on two idle cores with its default model, about."""
        self.quick, self.json = arguments.quick, arguments.json
        self.repetitions = arguments.repetitions or (1 if self.quick else arguments.default_repetitions)
        self.figures = {"title": title, "machine": machine(), "notes": [], "tables": []}
        run = "quick" if self.quick else "full"
        takes = f"a {run} run takes about {duration(seconds[run])} on two cores with its default model"
        print(title, self.figures["machine"], takes, sep="\n", flush=True)

    def note(self, sentence):
        """Print a sentence that belongs to the figures, and save it with them."""
        print(sentence, flush=True)
        self.figures["notes"].append(sentence)

    def table(self, title, cases, shows, extra, idea=None, once=False):
        """Measure cases, print a table and a sentence; returns the rows.

        cases: as in `measure`. shows: timings -> a sentence about them. extra: (name of a case, timings) -> more
        columns of its row, or None for no row. idea: what this is in README.md's table of ideas; without one the table
        is not in it. once: one call of each case, no warm-up.
        """
        print(f"\n{title}", flush=True)
        start, clear = time.perf_counter(), "\r\x1b[K" if sys.stderr.isatty() else None

        def progress(name, done, n_calls):
            if clear:
                left = (time.perf_counter() - start) * (n_calls / max(done, 1) - 1)
                text = f"  {done} of {n_calls}: {name}" + (f", about {duration(left)} left" if done else "")
                print(clear, text, sep="", end="", file=sys.stderr, flush=True)

        timings = measure(cases, 1 if once else self.repetitions, 0 if once else 1, progress)
        print(clear or "", end="", file=sys.stderr, flush=True)
        rows = []
        for name, timing in timings.items():
            more = extra(name, timings)
            if more is not None:
                cpu = {} if timing.cpu is None else {"cpu ms": timing.cpu}
                rows.append({"case": name, "ms": timing.median, "min": timing.min, "max": timing.max, **cpu, **more})
        lines = [list(rows[0])] + [[cell(value) for value in row.values()] for row in rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
        sentence = shows(timings)
        print(f"-> {sentence}", flush=True)
        self.figures["tables"].append({"title": title, "idea": idea, "shows": sentence, "rows": rows})
        if self.json:
            self.json.write_text(json.dumps(self.figures, indent=1))
        return rows
