"""Speculative decoding: exact in distribution, exact in greedy, honest in its bookkeeping.

How exactness is judged. What `speculate` should produce is enumerated from the target alone, token by token. What it
does produce is found in three ways:

1. As 200,000 runs, compared by chi-square. Runs that have made the same choices so far are carried as one, with their
   number: `Branches` stands in for the random generator, and where one run would draw, it deals the runs out to the
   outcomes by a multinomial draw. That is the same experiment as 200,000 separate runs, at the price of one run for
   each different path. `speculate`, `propose` and `verify` are the package's own.
2. As exact probabilities: the same, with the weight of a path multiplied by each outcome's probability. Nothing is
   random, so the two distributions have to be equal to rounding.
3. As plain runs of `generate` with NumPy's generator, `draw` and everything else as they are, for a few settings.

The models of these tests are stand-ins: a function from the ids so far to logits, remembered for each prefix. A fault
that the tests would not notice would make them worthless, so five faults are put in on purpose and have to be noticed.
"""

import itertools
import json
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minigen import generate, stream
from minigen.engine import speculative
from minigen.engine.decode import Stopwatch
from minigen.engine.hooks import Hooks
from minigen.engine.model import GPT2, GPT2Config
from minigen.engine.sampler import History, draw, probs
from minigen.engine.speculative import AdaptiveDraftLength, ModelDrafter, PromptLookupDrafter, speculate, verify
from minigen.options import DecodingConfig, SamplingConfig
from minigen.text.tokenizer import Tokenizer
from tests.oracles.chi_square import assert_follows, chi_square, chi_square_bound
from tests.oracles.models import Letters, StandIn, as_logits, tiny_model
from tests.oracles.reference import reference_logits
from tests.oracles.tiny import as_stored, tiny_config, tiny_params

OFF = dict(temperature=1.0, top_p=1.0)  # the model's own distribution
N_TOKENS = 3  # whose joint distribution is compared
RUNS = 200_000


# ---------------------------------------------------------------------------------------------------------------------
# Models


def table_logits(V, seed, spread=2.8):
    """Random logits that depend on the last two ids."""
    table = np.random.default_rng(seed).normal(0, spread, (8, 8, V)).astype(np.float32)
    return lambda ids: table[ids[-2] if len(ids) > 1 else 0, ids[-1]]


def near(logits_of, V, seed, noise=1.0):
    """A draft for a target: its logits and noise, [V]. Where V is larger than the target's, noise alone."""
    other = table_logits(V, seed, noise)

    def logits(ids):
        result = other(ids).copy()
        ours = logits_of(ids)[:V]
        result[: len(ours)] += ours
        return result

    return logits


class IdCache:
    """A cache that keeps the ids themselves, and nothing else."""

    nbytes = 0

    def __init__(self, capacity):
        self.max_chunk = capacity
        self.ids = []

    @property
    def length(self):
        return [len(self.ids)]

    def truncate(self, length):
        assert 0 <= length <= len(self.ids)
        del self.ids[length:]


class Lean(StandIn):
    """A stand-in for the thousands of short runs of an `Experiment`: a real cache would take most of their time."""

    def new_cache(self, batch=1, capacity=None, window=None):
        return IdCache(capacity)

    def forward(self, ids, cache, *, last_only=True, **_):
        cache.ids.extend(map(int, ids[0]))
        n = len(cache.ids)
        if last_only:
            return self.logits_of(tuple(cache.ids))[None]
        return [[self.logits_of(tuple(cache.ids[:end])) for end in range(n - len(ids[0]) + 1, n + 1)]]


def stand_in_pair(seed, V=4, V_draft=None, spread=2.8):
    """A target and a draft that agrees with it in part."""
    target = Lean(table_logits(V, seed, spread), V)
    V_draft = V_draft or V
    return target, Lean(near(target.logits_of, V_draft, seed + 1000), V_draft)


def constant(p, kind=StandIn):
    return kind(as_logits(lambda ids: p), len(p))


def tiny(seed, *, std=0.5, **overrides):
    options = {"vocab_size": 61, "n_positions": 48, "eos_token_id": None, "bos_token_id": 0} | overrides
    return tiny_model(seed, std, **options).model


def noisy(model, noise, seed=1):
    """A model whose weights differ a little."""
    rng = np.random.default_rng(seed)
    params = {name: p + noise * rng.standard_normal(p.shape, np.float32) for name, p in as_stored(model).items()}
    return GPT2(model.config, params)


def oracle(V, seed, eos_token_id=None, n_positions=1000):
    """A target whose greedy text does not repeat itself: logits from a generator seeded with all the ids."""
    return StandIn(
        lambda ids: np.random.default_rng([seed, *map(int, ids)]).normal(0, 2, V).astype(np.float32),
        V,
        n_positions,
        eos_token_id,
    )


class Drafted(Hooks):
    """Notes the tokens proposed in each round."""

    def __init__(self):
        self.rounds = []

    def drafted(self, row, tokens):
        self.rounds.append(list(tokens))


# ---------------------------------------------------------------------------------------------------------------------
# All runs at once


class Uniform:
    """A number from [0, 1) that has not been drawn yet: what is asked about it is decided then, one question each."""

    __array_ufunc__ = None  # so that NumPy's numbers leave the arithmetic to this class

    def __init__(self, branches, scale=1.0):
        self.branches, self.scale = branches, scale

    def __mul__(self, factor):
        return Uniform(self.branches, self.scale * factor)

    __rmul__ = __mul__

    def __lt__(self, bound):
        below = min(max(float(bound / self.scale), 0.0), 1.0)
        return self.branches.choose([1 - below, below]) == 1

    __le__ = __lt__

    def __gt__(self, bound):
        return not self < bound

    __ge__ = __gt__


class Branches:
    """In place of a random generator: many runs at once (see the head of this file).

    rng: deals the runs out at random; None multiplies weights by probabilities instead.
    """

    def __init__(self, rng=None):
        self.rng = rng
        self.place = 0  # of the token that is being chosen, counted from the first generated one

    def outcomes(self, n, once):
        """Counter from what `once()` returns to how many of n runs return it (or to its weight, of n)."""
        result, self.pending = Counter(), [((), n)]
        for n_paths in itertools.count():
            if not self.pending:
                return result
            assert n_paths < 20_000  # three times what any of these tests needs: the code makes choices without end
            self.forced, self.count = self.pending.pop()
            self.path = []
            result[once()] += self.count

    def choose(self, p):
        if len(self.path) < len(self.forced):
            option = self.forced[len(self.path)]
        else:
            shares = self.count * np.asarray(p) if self.rng is None else self.rng.multinomial(self.count, p)
            option, *others = np.flatnonzero(shares).tolist()
            self.pending += [((*self.path, other), shares[other].item()) for other in others]
            self.count = shares[option].item()
        self.path.append(option)
        return option

    def random(self):
        return Uniform(self)

    def draw(self, p):
        # A draft that lies beyond the tokens which are compared cannot matter: no need to follow all its values.
        return int(np.argmax(p)) if self.place >= N_TOKENS else self.choose(p)


