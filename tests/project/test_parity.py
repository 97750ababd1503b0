"""The golden files are what the installed transformers library gives: they are made anew here and compared.

Of the beam search settings only a part is run again; making all of them takes many minutes.
"""

import importlib
import json

import numpy as np
import pytest

from tests.golden import make_beam
from tests.golden.make import HERE as GOLDEN
from tests.oracles.tiny import random_params

pytestmark = pytest.mark.parity


PARTS = sorted(path.stem for path in GOLDEN.glob("make_*.py") if path.stem != "make_beam")


@pytest.mark.parametrize("part", PARTS)
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


def test_golden_beams_are_what_transformers_gives():
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    golden = json.loads((GOLDEN / "beam.json").read_text())
    with np.load(GOLDEN / "beam.npz") as arrays:
        ends = np.cumsum(arrays["lengths"])
        texts = [ids.tolist() for ids in np.split(arrays["ids"], ends[:-1])]
        scores = arrays["scores"].tolist()
    models = {
        name: make_beam.bundled_model(make_beam.WEIGHTS / name)
        if note["seed"] is None
        else make_beam.torch_model(note["config"], random_params(note["config"], note["seed"], note["std"]))
        for name, note in golden["models"].items()
    }
    start = compared = 0
    for number, case in enumerate(map(make_beam.load_case, golden["cases"])):
        stop = start + len(case["prompts"]) * case["options"]["num_return_sequences"]
        if number % 6 == 0:
            groups = [case["prompts"]] if case["batched"] else [[prompt] for prompt in case["prompts"]]
            with torch.inference_mode():
                found = [
                    make_beam.search(models[case["model"]], group, case["eos_ids"], case["options"]) for group in groups
                ]
            assert [text for some, _ in found for text in some] == texts[start:stop]
            np.testing.assert_allclose([score for _, some in found for score in some], scores[start:stop], atol=1e-3)
            compared += 1
        start = stop
    assert start == len(texts) and compared > 60
