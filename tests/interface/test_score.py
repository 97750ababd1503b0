"""Scores of given texts: transformers' figures, the float64 reference, and what each token is scored by."""

import importlib
import json
import math
from pathlib import Path

import numpy as np
import pytest

import minigen
from tests.golden.make_score import STRIDES, TALES, TINY, TINY_SEED, TINY_STD
from tests.oracles.lookup import LookupModel
from tests.oracles.models import gpt2, tiny_model
from tests.oracles.reference import log_softmax, reference_logits
from tests.oracles.tiny import random_params, tiny_config, tiny_params, write_byte_vocab, write_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden"
FIGURES = json.loads((GOLDEN / "score.json").read_text())
CASES = [(text, stride) for text, strides in STRIDES.items() for stride in strides]
score_module = importlib.import_module("minigen.scoring")


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN / "score.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def tiny():
    return gpt2(TINY, random_params(TINY, TINY_SEED, TINY_STD))


# ---- against transformers and the formula ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("text, stride", CASES)
def test_it_is_the_figure_of_transformers(text, stride, golden, tiny, fairytale):
    model = tiny if text.startswith("tiny") else fairytale[0]
    score = minigen.score(model, golden[f"{text}/ids"].tolist(), stride)
    figures = FIGURES[f"{text}/{stride}"]
    ours = [math.nan if logprob is None else logprob for logprob in score.logprobs]
    np.testing.assert_allclose(ours, golden[f"{text}/{stride}/logprobs"], rtol=0, atol=1e-4)
    assert score.n_tokens == figures["n_tokens"]
    assert score.nll / score.n_tokens == pytest.approx(figures["nll_per_token"], abs=1e-4, rel=0)
    assert score.perplexity == pytest.approx(figures["perplexity"], rel=1e-4)
    assert score.stride == (stride or model.config.n_positions // 2)
    assert score.token_ids == golden[f"{text}/ids"].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("stride", [1, 6, 16, None])
def test_each_token_is_scored_by_the_first_window_that_reaches_it(stride, golden, tiny):
    """The windows begin at 0, stride, 2 * stride ...; in each, the float64 reference runs the window alone."""
    ids, n_positions = golden["tiny-long/ids"].tolist(), TINY["n_positions"]
    params = random_params(TINY, TINY_SEED, TINY_STD)
    step = 8 if stride is None else stride
    expected = [None] * len(ids)
    for t in range(1, len(ids)):
        begin = next(begin for begin in range(0, len(ids), step) if t < begin + n_positions)
        if begin < t:
            expected[t] = float(log_softmax(reference_logits(TINY, params, ids[begin:t])[-1])[ids[t]])
    score = minigen.score(tiny, ids, stride)
    assert [logprob is None for logprob in score.logprobs] == [logprob is None for logprob in expected]
    np.testing.assert_allclose([p or 0 for p in score.logprobs], [p or 0 for p in expected], rtol=0, atol=1e-4)
    scored = [p for p in expected if p is not None]
    assert score.n_tokens == len(scored)
    assert score.nll == pytest.approx(-sum(scored), abs=1e-3)
    assert score.perplexity == pytest.approx(math.exp(-sum(scored) / len(scored)), rel=1e-4)


class Counting(LookupModel):
    """A model in which the log-probability of token 0 is minus the number of tokens seen before it."""

    most_logits = 0

    def __init__(self, n_positions):
        super().__init__(lambda ids: np.log([math.exp(-len(ids)), 1 - math.exp(-len(ids))]), 2, n_positions)

    def forward(self, ids, cache, last_only=True):
        self.most_logits = max(self.most_logits, 1 if last_only else len(ids[0]))
        return super().forward(ids, cache, last_only=last_only)


@pytest.mark.parametrize("chunk", [3, 128])
@pytest.mark.parametrize("n_positions", [2, 3, 10])
def test_every_token_once_and_with_enough_before_it(n_positions, chunk, monkeypatch):
    monkeypatch.setattr(score_module, "CHUNK", chunk)
    model = Counting(n_positions)
    for length in (2, 3, 9, 10, 11, 20, 35):
        for stride in range(1, n_positions + 1):
            score = minigen.score(model, [0] * length, stride)
            # Without overlap the first token of each window has nothing before it.
            unscored = range(0, length, n_positions) if stride == n_positions else [0]
            assert [t for t in range(length) if score.logprobs[t] is None] == list(unscored)
            assert score.n_tokens == length - len(unscored)
            for t in set(range(length)) - set(unscored):
                before = round(-score.logprobs[t])
                assert min(t, n_positions - stride) <= before <= min(t, n_positions - 1)
                assert t >= n_positions or before == t  # the first window sees all there is
    assert model.most_logits <= chunk


def test_a_begin_of_text_token_has_the_first_token_scored(tiny, golden):
    ids = golden["tiny-short/ids"].tolist()
    alone, begun = minigen.score(tiny, ids), minigen.score(tiny, [TINY["bos_token_id"], *ids])
    assert alone.logprobs[0] is None and begun.logprobs[0] is None
    assert (alone.n_tokens, begun.n_tokens) == (len(ids) - 1, len(ids))
    assert begun.logprobs[1] < 0


def test_bits_per_byte_are_of_the_bytes_of_the_tokens_scored(fairytale):
    model, tokenizer = fairytale
    text = TALES["fairytale-short"]
    ids = tokenizer.encode(text)
    assert text.startswith("In the") and tokenizer.decode(ids[:1]) == "In" and "—" in text  # three bytes
    score = minigen.score(model, ids)
    n_bytes = len(text.encode()) - len("In")
    assert score.bits_per_byte(tokenizer) == pytest.approx(score.nll / math.log(2) / n_bytes, rel=1e-12)


def test_numpy_ids_and_a_perplexity_no_float_holds(tiny, golden):
    ids = golden["tiny-short/ids"]
    assert minigen.score(tiny, ids) == minigen.score(tiny, ids.tolist())
    assert minigen.Score(nll=1e6, n_tokens=2, stride=1, token_ids=[0, 0, 0], logprobs=[]).perplexity == math.inf


@pytest.mark.parametrize(
    "ids, stride, words",
    [
        ([], None, ["tokens: 0"]),
        ([5], None, ["tokens: 1", "no context"]),
        ([1, 2, 97], None, ["97", "0 to 96"]),
        ([1, -1, 2], None, ["-1", "0 to 96"]),
        ([1, 2.5], None, ["2.5"]),
        ([1, 2], 0, ["stride is 0", "1 to the model's context, 16"]),
        ([1, 2], -3, ["stride is -3"]),
        ([1, 2], 17, ["stride is 17", "16"]),
        ([1, 2], 2.0, ["stride is 2.0"]),
        ([1, 2], True, ["stride is True"]),
    ],
)
def test_what_cannot_be_scored(tiny, ids, stride, words):
    with pytest.raises(ValueError) as error:
        minigen.score(tiny, ids, stride)
    assert all(word in str(error.value) for word in words), error.value


def test_a_model_of_one_position_and_a_model_that_is_broken():
    with pytest.raises(ValueError, match="windows of up to 1"):
        minigen.score(tiny_model(n_positions=1).model, [1, 2, 3])
    config = tiny_config()
    params = tiny_params(config)
    params["ln_f.bias"][0] = np.nan
    with pytest.raises(ValueError, match=r"token 1 .* nan"):
        minigen.score(gpt2(config, params), [1, 2, 3])


# ---- the command line --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def byte_folder(tmp_path_factory):
    """A tiny checkpoint: 16 positions, one token a byte."""
    folder = tmp_path_factory.mktemp("score") / "bytes"
    config = tiny_config(vocab_size=257)
    write_checkpoint(folder, config, tiny_params(config, seed=3))
    return write_byte_vocab(folder)


@pytest.fixture
def score_cli(cli, byte_folder):
    return lambda *args, stdin=b"": cli("--model", byte_folder, *args, stdin=stdin)


def test_a_file_and_stdin(score_cli, byte_folder, tmp_path):
    text = "The fox — and the cat."
    (tmp_path / "text.txt").write_text(text + "\n", encoding="utf-8")
    model, tokenizer = minigen.load(byte_folder)
    score = minigen.score(model, tokenizer.encode(text), 5)
    assert score.n_tokens == len(text.encode()) - 1  # the final newline is dropped

    code, out, err = score_cli("--score", tmp_path / "text.txt", "--stride", 5)
    summary = f"perplexity {score.perplexity:.4f} · {score.nll / math.log(2) / score.n_tokens:.4f} bits a byte · "
    assert (code, out) == (0, summary + "23 of 24 tokens scored\n")
    header, closing = err.splitlines()
    assert "bytes" in header and "context 16" in header
    assert closing.startswith("stride 5 ")
    assert score_cli("--score", "-", "--stride", 5, "-q", stdin=(text + "\n").encode()) == (0, out, "")
    assert score_cli("--score", tmp_path / "text.txt", "-q")[1] != out

    code, listed, _ = score_cli("--score", tmp_path / "text.txt", "--stride", 5, "--logprobs", 0, "-q")
    *lines, last = listed.splitlines()
    assert last + "\n" == out
    assert lines[:2] == ["        -  'T'", f"{score.logprobs[1]:9.4f}  'h'"]
    assert len(lines) == 24

    (line,) = score_cli("--score", tmp_path / "text.txt", "--stride", 5, "--json", "-q")[1].splitlines()
    parsed = json.loads(line)
    assert parsed["logprobs"] is None and parsed["model"] == str(byte_folder)
    assert (parsed["perplexity"], parsed["nll"]) == (score.perplexity, score.nll)
    assert (parsed["n_tokens"], parsed["stride"]) == (23, 5)
    assert parsed["bits_per_byte"] == pytest.approx(score.nll / math.log(2) / 23)
    tokens = json.loads(score_cli("--score", tmp_path / "text.txt", "--stride", 5, "--json", "--logprobs", 0)[1])[
        "logprobs"
    ]
    assert [entry["logprob"] for entry in tokens] == score.logprobs
    assert [entry["token"] for entry in tokens] == score.token_ids
    assert tokens[1]["text"] == "h"


def test_json_has_no_infinity(score_cli, monkeypatch):
    """F16: a perplexity that a float cannot hold."""
    monkeypatch.setattr("minigen.scoring.TextScore.perplexity", math.inf)
    code, out, _ = score_cli("--score", "-", "--json", "-q", stdin=b"a text")
    assert code == 0
    assert json.loads(out, parse_constant=pytest.fail)["perplexity"] is None


def test_end_of_text_at_the_beginning_has_all_of_a_file_scored(score_cli):
    assert "2 of 3 tokens" in score_cli("--score", "-", stdin=b"<|endoftext|>ab")[1]


@pytest.mark.parametrize(
    "args, words",
    [
        (["--temperature", "0"], ["temperature is 0.0", "--score"]),
        (["--num-beams", "1"], ["--num-beams is 1", "--score"]),
        (["--no-cache"], ["--no-cache", "--score"]),
        (["--stop", "x"], ["--stop", "--score"]),
        (["--speculative"], ["--speculative", "--score"]),
        (["--draft-model", "m"], ["--draft-model", "--score"]),
        (["--prompt-cache", "c"], ["--prompt-cache", "--score"]),
        (["--no-echo"], ["--no-echo", "--score"]),
        (["--show-probs"], ["--show-probs", "--score"]),
        (["-f", "other"], ["-f", "other", "--score"]),
        (["--logprobs", "3"], ["logprobs is 3", "--score"]),
        (["--stride", "0"], ["stride is 0", "16"]),
        (["--stride", "17"], ["stride is 17", "16"]),
        (["--stride", "few"], ["few"]),
    ],
    ids=" ".join,
)
def test_options_that_scoring_does_not_use_are_refused(score_cli, args, words):
    code, out, err = score_cli("--score", "-", "-q", *args, stdin=b"a text")
    assert (code, out) == (2, "") and len(err.splitlines()) == 1
    assert all(word in err for word in words), err


def test_what_cannot_be_read_or_scored(score_cli, tmp_path):
    for args, stdin, words in (
        (["--score", tmp_path / "missing.txt"], b"", ["missing.txt", "No such file"]),
        (["--score", tmp_path], b"", ["directory"]),
        (["--score", "-"], b"", ["tokens: 0"]),
        (["--score", "-"], b"\n", ["tokens: 0"]),
        (["--score", "-"], b"a", ["tokens: 1"]),
        (["--score", "-", "a prompt"], b"text", ["a prompt", "--score"]),
        (["a prompt", "--stride", 4], b"", ["stride is 4", "--score"]),
    ):
        code, out, err = score_cli(*args, "-q", stdin=stdin)
        assert (code, out) == (2, "") and len(err.splitlines()) == 1
        assert all(word in err for word in words), err