class BareRow:
    """What `speculate` needs of a `Row`; it ends after N_TOKENS tokens, however much budget the drafts had."""

    def __init__(self, prompt, rng, eos_ids):
        self.ids, self.context, self.n_prompt = list(prompt), list(prompt), len(prompt)
        self.rng, self.eos_ids, self.finish_reason = rng, eos_ids, None

    @property
    def history(self):
        return History(self.ids, self.n_prompt)

    @property
    def n_generated(self):
        return len(self.ids) - self.n_prompt

    def accept(self, token, logits, from_draft):
        self.ids.append(token)
        self.context.append(token)
        if token in self.eos_ids or self.n_generated == N_TOKENS:
            self.finish_reason = "length"
        return token, from_draft


PROMPT = [1, 2, 1]


class Experiment:
    """Runs `speculate` from PROMPT, many runs at once.

    Remembers `probs` for the same logits and history, and puts quicker forms in place of `draw`, `feed` and `np.pad`,
    which would take most of the time; `speculate`, `propose` and `verify` are untouched.
    """

    def __init__(self, monkeypatch):
        self.branches = None
        self.known = {}
        monkeypatch.setattr(speculative, "probs", self.probs)
        monkeypatch.setattr(speculative, "draw", lambda p, rng: rng.draw(p))
        monkeypatch.setattr(speculative, "feed", self.feed)
        monkeypatch.setattr(np, "pad", self.pad)

    def probs(self, logits, history, sampling):
        self.branches.place = len(history.ids) - history.n_prompt
        key = (logits.tobytes(), *history.ids)
        if key not in self.known:
            self.known[key] = probs(logits, history, sampling)
        return self.known[key]

    @staticmethod
    def feed(model, cache, contexts):
        return model.forward([contexts[0][cache.length[0] :]], cache)

    @staticmethod
    def pad(row, width, constant_values):
        return np.concatenate([np.full(width[0], constant_values), row, np.full(width[1], constant_values)])

    def run(self, target, draft, sampling, k, *, runs=None, seed=0, drafter=None):
        """Counter from the tokens that came out to the number of runs, or, where runs is None, the probability.

        `steps` then holds for each path its share and its steps, (token, whether it was an accepted draft).
        """
        self.known.clear()
        self.steps = []
        self.branches = Branches(None if runs is None else np.random.default_rng(seed))
        config, stopwatch = DecodingConfig(max_tokens=50), Stopwatch()
        drafter = drafter or ModelDrafter

        def once():
            row = BareRow(PROMPT, self.branches, sampling.eos_ids)
            proposer = drafter(draft, target.config.vocab_size, row.context, sampling, config)
            steps = list(speculate(target, row, proposer, sampling, config, k, stopwatch))
            self.steps.append((self.branches.count, steps))
            return tuple(token for token, _ in steps)

        return self.branches.outcomes(1.0 if runs is None else runs, once)


@pytest.fixture
def experiment(monkeypatch):
    return Experiment(monkeypatch)


def enumerate_target(logits_of, sampling):
    """Outcome -> probability of the next N_TOKENS tokens after PROMPT, or fewer up to end-of-text, by the target."""
    result, unfinished = {}, {(): 1.0}
    for _ in range(N_TOKENS):
        longer = {}
        for tokens, weight in unfinished.items():
            p = probs(logits_of((*PROMPT, *tokens)), History([*PROMPT, *tokens], len(PROMPT)), sampling)
            for token in np.flatnonzero(p).tolist():
                ended = token in sampling.eos_ids
                (result if ended else longer)[(*tokens, token)] = weight * p[token]
        unfinished = longer
    return result | unfinished


def largest_difference(found, expected):
    return max(abs(found.get(outcome, 0) - expected.get(outcome, 0)) for outcome in found.keys() | expected.keys())


def test_branches_deal_out_all_runs():
    def once():
        first = branches.choose([0.5, 0.25, 0.25])
        if first == 0:
            return "low" if 0.4 > branches.random() * 0.8 else "high"  # half of what came here
        return branches.choose([0.0, 1.0, 0.0])

    branches = Branches()
    assert branches.outcomes(1.0, once) == {"low": 0.25, "high": 0.25, 1: 0.5}
    branches = Branches(np.random.default_rng(0))
    counts = branches.outcomes(RUNS, once)
    assert_follows(counts, {"low": 0.25, "high": 0.25, 1: 0.5})


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
    "top_k 3": OFF | dict(top_k=3),
    "top_p 0.5": OFF | dict(top_p=0.5),
    "top_p 0.9": OFF | dict(top_p=0.9),
    "min_p": OFF | dict(min_p=0.2),
    "typical_p 0.5": OFF | dict(typical_p=0.5),
    "typical_p 0.9": OFF | dict(typical_p=0.9),
    "repetition": OFF | dict(repetition_penalty=1.5),
    "repetition wanted": OFF | dict(repetition_penalty=0.7),
    "presence": OFF | dict(presence_penalty=1.0),
    "frequency": OFF | dict(frequency_penalty=0.8),
    "presence wanted": OFF | dict(presence_penalty=-0.7, frequency_penalty=0.3),
    "n-gram": OFF | dict(no_repeat_ngram_size=3),
    "bias": OFF | dict(logit_bias={0: 1.5, 2: -1.0}),
    "ban": OFF | dict(logit_bias={1: -math.inf}),
    "end of text": OFF | dict(eos_ids=(3,)),
    "min_tokens": OFF | dict(eos_ids=(3,), min_tokens=2),
    "ignore_eos": OFF | dict(eos_ids=(3,), ignore_eos=True),
    "processor": OFF | dict(logits_processors=(not_the_last_one,)),
    "mix 1": dict(temperature=0.9, top_p=0.95, top_k=3, repetition_penalty=1.3),
    "mix 2": dict(temperature=1.4, top_p=0.8, frequency_penalty=0.6, logit_bias={2: 0.8}, eos_ids=(3,), min_tokens=1),
    "mix 3": OFF | dict(typical_p=0.8, min_p=0.05, no_repeat_ngram_size=3, presence_penalty=0.4),
    "mix 4": dict(
        temperature=1.2, top_k=3, top_p=0.9, min_p=0.1, typical_p=0.95, logits_processors=(not_the_last_one,)
    ),
}


def case(name, V):
    """(target, draft, sampling) of a setting. Flatter logits where little of steep ones would be left to compare."""
    options = SETTINGS[name]
    if V == 3 and "eos_ids" in options:
        options = options | dict(eos_ids=(2,))  # the last id
    sampling = SamplingConfig(**options)
    filtered = sampling.temperature < 1 or sampling.top_p < 1 or sampling.min_p > 0 or sampling.typical_p < 1
    return *stand_in_pair(seed=10 * V + len(name), V=V, spread=1.5 if filtered else 2.8), sampling


