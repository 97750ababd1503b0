"""What every test shares: no network, one BLAS thread, the command, the bundled models and two tiny ones."""

import io
import os
import sys
import warnings
from typing import NamedTuple

# No test may reach the network; the hub library reads this when it is imported, also in subprocesses.
os.environ["HF_HUB_OFFLINE"] = "1"
# The models are tiny: a second BLAS thread gains nothing, and on a busy machine its spinning costs minutes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import pytest

import minigen
from minigen.command.main import main
from minigen.kernels import chunked, linear, parallel
from tests.oracles.tiny import tiny_config, tiny_params, write_byte_vocab, write_checkpoint


@pytest.fixture(scope="session")
def fairytale():
    """(model, tokenizer) of the larger bundled checkpoint."""
    return minigen.load("fairytale")


@pytest.fixture(scope="session")
def distilfairytale():
    """(model, tokenizer) of the smaller one, which drafts for it."""
    return minigen.load("distilfairytale")


@pytest.fixture(scope="session")
def byte_vocab(tmp_path_factory):
    """A folder with the vocabulary of bytes: 257 ids, the last of which is end-of-text."""
    return write_byte_vocab(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="session")
def byte_tokenizer(byte_vocab):
    return minigen.Tokenizer.from_folder(byte_vocab, 257)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A tiny checkpoint: 64 positions, one token per byte; nearly all of what it writes is broken UTF-8."""
    folder = tmp_path_factory.mktemp("tiny") / "modèle"
    config = tiny_config(vocab_size=257, n_positions=64)
    return write_byte_vocab(write_checkpoint(folder, config, tiny_params(config, seed=3)))


@pytest.fixture(scope="session")
def tiny(tiny_folder):
    """(model, tokenizer) of `tiny_folder`."""
    return minigen.load(str(tiny_folder))


@pytest.fixture
def three_threads(monkeypatch):
    """Three threads whatever the machine has, and workers of this test's own."""
    for module in (parallel, linear, chunked):
        monkeypatch.setattr(module, "THREADS", 3)
    monkeypatch.setattr(parallel, "_jobs", None)


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def cli(capsys, monkeypatch):
    """Runs the command line in this process: cli(*arguments, stdin=bytes) returns a `Result`."""

    def run(*args, stdin=b""):
        stream = io.TextIOWrapper(io.BytesIO(stdin)) if isinstance(stdin, bytes) else stdin
        monkeypatch.setattr(sys, "stdin", stream)
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # main replaces it
        try:
            code = main([str(arg) for arg in args])
        except SystemExit as exit:
            code = exit.code
        return Result(code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def tiny_cli(cli, tiny_folder):
    """`cli` with the tiny model."""
    return lambda *args, stdin=b"": cli("--model", tiny_folder, *args, stdin=stdin)


@pytest.fixture
def watch(monkeypatch):
    """watch(model): a list to which every later forward pass of the model adds the [B, T] of its ids."""

    def watched(model):
        shapes, forward = [], model.forward

        def forward_and_note(ids, *args, **kwargs):
            shapes.append(np.shape(np.atleast_2d(ids)))
            return forward(ids, *args, **kwargs)

        monkeypatch.setattr(model, "forward", forward_and_note)
        return shapes

    return watched
