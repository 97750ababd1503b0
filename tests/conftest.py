"""What every test shares: no network, one BLAS thread, the bundled models and the byte vocabulary, loaded once."""

import os

# No test may reach the network; the hub library reads this when it is imported, also in subprocesses.
os.environ["HF_HUB_OFFLINE"] = "1"
# The models are tiny: a second BLAS thread gains nothing, and on a busy machine its spinning costs minutes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import pytest

import minigen
from tests.oracles.tiny import write_byte_vocab


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
