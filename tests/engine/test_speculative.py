"""Speculative decoding: exact in distribution, right in its bookkeeping.

How exactness is judged. What `speculate` should produce is enumerated from the target alone, token by token. What it
does produce is found in two ways:

1. As exact probabilities. `Branches` stands in for the noise: at each random choice it follows every outcome, with the
   outcome's probability as its weight. Nothing is random, so the two distributions have to be equal up to rounding.
2. As 2,000 runs with different seeds and the package's own noise, compared by a chi-square test.

The models are `LookupModel`s: functions from the ids so far to logits. That the coupled rule gives the text of plain
decoding is in test_one_seed.py.
"""

import functools
import itertools
import json
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minigen import api, generate, stream
from minigen.engine import speculative
from minigen.engine.decode import PrefixCache, Run, Sequence
from minigen.engine.hooks import NO_HOOKS, Hooks
from minigen.engine.model import GPT2, GPT2Config
from minigen.engine.sampler import History, Noise, next_token_probs
from minigen.engine.speculative import (
    RULES,
    Draft,
    ModelDrafter,
    PromptLookupDrafter,
    rejection,
    speculate,
)
from minigen.options import DecodingConfig, SamplingConfig
from minigen.text.tokenizer import Tokenizer
from tests.oracles.chi_square import assert_follows
from tests.oracles.lookup import Letters, LookupModel, lookup_pair, near, text_logits
from tests.oracles.reference import reference_logits
from tests.oracles.tiny import as_stored, tiny_config, tiny_params

OFF = dict(temperature=1.0, top_p=1.0)  # the model's own distribution
N_TOKENS = 3  # whose joint distribution is compared
PROMPT = [1, 2, 1]


def generate_one(model, tokenizer, prompt, **options):
    (completion,) = generate(model, tokenizer, [prompt] if isinstance(prompt, list) else prompt, **options)
    return completion


def outcome(done):
    return done.token_ids, done.text, done.finish_reason, done.stop_sequence


def tiny_model(seed, *, std=0.5, **overrides):
    config = tiny_config(**{"vocab_size": 61, "n_positions": 48, "eos_token_id": None, "bos_token_id": 0} | overrides)
    return GPT2(GPT2Config.from_dict(config), tiny_params(config, seed, std))


# ---------------------------------------------------------------------------------------------------------------------
# All outcomes of a run


class Branches:
    """Follows every outcome of every random choice."""

    def outcomes(self, once):
        """Counter from what `once()` returns to its probability."""
        result, pending = Counter(), [((), 1.0)]
        for n_paths in itertools.count():
            if not pending:
                return result
            assert n_paths < 20_000  # three times what any of these tests needs: the code makes choices without end
            self.pending, (self.forced, self.weight), self.path = pending, pending.pop(), []
            result[once()] += self.weight

    def choose(self, p):
        if len(self.path) < len(self.forced):
            option = self.forced[len(self.path)]
        else:
            option, *others = np.flatnonzero(p).tolist()
            self.pending += [((*self.path, other), self.weight * p[other]) for other in others]
            self.weight *= p[option]
        self.path.append(option)
        return option


class Uniform:
    """A number between 0 and 1 that is not drawn yet: what is asked about it is decided then, one question each."""

    def __init__(self, branches, scale=1.0):
        self.branches, self.scale = branches, scale

    def __mul__(self, factor):
        return Uniform(self.branches, self.scale * float(factor))

    def __lt__(self, bound):
        below = min(max(float(bound / self.scale), 0.0), 1.0)
        return self.branches.choose([1 - below, below]) == 1


class BranchNoise:
    """In place of `Noise`, with a function `draw` in place of `sample_token`."""

    def __init__(self, branches, position):
        self.branches, self.position = branches, position

    def _replace(self, stream=0, position=None):
        return BranchNoise(self.branches, position or self.position)

    def uniforms(self, tokens):
        return [Uniform(self.branches) for _ in tokens]

    def draw(self, p):
        # A draft beyond the tokens that are compared cannot matter: not all its values have to be followed.
        return int(np.argmax(p)) if self.position >= len(PROMPT) + N_TOKENS else self.branches.choose(p)


def draw(p, noise):
    return noise.draw(p)


class BareCache:
    """In place of a `PrefixCache`: looks the logits up without any cache."""

    kv = SimpleNamespace(max_chunk=1000)

    def __init__(self, model):
        self.model = model

    def feed(self, texts, n_logits=1):
        (ids,) = texts
        ends = range(len(ids) - n_logits + 1, len(ids) + 1)
        return np.array([[self.model.logits_of(tuple(ids[:end])) for end in ends]])


class BareRun:
    """What `speculate` needs of a `Run`; texts end after N_TOKENS tokens, however much budget the drafts had."""

    hooks = NO_HOOKS

    def __init__(self, model, sampling, seed=0):
        self.model, self.sampling, self.cache = model, sampling, BareCache(model)
        self.decoding = DecodingConfig(max_tokens=50, seed=seed)
        self.feed = self.cache.feed

    def context(self, ids):
        return ids

    def finish_reason(self, ids, n_prompt):
        return "length" if ids[-1] in self.sampling.eos_ids or len(ids) - n_prompt == N_TOKENS else None


