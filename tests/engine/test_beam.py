"""Beam search against transformers' golden files, exhaustive enumeration and the float64 reference.

Letters in comments: V vocabulary, n beams, L the most tokens that may be generated.
"""

import copy
import functools
import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from minigen.api import completions, generate, stream
from minigen.engine.hooks import Hooks
from tests.golden.make_beam import load_case
from tests.golden.make_logits import golden_params
from tests.oracles.lookup import Letters, LookupModel, as_logits
from tests.oracles.models import gpt2, tiny_model
from tests.oracles.reference import log_softmax, reference_logits, reference_logprobs

GOLDEN = Path(__file__).parents[1] / "golden"
PENALTIES = (-1.0, 0.0, 0.5, 1.0, 2.0)
RULES = (False, True, "never")
LETTERS = Letters()


# ---- models and oracles ------------------------------------------------------------------------------------------


def table_model(table, V, eos_ids=(), n_prompt=1, n_positions=64):
    """A model whose next-token probabilities are table(generated ids so far), whatever the prompt."""
    return LookupModel(as_logits(lambda ids: table(ids[n_prompt:])), V, n_positions, list(eos_ids) or None)


@functools.cache
def random_table(vocab_size, seed):
    """ids -> probabilities that depend on all ids so far, remembered."""

    @functools.cache
    def table(ids):
        return np.random.default_rng([seed, *ids]).dirichlet(np.full(vocab_size, 0.7)) * 0.999 + 0.001 / vocab_size

    return table


def logs(table):
    """ids -> natural logarithms of the next token's probabilities, remembered."""

    @functools.cache
    def logprobs(ids):
        with np.errstate(divide="ignore"):
            return np.log(table(ids))

    return logprobs


def reference_table(config, params, prompt, window=None):
    """ids -> log-probabilities of the token after prompt + ids, by the float64 reference, remembered."""

    @functools.cache
    def logprobs(ids):
        return log_softmax(reference_logits(config, params, [*prompt, *ids], window)[-1])

    return logprobs


def reference_sum(t, prompt, ids, window=None):
    """The sum of the log-probabilities of ids after prompt."""
    logprobs = reference_logprobs(t.config, t.params, prompt, ids, window)
    return logprobs[range(len(ids)), ids].sum()


# ---- exhaustive enumeration --------------------------------------------------------------------------------------


def enumerate_all(logprobs, ends, budget, penalty, rule, n):
    """The n best of all texts that there are, and after how many tokens the search may stop.

    logprobs(ids) -> [V]; ends(ids) tells whether a text is complete. No text is ever dropped: the stopping rule alone
    decides up to which length texts count. Returns [(score, sum, ids)], best first, and that length.
    """
    live, done = {(): 0.0}, []
    for length in range(1, budget + 1):
        longer = {}
        for ids, total in live.items():
            for token, logprob in enumerate(logprobs(ids)):
                if logprob > -math.inf:
                    longer[(*ids, token)] = total + logprob
        complete = {ids for ids in longer if length == budget or ends(ids)}
        done += [(longer[ids] / length**penalty, longer[ids], ids) for ids in complete]
        done = sorted(done, reverse=True)[:n]
        live = {ids: total for ids, total in longer.items() if ids not in complete}
        if not live:
            break
        if len(done) == n:
            # What the best live text would score if it ended now, or, in the best case, at full length.
            end = budget if rule == "never" and penalty > 0 else length
            if rule is True or max(live.values()) / end**penalty <= done[-1][0]:
                break
    return done, length


def enough_beams(V, n_eos, budget):
    """So many beams that nothing is lost: the candidates of the last step but one. At the last step all texts end at
    the same length, and the n best sums are the n best scores."""
    return V * (V - n_eos) ** (budget - 2)


def ends_with(eos_ids):
    return lambda ids: ids[-1] in eos_ids


def check_ranking(found, expected, tolerance):
    """Completions are the expected [(score, sum, ids)], in that order; those that exceed what there is are empty."""
    found, rest = found[: len(expected)], found[len(expected) :]
    assert [tuple(completion.token_ids) for completion in found] == [ids for _, _, ids in expected]
    for completion in rest:
        assert (completion.text, completion.token_ids, completion.score) == ("", [], None)
        assert completion.finish_reason == "length"
    for completion, (score, total, _) in zip(found, expected, strict=True):
        assert completion.sum_logprob == pytest.approx(total, abs=tolerance)
        assert completion.score == pytest.approx(score, abs=tolerance * max(1, score / total))