@pytest.mark.parametrize("name", SETTINGS)
def test_next_tokens_are_distributed_as_the_targets(experiment, name):
    """X01, X02: filters and penalties on both models."""
    target, draft, sampling = case(name, V=4)
    expected = enumerate_target(target.logits_of, sampling)
    for k in (1, 3):  # 2 and 4 are in the next test
        found = experiment.run(target, draft, sampling, k, runs=RUNS, seed=k)
        assert sum(found.values()) == RUNS
        assert_follows(found, expected)


@pytest.mark.parametrize("name", SETTINGS)
def test_next_tokens_have_exactly_the_targets_probabilities(experiment, name):
    target, draft, sampling = case(name, V=3)
    expected = enumerate_target(target.logits_of, sampling)
    assert sum(expected.values()) == pytest.approx(1)
    for k in (2, 4):
        assert largest_difference(experiment.run(target, draft, sampling, k), expected) < 1e-12


@pytest.mark.parametrize("V_draft", [3, 4, 6])
@pytest.mark.parametrize("name", ["plain", "mix 1", "mix 2", "frequency"])
def test_drafts_with_fewer_or_more_rows_stay_exact(experiment, V_draft, name):
    sampling = SamplingConfig(**SETTINGS[name])
    target, draft = stand_in_pair(seed=7, V_draft=V_draft)
    found = experiment.run(target, draft, sampling, 3, runs=RUNS)
    assert_follows(found, enumerate_target(target.logits_of, sampling))
    accepted = {token for _, steps in experiment.steps for token, from_draft in steps if from_draft}
    assert accepted and max(accepted) < min(V_draft, 4)


@pytest.mark.parametrize("name", ["plain", "defaults", "repetition", "mix 1", "mix 2"])
def test_ngram_drafts_stay_exact(experiment, name):
    sampling = SamplingConfig(**SETTINGS[name])
    target, _ = stand_in_pair(seed=8)
    expected = enumerate_target(target.logits_of, sampling)
    for k in (1, 2, 3, 5):
        found = experiment.run(
            target, None, sampling, k, drafter=lambda draft, V, context, sampling, config: PromptLookupDrafter(V, 2)
        )
        assert largest_difference(found, expected) < 1e-12
    assert any(from_draft for _, steps in experiment.steps for _, from_draft in steps)


@pytest.mark.parametrize("name", ["plain", "mix 1"])
def test_auto_stays_exact(experiment, monkeypatch, name):
    # A clock that gives each path the same times, or the paths could not be followed twice.
    sampling = SamplingConfig(**SETTINGS[name])
    target, draft = stand_in_pair(seed=9, V=3)
    monkeypatch.setattr(AdaptiveDraftLength, "record", lambda *_: None)
    monkeypatch.setattr(AdaptiveDraftLength, "choose", lambda self: next(self.lengths))
    expected = enumerate_target(target.logits_of, sampling)
    for lengths in itertools.permutations(range(3)):
        monkeypatch.setattr(AdaptiveDraftLength, "__init__", lambda self, x=lengths: setattr(self, "lengths", iter(x)))
        found = experiment.run(target, draft, sampling, "auto")
        assert largest_difference(found, expected) < 1e-12


@pytest.mark.parametrize("name", ["plain", "mix 1"])
def test_tiny_models_against_the_float64_reference(experiment, name):
    sampling = SamplingConfig(**SETTINGS[name])
    config = tiny_config(vocab_size=4, n_positions=16)
    target_params, draft_params = tiny_params(config, seed=3), tiny_params(config, seed=4, std=0.3)
    target, draft = (GPT2(GPT2Config.from_dict(config), params) for params in (target_params, draft_params))
    stand_ins = [Lean(lambda ids, m=model: m.forward([ids])[0], 4) for model in (target, draft)]
    expected = enumerate_target(
        lambda ids: reference_logits(config, target_params, ids)[-1].astype(np.float32), sampling
    )
    for k in (2,):
        assert_follows(experiment.run(*stand_ins, sampling, k, runs=RUNS, seed=k), expected)


# ---- the same tests must notice faults -------------------------------------------------------------------------------


def resample_from_p(token, p, q, rng):
    if rng.random() * q[token] < p[token]:
        return token, True
    return rng.draw(p), False


def always_accept(token, p, q, rng):
    return token, True


class ArgmaxDrafter(ModelDrafter):
    """Proposes the most probable token and passes off its softmax as the distribution it was drawn from."""

    def propose(self, row, k):
        honest_draw = speculative.draw
        speculative.draw = lambda q, rng: int(q.argmax())
        try:
            return super().propose(row, k)
        finally:
            speculative.draw = honest_draw


class SharpDrafter(ModelDrafter):
    """Draws at one temperature and reports the distribution of another."""

    def propose(self, row, k):
        tokens, distributions = super().propose(row, k)
        return tokens, [q**2 / (q**2).sum() for q in distributions]


def forget_drafted_tokens(monkeypatch):
    """The target's distributions at all places get the history that the round began with."""
    state = SimpleNamespace(drafting=False, n_ids=0)
    honest_propose, honest_probs = ModelDrafter.propose, speculative.probs

    def propose(self, row, k):
        state.drafting, state.n_ids = True, len(row.ids)
        result = honest_propose(self, row, k)
        state.drafting = False
        return result

    def stale_probs(logits, history, sampling):
        ids = history.ids if state.drafting else history.ids[: state.n_ids]
        return honest_probs(logits, History(ids, history.n_prompt), sampling)

    monkeypatch.setattr(ModelDrafter, "propose", propose)
    monkeypatch.setattr(speculative, "probs", stale_probs)


FAULTS = {
    "resampling from p": dict(verify=resample_from_p),
    "always accepting": dict(verify=always_accept),
    "argmax drafts": dict(drafter=ArgmaxDrafter),
    "another temperature": dict(drafter=SharpDrafter),
    "stale history": dict(patch=forget_drafted_tokens),
}


@pytest.mark.parametrize("name", ["frequency", "mix 2"])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(experiment, monkeypatch, fault, name):
    """X02: a draft that takes its best token but is scored by its softmax."""
    target, draft, sampling = case(name, V=4)  # as in the test that they have to fail
    expected = enumerate_target(target.logits_of, sampling)
    parts = FAULTS[fault]
    if "verify" in parts:
        monkeypatch.setattr(speculative, "verify", parts["verify"])
    if "patch" in parts:
        parts["patch"](monkeypatch)
    for k in (1, 3):
        statistic, bound = chi_square(
            experiment.run(target, draft, sampling, k, runs=RUNS, seed=k, drafter=parts.get("drafter")), expected
        )
        assert statistic > bound


# ---- worked by hand: p = [.3, .5, .2], q = [.6, .2, .2] --------------------------------------------------------------

P, Q = np.array([0.3, 0.5, 0.2]), np.array([0.6, 0.2, 0.2])


