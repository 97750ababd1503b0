"""A slice of tests/fuzz: some inputs of every kind, always the same. `python -m tests.fuzz` runs more, and others."""

import pytest

from tests.fuzz.__main__ import NAMES
from tests.fuzz.kinds import KINDS
from tests.fuzz.runner import run_batch

# Of each kind as many as take about two seconds, most of which is the start of a worker.
COUNTS = {"checkpoint": 500, "config": 120, "tokenizer": 120, "cli": 120, "prompt": 100, "prompt-cache": 150}
# What must come of some of the inputs: a kind that only refuses, or only accepts, tests nothing.
OUTCOMES = {
    "checkpoint": {"loaded", "refused"},
    "config": {"loaded", "refused"},
    "tokenizer": {"loaded", "refused"},
    "cli": {"exit 0", "exit 2"},
    "prompt": {"taken", "refused"},
    "prompt-cache": {"taken", "refused"},
}


def test_every_kind_has_a_name_and_a_slice():
    assert NAMES == list(KINDS) == list(COUNTS)


@pytest.mark.parametrize("kind", COUNTS)
def test_damaged_and_odd_inputs_end_in_the_right_result_or_in_one_sentence(kind, tmp_path):
    words, found = run_batch(kind, 0, 0, COUNTS[kind], tmp_path)
    assert not found, "\n".join(map(str, found[:5]))
    assert words.total() == COUNTS[kind]
    assert set(words) == OUTCOMES[kind]