# V, end-of-text ids, L
SPACES = [
    (3, (2,), 5),
    (4, (0,), 4),
    (5, (3, 1), 4),
    (6, (0, 2, 5, 3), 4),  # the rules make a difference here and in the next two: texts can fill the list early
    (3, (0, 2), 7),
    (6, (1, 2, 3, 4, 5), 6),
    (4, (), 3),
]


@pytest.mark.slow
@pytest.mark.parametrize("V, eos_ids, budget", SPACES)
def test_with_enough_beams_the_list_is_the_true_ranking(V, eos_ids, budget):
    n = enough_beams(V, len(eos_ids), budget)
    for seed, penalty, rule in product(range(2), PENALTIES, RULES):
        table = random_table(V, seed)
        expected, steps = enumerate_all(logs(table), ends_with(eos_ids), budget, penalty, rule, n)
        model = table_model(table, V, eos_ids)
        found = generate(
            model,
            LETTERS,
            [[0]],
            num_beams=n,
            num_return_sequences=n,
            length_penalty=penalty,
            early_stopping=rule,
            max_tokens=budget,
        )
        check_ranking(found, expected, 1e-5)
        assert len(model.passes) == steps, "the search stops where the rule says"


def test_the_enumeration_tells_the_rules_apart():
    # Otherwise the test above would not test them.
    different = {pair: 0 for pair in [(False, True), (True, "never"), (False, "never")]}
    for V, eos_ids, budget in SPACES[3:6]:
        for seed, penalty in product(range(5), PENALTIES):
            n = enough_beams(V, len(eos_ids), budget)
            results = {
                rule: enumerate_all(logs(random_table(V, seed)), ends_with(eos_ids), budget, penalty, rule, n)[0]
                for rule in RULES
            }
            for one, other in different:
                different[one, other] += results[one] != results[other]
    assert min(different.values()) >= 3, different


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("V, eos_ids, budget", [(3, (2,), 5), (5, (1, 3), 4), (3, (0, 2), 7), (4, (), 3)])
def test_the_true_ranking_of_a_tiny_model(V, eos_ids, budget, window):
    n = enough_beams(V, len(eos_ids), budget)
    for seed in range(2):
        config, params, model = tiny_model(seed, n_layer=3, vocab_size=V, eos_token_id=list(eos_ids))
        prompt = np.random.default_rng(seed).integers(V, size=1 + 4 * seed).tolist()
        logprobs = reference_table(config, params, prompt, window)
        for penalty, rule in product(PENALTIES[seed::2], RULES):
            expected, _ = enumerate_all(logprobs, ends_with(eos_ids), budget, penalty, rule, n)
            options = {"length_penalty": penalty, "early_stopping": rule, "max_tokens": budget, "window": window}
            found = generate(model, LETTERS, [prompt], num_beams=n, num_return_sequences=n, **options)
            check_ranking(found, expected, 1e-4)


def test_penalties_and_bans_count_what_each_beam_generated():
    # A presence penalty takes only the output into account, min_tokens counts it; both differ from beam to beam.
    V, eos_ids, budget = 4, (1,), 4
    n = enough_beams(V, 1, budget)
    for seed in range(5):
        plain = logs(random_table(V, seed))

        def logprobs(ids, plain=plain):
            counts = np.bincount(np.array(ids, int), minlength=V)
            row = plain(ids) - 0.7 * (counts > 0) - 0.4 * counts
            row[2] += 0.3
            if len(ids) < 2:
                row[1] = -math.inf
            return row

        expected, _ = enumerate_all(logprobs, ends_with(eos_ids), budget, 1.0, "never", n)
        found = generate(
            table_model(random_table(V, seed), V, eos_ids, n_prompt=3),
            LETTERS,
            [[2, 3, 0]],
            num_beams=n,
            num_return_sequences=n,
            max_tokens=budget,
            early_stopping="never",
            presence_penalty=0.7,
            frequency_penalty=0.4,
            min_tokens=2,
            logit_bias={2: 0.3},
        )
        check_ranking(found, expected, 1e-5)


def test_processors_see_each_beams_ids_and_its_log_probabilities():
    table, seen = random_table(5, 3), []

    def processor(history, scores):
        seen.append(history.ids)
        assert history.n_prompt == 2 and history.ids[:2] == [4, 1]
        np.testing.assert_allclose(np.exp(scores), table(tuple(history.ids[2:])), rtol=1e-5)
        return scores

    model = table_model(table, 5, (), n_prompt=2)
    generate(model, LETTERS, [[4, 1]], num_beams=3, max_tokens=4, logits_processors=[processor])
    assert [len(ids) for ids in seen] == [2, 3, 3, 3, 4, 4, 4, 5, 5, 5]
    assert len(set(map(tuple, seen))) == 10