def n_examined(steps, k):
    """How many drafts the target looked at: every token comes from one, but those that follow k accepted ones."""
    examined = in_round = 0
    for _, from_draft in steps:
        examined += in_round < k
        in_round = in_round + 1 if from_draft else 0
    return examined


@pytest.mark.parametrize("k", range(1, 6))
def test_worked_example(experiment, k):
    """X01: after a rejection, a draw from p instead of the residual."""
    target, draft = constant(P, Lean), constant(Q, Lean)
    found = experiment.run(target, draft, SamplingConfig(**OFF), k)
    for tokens in itertools.product(range(3), repeat=N_TOKENS):
        assert found[tokens] == pytest.approx(math.prod(P[list(tokens)]), rel=1e-6)
    accepted = sum(share * sum(from_draft for _, from_draft in steps) for share, steps in experiment.steps)
    examined = sum(share * n_examined(steps, k) for share, steps in experiment.steps)
    assert accepted / examined == pytest.approx(np.minimum(P, Q).sum(), rel=1e-6)  # 0.7


def test_worked_example_faulty(experiment, monkeypatch):
    """X01: the fault gives other frequencies, which the test sees."""
    # The figures that faults are known to give: resampling from p, and greedy drafts scored with their softmax.
    target, draft = constant(P, Lean), constant(Q, Lean)

    def first_token(**kwargs):
        shares = np.zeros(3)
        for tokens, share in experiment.run(target, draft, SamplingConfig(**OFF), 2, **kwargs).items():
            shares[tokens[0]] += share
        return shares

    assert first_token() == pytest.approx(P, abs=1e-6)
    assert first_token(drafter=ArgmaxDrafter) == pytest.approx([0.5, 0.5, 0.0], abs=1e-6)
    monkeypatch.setattr(speculative, "verify", resample_from_p)
    assert first_token() == pytest.approx([0.39, 0.35, 0.26], abs=1e-6)


def test_verify_with_a_real_generator():
    rng = np.random.default_rng(5)
    n, counts, n_accepted = 40_000, Counter(), 0
    for _ in range(n):
        token, accepted = verify(draw(Q, rng), P, Q, rng)
        counts[token] += 1
        n_accepted += accepted
    assert_follows(counts, dict(enumerate(P)))
    assert_follows(Counter({True: n_accepted, False: n - n_accepted}), {True: 0.7, False: 0.3})


class Given:
    """A generator whose uniforms are given, and that has no others."""

    def __init__(self, *values):
        self.values = list(values)

    def random(self):
        return self.values.pop(0)


def test_verify_takes_no_uniform_for_what_is_certain():
    one, other = np.array([1.0, 0, 0]), np.array([0, 1.0, 0])
    assert verify(0, one, one, Given()) == (0, True)
    assert verify(1, one, other, Given()) == (0, False)  # greedy: neither the decision nor the replacement is open
    assert verify(1, P, Q, Given()) == (1, True)  # p > q
    assert verify(0, P, Q, Given(0.499)) == (0, True)
    assert verify(0, P, Q, Given(0.501)) == (1, False)  # max(p - q, 0) leaves one token
    assert verify(0, np.array([0, 0.5, 0.5]), Q, Given(0.7)) == (2, False)  # p = 0: only the replacement is drawn


def test_verify_where_p_and_q_differ_by_rounding_alone():
    # The token is rejected by a hair, and max(p - q, 0) leaves nothing to replace it by: then p is drawn from.
    p, q, almost_one = np.array([0.5, 0.5]), np.array([0.5 + 2**-51, 0.5]), 1 - 2**-53
    assert q[0] > p[0] and almost_one * q[0] > p[0]
    assert verify(0, p, q, Given(almost_one, 0.25)) == (0, False)
    assert verify(0, p, q, Given(almost_one, 0.75)) == (1, False)


@given(st.integers(2, 6), st.integers(0, 2**32 - 1))
@settings(deadline=None, derandomize=True, database=None, max_examples=200)
def test_verify_gives_p_for_any_pair(V, seed):
    # By Branches on verify alone: sum over drafts x of q(x) * P(outcome | x) must be p.
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(V, 0.3)), rng.dirichlet(np.full(V, 0.3))
    p[rng.random(V) < 0.3] = 0
    p = p / p.sum() if p.sum() else np.eye(V)[0]
    q[rng.random(V) < 0.3] = 0
    q = q / q.sum() if q.sum() else np.eye(V)[-1]
    branches = Branches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculative, "draw", lambda p, rng: rng.draw(p))
        found = branches.outcomes(1.0, lambda: verify(branches.choose(q), p, q, branches))
    accepted = sum(share for (_, was_accepted), share in found.items() if was_accepted)
    assert accepted == pytest.approx(np.minimum(p, q).sum())
    for token in range(V):
        assert found[token, True] + found[token, False] == pytest.approx(p[token], abs=1e-12)


# ---- runs of generate, with nothing replaced ------------------------------------------------------------------------


def generate_one(model, tokenizer, prompt, **options):
    (completion,) = generate(model, tokenizer, [prompt] if isinstance(prompt, list) else prompt, **options)
    return completion


@pytest.mark.parametrize("name", ["plain", "mix"])
def test_transitions_in_long_texts(name):
    # A chain: logits depend on the last id alone. Given how often each id occurs, the ids after it are multinomial.
    options = {"plain": OFF, "mix": dict(temperature=1.2, top_k=4, top_p=0.95)}[name]
    V, letters = 5, Letters(5)
    table, noise = np.random.default_rng(0).normal(0, 1, (2, V, V)).astype(np.float32)
    target = StandIn(lambda ids: table[ids[-1]], V)
    draft = StandIn(lambda ids: table[ids[-1]] + noise[ids[-1]], V)
    counts = Counter()
    for k, seed in itertools.product((1, 2, 4), range(5)):
        drafter = dict(draft_model=(draft, letters), num_draft_tokens=k)
        done = generate_one(target, letters, [0], seed=seed, max_tokens=140, **drafter, **options)
        counts.update(itertools.pairwise([0, *done.token_ids]))
    assert counts.total() == 2_100
    statistic = freedom = 0
    for token in range(V):
        p = probs(table[token], History([0], 1), SamplingConfig(**options))
        observed = np.array([counts[token, following] for following in range(V)])
        assert not observed[p == 0].any()
        expected = p[p > 0] * observed.sum()
        assert expected.min() >= 5
        statistic += ((observed[p > 0] - expected) ** 2 / expected).sum()
        freedom += len(expected) - 1
    assert statistic < chi_square_bound(freedom)


# ---------------------------------------------------------------------------------------------------------------------
# Greedy


@pytest.fixture(scope="module")
def pair(fairytale, distilfairytale):
    """The bundled models: (target, tokenizer), (draft, tokenizer)."""
    return fairytale, distilfairytale