class BranchRow(Sequence):
    branches = None

    @property
    def noise(self):
        return BranchNoise(self.branches, len(self.ids))


class Experiment:
    """Runs `speculate` from PROMPT; `steps` has for each path its probability and `GeneratedToken`s."""

    def __init__(self, monkeypatch):
        self.monkeypatch, self.known = monkeypatch, {}
        monkeypatch.setattr(speculative, "next_token_probs", self.next_token_probs)

    def next_token_probs(self, logits, history, sampling):
        key = (logits.tobytes(), *history.ids)
        if key not in self.known:
            self.known[key] = next_token_probs(logits, history, sampling)
        return self.known[key]

    def run(self, target, draft, sampling, k, rule="rejection", drafter=ModelDrafter):
        """Counter from the tokens that came out to their probability."""
        self.known.clear()
        self.monkeypatch.setattr(speculative, "sample_token", draw)
        self.steps, branches = [], Branches()
        rule = RULES.get(rule, rule)

        def once():
            run = BareRun(target, sampling)
            row = BranchRow(run, PROMPT)
            row.branches = branches
            proposer = drafter(BareCache(draft), target.config.vocab_size, sampling) if draft else drafter
            steps = list(speculate(run, row, proposer, k, rule))
            self.steps.append((branches.weight, steps))
            return tuple(step.token for step in steps)

        return branches.outcomes(once)

    def sample(self, target, draft, sampling, k, rule, n_runs):
        """Counter from the tokens that came out to the number of seeds, with the package's own noise."""
        self.known.clear()
        result = Counter()
        for seed in range(n_runs):
            run = BareRun(target, sampling, seed)
            drafter = ModelDrafter(BareCache(draft), target.config.vocab_size, sampling)
            steps = speculate(run, Sequence(run, PROMPT), drafter, k, RULES[rule])
            result[tuple(step.token for step in steps)] += 1
        return result


@pytest.fixture
def experiment(monkeypatch):
    return Experiment(monkeypatch)


def enumerate_target(logits_of, sampling):
    """Outcome -> probability of the next N_TOKENS tokens after PROMPT, or fewer up to end-of-text, by the target."""
    result, unfinished = {}, {(): 1.0}
    for _ in range(N_TOKENS):
        longer = {}
        for tokens, weight in unfinished.items():
            history = History([*PROMPT, *tokens], len(PROMPT))
            p = next_token_probs(logits_of((*PROMPT, *tokens)), history, sampling)
            for token in np.flatnonzero(p).tolist():
                ended = token in sampling.eos_ids
                (result if ended else longer)[(*tokens, token)] = weight * p[token]
        unfinished = longer
    return result | unfinished


def largest_difference(found, expected):
    return max(abs(found.get(tokens, 0) - expected.get(tokens, 0)) for tokens in found.keys() | expected.keys())


def test_branches_follow_all_outcomes():
    def once():
        first = branches.choose([0.5, 0.25, 0.25])
        if first == 0:
            return "low" if Uniform(branches) * 0.8 < 0.4 else "high"  # half of what came here
        return branches.choose([0.0, 1.0, 0.0])

    branches = Branches()
    assert branches.outcomes(once) == {"low": 0.25, "high": 0.25, 1: 0.5}


# ---------------------------------------------------------------------------------------------------------------------
# Exactness under sampling


def not_the_last_one(history, logits):
    """A caller's processor that depends on the history: no token stands twice in a row."""
    logits = logits.copy()
    logits[history.ids[-1]] = -np.inf
    return logits


SETTINGS = {
    "plain": OFF,
    "cold": OFF | dict(temperature=0.6),
    "hot": OFF | dict(temperature=1.8),
    "defaults": {},
    "greedy": dict(temperature=0),
    "top_k 1": OFF | dict(top_k=1),
    "top_k 2": OFF | dict(top_k=2),
    "top_p": OFF | dict(top_p=0.7),
    "min_p": OFF | dict(min_p=0.2),
    "typical_p": OFF | dict(typical_p=0.7),
    "repetition": OFF | dict(repetition_penalty=1.5),
    "presence": OFF | dict(presence_penalty=1.0),
    "frequency": OFF | dict(frequency_penalty=0.8),
    "n-gram": OFF | dict(no_repeat_ngram_size=3),
    "bias": OFF | dict(logit_bias={0: 1.5, 2: -1.0}),
    "ban": OFF | dict(logit_bias={1: -math.inf}),
    "end of text": OFF | dict(eos_ids=(2,)),
    "min_tokens": OFF | dict(eos_ids=(2,), min_tokens=2),
    "ignore_eos": OFF | dict(eos_ids=(2,), ignore_eos=True),
    "processor": OFF | dict(logits_processors=(not_the_last_one,)),
    "mix 1": dict(temperature=0.9, top_p=0.95, top_k=3, repetition_penalty=1.3),
    "mix 2": dict(temperature=1.4, top_p=0.8, frequency_penalty=0.6, logit_bias={2: 0.8}, eos_ids=(2,), min_tokens=1),
    "mix 3": OFF | dict(typical_p=0.8, min_p=0.05, no_repeat_ngram_size=3, presence_penalty=0.4),
    "mix 4": dict(temperature=1.2, top_k=3, min_p=0.1, typical_p=0.95, logits_processors=(not_the_last_one,)),
}