def test_fewer_texts_than_beams():
    # V = 3, L = 2: one text of one token and six of two.
    table = random_table(3, 0)
    found = generate(table_model(table, 3, (2,)), LETTERS, [[0]], num_beams=9, num_return_sequences=9, max_tokens=2)
    expected, _ = enumerate_all(logs(table), ends_with((2,)), 2, 1.0, False, 9)
    assert (len(expected), len(found)) == (7, 9)
    check_ranking(found, expected, 1e-5)


# ---- CHAIN: a small model whose searches can be followed by hand -------------------------------------------------

A, B, E = range(3)
CHAIN_LETTERS = Letters(["A", "B", "E"])


def chain(ids, after_b=(0.25, 0.25, 0.50)):
    if not ids:
        return [0.45, 0.20, 0.35]
    if ids[-1] == B:
        return list(after_b)
    return [0.90, 0.05, 0.05] if len(ids) < 4 else [0.005, 0.005, 0.99]


def search_chain(table=chain, prompt=(A,), **options):
    """[(text, score)] of two beams on CHAIN."""
    model = table_model(table, 3, (E,), n_prompt=len(prompt), n_positions=1000)
    found = generate(model, CHAIN_LETTERS, [list(prompt)], num_beams=2, num_return_sequences=2, max_tokens=6, **options)
    for completion in found:
        assert completion.text == CHAIN_LETTERS.decode(completion.token_ids).removesuffix("E")
    return [(CHAIN_LETTERS.decode(completion.token_ids), completion.score) for completion in found]


@pytest.mark.parametrize("n_prompt", [1, 3, 500])
@pytest.mark.parametrize(
    "penalty, texts, scores", [(0.0, ["E", "AAAAE"], [-1.0498, -1.1246]), (1.0, ["AAAAE", "BAAAE"], [-0.2249, -0.6433])]
)
def test_chain_with_and_without_length_penalty(n_prompt, penalty, texts, scores):
    """B02: a length penalty of 0 is neutral, a larger one favours longer texts, whatever the prompt's length."""
    found = search_chain(prompt=[B, A] * (n_prompt // 2) + [B], length_penalty=penalty, early_stopping="never")
    assert [text for text, _ in found] == texts
    assert [score for _, score in found] == pytest.approx(scores, abs=1e-4)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_chain_finds_the_best_of_all_texts(penalty):
    """B02: against all texts."""
    (score, _, ids), *_ = enumerate_all(logs(chain), ends_with((E,)), 6, penalty, "never", 2)[0]
    best = search_chain(length_penalty=penalty, early_stopping="never")[0]
    assert best == (CHAIN_LETTERS.decode(ids), pytest.approx(score, abs=1e-6))


@pytest.mark.parametrize(
    "after_b, rule, expected",
    [
        # BA stays in the beam: .20 * .26 * .9 * .9 * .99 for BAAAE
        ((0.26, 0.24, 0.50), "never", [("AAAAE", -0.22493), ("BAAAE", -0.63546)]),
        ((0.26, 0.24, 0.50), False, [("AAAAE", -0.22493), ("BAAAE", -0.63546)]),
        # BB stays instead and soon falls out; AAABAE comes up one step after the plain rule has stopped at AAABE.
        ((0.24, 0.26, 0.50), "never", [("AAAAE", -0.22493), ("AAABAE", -0.90702)]),
        ((0.24, 0.26, 0.50), False, [("AAAAE", -0.22493), ("AAABE", -0.93962)]),
        # Two finished texts are there after two steps.
        ((0.26, 0.24, 0.50), True, [("E", -1.04982), ("BE", -1.15129)]),
    ],
)
def test_chain_step_by_step(after_b, rule, expected):
    """B04: beams that begin alike and stay alike."""
    found = search_chain(functools.partial(chain, after_b=after_b), early_stopping=rule)
    assert [text for text, _ in found] == [text for text, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-5)


@pytest.mark.parametrize("n_prompt", [3, 500])
@pytest.mark.parametrize("n_tokens", [1, 2, 5])
def test_a_uniform_model_scores_every_text_alike(n_prompt, n_tokens):
    """B01: the prompt's length in the length penalty."""
    V = 50257
    model = table_model(lambda ids: np.full(V, 1 / V), V, (), n_prompt=n_prompt, n_positions=1000)
    letters = Letters(["x"] * V)
    found = generate(model, letters, [[7] * n_prompt], num_beams=2, num_return_sequences=2, max_tokens=n_tokens)
    for completion in found:
        assert len(completion.token_ids) == n_tokens
        assert completion.score == pytest.approx(-10.82490511970208, abs=1e-5)


def test_a_draw_is_no_reason_to_go_on():
    # All tokens are equally likely and 0 ends a text: after two steps there are the texts 0 and 10, and with penalty 1
    # all that could follow scores the same.
    model = table_model(lambda ids: np.full(4, 0.25), 4, (0,))
    for rule in RULES:
        model.passes.clear()
        options = {"length_penalty": 1.0, "early_stopping": rule, "max_tokens": 2 if rule == "never" else 9}
        found = generate(model, LETTERS, [[1]], num_beams=2, num_return_sequences=2, **options)
        assert [completion.score for completion in found] == pytest.approx([math.log(0.25)] * 2)
        assert len(model.passes) == 2


# ---- golden: transformers' generate ------------------------------------------------------------------------------


@functools.cache
def golden_file():
    notes = json.loads((GOLDEN / "beam.json").read_text())
    return notes["models"], [load_case(case) for case in notes["cases"]]


@functools.cache
def golden_texts():
    """For each case its texts and their scores."""
    arrays = np.load(GOLDEN / "beam.npz")
    texts = [ids.tolist() for ids in np.split(arrays["ids"], np.cumsum(arrays["lengths"])[:-1])]
    scores, cases, start = arrays["scores"].tolist(), [], 0
    for case in golden_file()[1]:
        stop = start + len(case["prompts"]) * case["options"]["num_return_sequences"]
        cases.append((texts[start:stop], scores[start:stop]))
        start = stop
    assert start == len(texts)
    return cases


@functools.cache
def golden_model(name):
    note = golden_file()[0][name]
    return gpt2(note["config"], golden_params(name, note))


@pytest.mark.parametrize("num_beams", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 9))])
def test_texts_and_scores_are_those_of_transformers(num_beams):
    for case, (texts, scores) in zip(golden_file()[1], golden_texts(), strict=True):
        name, options = case["model"], case["options"]
        if options["num_beams"] != num_beams:
            continue
        model = copy.copy(golden_model(name))
        model.config = replace(model.config, eos_token_id=case["eos_ids"] or None)
        found = generate(model, Letters(["x"] * 4096), case["prompts"], **options)
        assert [completion.token_ids for completion in found] == texts, case
        for completion, score in zip(found, scores, strict=True):
            # transformers adds up in float32; a negative penalty multiplies what that loses by the length.
            factor = len(completion.token_ids) ** -options["length_penalty"]
            assert abs(completion.score - score) < 5e-5 * max(1, factor), case
            assert completion.score == pytest.approx(completion.sum_logprob * factor, rel=1e-12)
        indices = np.repeat(range(len(case["prompts"])), options["num_return_sequences"])
        assert [completion.prompt_index for completion in found] == indices.tolist()


