"""What the kinds of input share: how a fault is told, what every input must keep to, a tiny model and its command."""

import contextlib
import io
import itertools
import json
import os
import re
import shutil
import sys
import time
import tracemalloc
import warnings

import numpy as np

import minigen
from minigen import Tokenizer
from minigen.command import main as cli
from tests.oracles.reference import reference_logits
from tests.oracles.tiny import tiny_config, tiny_params, write_byte_vocab, write_checkpoint

SLACK = 4 * 2**20  # bytes that may be allocated beside the size of the files: Python's own objects, tiny caches
MAX_SENTENCE = 1000  # characters of an error that are still one sentence


class Fault(Exception):
    """minigen did what it must not do."""


def require(ok, what):
    if not ok:
        raise Fault(what)


def size_of(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def write(folder, files):
    """Replace the folder's content: {name: bytes, or the target of a symbolic link}."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in files.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            (folder / name).symlink_to(content)


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@contextlib.contextmanager
def measured(limit):
    """No more than `limit` bytes may be allocated in here, by Python and NumPy together."""
    tracemalloc.start()
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            yield
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        require(peak <= limit, f"{peak} bytes were allocated, {limit} would do")


@contextlib.contextmanager
def still_clock():
    """A clock that goes on by a millisecond each time it is read: two runs of the same take the same time."""
    clock, perf_counter = itertools.count(), time.perf_counter
    time.perf_counter = lambda: next(clock) / 1000
    try:
        yield
    finally:
        time.perf_counter = perf_counter


def check_sentence(error, *names):
    """An error must be one sentence that names one of these."""
    text = str(error)
    ours = "\n" not in text and "[Errno" not in text and len(text) <= MAX_SENTENCE
    require(text and ours and not isinstance(error, UnicodeError), f"no sentence of ours: {error!r}")
    require(any(str(name) in text for name in names), f"names none of {names}: {text}")


def check_logits(logits, config, params):
    """Equal to the reference where the weights are ordinary numbers: absurd ones leave no digit to compare."""
    if all(np.isfinite(value).all() and np.abs(value).max(initial=0) < 10 for value in params.values()):
        with np.errstate(all="ignore"):
            wanted = reference_logits(config, params, [0, 1])
        close = np.allclose(logits, wanted, rtol=1e-3, atol=1e-3) or not np.isfinite(wanted).all()
        require(close, f"logits are {logits}, the reference's {wanted}")


class Kind:
    def __init__(self, folder):
        self.input = folder / "input"
        self.input.mkdir()
        self.outside = folder / "outside"
        self.opened = []
        sys.addaudithook(lambda event, args: self.opened.append(args[0]) if event == "open" else None)

    def check_opened(self):
        """No file of the fuzzed kinds may have been opened outside the folder; threadpoolctl reads the last one."""
        for path in self.opened:
            path = os.path.abspath(os.fsdecode(path)) if isinstance(path, str | bytes | os.PathLike) else ""
            inside = path.startswith((str(self.input), sys.prefix, sys.base_prefix, os.path.dirname(minigen.__file__)))
            bad = path.startswith((str(self.outside), "/etc", "/dev", "/proc")) and path != "/proc/self/maps"
            require(not bad and (inside or not path.endswith((".safetensors", ".json", ".txt"))), f"{path} was opened")


class Run(Kind):
    """What the two kinds of command lines share: a tiny model, and the command line in this process."""

    def __init__(self, folder):
        super().__init__(folder)
        self.model = folder / "model"
        config = tiny_config(vocab_size=257, n_positions=64)
        write_byte_vocab(write_checkpoint(self.model, config, tiny_params(config, seed=3)))
        self.tokenizer = Tokenizer.from_folder(self.model, 257)

    def main(self, argv, stdin):
        """(exit code, stdout as bytes, lines of stderr)."""
        write(self.input, {"stdin": stdin, **getattr(self, "files", {})})
        (self.input / "argv.json").write_text(json.dumps(argv))
        streams = sys.stdin, sys.stdout, sys.stderr
        out, err = io.BytesIO(), io.BytesIO()
        sys.stdin = io.TextIOWrapper(io.BytesIO(stdin))
        sys.stdout, sys.stderr = (io.TextIOWrapper(stream, write_through=True) for stream in (out, err))
        os.chdir(self.input)
        try:
            with warnings.catch_warnings():
                code = cli.main(argv)
        except SystemExit as exit:  # --help, --version
            code = exit.code or 0
        finally:
            kept = sys.stdout, sys.stderr  # closing them would close `out` and `err`
            sys.stdin, sys.stdout, sys.stderr = streams
            os.chdir(self.input.parent)
        out, err = out.getvalue(), err.getvalue()
        for stream in kept:
            stream.detach()
        return code, out, err.decode("utf-8").splitlines()

    def check(self, code, out, err, argv):
        require(code in (0, 2), f"exit code {code}")
        require("Traceback" not in "".join(err), f"a traceback: {err}")
        out.decode("utf-8")
        if code == 2:
            # The header may have come before the error.
            lines = [line for line in err if not re.match(r"minigen \d+\.|minigen: warning: |hint: ", line)]
            errors = [line for line in lines if line.startswith("minigen: ")]
            if {"-i", "--interactive"} & set(argv):
                # Each turn has an error or notes of its own, and others follow.
                require(errors, f"no sentence: {lines}")
            else:
                require(len(lines) == 1 == len(errors), f"no sentence: {lines}")
        elif "--json" in argv and not {"-h", "--help", "--version"} & set(argv):
            for line in out.decode("utf-8").split("\n")[:-1]:
                json.loads(line)
