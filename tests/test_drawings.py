"""README's drawings: the committed files are what the script draws, and what they show is so."""

import importlib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from benchmarks import all as all_benchmarks
from benchmarks import drawings

README = Path(__file__).resolve().parents[1] / "README.md"


@pytest.mark.parametrize("name", drawings.DRAWINGS)
def test_the_committed_files_are_what_the_script_writes(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(drawings, "FIGURES", tmp_path)
    drawings.main()
    committed = Path(drawings.__file__).parent / "figures" / name
    assert (tmp_path / name).read_bytes() == committed.read_bytes().replace(b"\r\n", b"\n")
    assert str(tmp_path / name) in capsys.readouterr().out
    assert ElementTree.fromstring(committed.read_text(encoding="utf-8")).tag.endswith("svg")
    assert committed.stat().st_size < 20_000
    assert f"benchmarks/figures/{name}" in README.read_text(encoding="utf-8")
    assert "drawings" not in all_benchmarks.SCRIPTS  # it measures nothing


def test_every_box_names_a_function_where_it_stands():
    for file, names, *_ in drawings.BOXES:
        module = importlib.import_module(f"minigen.{file.removesuffix('.py')}")
        for name in names:
            thing = module
            for part in name.split("."):
                thing = getattr(thing, part)
            assert thing.__module__ == module.__name__, (file, name)


def test_boxes_do_not_overlap():
    for index, (*_, x, y, width, height, _) in enumerate(drawings.BOXES):
        for *_, x2, y2, width2, height2, _ in drawings.BOXES[:index]:
            assert x + width <= x2 or x2 + width2 <= x or y + height <= y2 or y2 + height2 <= y


def test_the_ring_shows_the_last_position_of_every_slot_and_the_window_before_the_query():
    """Worked out without a cache: what was fed in order, and what was taken back."""
    written = [list(range(14)), list(range(17)), [*range(17), 15]]
    queries = [13, 16, 15]
    forgotten = [(), (), (16,)]
    states = list(drawings.driven_cache())
    assert len(states) == 3
    for (_, slot_pos, seen, query), positions, expected, gone in zip(states, written, queries, forgotten, strict=True):
        slots = [-1] * 12
        for position in positions:
            slots[position % 12] = position
        slots = [-1 if position in gone else position for position in slots]
        assert (query, slot_pos.tolist()) == (expected, slots)
        np.testing.assert_array_equal(seen, [query - 8 < position <= query for position in slots])
        assert sorted(slot_pos[seen]) == list(range(query - 7, query + 1))