def test_the_golden_cases_cover_the_options():
    _, cases = golden_file()
    assert len(cases) >= 320
    settings = {
        tuple(case["options"][key] for key in ("num_beams", "length_penalty", "early_stopping")) for case in cases
    }
    assert settings == set(product(range(2, 9), PENALTIES, RULES))
    last = [(texts[0][-1] in case["eos_ids"]) for case, (texts, _) in zip(cases, golden_texts(), strict=True)]
    assert 0.3 < np.mean(last) < 0.85


# ---- scores, and the cache behind them ---------------------------------------------------------------------------


class Parents(Hooks):
    """Notes for each step of a search the rows of the step before from which its rows come."""

    def __init__(self):
        self.rows = []

    def on_beam_step(self, beams, logits, candidates, kept, finished):
        self.rows.append([candidate.parent for candidate in kept])


def generate_and_watch(model, prompt, **options):
    """(completions, the parents of each step's rows) of one search, all of whose beams are returned."""
    parents = Parents()
    steps = stream(model, LETTERS, [prompt], num_return_sequences=options["num_beams"], hooks=parents, **options)
    return completions(steps), parents.rows


@pytest.mark.slow
@pytest.mark.parametrize("num_beams", [2, 4, 7])
def test_scores_are_those_of_the_reference(num_beams):
    """B05: a cache that is not reordered with its beams, in whatever way they change places."""
    patterns = set()
    for seed, window in product(range(4), (None, 4)):
        t = tiny_model(seed, n_layer=3, n_positions=24)
        prompt = np.random.default_rng(seed).integers(97, size=1 + 3 * seed).tolist()
        penalty = PENALTIES[seed]
        options = {"num_beams": num_beams, "length_penalty": penalty, "window": window, "max_tokens": 10}
        found, parents = generate_and_watch(t.model, prompt, **options)
        patterns |= set(map(tuple, parents[1:]))
        for completion in found:
            ids = completion.token_ids
            assert completion.sum_logprob == pytest.approx(reference_sum(t, prompt, ids, window), abs=5e-5)
            assert completion.score == pytest.approx(completion.sum_logprob / len(ids) ** penalty, rel=1e-12)
        scores = [completion.score for completion in found]
        assert scores == sorted(scores, reverse=True)
    assert len(patterns) >= (2 if num_beams == 2 else 8), patterns