def case(name, V):
    """(target, draft, sampling) of a setting. Flatter logits if little of steep ones would be left to compare."""
    sampling = SamplingConfig(**SETTINGS[name])
    filtered = sampling.temperature < 1 or sampling.top_p < 1 or sampling.min_p > 0 or sampling.typical_p < 1
    return *lookup_pair(seed=10 * V + len(name), V=V, spread=1.5 if filtered else 2.8), sampling


@pytest.mark.parametrize(
    ("name", "rule"), [(name, "rejection") for name in SETTINGS] + [(name, "coupled") for name in ("defaults", "mix 2")]
)
def test_next_tokens_have_exactly_the_targets_probabilities(experiment, name, rule):
    """X01, X02: filters and penalties on both models."""
    target, draft, sampling = case(name, V=3)
    expected = enumerate_target(target.logits_of, sampling)
    assert sum(expected.values()) == pytest.approx(1)
    for k in (2, 4) if name.startswith(("plain", "mix")) else (2,):
        assert largest_difference(experiment.run(target, draft, sampling, k, rule), expected) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("name, rule", [("cold", "rejection"), ("top_k 2", "rejection"), ("mix 2", "coupled")])
def test_next_tokens_are_distributed_as_the_targets(experiment, name, rule):
    # The package's own noise: numbers that served for a rejected draft must not serve for its replacement. Under these
    # settings 2,000 runs show each pair of draft, decision and replacement that shares its numbers.
    target, draft, sampling = case(name, V=4)
    found = experiment.sample(target, draft, sampling, 2, rule, 2_000)
    assert_follows(found, enumerate_target(target.logits_of, sampling))


@pytest.mark.slow
@pytest.mark.parametrize("V_draft", [3, 6])
def test_drafts_of_another_vocabulary_stay_exact(experiment, V_draft):
    sampling = SamplingConfig(**SETTINGS["frequency"])
    target, draft = lookup_pair(seed=7, V_draft=V_draft)
    found = experiment.run(target, draft, sampling, 2)
    assert largest_difference(found, enumerate_target(target.logits_of, sampling)) < 1e-12
    accepted = {step.token for _, steps in experiment.steps for step in steps if step.from_draft}
    assert accepted and max(accepted) < min(V_draft, 4)


@pytest.mark.parametrize(("last", "n_drafts"), [(4, 2), (5, 0), (6, 0)])
def test_a_draft_model_runs_no_id_that_it_lacks(last, n_drafts):
    config = tiny_config(vocab_size=5)
    draft = GPT2(GPT2Config.from_dict(config), tiny_params(config))
    row = SimpleNamespace(ids=[1, last], context=[1, last], n_prompt=2, noise=Noise(0, 0, 2))
    assert len(ModelDrafter(PrefixCache(draft), 97, SamplingConfig()).propose(row, 2)) == n_drafts


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["plain", "defaults", "repetition", "mix 1"])
def test_ngram_drafts_stay_exact(experiment, name, rule):
    sampling = SamplingConfig(**SETTINGS[name])
    target, _ = lookup_pair(seed=28)
    expected = enumerate_target(target.logits_of, sampling)
    for k in (1, 2, 3, 5):
        found = experiment.run(target, None, sampling, k, rule, drafter=PromptLookupDrafter(2))
        assert largest_difference(found, expected) < 1e-12
    assert any(step.from_draft for _, steps in experiment.steps for step in steps)


@pytest.mark.slow
def test_tiny_models_against_the_float64_reference(experiment):
    sampling = SamplingConfig(**SETTINGS["mix 1"])
    config = tiny_config(vocab_size=4, n_positions=16)
    params = [tiny_params(config, seed=3), tiny_params(config, seed=4, std=0.3)]
    models = [GPT2(GPT2Config.from_dict(config), values) for values in params]
    target, draft = (LookupModel(lambda ids, m=model: m.forward([ids])[0], 4) for model in models)
    logits = functools.partial(reference_logits, config, params[0])
    expected = enumerate_target(lambda ids: logits(ids)[-1].astype(np.float32), sampling)
    assert largest_difference(experiment.run(target, draft, sampling, 2), expected) < 1e-5


# ---- the tests above must notice faults ------------------------------------------------------------------------------


def resample_from_p(draft, p, noise):
    (u,) = noise.uniforms([0])
    return (draft.token, True) if u * draft.q[draft.token] < p[draft.token] else (noise.draw(p), False)


def always_accept(draft, p, noise):
    return draft.token, True


class ArgmaxDrafter(ModelDrafter):
    """Proposes the most probable token and passes off its softmax as the distribution it was drawn from."""

    def propose(self, row, k):
        return [Draft(int(draft.q.argmax()), draft.q) for draft in super().propose(row, 1)]


class SharpDrafter(ModelDrafter):
    """Draws at one temperature and reports the distribution of another."""

    def propose(self, row, k):
        return [Draft(token, q**2 / (q**2).sum()) for token, q in super().propose(row, k)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [dict(rule=resample_from_p), dict(rule=always_accept), dict(drafter=ArgmaxDrafter), dict(drafter=SharpDrafter)],
)
def test_faults_are_noticed(experiment, fault):
    """X02: a draft that takes its best token but is scored by its softmax."""
    target, draft, sampling = case("mix 2", V=3)
    expected = enumerate_target(target.logits_of, sampling)
    assert largest_difference(experiment.run(target, draft, sampling, 2, **fault), expected) > 1e-3


