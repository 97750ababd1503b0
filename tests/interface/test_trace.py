"""The trace: every number on the page is one that the run had, and tracing does not change the output.

The oracles: float64 formulas for attention and probabilities, SplitMix64 in Python's whole numbers for the races, a
dictionary of slots for the ring, and runs without a trace for texts, scores and counts of drafts.
"""

import base64
import functools
import json
import math
import re
import zlib
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np
import pytest

import minigen
from minigen import GPT2, DecodingConfig, GPT2Config, History, PrefixCache, SamplingConfig, Tokenizer, generate
from minigen.command import main as cli
from minigen.engine.sampler import next_token_probs
from minigen.tracing import recorder
from minigen.tracing.page import stream_with_trace
from minigen.tracing.recorder import TOP, Recorder, stages
from tests.oracles.reference import gelu_tanh, layer_norm, reference_logits
from tests.oracles.splitmix64 import uniforms
from tests.oracles.tiny import tiny_config, tiny_params, write_byte_vocab, write_checkpoint

VOCAB = 257
PROMPT = "abcabcab"


# ---- helpers -----------------------------------------------------------------------------------------------------


class Tiny(NamedTuple):
    config: dict
    params: dict
    model: GPT2


@functools.cache
def tiny(seed=0, **overrides):
    config = tiny_config(**{"vocab_size": VOCAB, "n_layer": 3, "n_positions": 48} | overrides)
    params = tiny_params(config, seed)
    for layer in range(config["n_layer"]):
        params[f"h.{layer}.attn.c_proj.weight"] *= np.float32(4)
    return Tiny(config, params, GPT2(GPT2Config.from_dict(config), dict(params)))


