"""The golden files are what the installed transformers library gives: they are made anew here and compared."""

import importlib
import json

import numpy as np
import pytest

from tests.golden.make import HERE as GOLDEN

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("part", sorted(path.stem for path in GOLDEN.glob("make_*.py")))
def test_golden_files_are_what_transformers_gives(part, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    importlib.import_module(f"tests.golden.{part}").main(tmp_path)
    made = sorted(path for path in tmp_path.iterdir() if path.suffix in (".json", ".npz"))
    assert made
    for path in made:
        if path.suffix == ".npz":
            with np.load(path) as new, np.load(GOLDEN / path.name) as old:
                assert sorted(new) == sorted(old)
                for name in new:
                    if new[name].dtype.kind == "f":
                        np.testing.assert_allclose(new[name], old[name], rtol=0, atol=1e-4, err_msg=name)
                    else:
                        assert (new[name] == old[name]).all(), name
        else:
            assert without_floats(json.loads(path.read_text())) == without_floats(
                json.loads((GOLDEN / path.name).read_text())
            )


def without_floats(value):
    """JSON content without its measured numbers, which differ in the last digits from processor to processor."""
    if isinstance(value, dict):
        return {key: without_floats(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [without_floats(entry) for entry in value]
    return None if isinstance(value, float) else value