# ---- worked by hand: p = [.3, .5, .2], q = [.6, .2, .2] --------------------------------------------------------------

P, Q = np.array([0.3, 0.5, 0.2]), np.array([0.6, 0.2, 0.2])


def constant_model(p):
    with np.errstate(divide="ignore"):
        logits = np.log(np.asarray(p, float)).astype(np.float32)
    return LookupModel(lambda ids: logits, len(logits))


def first_drafts(steps, k):
    """How many drafts the target examined: every token comes from one, except those that follow k accepted ones."""
    examined = in_round = 0
    for step in steps:
        examined += in_round < k
        in_round = in_round + 1 if step.from_draft else 0
    return examined


@pytest.mark.parametrize("k", [1, 2, 4])
def test_worked_example(experiment, k):
    """X01: after a rejection, a draw from p instead of the residual."""
    found = experiment.run(constant_model(P), constant_model(Q), SamplingConfig(**OFF), k)
    for tokens in itertools.product(range(3), repeat=N_TOKENS):
        assert found[tokens] == pytest.approx(math.prod(P[list(tokens)]), rel=1e-6)
    accepted = sum(share * sum(step.from_draft for step in steps) for share, steps in experiment.steps)
    examined = sum(share * first_drafts(steps, k) for share, steps in experiment.steps)
    assert accepted / examined == pytest.approx(np.minimum(P, Q).sum(), rel=1e-6)  # 0.7, the most that any rule can


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_acceptance_of_each_rule(rule):
    # Rejection: sum of min(p, q). Coupled: token x wins both races if E[x] < min over y of E[y] / max(p[y] / p[x],
    # q[y] / q[x]), which has probability 1 / sum over y of max(p[y] / p[x], q[y] / q[x]).
    p, q = np.array([0.4, 0.1, 0.3, 0.2]), np.array([0.05, 0.6, 0.25, 0.1])
    ratio = np.maximum(p / p[:, None], q / q[:, None])
    expected = np.minimum(p, q).sum() if rule == "rejection" else (1 / ratio.sum(axis=1)).sum()
    n, counts, n_accepted = 4_000, Counter(), 0
    for position in range(n):
        noise = Noise(3, 0, position)
        draft = Draft(speculative.sample_token(q, noise), q)
        token, accepted = RULES[rule](draft, p, noise)
        assert accepted == (token == draft.token) or rule == "rejection"
        counts[token] += 1
        n_accepted += accepted
    assert_follows(counts, dict(enumerate(p)))
    assert abs(n_accepted / n - expected) < 5 * math.sqrt(expected * (1 - expected) / n)


class GivenNoise:
    """Noise whose uniforms for the decision and exponentials for the replacement are given."""

    def __init__(self, u=None, exponentials=None, stream=0):
        self.u, self.given, self.stream = u, exponentials, stream

    def _replace(self, stream):
        return GivenNoise(self.u, self.given, stream)

    def uniforms(self, tokens):
        assert self.stream not in (0, 2)  # those of the draw and of the replacement
        return np.array([self.u])

    def exponentials(self, tokens):
        assert self.stream not in (0, 1)
        return np.asarray(self.given)[tokens]


def test_rejection_if_p_and_q_differ_by_rounding_alone():
    # The token is rejected by a hair, and max(p - q, 0) leaves nothing to replace it by: then p is drawn from.
    p, q, almost_one = np.array([0.5, 0.5]), np.array([0.5 + 2**-51, 0.5]), 1 - 2**-53
    assert rejection(Draft(0, q), p, GivenNoise(almost_one, [1, 2])) == (0, False)
    assert rejection(Draft(0, q), p, GivenNoise(almost_one, [2, 1])) == (1, False)


@given(st.integers(2, 6), st.integers(0, 2**32 - 1))
@settings(deadline=None, derandomize=True, database=None, max_examples=100)
def test_rejection_gives_p_for_any_pair(V, seed):
    # The sum over drafts x of q(x) * P(outcome | x) must be p.
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(V, 0.3)), rng.dirichlet(np.full(V, 0.3))
    p[rng.random(V) < 0.3] = 0
    p = p / p.sum() if p.sum() else np.eye(V)[0]
    q[rng.random(V) < 0.3] = 0
    q = q / q.sum() if q.sum() else np.eye(V)[-1]
    branches = Branches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculative, "sample_token", draw)
        found = branches.outcomes(lambda: rejection(Draft(branches.choose(q), q), p, BranchNoise(branches, 0)))
    accepted = sum(share for (_, was_accepted), share in found.items() if was_accepted)
    assert accepted == pytest.approx(np.minimum(p, q).sum())
    for token in range(V):
        assert found[token, True] + found[token, False] == pytest.approx(p[token], abs=1e-12)


