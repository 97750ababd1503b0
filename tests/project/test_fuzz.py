"""A slice of tests/fuzz: some inputs of every kind, always the same. `python -m tests.fuzz` runs more, and others."""

import random
import sys
from collections import Counter

import pytest

from tests.fuzz import __main__ as fuzz
from tests.fuzz.__main__ import NAMES
from tests.fuzz.kinds import KINDS
from tests.fuzz.runner import run_batch

# Of each kind, as many as take about half a second.
COUNTS = {
    "checkpoint": 120,
    "config": 30,
    "token-ids": 20,
    "tokenizer": 30,
    "tokenizer-files": 25,
    "cli": 35,
    "prompt": 25,
    "prompt-cache": 40,
    "streams": 15,
    "options": 50,
}
# What must come of some of the inputs: a kind that only refuses, or only accepts, tests nothing.
OUTCOMES = {
    "checkpoint": {"loaded", "refused"},
    "config": {"loaded", "refused"},
    "token-ids": {"begins", "no begin"},
    "tokenizer": {"loaded", "refused"},
    "tokenizer-files": {"loaded", "refused"},
    "cli": {"exit 0", "exit 2"},
    "prompt": {"taken", "refused"},
    "prompt-cache": {"taken", "refused"},
    "streams": {"exit 0", "exit 2", "exit 141"},
    "options": {"same", "refused"},
}


def test_every_kind_has_a_name_and_a_slice():
    assert NAMES == list(KINDS) == list(COUNTS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", COUNTS)
def test_damaged_and_odd_inputs_end_in_the_right_result_or_in_one_sentence(kind, tmp_path, monkeypatch):
    if kind == "streams" and not sys.platform.startswith("linux"):
        pytest.skip("forks, and sets the size of pipes")
    if kind == "streams":  # forks, which needs a process without threads
        words, found = run_batch(kind, 0, 67, COUNTS[kind], tmp_path)  # among these are all forms of stdout and stderr
        assert not found, "\n".join(map(str, found[:5]))
    else:  # in this process, because the start of a worker takes longer than the slice
        monkeypatch.setenv("MINIGEN_LINEAR", "plain")
        monkeypatch.chdir(tmp_path)  # for files that the command is told to write
        maker, words = KINDS[kind](tmp_path), set()
        for index in range(COUNTS[kind]):
            try:
                words.add(maker.run(random.Random(f"0 {kind} {index}")))
            except Exception as error:
                raise AssertionError(
                    f"python -m tests.fuzz --only {kind} --seed 0 --first {index} --count 1"
                ) from error
    assert set(words) == OUTCOMES[kind]


def test_the_time_is_kept_and_kinds_that_were_not_tried_are_named(monkeypatch, capsys):
    now, tried = [0.0], []

    def run(kind, seed, first, count, keep):
        tried.append((kind, first, count))
        now[0] += count * 0.02  # seconds, as an input of one of the slower kinds takes
        return Counter({"taken": count}), []

    monkeypatch.setattr(fuzz, "run_batch", run)
    monkeypatch.setattr(fuzz.time, "monotonic", lambda: now[0])
    assert fuzz.main(["--minutes", "0.1"]) == 0
    assert now[0] <= 6 + 2 and [kind for kind, _, _ in tried] == NAMES[: len(tried)]
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if "not tried" in line] == [
        f"{kind}: not tried, for the time was up" for kind in NAMES[len(tried) :]
    ]
    # With time enough, every kind has the same inputs.
    tried.clear()
    assert fuzz.main(["--count", "250"]) == 0
    assert {kind: sum(count for other, _, count in tried if other == kind) for kind in NAMES} == dict.fromkeys(
        NAMES, 250
    )
    assert "not tried" not in capsys.readouterr().out