def is_near_tie(model, prompt, ours, theirs):
    """Whether two greedy texts part at a place where the target finds the two tokens equally good, but for rounding.

    The logits are those of the float64 reference.
    """
    n = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    config = {name: getattr(model.config, name) for name in ("n_head", "layer_norm_epsilon", "activation_function")}
    logits = reference_logits(config, as_stored(model), [*prompt, *ours[:n]])[-1]
    return (
        abs(logits[ours[n]] - logits[theirs[n]]) < 1e-4
        and max(logits[ours[n]], logits[theirs[n]]) > logits.max() - 1e-4
    )


def worst(model):
    """A draft that takes the target's least probable token."""
    return StandIn(lambda ids: -model.forward([ids])[0], model.config.vocab_size, model.config.n_positions)


STORY = (
    "Once upon a time, in a little house at the edge of the forest, there lived an old woman and her cat. Every morning"
    ' the cat went out to catch a mouse, and every evening it came back with nothing but dew on its paws.\n\n"You are'
    ' too kind to the mice," said the old woman. "I am not kind," said the cat. "I am slow." One day a young king rode'
    " by, and his horse was tired. He asked for water, and she gave him milk. He asked for bread, and she gave him cake"
    ". Then he took off his crown and put it on the table, and said that whoever could tell him what he had lost should"
    " have it. The old woman thought, and the cat thought, and the mouse under the floor thought as well."
)


@pytest.mark.slow
def test_greedy_equals_plain_decoding_on_the_bundled_pair(pair):
    (model, tokenizer), draft = pair
    ids = tokenizer.encode(STORY)
    prompts = [ids[: 1 + 15 * n] for n in range(4)] + [ids[14 * n : 14 * n + 5] for n in range(4)]
    noise = tiny(1, vocab_size=model.config.vocab_size, n_positions=512)
    drafters = {
        "distilled": dict(draft_model=draft),
        "wrong": dict(draft_model=(constant(np.eye(4096)[17] + 1e-9), tokenizer)),
        "random": dict(draft_model=(noise, tokenizer)),
        "itself": dict(draft_model=(model, tokenizer)),
        "n-gram": dict(prompt_lookup_num_tokens=3),
    }
    ties, accepted = 0, Counter()
    for n, prompt in enumerate(prompts):
        options = dict(temperature=0, max_tokens=10, ignore_eos=n % 2 == 0)
        plain = generate_one(model, tokenizer, prompt, **options)
        for name, drafter in drafters.items():
            k = dict(num_draft_tokens=1 + n % 5) if "draft_model" in drafter else {}
            done = generate_one(model, tokenizer, prompt, **options, **drafter, **k)
            accepted[name] += done.speculation.accepted
            if done.token_ids != plain.token_ids:
                assert is_near_tie(model, prompt, plain.token_ids, done.token_ids)
                ties += 1
            else:
                assert (done.text, done.finish_reason) == (plain.text, plain.finish_reason)
    assert ties <= 1  # of 40 runs of 10 tokens
    assert accepted["wrong"] <= 2 and accepted["random"] <= 5
    assert accepted["distilled"] > 20 and accepted["n-gram"] > 0
    assert accepted["itself"] > 40