def test_logprobs_are_those_of_plain_decoding():
    model, letters = tiny_model(3), Letters(61)
    options = dict(temperature=0, max_tokens=20, logprobs=3)
    plain = generate_one(model, letters, [5, 6, 7], **options)
    for draft in (model, tiny_model(4)):
        done = generate_one(model, letters, [5, 6, 7], draft_model=(draft, letters), **options)
        assert [entry.token for entry in done.logprobs] == plain.token_ids
        for ours, theirs in zip(done.logprobs, plain.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [token for token, _, _ in ours.top] == [token for token, _, _ in theirs.top]


# ---------------------------------------------------------------------------------------------------------------------
# Caches


def assert_equals_cold_prefill(model, cache, ids):
    """The cache holds exactly ids, as a new cache that is given them at once does."""
    fresh = model.new_cache(1, cache.capacity, cache.window)
    for chunk in [ids] if cache.window is None else [[token] for token in ids]:
        model.forward([chunk], fresh)
    assert cache.length.tolist() == [len(ids)] and cache.slot_pos.max() == len(ids) - 1
    first_seen = 0 if cache.window is None else max(len(ids) - cache.window + 1, 0)  # by the next token
    positions = np.arange(first_seen, len(ids))
    slots = positions % cache.capacity
    assert cache.slot_pos[0, slots].tolist() == positions.tolist()
    for ours, theirs in zip(cache.keys + cache.values, fresh.keys + fresh.values, strict=True):
        np.testing.assert_allclose(ours[0][..., slots], theirs[0][..., slots], atol=1e-5, rtol=1e-5)


class Rounds(Hooks):
    """Generates with `speculate`, and compares both caches with a cold prefill at each round's draft and check."""

    def __init__(self, model, draft, prompt, k, rule="coupled", **options):
        sampling, config, *_ = api.check_options(options)
        self.run = Run(model, sampling, config, hooks=self)
        self.results = []  # of each round: how many tokens were drafted, how many came out
        self.row = Sequence(self.run, prompt)
        self.drafter = ModelDrafter(self.run.new_cache([prompt], draft), model.config.vocab_size, sampling)
        self.tokens = list(speculate(self.run, self.row, self.drafter, k, RULES[rule]))
        self.end_round()

    def end_round(self):
        if self.results:
            n_drafts, before = self.results[-1]
            self.results[-1] = n_drafts, self.row.n_generated - before

    def on_draft(self, row, tokens):
        self.end_round()
        self.results.append((len(tokens), row.n_generated))
        self.text = row.context + tokens
        if tokens:  # the draft model has not run its own last proposal
            assert_equals_cold_prefill(self.drafter.cache.model, self.drafter.cache.kv, self.text[:-1])

    def on_forward(self, cache):
        if self.results and cache.length[0] == len(self.text):
            assert_equals_cold_prefill(self.run.model, cache, self.text)


CACHE_OPTIONS = {
    "greedy": dict(temperature=0),
    "sampled": OFF,
    "penalties": dict(top_k=20, repetition_penalty=1.4, frequency_penalty=0.5, no_repeat_ngram_size=3),
    "window": OFF | dict(window=5),
    "shift": OFF | dict(context_shift=True, keep=3),
}


@pytest.mark.slow
@pytest.mark.parametrize("options", CACHE_OPTIONS.values(), ids=CACHE_OPTIONS)
@pytest.mark.parametrize("rule", RULES)
def test_caches_after_each_round(rule, options):
    """X04: with the target as its own draft, only the rate of acceptance tells that a cache is wrong."""
    model = tiny_model(5, n_positions=20 if "context_shift" in options else 80)
    rounds = Rounds(model, model, [3, 1, 4, 1], 4, rule, max_tokens=21, seed=3, **options)
    assert all(n_out == n_drafts + 1 for n_drafts, n_out in rounds.results)
    assert "context_shift" in options or all(n_drafts == 4 for n_drafts, _ in rounds.results[:-1])
    stats = rounds.row.speculation
    assert stats.accepted == stats.drafted == sum(token.from_draft for token in rounds.tokens) >= 10

    rng = np.random.default_rng(1)
    params = {name: p + 0.1 * rng.standard_normal(p.shape, np.float32) for name, p in as_stored(model).items()}
    rounds = Rounds(model, GPT2(model.config, params), [3, 1, 4, 1], 4, rule, max_tokens=30, seed=3, **options)
    assert len({n_out for _, n_out in rounds.results}) >= 3  # rejections at several places


@pytest.mark.parametrize("n", range(5))
def test_forced_acceptance(n):
    """X04: caches after 0, 1 ... all drafts accepted."""
    k, max_tokens, prompt, model = 4, 32, [7, 8, 9], LookupModel(text_logits(61, 6), 61)
    right = prompt + generate_one(model, Letters(61), prompt, temperature=0, max_tokens=40).token_ids
    fed = []

    class Forced(LookupModel):
        """Proposes the first n tokens of each round rightly, the others wrongly."""

        def forward(self, ids, cache=None, **options):
            fed.append(ids[0].tolist())
            super().forward(ids, cache, **options)
            n_in_round = (cache.length[0] - len(prompt)) % (n + 1) if n < k else 0
            wrong = cache.length[0] < len(right) and n_in_round == n < k
            return np.eye(61, dtype=np.float32)[[(right[cache.length[0]] + wrong) % 61]]

    draft = Forced(model.logits_of, 61)
    options = dict(temperature=0, max_tokens=max_tokens, draft_model=(draft, Letters(61)), num_draft_tokens=k)
    steps = list(stream(model, Letters(61), [prompt], **options))
    assert [step.token for step in steps] == right[len(prompt) :][:max_tokens]
    assert [step.from_draft for step in steps[: 5 * (n + 1)]] == ([True] * n + [False]) * 5
    stats = steps[-1].completion.speculation
    assert stats.target_passes + stats.accepted == max_tokens
    if n == k:  # the draft model runs every token once, the last one of each round too, which it had proposed
        ids = [token for chunk in fed for token in chunk]
        assert ids == right[: len(ids)] and len(ids) > len(prompt) + max_tokens - 2 * k


# ---------------------------------------------------------------------------------------------------------------------
# Where a text ends


def half_right(model):
    """A draft that is right at two places of three."""
    V = model.config.vocab_size
    return LookupModel(lambda ids: model.logits_of(ids) * (1 if len(ids) % 3 else -1), V, model.config.n_positions)


def check_ends(model, drafts=None, prompt=(0, 1), **options):
    """Speculation, with right and with half right drafts, ends as plain decoding does; plain decoding's completion."""
    letters, prompt = Letters(model.config.vocab_size), list(prompt)
    options = dict(temperature=0) | options
    plain = generate_one(model, letters, prompt, **options)
    # Three lengths and two rules: every second draft has the rules the other way round.
    pairs = itertools.product(drafts or (model, half_right(model)), (1, 3, 8))
    for (draft, k), rule in zip(pairs, itertools.cycle(RULES), strict=False):
        drafter = dict(draft_model=(draft, letters), num_draft_tokens=k, speculation_rule=rule)
        steps = list(stream(model, letters, [prompt], **drafter, **options))
        done = steps[-1].completion
        assert outcome(done) == outcome(plain)
        assert "".join(step.text for step in steps) == done.text
        assert [step.token for step in steps if step.token is not None] == done.token_ids
        assert [bool(step.finish_reason) for step in steps] == [False] * (len(steps) - 1) + [True]
        if done.token_ids:
            stats = done.speculation
            assert stats.accepted == sum(step.from_draft for step in steps)
            # Each pass gives one token more than it accepts, unless the text ends with an accepted one.
            assert stats.accepted + stats.target_passes == len(done.token_ids) + steps[-1].from_draft
            assert stats.accepted <= stats.drafted <= k * stats.target_passes
            assert done.timings.tokens == len(done.token_ids) and done.timings.prompt_tokens == len(prompt)
            if stats.drafted and draft is model:
                assert stats.accepted > 0
    assert plain.speculation is None
    return plain


def text_model(V, seed, **options):
    """A target whose greedy text does not repeat itself."""
    return LookupModel(text_logits(V, seed), V, **options)


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 4, 10])
def test_max_tokens_inside_a_block(max_tokens):
    """S12: no or few new tokens with speculation."""
    plain = check_ends(text_model(8, 1), max_tokens=max_tokens)
    assert len(plain.token_ids) == max_tokens and plain.finish_reason == "length"