@pytest.fixture(scope="module", autouse=True)
def small_slack():
    """Rings of a window that wrap within these short texts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefixCache, "WINDOW_SLACK", 3)
        yield


@functools.cache
def draft_model():
    """A model that often agrees with tiny(): its weights, a little moved."""
    config, params, _ = tiny()
    moved = {name: value + np.float32(0.18) * tiny(1).params[name] for name, value in params.items()}
    return Tiny(config, moved, GPT2(GPT2Config.from_dict(config), dict(moved)))


@pytest.fixture(scope="module")
def tok(tmp_path_factory):
    return Tokenizer.from_folder(write_byte_vocab(tmp_path_factory.mktemp("bytes")), VOCAB)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "trace.html"


def data_of(file):
    """What a page carries, read as a browser does: from the opening tag to the first closing one."""
    html = file.read_text(encoding="utf-8")
    return json.loads(re.search('<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)[1])


STOPS = "zatA U_R9GY#D<-mjrw.'1|}\"VNg0ThSxH%=$P>;Jef7Q~By5kXu"
DRAFTS = {"drafts": True, "temperature": 2.0, "max_tokens": 39}
LOOKUP = {"prompt_lookup_num_tokens": 3, "temperature": 0.5, "max_tokens": 39}
# Every way of decoding; "drafts" means a draft model, "cache" a prompt cache.
MODES = {
    "sampled": {"temperature": 1.0, "top_p": 0.4, "top_k": 30},
    "greedy": {"temperature": 0},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "temperature": 1.5, "min_p": 0.01},
    "several": {"num_return_sequences": 2},
    "uneven": {"num_return_sequences": 3, "temperature": 2.0, "top_p": 1.0, "stop": list("aeioustnrhlTHEANDOR ,.19")},
    "no cache": {"use_cache": False, "max_tokens": 8},
    "window": {"window": 5, "max_tokens": 39, "temperature": 1.2, "ignore_eos": True},
    "shift": {"context_shift": True, "keep": 3, "max_tokens": 70, "ignore_eos": True},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beams with penalties": {"num_beams": 3, "repetition_penalty": 1.3, "length_penalty": 0.5},
    # Some of its texts are beaten by later ones.
    "beams that end": {"num_beams": 2, "early_stopping": "never", "length_penalty": 4.0, "stop": list(STOPS)},
    "draft model": DRAFTS,
    "greedy draft model": DRAFTS | {"temperature": 0},
    "draft model and shift": DRAFTS | {"context_shift": True, "max_tokens": 60, "ignore_eos": True},
    "draft model and window": DRAFTS | {"window": 6, "ignore_eos": True},
    "rejection": DRAFTS | {"speculation_rule": "rejection"},
    "n-grams": LOOKUP,
    "n-grams, rejection": LOOKUP | {"speculation_rule": "rejection"},
    "prompt cache": {"cache": True},
}
SPECULATIVE = [mode for mode in MODES if {"drafts", "prompt_lookup_num_tokens"} & {*MODES[mode]}]
BEAMS = ["beams", "beams with penalties", "beams that end"]


def options_of(mode, tok, tmp_path):
    options = {"seed": 5, "max_tokens": 20} | MODES[mode]
    if options.pop("drafts", None):
        options["draft_model"] = (draft_model().model, tok)
    if options.pop("cache", None):
        options["cache"] = tmp_path / "prompt.kv"
        generate(tiny().model, tok, PROMPT[:5], cache=options["cache"], max_tokens=1)
    return options


def prompts_of(mode):
    if mode == "beams that end":
        return [[92, 172, 148, 49, 168, 147]]
    return ["abcabcab", "xyz"] if mode in ("several", "uneven", "beams") else PROMPT


class Run(NamedTuple):
    data: dict
    done: list
    attention: np.ndarray


@pytest.fixture(scope="module")
def runs(tok, tmp_path_factory):
    """mode -> its `Run`, made once."""

    @functools.cache
    def run(mode):
        file = tmp_path_factory.mktemp("run") / "trace.html"
        done = minigen.trace(tiny().model, tok, prompts_of(mode), file, **options_of(mode, tok, file.parent))
        data = data_of(file)
        return Run(data, done, np.frombuffer(zlib.decompress(base64.b64decode(data["attention"])), np.uint8))

    return run


def softmax(x):
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def reference_attention(config, params, ids, window=None):
    """Attention weights float64 [L, H, T, T] by the formulas; the layers are those of tests/reference.py."""
    p = {name: np.asarray(value, float) for name, value in params.items()}
    position = np.arange(len(ids))
    hidden = position[None] > position[:, None]
    if window:
        hidden |= position[None] <= position[:, None] - window
    x, found = p["wte.weight"][ids] + p["wpe.weight"][: len(ids)], []
    for layer in range(config["n_layer"]):
        w = {name.removeprefix(f"h.{layer}."): value for name, value in p.items() if name.startswith(f"h.{layer}.")}
        h = layer_norm(x, w["ln_1.weight"], w["ln_1.bias"], 1e-5)
        q, k, v = np.split(h @ w["attn.c_attn.weight"] + w["attn.c_attn.bias"], 3, axis=-1)
        q, k, v = (np.stack(np.split(a, config["n_head"], axis=-1)) for a in (q, k, v))  # [T, E] -> [H, T, D]
        found.append(softmax(np.where(hidden, -np.inf, q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1]))))
        heads = np.concatenate(list(found[-1] @ v), axis=-1)
        x = x + heads @ w["attn.c_proj.weight"] + w["attn.c_proj.bias"]
        h = layer_norm(x, w["ln_2.weight"], w["ln_2.bias"], 1e-5)
        h = gelu_tanh(h @ w["mlp.c_fc.weight"] + w["mlp.c_fc.bias"])
        x = x + h @ w["mlp.c_proj.weight"] + w["mlp.c_proj.bias"]
    return np.stack(found)


def all_choices(data):
    """(the row's ids, choice) for the run's own choices and for those about prompts."""
    rows = {row["index"]: row for row in data["rows"]}
    found = [(rows[choice["row"]]["ids"], choice) for choice in data["choices"]]
    for row in data["rows"]:
        found += [(row["ids"], choice) for choice in data["prompts"][str(row["prompt"])]]
    return found


@functools.cache
def logits_of(of, window, ids):
    """The reference's logits [T, V] of ids; `of` is `tiny` or `draft_model`."""
    return reference_logits(of().config, of().params, list(ids), window=window)


def context_of(ids, choice, keep):
    """The ids that the model saw when it made a choice: a shift has taken out those after the kept ones."""
    before = ids[: choice["at"]]
    return before[:keep] + before[keep + choice["shift"] :]


# ---- the run is the same -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_traced_run_gives_what_an_untraced_one_gives(runs, tok, tmp_path, mode):
    plain = generate(tiny().model, tok, prompts_of(mode), **options_of(mode, tok, tmp_path))
    run = runs(mode)
    for field in ("text", "token_ids", "finish_reason", "prompt_index", "score", "sum_logprob"):
        assert [getattr(done, field) for done in run.done] == [getattr(done, field) for done in plain], field
    prompts = [prompts_of(mode)] if isinstance(prompts_of(mode), str) else prompts_of(mode)
    prompts = [tok.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    expected = [prompts[done.prompt_index] + done.token_ids for done in plain]
    assert [row["ids"] for row in run.data["rows"]] == expected
    assert [row["finish_reason"] for row in run.data["rows"]] == [done.finish_reason for done in plain]
    if mode == "uneven":
        assert len({len(done.token_ids) for done in plain}) > 3
    # Every generated token has its choice, and so has every token of a prompt except the first.
    for row in run.data["rows"]:
        choices = [choice for choice in run.data["choices"] if choice["row"] == row["index"]]
        choices = run.data["prompts"][str(row["prompt"])] + choices
        assert [choice["at"] for choice in choices] == list(range(1, len(row["ids"])))
        assert [choice["token"] for choice in choices] == row["ids"][1:]


def test_the_hook_changes_no_bit_of_the_logits():
    ids, calls = np.arange(20).reshape(2, 10), []
    plain = tiny().model.forward(ids)
    watched = tiny().model.forward(ids, attention_hook=lambda *arguments: calls.append(arguments))
    assert plain.tobytes() == watched.tobytes()
    assert [arguments[0] for arguments in calls] == [0, 1, 2]


@pytest.mark.parametrize("mode", ["sampled", "beams", "draft model", "shift", "prompt cache"])
def test_without_a_trace_nothing_is_recorded_and_the_hook_is_off(tok, tmp_path, monkeypatch, mode):
    options, forward, hooks = options_of(mode, tok, tmp_path), GPT2.forward, []

    def watched(self, *args, attention_hook=None, **kwargs):
        hooks.append(attention_hook)
        return forward(self, *args, attention_hook=attention_hook, **kwargs)

    monkeypatch.setattr(GPT2, "forward", watched)
    for name in [name for name in vars(Recorder) if callable(getattr(Recorder, name))]:
        monkeypatch.setattr(Recorder, name, None)  # a call would raise TypeError
    generate(tiny().model, tok, PROMPT, **options)
    assert hooks and set(hooks) == {None}


# ---- attention ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_attention_is_what_the_formulas_give(runs, mode):
    run = runs(mode)
    window, keep = run.data["window"], run.data["keep"]
    of_text = functools.cache(lambda ids: reference_attention(tiny().config, tiny().params, list(ids), window))
    L, H = run.data["layers"], run.data["heads"]
    compared = []
    for ids, choice in all_choices(run.data):
        context = context_of(ids, choice, keep)
        offset, first, n = choice["attention"]
        assert (first, first + n) == (max(0, len(context) - window) if window else 0, len(context))
        found = run.attention[offset : offset + L * H * n].reshape(L, H, n) / 255
        # Of causal attention a longer text's first rows are the shorter one's.
        whole = tuple(context if choice["shift"] else ids[: min(len(ids), tiny().config["n_positions"])])
        expected = of_text(whole)[:, :, len(context) - 1, first : len(context)]
        np.testing.assert_allclose(found, expected, atol=0.5 / 255 + 1e-3)
        compared.append(found)
    # The heads must differ, or exchanged ones would not show.
    assert np.concatenate([weights[:, 0].ravel() - weights[:, 1].ravel() for weights in compared]).std() > 0.05


# ---- probabilities and draws -------------------------------------------------------------------------------------


def by_hand(logits, options):
    """The columns of temperature, top-k, top-p in float64, and the model alone before them."""
    t = options["temperature"]
    columns = [softmax(logits), softmax(logits / t) if t else np.eye(len(logits))[logits.argmax()]]
    order = np.argsort(-columns[1], kind="stable")
    p = columns[1].copy()
    p[order[options.get("top_k") or len(p) :]] = 0
    columns.append(p / p.sum())
    p, before = columns[2].copy(), 0.0
    for token in order:
        p[token], before = (p[token] if before < options["top_p"] else 0), before + p[token]
    columns.append(p / p.sum())
    return columns


def test_candidates_have_the_probabilities_of_each_filter(runs):
    data = runs("sampled").data
    assert data["stages"] == ["model", "top_k 30", "top_p 0.4"]
    cuts = 0
    for choice in data["choices"]:
        logits = reference_logits(tiny().config, tiny().params, data["rows"][0]["ids"][: choice["at"]])[-1]
        model, _, top_k, top_p = by_hand(logits, MODES["sampled"])
        for token, values in choice["candidates"]:
            np.testing.assert_allclose(values, [model[token], top_k[token], top_p[token]], rtol=2e-3, atol=1e-6)
            cuts += values[1] > 0 and values[2] == 0
        assert choice["left"] == [VOCAB, 30, np.count_nonzero(top_p)]
        listed = {token for token, _ in choice["candidates"]}
        assert {*np.argsort(-model)[:9]} <= listed and {choice["token"]} <= listed
    assert cuts > 20


def test_a_prompt_has_the_models_own_probabilities(runs):
    data = runs("window").data
    logits = reference_logits(tiny().config, tiny().params, data["rows"][0]["ids"], window=5)
    for choice in data["prompts"]["0"]:
        p = softmax(logits[choice["at"] - 1])
        assert dict(choice["candidates"])[choice["token"]] == pytest.approx([p[choice["token"]]], rel=2e-3)


CONFIGS = [
    {},
    {"temperature": 0, "top_k": 3},
    {"temperature": 0, "repetition_penalty": 1.5},
    {"temperature": 1, "top_p": 1},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.7, "min_p": 0.02, "typical_p": 0.8},
    {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3, "no_repeat_ngram_size": 2},
    {"logit_bias": {4: -math.inf, 5: 3.0}, "min_tokens": 9, "eos_ids": (7,)},
    {"ignore_eos": True, "eos_ids": (7, 8), "logits_processors": (lambda history, logits: logits * 2,)},
]


@pytest.mark.parametrize("options", CONFIGS)
def test_the_last_stage_is_the_samplers_own_distribution_to_the_bit(options):
    sampling = SamplingConfig(**options)
    found = stages(sampling)
    for seed in range(5):
        logits = np.random.default_rng(seed).normal(0, 3, 40).astype(np.float32)
        history = History([1, 4, 6, 4, 1, 4], 2)
        last, own = (next_token_probs(logits, history, config) for config in (found[-1][1], sampling))
        assert last.tobytes() == own.tobytes()
    alone = next_token_probs(logits, history, found[0][1])
    np.testing.assert_allclose(alone, softmax(logits.astype(float)), rtol=1e-5)
    assert len({name for name, _ in found}) == len(found)


def finish(p, *place):
    """The tokens in the order of E / p, and every token's E."""
    noise = np.array([-math.log(u) for u in uniforms(len(p), *place)])
    return sorted(np.flatnonzero(p).tolist(), key=lambda token: noise[token] / p[token]), noise


@pytest.mark.slow
@pytest.mark.parametrize("mode", [mode for mode in MODES if not {"num_beams", "min_p"} & {*MODES[mode]}])
def test_the_race_and_the_drafts_are_those_of_the_formulas(runs, mode):
    data, options = runs(mode).data, {"temperature": 0.7, "top_p": 0.9} | MODES[mode]
    races, outcomes = 0, set()

    def distribution(of, choice):
        ids = data["rows"][choice["row"]]["ids"]
        context = context_of(ids, choice, data["keep"])
        # The logits of a text's beginning are those of the whole text there, as attention is causal.
        text = context if choice["shift"] else ids[: tiny().config["n_positions"]]
        logits = logits_of(of, data["window"], tuple(text))[len(context) - 1].copy()
        logits[-1] -= np.inf if options.get("ignore_eos") else 0
        return by_hand(logits, options)[-1]

    for choice in data["choices"]:
        place = 5, choice["row"] % options.get("num_return_sequences", 1), choice["at"]
        p, stream, draft = distribution(tiny, choice), 0, choice.get("draft")
        candidates, token, last = dict(choice["candidates"]), choice["token"], len(data["stages"])
        if draft:
            drafted, rule = draft["token"], options.get("speculation_rule", "coupled")
            assert draft["rule"] == rule and drafted in candidates
            outcomes.add(draft["accepted"])
            assert draft["p"] == pytest.approx(p[drafted], rel=2e-3)
            if "drafts" in options:
                q = distribution(draft_model, choice)
                assert drafted == finish(q, *place, 0)[0][0] and draft["q"] == pytest.approx(q[drafted], rel=2e-3)
                of_q = [values[last] for values in candidates.values()]
                assert of_q == pytest.approx(q[list(candidates)], rel=2e-3, abs=1e-6)
            else:
                q = np.eye(VOCAB)[drafted]
                assert draft["q"] is None
            if rule == "coupled":
                assert draft["u"] is None and draft["accepted"] == (token == drafted)
            else:
                assert draft["u"] == uniforms(1, *place, 1)[0]
                assert draft["accepted"] == (draft["u"] < p[drafted] / q[drafted])
                if draft["accepted"]:
                    assert token == drafted and choice["race"] is None
                    continue
                p, stream = np.maximum(p - q, 0) / np.maximum(p - q, 0).sum(), 2
                shown = [values[-1] for values in candidates.values()]
                assert shown == pytest.approx(p[list(candidates)], rel=2e-2, abs=1e-4)
        if np.count_nonzero(p) == 1:
            assert choice["race"] is None and p[token] == 1
            continue
        order, noise = finish(p, *place, stream)
        found = dict(choice["race"])
        # The runner-up, too, is the second of all tokens.
        assert token == order[0] and list(found)[:2] == order[:2]
        excluded_draft = [drafted] if draft and not p[drafted] else []
        assert list(found) == [id for id in order if id in candidates] + excluded_draft
        assert list(found.values()) == pytest.approx(noise[list(found)], rel=1e-4)
        races += 1
    assert (races > 5) == (options["temperature"] > 0)
    assert outcomes == ({True, False} if mode in SPECULATIVE else set())


def test_of_equal_candidates_those_with_the_lowest_ids_are_listed():
    config = tiny_config(vocab_size=VOCAB, n_layer=1)
    params = {name: np.zeros_like(value) for name, value in tiny_params(config).items()}
    recording = Recorder(GPT2(GPT2Config.from_dict(config), params))
    recording.config = DecodingConfig()
    (choice,) = recording.prompt_choices([5, 200])
    assert [token for token, _ in choice["candidates"]] == [*range(TOP), 200]


# ---- the ring ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_the_ring_is_that_of_a_model_of_one(runs, mode):
    data = runs(mode).data
    for row in data["rows"]:
        rolled_back = 0
        model, length, shown, shifts = {}, 0, [], set()
        for step in data["steps"]:
            ring = step["rows"].get(str(row["index"]))
            if ring is None:
                continue
            C = step["capacity"]
            if step["new"]:
                model, length, shown = {}, 0, [-1] * C
            if step["kind"] in ("pass", "restored"):
                model |= {position % C: position for position in range(length, ring["length"])}
            else:
                model = {slot: position for slot, position in model.items() if position < ring["length"]}
                rolled_back += length - ring["length"]
                assert ring["length"] < length
            if step["kind"] == "pass":
                assert ring["written"] == [length, ring["length"]] and ring["length"] > length
                window = data["window"] or ring["length"]
                assert ring["sees"] == max(0, ring["length"] - window)
                if mode not in SPECULATIVE + BEAMS:  # whose rows do not hold yet what is fed
                    assert ring["length"] == ring["n"] - ring["shift"]
                shifts.add(ring["shift"])
            for slot, position, count in ring["changes"]:
                for i in range(count):
                    assert shown[slot + i] != (position + i if position >= 0 else -1)
                    shown[slot + i] = position + i if position >= 0 else -1
            length = ring["length"]
            assert {slot: position for slot, position in enumerate(shown) if position >= 0} == model
        assert shown and (shifts != {0}) == (mode in ("shift", "draft model and shift"))
    capacity = {step["capacity"] for step in data["steps"]}
    if mode == "window":
        assert capacity == {5 + 3} and length > 40  # the ring goes around five times
    if mode == "prompt cache":  # none of the five tokens in the file is run again
        kinds = [(step["kind"], step["rows"]["0"].get("written")) for step in data["steps"][:2]]
        assert kinds == [("restored", None), ("pass", [5, 8])]
    if mode in SPECULATIVE:
        dropped = sum(len(found["drafts"]) + 1 - len(found["choices"]) for found in data["rounds"][:-1])
        assert rolled_back >= dropped > 0


# ---- beams -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", BEAMS)
def test_the_tree_leads_to_the_scores_of_the_search(runs, mode):
    run = runs(mode)
    for row, done in zip(run.data["rows"], run.done, strict=True):
        steps = [step for step in run.data["beams"] if step["prompt"] == row["prompt"]]
        beam, sums = 0, []
        for step, token in zip(steps, done.token_ids, strict=False):
            found = [entry for entry in step["candidates"] if (entry["parent"], entry["token"]) == (beam, token)]
            assert len(found) == 1
            sums.append(found[0]["sum"])
            beam = found[0].get("row")
        assert len(sums) == len(done.token_ids)
        assert (sums[-1], found[0]["score"], row["score"]) == (done.sum_logprob, done.score, done.score)
        assert beam is None and "out" not in found[0]
        if mode == "beams":
            logits = reference_logits(tiny().config, tiny().params, row["ids"])[row["n_prompt"] - 1 : -1]
            each = [math.log(softmax(place)[token]) for place, token in zip(logits, done.token_ids, strict=True)]
            np.testing.assert_allclose(sums, np.cumsum(each), rtol=1e-4)


@pytest.mark.parametrize("mode", ["beams", "beams with penalties"])
def test_a_beams_candidates_are_those_of_its_own_text(runs, mode):
    data = runs(mode).data
    assert data["stages"] == ["model", "log p", "repetition_penalty 1.3"][: 2 + (mode != "beams")]
    for choice in data["choices"]:
        ids = data["rows"][choice["row"]]["ids"][: choice["at"]]
        p = softmax(reference_logits(tiny().config, tiny().params, ids)[-1])
        for token, values in choice["candidates"]:
            log_p = math.log(p[token])
            # The penalty multiplies the logarithm, which is negative.
            expected = [p[token], log_p, log_p * (1.3 if token in ids else 1)][: len(values)]
            assert values == pytest.approx(expected, rel=3e-3, abs=1e-4)


@pytest.mark.parametrize("mode", BEAMS)
def test_every_beam_has_one_fate(runs, mode):
    data = runs(mode).data
    finished, beaten = 0, []
    for prompt in {step["prompt"] for step in data["beams"]}:
        alive, sums, best = 1, [0.0], []
        for number, step in enumerate([step for step in data["beams"] if step["prompt"] == prompt]):
            entries = step["candidates"]
            assert [entry["sum"] for entry in entries] == sorted((entry["sum"] for entry in entries), reverse=True)
            assert all(entry["parent"] < alive and entry["sum"] <= sums[entry["parent"]] for entry in entries)
            kept = {entry["row"]: entry["sum"] for entry in entries if "row" in entry}
            finished += sum("score" in entry for entry in entries)
            # Of all that have finished the num_beams best count; a text that was among them may be beaten later.
            before = best
            best = sorted(before + [e for e in entries if "score" in e], key=lambda entry: -entry["score"])
            best = best[: MODES[mode]["num_beams"]]
            beaten += [(entry, number) for entry in before if entry not in best]
            alive, sums = len(kept), [kept[row] for row in sorted(kept)]
            assert sorted(kept) == list(range(alive)) and alive <= MODES[mode]["num_beams"]
    assert finished >= len(data["rows"])
    entries = [entry for step in data["beams"] for entry in step["candidates"]]
    assert [entry["out"] for entry, _ in beaten] == [number for _, number in beaten]
    assert sum("out" in entry for entry in entries) == len(beaten)
    assert beaten or mode != "beams that end"


def test_a_large_bias_is_a_finite_number_on_the_page(tok, file):
    minigen.trace(tiny().model, tok, PROMPT, file, num_beams=2, logit_bias={65: 800.0, 66: -math.inf}, max_tokens=3)
    data = data_of(file)  # JSON has no infinity, and render_page allows none
    assert data["stages"][-1] == "logit_bias"
    for choice in data["choices"]:
        found = dict(choice["candidates"])
        model, log_p, biased = found[65]
        assert log_p == pytest.approx(math.log(model), abs=1e-3) and biased == pytest.approx(log_p + 800, abs=0.01)
        assert all(token != 66 or values[-1] is None for token, values in found.items())
        assert choice["left"] == [VOCAB, VOCAB, VOCAB - 1]


# ---- speculation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", SPECULATIVE)
def test_rounds_have_the_drafts_and_the_counts_of_the_run(runs, mode):
    run = runs(mode)
    data, stats = run.data, run.done[0].speculation
    assert sum(len(found["drafts"]) for found in data["rounds"]) == stats.drafted
    assert len(data["rounds"]) == stats.target_passes
    drafts = [choice["draft"] for choice in data["choices"] if "draft" in choice]
    assert sum(draft["accepted"] for draft in drafts) == stats.accepted
    assert 0 < stats.accepted < stats.drafted
    assert [index for found in data["rounds"] for index in found["choices"]] == list(range(len(data["choices"])))
    for found in data["rounds"]:
        choices = [data["choices"][index] for index in found["choices"]]
        assert all(choice["step"] == found["step"] for choice in choices)
        for place, choice in enumerate(choices):
            if place < len(found["drafts"]):
                assert choice["draft"]["token"] == found["drafts"][place]
            assert choice.get("draft", {}).get("accepted", False) or place == len(choices) - 1
            assert choice["at"] == found["at"] + place


# ---- the page ----------------------------------------------------------------------------------------------------


NASTY = "</script><!--<script>alert(1)</script> \u2028\u2029\0 \"'\\ {{data}} \u202e \ud83d\ude00 \U0001f600 \udc00 é"


def test_no_text_breaks_the_page(tok, file):
    # In the prompt it is spelled by single bytes; in the options it stands whole.
    options = {"max_tokens": 4, "seed": 1, "stop": [NASTY]}
    minigen.trace(tiny(n_positions=128).model, tok, NASTY, file, **options)
    html = file.read_text(encoding="utf-8")
    assert html.count("<script") == html.count("</script>") == 2
    data = data_of(file)
    row = data["rows"][0]
    shown = [data["vocabulary"][str(id)] for id in row["ids"][: row["n_prompt"]]]
    joined = b"".join(part.encode() if isinstance(part, str) else bytes(part) for part in shown)
    assert joined.decode() == NASTY.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert [0xC3] in shown and "\u2028" not in html


def test_the_page_says_what_it_is_a_run_of(folder, tok, file):
    arguments = ["-m", folder, PROMPT, "-s", "5", "-n", "9", "-q", "--stop", "a b", "--ignore-eos", "--no-cache"]
    assert cli.main([*arguments, "--logit-bias", "5-inf", "--trace", str(file)]) == 0
    size = "3 layers of 2 heads, vocabulary 257"
    head, *options = [f"model: {folder}, {size}", f"minigen {minigen.__version__}"], "--seed 5", "--max-tokens 9"
    options += ["--stop 'a b'", "--ignore-eos", "--no-cache", "--logit-bias 5-inf"]
    options += ["--temperature 0.7 (default)", "--top-p 0.9 (default)"]
    assert sorted(data_of(file)["about"]) == sorted([*head, *options])
    # From Python the model has no name.
    options = {"max_tokens": 2, "seed": 1, "logits_processors": [lambda history, logits: logits], "use_cache": True}
    minigen.trace(tiny().model, tok, PROMPT, file, draft_model=(draft_model().model, tok), **options)
    options = ["--max-tokens 2", "--num-draft-tokens 2 (default)", "--seed 1", "--temperature 0.7 (default)"]
    options += ["--top-p 0.9 (default)", "logits_processors"]
    found = data_of(file)["about"]
    assert found[:3] == [f"model: {size}", f"drafts: {size}", head[1]] and sorted(found[3:]) == options
    options = {"names": ("one", "two"), "draft_model": (draft_model().model, tok), "seed": 1}
    list(stream_with_trace(tiny().model, tok, PROMPT, file, **options))
    assert data_of(file)["about"][:2] == [f"model: one, {size}", f"drafts: two, {size}"]
    minigen.trace(tiny().model, tok, PROMPT, file, prompt_lookup_num_tokens=2, seed=1)
    assert "drafts: n-gram lookup in the text" in data_of(file)["about"]
    options = {"num_beams": 2, "early_stopping": True, "length_penalty": 0.5, "max_tokens": 2}
    minigen.trace(tiny().model, tok, PROMPT, file, **options)
    data = data_of(file)
    typed = ["--early-stopping true", "--length-penalty 0.5", "--max-tokens 2", "--num-beams 2"]
    assert sorted(data["about"][2:]) == typed and data["length_penalty"] == 0.5


def test_the_page_shows_the_number_that_a_numpy_scalar_holds(tok, file):
    """F20: a float32 prints fewer digits than it has."""
    minigen.trace(tiny().model, tok, "ab", file, max_tokens=1, min_p=np.float32(0.9))
    assert "--min-p 0.8999999761581421" in data_of(file)["about"]


@pytest.mark.slow
def test_a_hundred_tokens_of_the_bundled_model_are_less_than_300_kilobytes(file):
    minigen.trace(*minigen.load(), "Once upon a time", file, max_tokens=100, seed=1, ignore_eos=True)
    assert data_of(file)["rows"][0]["n_generated"] == 100
    assert file.stat().st_size < 300_000


def test_a_long_run_is_recorded_up_to_a_bound_and_says_so(tok, file, monkeypatch):
    monkeypatch.setattr(recorder, "MAX_TOKENS", 7)
    done = minigen.trace(tiny().model, tok, PROMPT, file, max_tokens=20, seed=5)
    data = data_of(file)
    assert done[0].token_ids == generate(tiny().model, tok, PROMPT, max_tokens=20, seed=5)[0].token_ids
    assert (data["n_choices"], data["max_choices"], len(data["choices"])) == (20, 7, 7)
    assert (len(data["rows"][0]["ids"]), data["rows"][0]["n_generated"]) == (8 + 7, 20)
    assert len(data["steps"]) == 8  # the pass that the eighth choice would have followed from
    # Of beams each counts: one at the first step, three at every other.
    minigen.trace(tiny().model, tok, PROMPT, file, max_tokens=20, num_beams=3, ignore_eos=True)
    data = data_of(file)
    assert (data["n_choices"], len(data["beams"]), len(data["choices"])) == (1 + 3 * 19, 3, 3)
    monkeypatch.setattr(recorder, "MAX_ATTENTION_WEIGHTS", 200)
    minigen.trace(tiny().model, tok, PROMPT, file, max_tokens=20, seed=5)
    data = data_of(file)
    kept = [choice["attention"][2] for _, choice in all_choices(data) if choice["attention"]]
    assert 0 < 6 * sum(kept) <= 200 and data["choices"][6]["attention"] is None


def test_a_run_that_is_left_early_is_shown_so_far(tok, file):
    steps = stream_with_trace(tiny().model, tok, PROMPT, file, max_tokens=20, seed=5)
    for _ in range(3):
        next(steps)
    steps.close()
    row = data_of(file)["rows"][0]
    assert (row["finish_reason"], row["n_generated"]) == (None, 3)


def test_an_error_in_the_run_is_told_and_writes_nothing(tok, file):
    def refuse(history, logits):
        return logits if len(history.ids) < 11 else np.full_like(logits, -np.inf)

    with pytest.raises(ValueError, match="generated token 4 cannot be chosen: every token is ruled out"):
        minigen.trace(tiny().model, tok, PROMPT, file, logits_processors=[refuse])
    assert not file.exists()
    assert minigen.trace(tiny().model, tok, [], file) == [] and not file.exists()


# ---- the file ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, fault",
    [("", "not an ordinary file"), ("no/such/trace.html", "No such file"), ("a\0b", "null"), ("x" * 300, "too long")],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(tok, tmp_path, monkeypatch, name, fault):
    monkeypatch.setattr(GPT2, "forward", None)
    with pytest.raises(OSError, match=f"cannot write the trace .*{fault}.*; name another file"):
        minigen.trace(tiny().model, tok, PROMPT, f"{tmp_path}/{name}")
    assert list(tmp_path.iterdir()) == []


def test_options_are_checked_before_the_file_is_touched(tok, file):
    file.write_text("old")
    with pytest.raises(ValueError, match="top_k is -1"):
        minigen.trace(tiny().model, tok, PROMPT, file, top_k=-1)
    assert file.read_text() == "old"


def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(tok, file, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    file.write_text("old")
    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(OSError, match=r"cannot write the trace .*: No space left on device"):
        minigen.trace(tiny().model, tok, PROMPT, file, max_tokens=2)
    assert file.read_text() == "old" and list(file.parent.iterdir()) == [file]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("model"), tiny().config, tiny().params)
    return str(write_byte_vocab(folder))


def test_without_a_file_the_page_is_an_object_that_a_notebook_displays(tok, file):
    options = {"max_tokens": 4, "seed": 1, "stop": [NASTY]}
    shown = minigen.trace(tiny().model, tok, PROMPT, **options)
    plain = generate(tiny().model, tok, PROMPT, **options)
    assert [done.text for done in shown.completions] == [done.text for done in shown] == [done.text for done in plain]
    frame = ElementTree.fromstring(shown._repr_html_())
    assert (frame.tag, frame.get("sandbox"), len(frame)) == ("iframe", "allow-scripts", 0)
    shown.save(file)
    assert frame.get("srcdoc").split() == file.read_text(encoding="utf-8").split()
    with pytest.raises(OSError, match=r"cannot write the trace .*: it is not an ordinary file"):
        shown.save(file.parent)
    nothing = minigen.trace(tiny().model, tok, [])
    assert nothing == [] and nothing._repr_html_() is None
    with pytest.raises(ValueError, match="there is no page: the run had no prompts"):
        nothing.save(file)


def test_the_command_line_prints_the_same_text_and_says_what_it_wrote(folder, file, capsys):
    arguments = ["-m", folder, PROMPT, "--seed", "5", "-n", "9"]
    assert cli.main([*arguments, "-q"]) == 0
    plain = capsys.readouterr()
    assert cli.main([*arguments, "--trace", str(file)]) == 0
    traced = capsys.readouterr()
    assert traced.out == plain.out and data_of(file)["rows"][0]["n_generated"] == 9
    kilobytes = round(len(file.read_bytes()) / 1000)
    assert f"wrote the trace {file} ({kilobytes} kB): open {file.as_uri()} in a browser" in traced.err.splitlines()
    assert cli.main([*arguments, "-q", "--trace", str(file)]) == 0
    assert capsys.readouterr().err == ""
    assert cli.main([*arguments, "-q", "--trace", str(file.parent)]) == 2
    fault = f"cannot write the trace {file.parent}: it is not an ordinary file; name another file"
    assert capsys.readouterr() == ("", f"minigen: {fault}\n")