@pytest.mark.slow
def test_a_window_whose_ring_wraps_during_the_search():
    # A window of 5 has a ring of 5 + 63 slots: the prompt fills it up to 4, the search goes round, and what was the
    # prompt's becomes the beams'.
    for seed, n_prompt in ((0, 64), (1, 66), (2, 68), (3, 30), (4, 85)):
        t = tiny_model(seed, n_layer=3, n_positions=100)
        prompt = np.random.default_rng(seed).integers(97, size=n_prompt).tolist()
        options = {"num_beams": 4, "max_tokens": 14, "window": 5, "early_stopping": "never"}
        found, parents = generate_and_watch(t.model, prompt, **options)
        for completion in found:
            total = reference_sum(t, prompt, completion.token_ids, 5)
            assert completion.sum_logprob == pytest.approx(total, abs=5e-5)
        moved = [n_prompt + step for step, rows in enumerate(parents) if rows != list(range(len(rows)))]
        assert n_prompt == 30 or max(moved) > 70, "rows are to be moved after the ring has wrapped"


def test_one_row_for_the_prompt_and_no_more_than_num_beams_for_a_step(watch):
    for seed, num_beams in product(range(2), (2, 5)):
        model = tiny_model(seed, n_positions=40).model
        passes = watch(model)
        prompts = np.random.default_rng(seed).integers(97, size=(2, 12)).tolist()
        generate(model, LETTERS, prompts, num_beams=num_beams, num_return_sequences=num_beams, max_tokens=10)
        second = passes.index((1, 12), 1)
        for shapes in (passes[:second], passes[second:]):
            assert shapes[0] == (1, 12) and len(shapes) <= 10 and set(shapes[1:]) == {(num_beams, 1)}


def test_beams_that_go_on_stay_in_their_rows():
    # So that a step copies only the rows of beams that died; test_cache.py sees that it copies no others.
    n_moved = 0
    for seed in range(6):
        model = tiny_model(seed, n_layer=3, n_positions=24).model
        prompt = np.random.default_rng(seed).integers(97, size=7).tolist()
        _, (first, *later) = generate_and_watch(model, prompt, num_beams=6, max_tokens=12, early_stopping="never")
        assert first == [0] * 6, "the prompt's row is repeated once"
        for rows in later:
            assert all(rows[parent] == parent for parent in rows if parent < len(rows)), rows
            n_moved += sum(parent != row for row, parent in enumerate(rows))
    assert n_moved > 50


# ---- texts, ends and limits --------------------------------------------------------------------------------------


def test_fewer_results_than_beams_are_the_first_of_all():
    model, options = tiny_model(0).model, {"num_beams": 5, "max_tokens": 8}
    everything = generate(model, LETTERS, [[1, 2]], num_return_sequences=5, **options)
    for n in range(1, 5):
        some = generate(model, LETTERS, [[1, 2]], num_return_sequences=n, **options)
        assert [(c.token_ids, c.score) for c in some] == [(c.token_ids, c.score) for c in everything[:n]]
    assert len(generate(model, LETTERS, [[1, 2]], **options)) == 1


def test_several_prompts_give_what_each_gives_alone():
    model, prompts = tiny_model(0).model, [[3, 1, 4, 1, 5], [9], [2, 6, 5]]
    options = {"num_beams": 3, "num_return_sequences": 2, "max_tokens": 6}
    together = generate(model, LETTERS, prompts, **options)
    alone = [completion for prompt in prompts for completion in generate(model, LETTERS, [prompt], **options)]
    assert [(c.token_ids, c.score) for c in together] == [(c.token_ids, c.score) for c in alone]
    assert [c.prompt_index for c in together] == [0, 0, 1, 1, 2, 2]
    assert [c.timings.prompt_tokens for c in together] == [5, 5, 1, 1, 3, 3]