@pytest.mark.slow
def test_end_of_text_and_stop_string_inside_a_block():
    text = check_ends(text_model(8, 1), max_tokens=12).text
    assert text == "bghbdbgbgefc"  # token 1 first, token 4 as the tenth, token 0 never
    for eos, n in ((1, 1), (7, 3), (3, 5), (4, 10), ([2, 3], 5), (0, 12)):
        model = text_model(8, 1, eos_token_id=eos)
        plain = check_ends(model, max_tokens=12)
        assert (len(plain.token_ids), plain.finish_reason) == (n, "eos" if eos else "length")
        for options in (dict(ignore_eos=True), dict(min_tokens=6)):
            assert eos not in check_ends(model, max_tokens=12, **options).token_ids[:5]
    for stop in ("b", "d", "ghb", "bdb", "bge"):
        plain = check_ends(text_model(8, 1), max_tokens=12, stop=stop)
        assert plain.finish_reason == "stop" and plain.text == text[: text.index(stop)]
    # Only the beginning of a stop string: what was held back comes out at the end.
    assert check_ends(text_model(8, 1), max_tokens=12, stop=text[-3:] + "zz").text == text


@pytest.fixture
def proposals(monkeypatch):
    """A list to which each later call of `ModelDrafter.propose` adds (ids of the row, n_generated, k, its drafts)."""
    calls, propose = [], ModelDrafter.propose

    def watched(self, row, k):
        calls.append((list(row.ids), row.n_generated, k, drafts := propose(self, row, k)))
        return drafts

    monkeypatch.setattr(ModelDrafter, "propose", watched)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("n_draft", [8, 16, 24])
def test_nothing_is_drafted_beyond_budget_and_contexts(n_draft, proposals):
    """X07: a draft with a shorter context."""
    model, draft = (text_model(8, 1, n_positions=n) for n in (16, n_draft))
    for n_prompt, max_tokens, k in itertools.product((1, 7, 12, 16), (1, 2, 40), (1, 4, 30)):
        prompt, options = [1] * n_prompt, dict(temperature=0, max_tokens=max_tokens)
        proposals.clear()
        plain = generate_one(model, Letters(8), prompt, **options)
        drafter = dict(draft_model=(draft, Letters(8)), num_draft_tokens=k)
        done = generate_one(model, Letters(8), prompt, **options, **drafter)
        assert outcome(done) == outcome(plain)
        for ids, n_generated, asked, drafts in proposals:
            # A round may be all accepted, and then gives one token more.
            assert asked == min(k, max_tokens - n_generated - 1, 16 - len(ids)) > 0
            # What the draft model runs: the context and all but the last of what it proposes.
            assert len(drafts) == max(min(asked, n_draft - len(ids) + 1), 0)
        assert done.speculation.drafted == sum(len(drafts) for *_, drafts in proposals)
        assert plain.finish_reason == ("context" if n_prompt + max_tokens > 17 else "length")


