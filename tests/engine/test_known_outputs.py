"""Greedy continuations of OpenAI's own checkpoints that other projects have published; run where these are on disk."""

import json
from pathlib import Path

import pytest

import minigen
from minigen.files.hub import resolve_checkpoint

pytestmark = pytest.mark.hub
CASES = json.loads((Path(__file__).parents[1] / "data" / "known_outputs.json").read_text())["cases"]


@pytest.fixture(scope="module")
def loaded():
    """name -> (model, tokenizer), loaded once; skips where the model is not in the local cache (tests are offline)."""
    models = {}

    def load(name):
        try:
            resolve_checkpoint(name)
        except OSError as error:
            pytest.skip(str(error))
        if name not in models:
            models[name] = minigen.load(name)
        return models[name]

    return load


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['model']} {case.get('prompt', '')[:20]}".strip())
def test_published_greedy_outputs(loaded, case):
    model, tokenizer = loaded(case["model"])
    if "batch" in case:
        for prompt, text in zip(case["batch"], case["texts"], strict=True):
            n = len(tokenizer.encode(text)) - len(tokenizer.encode(prompt))
            (done,) = minigen.generate(model, tokenizer, prompt, temperature=0, max_tokens=n)
            assert prompt + done.text == text
        n = max(len(tokenizer.encode(text)) for text in case["texts"])
        batch = minigen.generate(model, tokenizer, case["batch"], temperature=0, max_tokens=n)
        for prompt, done, text in zip(case["batch"], batch, case["texts"], strict=True):
            assert (prompt + done.text).startswith(text)
        return
    prompt = [case["prompt_ids"]] if "prompt_ids" in case else case["prompt"]
    (done,) = minigen.generate(model, tokenizer, prompt, temperature=0, max_tokens=case["new_tokens"])
    assert done.token_ids == case["ids"] if "ids" in case else done.text == case["text"]