def test_several_end_of_text_ids_leave_enough_beams_to_go_on_with():
    # Three ends are the most probable tokens of every beam: of the best 2 * n candidates too few would go on.
    table = {(): [0.3, 0.05, 0.3, 0.2, 0.1, 0.05]}
    model = table_model(lambda ids: table.get(ids, [0.31, 0.09, 0.3, 0.19, 0.06, 0.05]), 6, (0, 2, 3))
    options = {"length_penalty": 2.0, "early_stopping": "never", "max_tokens": 5}
    found = generate(model, LETTERS, [[1]], num_beams=3, num_return_sequences=3, **options)
    assert model.passes == [(1, 1)] + [(3, 1)] * (len(model.passes) - 1)
    assert len(model.passes) >= 3
    assert len(found) == 3


def test_max_tokens_0_and_1():
    """S12: no new tokens with beams, and one."""
    model = table_model(random_table(8, 0), 8, (2, 4))
    options = {"num_beams": 3, "num_return_sequences": 3}
    found = generate(model, LETTERS, [[0]], max_tokens=0, **options)
    assert [(c.text, c.token_ids, c.finish_reason, c.score) for c in found] == [("", [], "length", None)] * 3
    assert model.passes == []
    p = random_table(8, 0)(())
    best = np.argsort(-p)[:3].tolist()
    found = generate(model, LETTERS, [[0]], max_tokens=1, **options)
    assert [c.token_ids for c in found] == [[token] for token in best]
    assert [c.score for c in found] == pytest.approx(np.log(p[best]).tolist(), abs=1e-5)
    assert [c.finish_reason for c in found] == ["eos" if token in (2, 4) else "length" for token in best]
    assert len(model.passes) == 1


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("n_prompt", [12, 13, 15, 16])
def test_the_context_ends_a_search(n_prompt, rule):
    # 16 positions leave room for 16 - n_prompt tokens and one more, which is never fed.
    V, eos_ids, budget = 3, (0, 2), 17 - n_prompt
    for seed in range(2):
        config, params, model = tiny_model(seed, vocab_size=V, eos_token_id=list(eos_ids))
        prompt = np.random.default_rng(seed).integers(V, size=n_prompt).tolist()
        logprobs = reference_table(config, params, prompt)
        expected, _ = enumerate_all(logprobs, ends_with(eos_ids), budget, 2.0, rule, 3)
        options = {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 2.0, "max_tokens": 50}
        found = generate(model, LETTERS, [prompt], early_stopping=rule, **options)
        check_ranking(found, expected, 1e-4)
        for completion in found:
            ended = completion.token_ids[-1] in eos_ids
            assert completion.finish_reason == ("eos" if ended else "context")


def test_no_step_is_made_for_lengths_that_the_context_rules_out():
    # "never" asks what the best beam could still score at full length, and that is what the context leaves.
    early = 0
    for seed in range(20):
        table = random_table(3, seed)
        model = table_model(table, 3, (0, 2), n_prompt=4, n_positions=12)
        expected, steps = enumerate_all(logs(table), ends_with((0, 2)), 9, 1.0, "never", 3)
        options = {"num_beams": 3, "num_return_sequences": 3, "early_stopping": "never", "max_tokens": 60}
        check_ranking(generate(model, LETTERS, [[1] * 4], **options), expected, 1e-5)
        assert len(model.passes) == steps
        early += steps < 9
    assert early >= 5


# ---- stop strings ------------------------------------------------------------------------------------------------

SYLLABLES = Letters(["ab", "cd", "x", "<end>"])


def ends_at(stops, eos_ids, letters):
    return lambda ids: ids[-1] in eos_ids or any(stop in letters.decode(ids) for stop in stops)


@pytest.mark.slow
@pytest.mark.parametrize("stops", [("cd",), ("bc",), ("bx", "dab"), ("b", "xx"), ("abcdx",), ("zz",)])
def test_a_stop_string_ends_a_text(stops):
    V, budget = 4, 4
    n = V * 3 ** (budget - 2)
    for seed, penalty, rule in ((0, 0.0, False), (1, 1.0, True), (2, 2.0, "never")):
        table = random_table(V, seed)
        expected, _ = enumerate_all(logs(table), ends_at(stops, (3,), SYLLABLES), budget, penalty, rule, n)
        model = table_model(table, V, (3,))
        options = {"length_penalty": penalty, "early_stopping": rule, "max_tokens": budget, "stop": stops}
        found = generate(model, SYLLABLES, [[0]], num_beams=n, num_return_sequences=n, **options)
        check_ranking(found, expected, 1e-5)
        for completion in found[: len(expected)]:
            ended = completion.token_ids[-1] == 3
            whole = SYLLABLES.decode(completion.token_ids[:-1] if ended else completion.token_ids)
            at = {stop: whole.find(stop) for stop in stops if stop in whole}
            if at:
                assert completion.finish_reason == "stop"
                assert completion.stop_sequence in at
                assert completion.text == whole[: at[completion.stop_sequence]]
            else:
                assert completion.finish_reason == ("eos" if ended else "length")
                assert completion.stop_sequence is None
                assert completion.text == whole