@pytest.mark.parametrize("right", [False, True])
def test_a_draft_token_costs_one_pass_of_the_draft_and_its_time(right, monkeypatch):
    clock = [0.0]  # which only passes move
    monkeypatch.setattr("time.perf_counter", lambda: clock[-1])

    class Timed(LookupModel):
        def forward(self, *args, **options):
            clock.append(clock[-1] + self.duration)
            return super().forward(*args, **options)

    model = text_model(8, 1)
    target, draft = (Timed(m.logits_of, 8) for m in (model, model if right else half_right(model)))
    target.duration, draft.duration = 10, 0.5
    options = dict(draft_model=(draft, Letters(8)), num_draft_tokens=3, temperature=0, max_tokens=50)
    stats = generate_one(target, Letters(8), [0, 1, 2], **options).speculation
    assert len(draft.passes) == stats.drafted > 20
    assert draft.passes[0] == (1, 3)  # the prompt, with the first
    assert stats.draft_seconds == 0.5 * stats.drafted
    assert stats.target_seconds == 10 * stats.target_passes > 50  # without the prompt's


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 7, 400])
def test_window_together_with_speculation(window):
    model, letters = text_model(8, 1), Letters(8)
    prompt, options = [n % 8 for n in range(90)], dict(max_tokens=24, window=window)  # longer than most of the rings
    plain = check_ends(model, prompt=prompt, **options)
    for drafter in (
        dict(draft_model=(text_model(8, 2), letters), num_draft_tokens=79),  # more than the ring can roll back
        dict(prompt_lookup_num_tokens=6),
    ):
        assert outcome(generate_one(model, letters, prompt, temperature=0, **options, **drafter)) == outcome(plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    "n_positions, keep, window", [(16, 0, None), (16, 7, 6), (2, 0, None), (3, 1, None), (4, 1, 2)]
)
def test_context_shift_together_with_speculation(n_positions, keep, window):
    model, short = (text_model(8, 1, n_positions=n) for n in (n_positions, -(-n_positions * 2 // 3)))
    options = dict(max_tokens=30, context_shift=True, keep=keep, window=window)
    options |= dict(repetition_penalty=1.2, frequency_penalty=0.1)
    for n_prompt in {1, min(n_positions, 10)}:
        prompt = [n % 8 for n in range(n_prompt)]
        plain = check_ends(model, (model, half_right(model), short), prompt, **options)
        done = generate_one(model, Letters(8), prompt, temperature=0, prompt_lookup_num_tokens=5, **options)
        assert len(plain.token_ids) == 30 and outcome(done) == outcome(plain)


# ---------------------------------------------------------------------------------------------------------------------
# Vocabularies


def with_vocab(folder, source, change):
    """A copy of a vocabulary in which `change(vocab)` was made; returns what `change` returned."""
    folder.mkdir()
    (folder / "merges.txt").write_bytes((source / "merges.txt").read_bytes())
    vocab = json.loads((source / "vocab.json").read_text(encoding="utf-8"))
    result = change(vocab)
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    return result


def test_another_vocabulary_is_refused(byte_vocab, tmp_path, fairytale):
    """X07: ids that mean other text in the draft."""

    def swap(vocab):
        vocab["a"], vocab["q"] = vocab["q"], vocab["a"]
        return min(vocab["a"], vocab["q"])

    first = with_vocab(tmp_path / "swapped", byte_vocab, swap)
    ours, theirs = Tokenizer.from_folder(byte_vocab), Tokenizer.from_folder(tmp_path / "swapped")
    model = text_model(257, 0)
    model.forward = None  # refused before anything is computed
    for tokenizer, other in ((ours, theirs), (theirs, ours)):
        with pytest.raises(ValueError, match=rf"vocabular.*\btoken {first}\b.*b'[aq]'.*b'[aq]'"):
            stream(model, tokenizer, "abc", draft_model=(model, other))
    with pytest.raises(ValueError, match="vocabulary"):
        stream(*fairytale, "A", draft_model=(model, ours))


@pytest.mark.slow
@pytest.mark.parametrize(("V", "V_draft"), [(8, 10), (10, 8), (7, 8)])
def test_vocabularies_of_other_sizes(V, V_draft, proposals):
    """X07: added or padded tokens in one of the two."""
    target, shared = text_model(V, 1), min(V, V_draft)
    draft = LookupModel(near(target.logits_of, V_draft, 2), V_draft)
    # The draft lacks the last id of this prompt if it is the smaller one.
    for prompt in ([1, 2], [1, V - 1, 2]):
        check_ends(target, (draft,), prompt, max_tokens=20)
        options = dict(draft_model=(draft, Letters(V)), max_tokens=20, seed=1, speculation_rule="rejection")
        assert max(generate_one(target, Letters(V), prompt, **OFF, **options).token_ids) < V
    proposed = [draft for *_, drafts in proposals for draft in drafts]
    assert proposed and all(draft.token < shared and not draft.q[shared:].any() for draft in proposed)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 63, 64, 300])
def test_a_draft_with_part_of_its_vocabulary_draws_from_the_softmax_of_that_part(size, proposals):
    config = tiny_config(vocab_size=257, n_positions=40)
    target, draft = (GPT2(GPT2Config.from_dict(config), tiny_params(config, seed, 0.3)) for seed in (1, 2))
    options = dict(temperature=1, top_p=1, max_tokens=20, seed=3, repetition_penalty=1.3)
    prompt = [256, 1, 2]  # the first id is outside a smaller vocabulary, and is read all the same
    done = generate_one(
        target, Letters(257), prompt, draft_model=(draft, Letters(257)), draft_vocab_size=size,
        num_draft_tokens=2, **options,
    )  # fmt: skip
    assert done.token_ids == generate_one(target, Letters(257), prompt, **options).token_ids
    assert sum(len(drafts) for *_, drafts in proposals) > 10
    for ids, _, _, found in proposals:
        if found:
            logits = draft.forward([ids])[0].astype(float)
            seen = sorted(set(ids))
            logits[seen] = np.where(logits[seen] > 0, logits[seen] / 1.3, logits[seen] * 1.3)
            expected = np.exp(logits[:size])
            np.testing.assert_allclose(found[0].q[:size], expected / expected.sum(), atol=1e-5)
            assert not found[0].q[size:].any()


def test_drafts_that_run_out_of_allowed_tokens():
    # Only the token that the draft lacks is allowed: the draft has nothing to propose, the target goes on.
    target, draft = lookup_pair(1, V=5, V_draft=4)
    bias = dict.fromkeys(range(4), -math.inf)
    assert check_ends(target, (draft,), logit_bias=bias, max_tokens=3).token_ids == [4] * 3
    # No token may come twice. The target ends after two; the draft would go on until it has used up all five.
    eye = np.eye(5, dtype=np.float32)
    target = LookupModel(lambda ids: eye[{0: 1, 1: 4}.get(ids[-1], 0)], 5, eos_token_id=4)
    draft = LookupModel(lambda ids: eye[(ids[-1] + 1) % 5], 5)
    plain = check_ends(target, (draft,), [0], no_repeat_ngram_size=1, max_tokens=12)
    assert (plain.token_ids, plain.finish_reason) == ([1, 4], "eos")


# ---------------------------------------------------------------------------------------------------------------------
# N-gram lookup


def slow_lookup(ids, k, longest):
    """What followed the last occurrence, before the end, of the longest possible end of ids; at most k of it."""
    matches = [
        (size, start)
        for size in range(1, longest + 1)
        for start in range(len(ids))
        if start + size < len(ids) and all(ids[start + i] == ids[len(ids) - size + i] for i in range(size))
    ]
    if not matches:
        return []
    size, start = max(matches)  # the longest first, then the latest
    return [ids[i] for i in range(start + size, min(start + size + k, len(ids)))]


def propose(ids, k, longest):
    drafts = PromptLookupDrafter(longest).propose(SimpleNamespace(context=ids, ids=ids), k)
    assert all(draft.q is None for draft in drafts)
    return [draft.token for draft in drafts]


@pytest.mark.slow
@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(1, 6), st.integers(1, 5))
@settings(deadline=None, derandomize=True, database=None, max_examples=300)
def test_ngram_drafter_against_a_slow_definition(ids, k, longest):
    before = list(ids)
    assert propose(ids, k, longest) == slow_lookup(ids, k, longest)
    assert ids == before