def test_greedy_equals_plain_decoding_on_tiny_models():
    """X02: greedy speculation against greedy decoding."""
    letters = Letters(61)
    rng = np.random.default_rng(0)
    ties, accepted = 0, Counter()
    for n in range(100):
        model = tiny(n // 10)
        prompt = rng.integers(0, 61, rng.integers(1, 20)).tolist()
        options = dict(temperature=0, max_tokens=10, repetition_penalty=1 + n % 2 / 2, no_repeat_ngram_size=n % 3)
        plain = generate_one(model, letters, prompt, **options)
        name, draft = {
            0: ("itself", model),
            1: ("wrong", StandIn(lambda ids, m=model: -m.forward([ids])[0], 61, model.config.n_positions)),
            2: ("random", tiny(1000 + n)),
            3: ("noisy", noisy(model, 0.02, n)),
            4: ("n-gram", None),
        }[n % 5]
        k = 1 + n // 5 % 6
        drafter = dict(prompt_lookup_num_tokens=k)
        if draft is not None:
            drafter = dict(draft_model=(draft, letters), num_draft_tokens=k)
        done = generate_one(model, letters, prompt, **options, **drafter)
        accepted[name] += done.speculation.accepted
        if done.token_ids != plain.token_ids:
            assert options["repetition_penalty"] == 1  # else the reference does not know
            assert is_near_tie(model, prompt, plain.token_ids, done.token_ids)
            ties += 1
    assert ties <= 1
    assert accepted["itself"] > 100 and accepted["noisy"] > 25 and accepted["wrong"] == 0


def test_logprobs_are_those_of_plain_decoding():
    model, letters = tiny(3), Letters(61)
    options = dict(temperature=0, max_tokens=20, logprobs=3)
    plain = generate_one(model, letters, [5, 6, 7], **options)
    for draft in (model, tiny(4)):
        done = generate_one(model, letters, [5, 6, 7], draft_model=(draft, letters), **options)
        assert [entry.token for entry in done.logprobs] == plain.token_ids
        for ours, theirs in zip(done.logprobs, plain.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [token for token, _, _ in ours.top] == [token for token, _, _ in theirs.top]


# ---------------------------------------------------------------------------------------------------------------------
# Caches


ROLLBACK_OPTIONS = {
    "greedy": dict(temperature=0),
    "sampled": OFF,
    "filters": dict(temperature=0.9, top_k=20, top_p=0.9),
    "penalties": OFF | dict(repetition_penalty=1.4, frequency_penalty=0.5, no_repeat_ngram_size=3),
    "processor": OFF | dict(logits_processors=(not_the_last_one,)),
    "window": OFF | dict(window=5),
}


@pytest.mark.parametrize("options", ROLLBACK_OPTIONS.values(), ids=ROLLBACK_OPTIONS)
@pytest.mark.parametrize("k", [1, 2, 4])
def test_a_draft_that_is_the_target_is_accepted_in_every_round(k, options):
    """X04: only the rate of acceptance tells that a cache is wrong."""
    model, letters = tiny(5, n_positions=80), Letters(61)
    options = dict(max_tokens=51, seed=3, num_draft_tokens=k) | options
    steps = list(stream(model, letters, [[3, 1, 4, 1]], draft_model=(model, letters), **options))
    n_full = 51 // (k + 1) * (k + 1)
    assert [step.from_draft for step in steps[:n_full]] == ([True] * k + [False]) * (n_full // (k + 1))
    stats = steps[-1].completion.speculation
    assert stats.accepted == stats.drafted == sum(step.from_draft for step in steps)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4])
def test_forced_acceptance(n):
    """X04: caches after 0, 1 ... all drafts accepted."""
    # The target's logits, and so its text, depend on every id that its cache holds.
    prompt, k, max_tokens, letters = [1, 2, 3], 4, 40, Letters(8)
    model = oracle(8, 1)
    right = prompt + generate_one(model, letters, prompt, temperature=0, max_tokens=max_tokens + k).token_ids

    def proposal(ids):
        """In each round n tokens of the text, then another; those that follow a wrong one do not matter."""
        wrong = n < k and (len(ids) - len(prompt)) % (n + 1) == n
        # The draft's own cache: the text, and of this round's proposals at most those after the first n.
        n_right = next((i for i, (a, b) in enumerate(zip(ids, right, strict=False)) if a != b), len(ids))
        assert len(ids) - n_right <= max(k - 1 - n, 0)
        return np.eye(8, dtype=np.float32)[(right[len(ids)] + wrong) % 8]

    draft = StandIn(proposal, 8)
    options = dict(temperature=0, max_tokens=max_tokens)
    steps = list(stream(model, letters, [prompt], draft_model=(draft, letters), num_draft_tokens=k, **options))
    assert [step.token for step in steps] == right[len(prompt) : len(prompt) + max_tokens]
    assert [step.from_draft for step in steps[: 5 * (n + 1)]] == ([True] * n + [False]) * 5
    # A draft is fed each token once, also the last of a round that was all accepted, which it has not yet read.
    n_read = [T for _, T in draft.passes]
    assert n_read[0] == len(prompt) - 1 and set(n_read[1:]) <= ({1, 2} if n == k else {1})
    assert n < k or sum(n_read) <= len(prompt) + max_tokens
    stats = steps[-1].completion.speculation
    assert stats.target_passes + stats.accepted == max_tokens


def test_bundled_pair_accepts_itself(pair):
    (model, tokenizer), _ = pair
    prompt = tokenizer.encode("The king said to his daughter")
    for options in (dict(temperature=0), dict(temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=2)):
        options |= dict(max_tokens=25, ignore_eos=True)
        done = generate_one(model, tokenizer, prompt, draft_model=(model, tokenizer), **options)
        assert done.speculation.accepted == done.speculation.drafted == 20
        assert done.speculation.target_passes == 5


# ---------------------------------------------------------------------------------------------------------------------
# Where a text ends


def same_outcome(done, plain):
    return (done.token_ids, done.text, done.finish_reason, done.stop_sequence) == (
        plain.token_ids,
        plain.text,
        plain.finish_reason,
        plain.stop_sequence,
    )


def half_right(model):
    """A draft that is right at two places of three."""
    V = model.config.vocab_size
    return StandIn(lambda ids: model.logits_of(ids) * (1 if len(ids) % 3 else -1), V)


def check_ends(model, options, drafts=None):
    """Speculation, with right and with half right drafts, ends as plain decoding does; returns plain decoding's end."""
    letters = Letters(model.config.vocab_size)
    plain = generate_one(model, letters, [0, 1], temperature=0, **options)
    for draft in drafts or (model, half_right(model)):
        for k in (1, 3, 8):
            steps = list(
                stream(
                    model, letters, [[0, 1]], draft_model=(draft, letters), num_draft_tokens=k, temperature=0, **options
                )
            )
            done = steps[-1].completion
            assert same_outcome(done, plain)
            assert "".join(step.text for step in steps) == done.text
            assert [step.token for step in steps if step.token is not None] == done.token_ids
            assert [bool(step.finish_reason) for step in steps] == [False] * (len(steps) - 1) + [True]
            if done.token_ids:
                stats = done.speculation
                assert stats.accepted == sum(step.from_draft for step in steps)
                # Each pass gives one token more than it accepts, unless the text ends with an accepted one.
                assert stats.accepted + stats.target_passes == len(done.token_ids) + steps[-1].from_draft
    return plain


def test_max_tokens_inside_a_block():
    """S12: no or few new tokens with speculation."""
    for max_tokens in (0, 1, 2, 3, 4, 5, 6, 7, 10):
        plain = check_ends(oracle(8, 1), dict(max_tokens=max_tokens))
        assert len(plain.token_ids) == max_tokens and plain.finish_reason == "length"


def test_end_of_text_inside_a_block():
    reasons = Counter()
    for eos in range(8):
        plain = check_ends(oracle(8, 1, eos), dict(max_tokens=12))
        reasons[plain.finish_reason] += 1
        assert (plain.token_ids[-1] == eos) == (plain.finish_reason == "eos")
    assert reasons["eos"] >= 5
    plain = check_ends(oracle(8, 1, [2, 3]), dict(max_tokens=12))
    assert plain.finish_reason == "eos"


def test_end_of_text_is_ignored_or_put_off():
    for options in (dict(ignore_eos=True), dict(min_tokens=6)):
        for eos in range(8):
            plain = check_ends(oracle(8, 1, eos), dict(max_tokens=12) | options)
            assert eos not in plain.token_ids[:5]


def test_stop_string_inside_a_block():
    text = generate_one(oracle(8, 1), Letters(8), [0, 1], temperature=0, max_tokens=12).text
    stops = {text[start : start + length] for start in range(10) for length in (1, 2, 3)}
    for stop in sorted(stops):
        plain = check_ends(oracle(8, 1), dict(max_tokens=12, stop=stop))
        assert plain.finish_reason == "stop" and plain.text == text[: text.index(stop)]
    # Only the beginning of a stop string: what was held back comes out at the end.
    plain = check_ends(oracle(8, 1), dict(max_tokens=12, stop=text[-3:] + "zz"))
    assert plain.text == text


def test_nothing_is_drafted_beyond_budget_and_contexts():
    letters, n_target = Letters(61), 16
    for n_draft, n_prompt, max_tokens, k in itertools.product((8, 16, 24), (1, 7, 16), (1, 2, 5, 40), (1, 4, 30)):
        model, draft = tiny(8, n_positions=n_target), tiny(8, n_positions=n_draft)
        prompt, drafted = [2 + n for n in range(n_prompt)], Drafted()
        options = dict(temperature=0, max_tokens=max_tokens)
        plain = generate_one(model, letters, prompt, **options)
        options |= dict(draft_model=(draft, letters), num_draft_tokens=k, hooks=drafted)
        n_generated = n_seen = 0
        for step in stream(model, letters, [prompt], **options):
            if len(drafted.rounds) > n_seen:  # the first token of a round
                (proposed,), n_seen = drafted.rounds[n_seen:], len(drafted.rounds)
                n_context = n_prompt + n_generated
                # A round may be all accepted, and then gives one token more. The draft is fed the context and all but
                # the last of what it proposes.
                asked = min(k, max_tokens - n_generated - 1, n_target - n_context)
                assert len(proposed) == max(min(asked, n_draft - n_context + 1), 0)
            n_generated += step.token is not None
        done = step.completion
        assert same_outcome(done, plain)
        assert done.speculation.drafted == sum(map(len, drafted.rounds))
        assert plain.finish_reason == ("context" if n_prompt + max_tokens > n_target + 1 else "length")


def test_a_prompt_that_fills_the_context():
    model, letters = tiny(9, n_positions=12), Letters(61)
    for options in (dict(draft_model=(model, letters)), dict(prompt_lookup_num_tokens=3)):
        done = generate_one(model, letters, [1, 2] * 6, temperature=0, max_tokens=9, **options)
        assert (len(done.token_ids), done.finish_reason) == (1, "context")
        assert done.token_ids == [int(model.forward([[1, 2] * 6])[0].argmax())]


def test_a_single_token_costs_the_draft_nothing():
    model, draft, letters = tiny(8), tiny(9), Letters(61)
    draft.forward = None  # a call would raise TypeError
    done = generate_one(model, letters, [1, 2, 3], draft_model=(draft, letters), temperature=0, max_tokens=1)
    assert done.token_ids == [int(model.forward([[1, 2, 3]])[0].argmax())]


def test_a_draft_with_a_short_context_still_helps_while_it_lasts():
    """X07: a draft with a shorter context."""
    model, letters = tiny(8, n_positions=40), Letters(61)
    short = GPT2(
        GPT2Config.from_dict(tiny_config(vocab_size=61, n_positions=16)),
        {**as_stored(model), "wpe.weight": model.params["wpe.weight"][:16]},
    )
    steps = list(stream(model, letters, [[1, 2, 3]], draft_model=(short, letters), temperature=0, max_tokens=30))
    # The context grows from 3 by 5 to 8 and 13; then 4 more can be drafted (positions up to 15), and none after.
    assert [step.from_draft for step in steps] == ([True] * 4 + [False]) * 3 + [False] * 15


@pytest.mark.parametrize("window", [1, 3, 20, 400])
def test_window_together_with_speculation(window):
    letters = Letters(61)
    model, other = tiny(10, n_positions=200), tiny(11, n_positions=200)
    prompt = [n % 61 for n in range(90)]  # the ring of 63 slots more than the window wraps
    options = dict(temperature=0, max_tokens=50, window=window)
    plain = generate_one(model, letters, prompt, **options)
    for drafter in (
        dict(draft_model=(model, letters)),
        dict(draft_model=(other, letters), num_draft_tokens=9),
        dict(prompt_lookup_num_tokens=6),
        dict(draft_model=(model, letters), num_draft_tokens=66),  # more than the ring takes back
    ):
        done = generate_one(model, letters, prompt, **options, **drafter)
        assert same_outcome(done, plain)
        if drafter.get("draft_model", (None,))[0] is model:
            assert done.speculation.accepted == done.speculation.drafted > 0


@pytest.mark.parametrize("window, keep", [(None, 0), (None, 7), (6, 7)])
@pytest.mark.parametrize("k", [1, 4, 15])
def test_context_shift_together_with_speculation(k, window, keep):
    letters = Letters(61)
    model = tiny(12, n_positions=16)
    for n_prompt in (5, 16):
        prompt = [12 + n for n in range(n_prompt)]
        options = dict(temperature=0, max_tokens=30, context_shift=True, keep=keep, window=window)
        options |= dict(repetition_penalty=1.2, frequency_penalty=0.1) if n_prompt == 5 else {}
        plain = generate_one(model, letters, prompt, **options)
        for drafter in (
            dict(draft_model=(model, letters), num_draft_tokens=k),
            dict(draft_model=(tiny(12, n_positions=11), letters), num_draft_tokens=k),
            dict(prompt_lookup_num_tokens=k),
        ):
            done = generate_one(model, letters, prompt, **options, **drafter)
            assert len(done.token_ids) == 30
            assert same_outcome(done, plain)
            if drafter.get("draft_model", (None,))[0] is model:  # also after a shift, with penalties on dropped tokens
                assert done.speculation.accepted == done.speculation.drafted > 0


@pytest.mark.parametrize("n_positions", [2, 3, 4])
def test_shifts_that_drop_one_or_two_tokens(n_positions):
    letters, model = Letters(61), tiny(12, n_positions=n_positions)
    for keep in {0, (n_positions - 1) // 2}:
        options = dict(temperature=0, max_tokens=40, context_shift=True, keep=keep, frequency_penalty=0.5)  # no loops
        plain = generate_one(model, letters, [5], **options)
        for k in (1, 2, 3):
            done = generate_one(model, letters, [5], draft_model=(model, letters), num_draft_tokens=k, **options)
            assert same_outcome(done, plain)


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


def test_swapped_entries_are_refused(byte_vocab, tmp_path):
    """X07: ids that mean other text in the draft."""

    def swap(vocab):
        vocab["a"], vocab["q"] = vocab["q"], vocab["a"]
        return min(vocab["a"], vocab["q"])

    first = with_vocab(tmp_path / "swapped", byte_vocab, swap)
    ours, theirs = Tokenizer.from_folder(byte_vocab), Tokenizer.from_folder(tmp_path / "swapped")
    model = tiny(0, vocab_size=257)
    passes = []
    model.forward = lambda *args, **kwargs: passes.append(args)
    for tokenizer, other in ((ours, theirs), (theirs, ours)):
        with pytest.raises(ValueError, match=rf"vocabular.*\btoken {first}\b.*b'[aq]'.*b'[aq]'"):
            stream(model, tokenizer, "abc", draft_model=(model, other))
    assert not passes  # refused before anything is computed


def test_bundled_pair_has_one_vocabulary(pair):
    (model, tokenizer), draft = pair
    assert generate_one(model, tokenizer, "A", draft_model=draft, max_tokens=2).speculation is not None


def test_an_unrelated_vocabulary_is_refused(pair, byte_vocab):
    (model, tokenizer), _ = pair
    other = (tiny(0, vocab_size=257), Tokenizer.from_folder(byte_vocab, 257))
    with pytest.raises(ValueError, match="vocabulary"):
        generate_one(model, tokenizer, "A", draft_model=other)


@pytest.fixture(scope="module")
def sizes(byte_vocab, tmp_path_factory):
    """(model, tokenizer) by name: 257 ids, one added token more, 257 padded to 300, all with the same bytes."""
    folder = tmp_path_factory.mktemp("added") / "vocab"
    with_vocab(folder, byte_vocab, lambda vocab: vocab.update({"<|more|>": 257}))
    (folder / "special_tokens_map.json").write_text('{"additional_special_tokens": ["<|more|>"]}', encoding="utf-8")
    widest = tiny_params(tiny_config(vocab_size=300, n_positions=48), seed=20)

    def model(V, tokenizer):
        params = widest | {"wte.weight": widest["wte.weight"][:V]}
        config = tiny_config(vocab_size=V, n_positions=48, eos_token_id=None)
        return GPT2(GPT2Config.from_dict(config), params), tokenizer

    return {
        "257": model(257, Tokenizer.from_folder(byte_vocab, 257)),
        "258": model(258, Tokenizer.from_folder(folder, 258)),
        "300": model(300, Tokenizer.from_folder(byte_vocab, 300)),
    }


@pytest.mark.parametrize(("target", "draft"), [*itertools.permutations(["257", "258", "300"], 2)])
def test_vocabularies_of_other_sizes(sizes, target, draft):
    """X07: added or padded tokens in one of the two."""
    (model, tokenizer), (draft_model, _) = sizes[target], sizes[draft]
    drafted = Drafted()
    for seed in range(3):
        greedy = dict(temperature=0, max_tokens=20, no_repeat_ngram_size=2)
        plain = generate_one(model, tokenizer, f"prompt {seed}", **greedy)
        done = generate_one(model, tokenizer, f"prompt {seed}", draft_model=sizes[draft], **greedy)
        assert done.token_ids == plain.token_ids
        options = dict(seed=seed, max_tokens=20, hooks=drafted)
        steps = stream(model, tokenizer, f"prompt {seed}", draft_model=sizes[draft], **options, **OFF)
        assert max(step.token for step in steps) < model.config.vocab_size
    assert 0 < max(itertools.chain(*drafted.rounds)) < min(model.config.vocab_size, draft_model.config.vocab_size)


@pytest.mark.parametrize("draft", ["257", "300"])
def test_ids_that_the_draft_lacks_in_prompt_and_text(sizes, draft):
    model, tokenizer = sizes["258"] if draft == "257" else sizes["300"]
    draft_model = sizes["257"]
    extra = model.config.vocab_size - 1
    for options in (dict(), dict(logit_bias={extra: 30.0}, max_tokens=6)):
        prompt = [70, extra, 71] if not options else [70, 71]
        plain = generate_one(model, tokenizer, prompt, temperature=0, **options)
        done = generate_one(model, tokenizer, prompt, temperature=0, draft_model=draft_model, **options)
        assert done.token_ids == plain.token_ids


def test_a_draft_for_which_every_token_is_ruled_out(sizes):
    # Only the token that the draft lacks is allowed: the draft has nothing to propose, the target goes on.
    model, tokenizer = sizes["258"]
    bias = dict.fromkeys(range(257), -math.inf)
    done = generate_one(model, tokenizer, [70, 71], draft_model=sizes["257"], logit_bias=bias, max_tokens=3)
    assert done.token_ids == [257] * 3


def test_a_draft_that_runs_out_of_tokens_ahead_of_the_target():
    # No token may come twice. The target ends after two; the draft would go on until it has used up all five.
    target = StandIn(lambda ids: np.eye(5, dtype=np.float32)[{0: 1, 1: 4}.get(ids[-1], 0)], 5, eos_token_id=4)
    draft = StandIn(lambda ids: np.eye(5, dtype=np.float32)[(ids[-1] + 1) % 5], 5)
    options = dict(temperature=0, no_repeat_ngram_size=1, max_tokens=12)
    plain = generate_one(target, Letters(5), [0], **options)
    assert (plain.token_ids, plain.finish_reason) == ([1, 4], "eos")
    for k in (1, 2, 3, 4, 5, 8):
        done = generate_one(target, Letters(5), [0], draft_model=(draft, Letters(5)), num_draft_tokens=k, **options)
        assert same_outcome(done, plain)


# ---------------------------------------------------------------------------------------------------------------------
# The n-gram drafter


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


def first_drafts(ids, k, longest):
    """What is proposed to follow a prompt."""
    drafted = Drafted()
    options = dict(prompt_lookup_num_tokens=k, max_matching_ngram_size=longest, max_tokens=k + 1)
    next(stream(constant(np.ones(10)), Letters(10), [ids], hooks=drafted, **options))
    return drafted.rounds[0]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(1, 6), st.integers(1, 5))
@settings(deadline=None, derandomize=True, database=None, max_examples=200)
def test_ngram_drafter_against_a_slow_definition(ids, k, longest):
    assert first_drafts(ids, k, longest) == slow_lookup(ids, k, longest)


def test_ngram_drafter_by_hand():
    assert first_drafts([1, 2, 3, 1, 2, 4, 1, 2], 5, 2) == [4, 1, 2]  # the latest occurrence, to the end of the text
    assert first_drafts([1, 2, 3, 9, 2, 4, 1, 2], 2, 2) == [3, 9]  # the longer match, though an earlier one
    assert first_drafts([1, 2, 3, 9, 2, 4, 1, 2], 2, 1) == [4, 1]
    assert first_drafts([5, 5, 5], 4, 3) == [5]  # a match may overlap the end
    assert first_drafts([1, 2, 3], 4, 3) == first_drafts([1], 4, 3) == []


def test_ngram_drafts_of_a_repeating_text_are_accepted():
    # A target that goes round in a circle of 5 ids.
    circle = StandIn(lambda ids: np.log(np.eye(5)[(ids[-1] + 1) % 5] * 0.9 + 0.02), 5)
    done = generate_one(
        circle, Letters(5), [0, 1, 2, 3, 4, 0], temperature=0, prompt_lookup_num_tokens=4, max_tokens=40
    )
    assert done.token_ids == [(1 + n) % 5 for n in range(40)]
    assert done.speculation.target_passes == 8 and done.speculation.accepted == 32


# ---------------------------------------------------------------------------------------------------------------------
# Seeds, counts, timings


@pytest.mark.parametrize(
    "drafter", [dict(num_draft_tokens=1), dict(num_draft_tokens=4), dict(prompt_lookup_num_tokens=3)]
)
def test_a_seed_repeats_a_text(drafter):
    model, letters = tiny(21), Letters(61)
    if "num_draft_tokens" in drafter:
        drafter = drafter | dict(draft_model=(tiny(22), letters))
    texts = [
        tuple(generate_one(model, letters, [1, 2, 1], seed=seed, max_tokens=20, **OFF, **drafter).token_ids)
        for seed in (1, 1, 2, 3)
    ]
    assert texts[0] == texts[1] and len(set(texts)) == 3


def test_counts_add_up():
    letters = Letters(8)
    for seed in range(20):
        logits_of, k = table_logits(8, seed), 1 + seed % 6
        target = StandIn(logits_of, 8, n_positions=60, eos_token_id=seed % 8)
        drafter = dict(draft_model=(StandIn(near(logits_of, 8, seed), 8), letters), num_draft_tokens=k)
        steps = list(stream(target, letters, [[1]], seed=seed, max_tokens=40, **drafter, **OFF))
        done = steps[-1].completion
        stats = done.speculation
        assert stats.accepted == sum(step.from_draft for step in steps)
        assert stats.accepted + stats.target_passes == len(done.token_ids) + steps[-1].from_draft
        assert stats.accepted <= stats.drafted <= k * stats.target_passes
        assert stats.draft_seconds > 0 and stats.target_seconds > 0
        assert done.timings.tokens == len(done.token_ids)


@pytest.mark.parametrize("prompt", [[5], [5, 6, 7]])
def test_timings_have_a_prompt_and_a_rest(prompt):
    model, letters = tiny(23), Letters(61)
    done = generate_one(model, letters, prompt, draft_model=(model, letters), max_tokens=20)
    assert done.timings.prompt_tokens == len(prompt)
    assert done.timings.prompt_seconds > 0 and done.timings.seconds > 0
    assert done.timings.cache_bytes == model.new_cache(1, len(prompt) + 20).nbytes