def test_the_prompt_does_not_count_for_stop_strings():
    table = random_table(4, 1)
    results = []
    for prompt in ([2], [0, 1], [0]):
        model = table_model(table, 4, (3,), n_prompt=len(prompt))
        found = generate(model, SYLLABLES, [prompt], num_beams=3, num_return_sequences=3, max_tokens=5, stop="bc")
        results.append([(c.text, c.token_ids, c.score) for c in found])
    assert results[0] == results[1] == results[2]


def test_a_stop_string_of_a_character_in_two_tokens():
    letters = Letters([b"\xc3", b"\xa9", b"a", b"<end>"])
    table = random_table(4, 2)
    expected, _ = enumerate_all(logs(table), ends_at(["é"], (3,), letters), 4, 1.0, "never", 36)
    model = table_model(table, 4, (3,))
    options = {"early_stopping": "never", "max_tokens": 4, "stop": "é"}
    found = generate(model, letters, [[2]], num_beams=36, num_return_sequences=36, **options)
    check_ranking(found, expected, 1e-5)
    stopped = [completion for completion in found if completion.finish_reason == "stop"]
    assert len(stopped) > 3
    assert all(completion.token_ids[-2:] == [0, 1] and "é" not in completion.text for completion in stopped)


@pytest.mark.parametrize("stop", ["\ufffd", "a\ufffd"])
def test_a_stop_string_that_half_a_character_looks_like(stop):
    # Half a character reads as U+FFFD until its other half is there; every prompt must get its completion.
    letters = Letters([b"\xc3", b"\xa9", b"a", b"<end>"])
    for seed in range(5):
        model = table_model(random_table(4, seed), 4, (3,))
        options = {"num_beams": 4, "num_return_sequences": 4, "max_tokens": 4, "stop": stop}
        found = generate(model, letters, [[2]], **options)
        assert len(found) == 4
        for completion in found:
            assert completion.finish_reason in ("stop", "eos", "length")
            if stop in completion.text:
                raise AssertionError(f"{completion.text!r} holds the stop string")


# ---- what comes back ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [{}, {"repetition_penalty": 1.5, "logit_bias": {5: 3.0}}, {"window": 3}])
def test_logprobs_are_the_models_own(extra):
    config, params, model = tiny_model(2)
    prompt = [4, 9, 30, 2, 1]
    options = {"num_beams": 3, "num_return_sequences": 3, "max_tokens": 7, "logprobs": 2} | extra
    found = generate(model, LETTERS, [prompt], **options)
    plain = generate(model, LETTERS, [prompt], **options | {"logprobs": None})
    assert [(c.text, c.score) for c in found] == [(c.text, c.score) for c in plain]
    assert all(c.logprobs is None for c in plain)
    for completion in found:
        ids = completion.token_ids
        expected = reference_logprobs(config, params, prompt, ids, extra.get("window"))
        assert [entry.token for entry in completion.logprobs] == ids
        for entry, row in zip(completion.logprobs, expected, strict=True):
            assert entry.text == LETTERS.decode([entry.token])
            assert entry.logprob == pytest.approx(row[entry.token], abs=5e-5)
            best = np.argsort(-row)[:2].tolist()
            assert [token for token, _, _ in entry.top] == best
            assert [logprob for _, _, logprob in entry.top] == pytest.approx(row[best].tolist(), abs=5e-5)
    if "repetition_penalty" not in extra:
        sums = [sum(entry.logprob for entry in completion.logprobs) for completion in found]
        assert [completion.sum_logprob for completion in found] == pytest.approx(sums, abs=1e-4)


def test_logprobs_up_to_the_end_of_the_context():
    t = tiny_model(1)
    prompt = np.random.default_rng(0).integers(97, size=13).tolist()
    (completion,) = generate(t.model, LETTERS, [prompt], num_beams=2, max_tokens=20, logprobs=0, ignore_eos=True)
    assert (len(completion.token_ids), completion.finish_reason) == (4, "context")
    total = reference_sum(t, prompt, completion.token_ids)
    assert sum(entry.logprob for entry in completion.logprobs) == pytest.approx(total, abs=1e-4)
    assert all(entry.top == [] for entry in completion.logprobs)