def test_ngram_options_reach_the_drafter():
    # After 1 2 stood 3 9, and 3 9 is what the target says; the last 2 alone was followed by 4.
    target = LookupModel(lambda ids: np.eye(10, dtype=np.float32)[3 if ids[-2:] == (1, 2) else 9], 10)
    prompt, options = [1, 2, 3, 9, 2, 4, 1, 2], dict(temperature=0, max_tokens=2, prompt_lookup_num_tokens=3)
    for size, accepted in ((1, 0), (2, 1), (3, 1)):
        done = generate_one(target, Letters(10), prompt, max_matching_ngram_size=size, **options)
        assert done.token_ids == [3, 9] and done.speculation.accepted == accepted


def test_a_token_that_neither_model_allows_is_not_accepted():
    """F23: a draft with p = q = 0."""
    token, accepted = rejection(Draft(1, np.array([1.0, 0, 0])), np.array([0.5, 0, 0.5]), Noise(1, 0, 0))
    assert not accepted and token != 1


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_the_model_as_its_own_draft_gives_the_same_text_cold_and_warm(tmp_path, rule):
    """F27: random numbers that are taken only if rounding makes p < q."""
    model, letters = text_model(8, 1), Letters(8)
    options = dict(draft_model=(model, letters), speculation_rule=rule, seed=3, max_tokens=30, cache=tmp_path / "kv")
    cold, warm = (generate_one(model, letters, [0, 1] * 9, **options) for _ in range(2))
    assert warm.timings.reused_tokens > 0 and warm.token_ids == cold.token_ids