def test_a_stream_gives_the_texts_token_by_token():
    table = random_table(4, 3)
    options = {"num_beams": 4, "num_return_sequences": 3, "max_tokens": 6, "stop": "bc"}
    done = generate(table_model(table, 4, (3,)), SYLLABLES, [[0], [1]], **options)
    steps = list(stream(table_model(table, 4, (3,)), SYLLABLES, [[0], [1]], **options))
    assert len(done) == 6
    for row, completion in enumerate(done):
        own = [step for step in steps if step.row == row]
        assert [step.token for step in own] == completion.token_ids
        assert "".join(step.text for step in own) == completion.text
        assert [step.completion is not None for step in own] == [False] * (len(own) - 1) + [True]
        assert own[-1].finish_reason == completion.finish_reason
        assert not any(step.from_draft for step in own)
        assert own[-1].completion.score == completion.score


# ---- what cannot be done -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("V", [4, 5, 6, 7, 8, 9, 13])
@pytest.mark.parametrize("num_beams", [2, 3])
def test_two_steps_where_a_step_has_about_as_many_candidates_as_there_are_tokens(V, num_beams):
    # By the definition: the best first tokens, then the best of everything that may follow them.
    for seed in range(5):
        table = random_table(V, seed)
        first = sorted(((math.log(p), token) for token, p in enumerate(table(()))), reverse=True)[:num_beams]
        texts = [(total + math.log(p), [a, b]) for total, a in first for b, p in enumerate(table((a,)))]
        options = {"num_beams": num_beams, "num_return_sequences": num_beams, "max_tokens": 2}
        found = generate(table_model(table, V, ()), LETTERS, [[0]], **options)
        assert [text.token_ids for text in found] == [ids for _, ids in sorted(texts, reverse=True)[:num_beams]]


@pytest.mark.parametrize("broken", [{(0, 0)}, {(1, 0)}, {(1, 1)}, {(0, 0), (0, 1), (1, 0), (1, 1)}])
def test_logits_that_are_not_numbers_are_named(broken):
    # In one beam of several, too.
    def table(ids):
        return [0.5, math.nan, 0.1, 0.1] if ids in broken else [0.5, 0.4, 0.05, 0.05]

    with pytest.raises(ValueError, match="token 3"):
        generate(table_model(table, 4, ()), LETTERS, [[0]], num_beams=4, max_tokens=5)


def test_nothing_to_go_on_with_is_named():
    with pytest.raises(ValueError, match=r"token 1 .*-inf"):
        generate(
            table_model(random_table(4, 0), 4, (3,)),
            LETTERS,
            [[0]],
            num_beams=2,
            logit_bias=dict.fromkeys(range(4), -math.inf),
        )
    # Three tokens are left and none may come twice.
    with pytest.raises(ValueError, match=r"token 4 .*-inf"):
        generate(table_model(random_table(4, 0), 4, ()), LETTERS, [[3]], num_beams=2, no_repeat_ngram_size=1)


def test_beams_with_nothing_to_go_on_with_die():
    # After a 0 nothing may come. The others go on, in fewer rows.
    def dead_end(history, scores):
        return np.full_like(scores, -np.inf) if len(history.ids) > 1 and history.ids[-1] == 0 else scores

    V, eos_ids, budget = 4, (3,), 4
    n = enough_beams(V, 1, budget)
    for seed in range(4):
        table = random_table(V, seed)

        def logprobs(ids, table=table):
            return np.full(V, -math.inf) if ids and ids[-1] == 0 else np.log(table(ids))

        expected, _ = enumerate_all(logprobs, ends_with(eos_ids), budget, 1.0, "never", n)
        model = table_model(table, V, eos_ids)
        options = {"num_beams": n, "num_return_sequences": n, "early_stopping": "never", "max_tokens": budget}
        found = generate(model, LETTERS, [[1]], logits_processors=[dead_end], **options)
        check_ranking(found, expected, 1e-5)


def test_texts_that_are_finished_survive_when_all_beams_die():
    # Three different letters are there and none may come twice: after three tokens a text has ended or cannot go on.
    letters = Letters(["a", "b", "c", "d"])
    table = random_table(4, 0)

    def logprobs(ids):
        with np.errstate(divide="ignore"):
            return np.log([0.0 if token in (3, *ids) else p for token, p in enumerate(table(ids))])

    expected, _ = enumerate_all(logprobs, ends_at(["ab"], (), letters), 8, 1.0, "never", 12)
    assert 1 <= len(expected) < 12
    model = table_model(table, 4, ())
    options = {"num_beams": 12, "num_return_sequences": 12, "max_tokens": 8, "no_repeat_ngram_size": 1}
    found = generate(model, letters, [[3]], early_stopping="never", stop="ab", **options)
    check_ranking(found, expected, 1e-5)
