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

import functools
import itertools
import json
import math
import warnings
from collections import Counter
from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minigen
from minigen import api, generate, stream
from minigen.command import main as cli
from minigen.engine import speculative
from minigen.engine.decode import Row, Stopwatch, feed
from minigen.engine.model import GPT2, GPT2Config
from minigen.engine.sampler import History, draw, probs
from minigen.engine.speculative import (
    AdaptiveDraftLength,
    ModelDrafter,
    PromptLookupDrafter,
    speculate,
    verify,
)
from minigen.options import DecodingConfig, SamplingConfig, SpeculationConfig
from minigen.text.tokenizer import Tokenizer
from tests.oracles.reference import reference_logits
from tests.oracles.tiny import as_stored, tiny_config, tiny_params, write_byte_vocab

OFF = dict(temperature=1.0, top_p=1.0)  # the model's own distribution
P_FALSE_ALARM = 1e-6  # of each chi-square test; the seeds are fixed, so a test that passes once always does
N_TOKENS = 3  # whose joint distribution is compared
RUNS = 200_000


# ---------------------------------------------------------------------------------------------------------------------
# Stand-ins for models and tokenizer


class IdCache:
    """A cache that keeps the ids themselves: a model that reads them sees at once if they are the wrong ones."""

    nbytes = 0

    def __init__(self, capacity):
        self.capacity = self.max_chunk = capacity
        self.ids = []

    @property
    def length(self):
        return [len(self.ids)]

    def truncate(self, length):
        assert 0 <= length <= len(self.ids)
        del self.ids[length:]

    def reorder(self, rows):
        assert list(rows) == [0]


class StandIn:
    """A model that looks its logits up: `logits_of` maps a tuple of ids to float32 [V]."""

    def __init__(self, logits_of, V, n_positions=100_000, eos_token_id=None):
        self.logits_of = functools.cache(logits_of)
        self.config = GPT2Config(
            vocab_size=V,
            n_positions=n_positions,
            n_embd=1,
            n_layer=1,
            n_head=1,
            bos_token_id=0,
            eos_token_id=eos_token_id,
        )

    def new_cache(self, batch=1, capacity=None, window=None):
        return IdCache(capacity)

    def forward(self, ids, cache, *, pad=None, last_only=True, attention_hook=None):
        (ids,) = ids
        cache.ids.extend(map(int, ids))
        assert len(cache.ids) <= cache.capacity
        if last_only:
            return self.logits_of(tuple(cache.ids))[None]
        n = len(cache.ids)
        return [[self.logits_of(tuple(cache.ids[:end])) for end in range(n - len(ids) + 1, n + 1)]]


class Letters:
    """The tokenizer of the stand-ins: token i is the i-th letter."""

    def __init__(self, n_vocab):
        self.n_vocab = n_vocab

    def token_bytes(self, token):
        return b"abcdefghijklmnop"[token : token + 1]

    def decode(self, ids):
        return b"".join(map(self.token_bytes, ids)).decode()

    def encode(self, text):
        return [ord(letter) - ord("a") for letter in text]


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


def constant_logits(p):
    with np.errstate(divide="ignore"):
        logits = np.log(np.asarray(p, float)).astype(np.float32)
    return lambda ids: logits


# ---------------------------------------------------------------------------------------------------------------------
# Chi-square


def chi_square_bound(df, p=P_FALSE_ALARM):
    """What a chi-square variable with df degrees of freedom exceeds with probability p (Wilson and Hilferty 1931)."""
    z = NormalDist().inv_cdf(1 - p)
    return df * (1 - 2 / (9 * df) + z * math.sqrt(2 / (9 * df))) ** 3


def chi_square(counts, expected):
    """(statistic, bound) of counts against expected probabilities, both by outcome.

    Cells in which fewer than 5 are expected are pooled, with the next larger one where that is still too few.
    """
    n = sum(counts.values())
    if any(expected.get(outcome, 0) == 0 for outcome in counts if counts[outcome]):
        return math.inf, 0.0  # what cannot happen has happened
    cells = sorted((n * p, counts[outcome]) for outcome, p in expected.items() if p > 0)
    while len(cells) > 1 and cells[0][0] < 5:
        (e0, c0), (e1, c1), *rest = cells
        cells = sorted([(e0 + e1, c0 + c1), *rest])
    if len(cells) == 1:
        return 0.0, 1.0
    return sum((c - e) ** 2 / e for e, c in cells), chi_square_bound(len(cells) - 1)


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


def check_runs(found, expected, runs=RUNS):
    statistic, bound = chi_square(found, expected)
    assert sum(found.values()) == runs
    assert statistic < bound


# ---------------------------------------------------------------------------------------------------------------------
# The machinery of these tests itself


def test_chi_square_bound():
    # Tables: the 1 % points for 10 and 100 degrees of freedom; and what 1e-6 is for 30, by incomplete gamma function.
    assert chi_square_bound(10, 0.01) == pytest.approx(23.209, rel=0.002)
    assert chi_square_bound(100, 0.01) == pytest.approx(135.807, rel=0.002)
    assert chi_square_bound(30) == pytest.approx(82.3, abs=0.5)


def test_chi_square_by_hand():
    statistic, bound = chi_square(Counter(a=60, b=40), dict(a=0.5, b=0.5))
    assert statistic == pytest.approx(4.0) and bound == chi_square_bound(1)
    # 2 and 4 expected: pooled to 6, of which 9 came.
    statistic, bound = chi_square(Counter(a=91, b=5, c=4), dict(a=0.94, b=0.04, c=0.02))
    assert statistic == pytest.approx(9 / 94 + 9 / 6) and bound == chi_square_bound(1)
    assert chi_square(Counter(a=99, x=1), dict(a=1.0))[0] == math.inf


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
    check_runs(counts, {"low": 0.25, "high": 0.25, 1: 0.5})


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


def stand_in_pair(seed, V=4, V_draft=None, spread=2.8):
    """A target and a draft that agrees with it in part."""
    target = StandIn(table_logits(V, seed, spread), V)
    V_draft = V_draft or V
    return target, StandIn(near(target.logits_of, V_draft, seed + 1000), V_draft)


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
    for k in (1, 2, 3, 5):  # 4 is in the next test
        check_runs(experiment.run(target, draft, sampling, k, runs=RUNS, seed=k), expected)


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
    check_runs(found, enumerate_target(target.logits_of, sampling))
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
    stand_ins = [StandIn(lambda ids, m=model: m.forward([ids])[0], 4) for model in (target, draft)]
    expected = enumerate_target(
        lambda ids: reference_logits(config, target_params, ids)[-1].astype(np.float32), sampling
    )
    for k in (1, 2):
        check_runs(experiment.run(*stand_ins, sampling, k, runs=RUNS, seed=k), expected)


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
    target, draft = StandIn(constant_logits(P), 3), StandIn(constant_logits(Q), 3)
    found = experiment.run(target, draft, SamplingConfig(**OFF), k)
    for tokens in itertools.product(range(3), repeat=N_TOKENS):
        assert found[tokens] == pytest.approx(math.prod(P[list(tokens)]), rel=1e-6)
    accepted = sum(share * sum(from_draft for _, from_draft in steps) for share, steps in experiment.steps)
    examined = sum(share * n_examined(steps, k) for share, steps in experiment.steps)
    assert accepted / examined == pytest.approx(np.minimum(P, Q).sum(), rel=1e-6)  # 0.7


def test_worked_example_faulty(experiment, monkeypatch):
    """X01: the fault gives other frequencies, which the test sees."""
    # The figures that faults are known to give: resampling from p, and greedy drafts scored with their softmax.
    target, draft = StandIn(constant_logits(P), 3), StandIn(constant_logits(Q), 3)

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
    check_runs(counts, dict(enumerate(P)), n)
    check_runs(Counter({True: n_accepted, False: n - n_accepted}), {True: 0.7, False: 0.3}, n)


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
    counts = np.zeros((V, V), int)
    for k in (1, 2, 4):
        for seed in range(2):
            done = generate_one(
                target,
                letters,
                [0],
                draft_model=(draft, letters),
                num_draft_tokens=k,
                seed=seed,
                max_tokens=700,
                **options,
            )
            np.add.at(counts, (np.array([0, *done.token_ids[:-1]]), np.array(done.token_ids)), 1)
    statistic = bound_df = 0
    for token in range(V):
        p = probs(table[token], History([0], 1), SamplingConfig(**options))
        assert not counts[token][p == 0].any()
        expected = p[p > 0] * counts[token].sum()
        assert expected.min() >= 5
        statistic += ((counts[token][p > 0] - expected) ** 2 / expected).sum()
        bound_df += len(expected) - 1
    assert counts.sum() == 4_200
    assert statistic < chi_square_bound(bound_df)


# ---------------------------------------------------------------------------------------------------------------------
# Greedy


@pytest.fixture(scope="module")
def pair():
    """The bundled models: (target, tokenizer), (draft, tokenizer)."""
    return minigen.load(), minigen.load("distilfairytale")


def tiny_model(seed, *, std=0.5, **overrides):
    config = tiny_config(**{"vocab_size": 61, "n_positions": 48, "eos_token_id": None, "bos_token_id": 0} | overrides)
    return GPT2(GPT2Config.from_dict(config), tiny_params(config, seed, std))


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


def test_greedy_equals_plain_decoding_on_the_bundled_pair(pair):
    (model, tokenizer), draft = pair
    ids = tokenizer.encode(STORY)
    prompts = [ids[: 1 + 9 * n] for n in range(6)] + [ids[14 * n : 14 * n + 5] for n in range(9)]
    noise = tiny_model(1, vocab_size=model.config.vocab_size, n_positions=512)
    drafters = {
        "distilled": dict(draft_model=draft),
        "wrong": dict(draft_model=(StandIn(constant_logits(np.eye(4096)[17] + 1e-9), 4096), tokenizer)),
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
    assert ties <= 2  # of 75 runs of 10 tokens
    assert accepted["wrong"] <= 2 and accepted["random"] <= 10
    assert accepted["distilled"] > 40 and accepted["n-gram"] > 0
    assert accepted["itself"] > 75


def test_greedy_equals_plain_decoding_on_tiny_models():
    """X02: greedy speculation against greedy decoding."""
    letters = Letters(61)
    rng = np.random.default_rng(0)
    ties, accepted = 0, Counter()
    for n in range(200):
        model = tiny_model(n // 20)
        prompt = rng.integers(0, 61, rng.integers(1, 20)).tolist()
        options = dict(temperature=0, max_tokens=10, repetition_penalty=1 + n % 2 / 2, no_repeat_ngram_size=n % 3)
        plain = generate_one(model, letters, prompt, **options)
        name, draft = {
            0: ("itself", model),
            1: ("wrong", worst(model)),
            2: ("random", tiny_model(1000 + n)),
            3: (
                "noisy",
                GPT2(
                    model.config,
                    {key: p + 0.02 * rng.standard_normal(p.shape, np.float32) for key, p in as_stored(model).items()},
                ),
            ),
            4: ("n-gram", None),
        }[n % 5]
        k = 1 + n // 5 % 6
        drafter = (
            dict(prompt_lookup_num_tokens=k)
            if draft is None
            else dict(draft_model=(draft, letters), num_draft_tokens=k)
        )
        done = generate_one(model, letters, prompt, **options, **drafter)
        accepted[name] += done.speculation.accepted
        if done.token_ids != plain.token_ids:
            assert options["repetition_penalty"] == 1  # else the reference does not know
            assert is_near_tie(model, prompt, plain.token_ids, done.token_ids)
            ties += 1
    assert ties <= 1
    assert accepted["itself"] > 200 and accepted["noisy"] > 50 and accepted["wrong"] == 0


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
    """The cache holds exactly ids, as a new cache that is given them at once does: slots, keys and values."""
    fresh = model.new_cache(1, cache.capacity, cache.window)
    if ids:
        feed(model, fresh, [ids])
    assert cache.length.tolist() == fresh.length.tolist() == [len(ids)]
    first_seen = 0 if cache.window is None else max(len(ids) - cache.window + 1, 0)  # by the next token
    assert cache.slot_pos.max(initial=-1) == len(ids) - 1
    positions = np.arange(first_seen, len(ids))
    slots = positions % cache.capacity
    assert cache.slot_pos[0, slots].tolist() == fresh.slot_pos[0, slots].tolist() == positions.tolist()
    for ours, theirs in zip(cache.keys + cache.values, fresh.keys + fresh.values, strict=True):
        np.testing.assert_allclose(ours[0][..., slots], theirs[0][..., slots], atol=1e-5, rtol=1e-5)


class Rounds:
    """Runs `speculate` and looks at both caches after each of its rounds."""

    def __init__(self, model, draft, prompt, k, *, drafter=ModelDrafter, **options):
        checked = api.check_options(options)
        self.model, self.draft, self.caches = model, draft, []
        new_cache = model.new_cache

        def recorded_new_cache(*args):
            self.caches.append(new_cache(*args))
            return self.caches[-1]

        self.fed = []  # the ids of each pass of the draft
        forward = draft.forward

        def recorded_forward(ids, cache, **kwargs):
            if cache is watched.cache:  # and not one for a comparison
                self.fed.append(np.ravel(ids).tolist())
            return forward(ids, cache, **kwargs)

        rounds = self

        class Watched(drafter):
            def propose(self, row, k):
                rounds.begin = (k, row.n_generated, len(row.context))
                tokens, distributions = super().propose(row, k)
                rounds.proposed = tokens
                return tokens, distributions

            def truncate(self, length):
                super().truncate(length)
                rounds.after(self.cache)

        self.row = Row(
            0, 0, prompt, model, Letters(model.config.vocab_size), checked.sampling, checked.decoding, Stopwatch()
        )
        self.results = []  # of each round: how many tokens were drafted, how many came out
        watched = Watched(draft, model.config.vocab_size, self.row.context, checked.sampling, checked.decoding)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "new_cache", recorded_new_cache)
            if draft is not model:
                patch.setattr(draft, "forward", recorded_forward)
            self.steps = list(speculate(model, self.row, watched, checked.sampling, checked.decoding, k, Stopwatch()))

    def after(self, draft_cache):
        context = self.row.context
        cache = self.caches[0]  # later ones are made for the comparison
        n_drafts, n_out = len(self.proposed), self.row.n_generated - self.begin[1]
        self.results.append((n_drafts, n_out))
        if len(context) < self.begin[2] + n_out:  # shifted
            assert cache.length[0] == draft_cache.length[0] == 0
            return
        assert_equals_cold_prefill(self.model, cache, context[:-1])
        if n_drafts:  # the draft has not seen its own last proposal
            assert_equals_cold_prefill(self.draft, draft_cache, context[:-2] if n_out > n_drafts else context[:-1])


CACHE_OPTIONS = {
    "greedy": dict(temperature=0),
    "sampled": OFF,
    "filters": dict(temperature=0.9, top_k=20, top_p=0.9),
    "penalties": OFF | dict(repetition_penalty=1.4, frequency_penalty=0.5, no_repeat_ngram_size=3),
    "processor": OFF | dict(logits_processors=(not_the_last_one,)),
    "window": OFF | dict(window=5),
}


@pytest.mark.parametrize("options", CACHE_OPTIONS.values(), ids=CACHE_OPTIONS)
@pytest.mark.parametrize("k", [1, 2, 4])
def test_a_draft_that_is_the_target_is_accepted_in_every_round(k, options):
    """X04: only the rate of acceptance tells that a cache is wrong."""
    model = tiny_model(5, n_positions=80)
    rounds = Rounds(model, model, [3, 1, 4, 1], k, max_tokens=51, seed=3, **options)
    assert len(rounds.results) >= 51 // (k + 1) - 1
    assert all(n_out == n_drafts + 1 for n_drafts, n_out in rounds.results)
    assert all(n_drafts == k for n_drafts, _ in rounds.results[:-1])
    pattern = ([True] * k + [False]) * 51
    n_full = 51 // (k + 1) * (k + 1)
    assert [step.from_draft for step in rounds.steps[:n_full]] == pattern[:n_full]
    stats = rounds.row.speculation
    assert stats.accepted == stats.drafted == sum(step.from_draft for step in rounds.steps)


@pytest.mark.parametrize("options", CACHE_OPTIONS.values(), ids=CACHE_OPTIONS)
def test_caches_after_each_round_of_an_ordinary_draft(options):
    model = tiny_model(5, n_positions=80)
    rng = np.random.default_rng(1)
    params = {name: p + 0.1 * rng.standard_normal(p.shape, np.float32) for name, p in as_stored(model).items()}
    rounds = Rounds(model, GPT2(model.config, params), [3, 1, 4, 1], 4, max_tokens=60, seed=3, **options)
    assert len({n_out for _, n_out in rounds.results}) >= 3  # rejections at several places


def test_bundled_pair_accepts_itself(pair):
    (model, tokenizer), _ = pair
    prompt = tokenizer.encode("The king said to his daughter")
    for options in (dict(temperature=0), dict(temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=2)):
        done = generate_one(
            model, tokenizer, prompt, draft_model=(model, tokenizer), max_tokens=50, ignore_eos=True, **options
        )
        assert done.speculation.accepted == done.speculation.drafted == 40
        assert done.speculation.target_passes == 10


class Forced(GPT2):
    """A draft that runs its own model, and then proposes the first n of each k tokens rightly, the others wrongly."""

    def __init__(self, config, params, right, n):
        super().__init__(config, params)
        self.right, self.n, self.place = right, n, 0

    def forward(self, ids, cache=None, *, pad=None, last_only=True, attention_hook=None):
        logits = super().forward(ids, cache, pad=pad, last_only=last_only)
        token = self.right[cache.length[0]]
        if self.place >= self.n:
            token = (token + 1) % self.config.vocab_size
        self.place += 1
        logits[:] = 0
        logits[0, token] = 9
        return logits


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4])
def test_forced_acceptance(n):
    """X04: caches after 0, 1 ... all drafts accepted."""
    prompt, k, max_tokens = [7, 8, 9], 4, 32
    model = tiny_model(6)
    right = prompt + generate_one(model, Letters(61), prompt, temperature=0, max_tokens=40).token_ids
    draft = Forced(model.config, as_stored(tiny_model(7)), right, n)

    class Restarted(ModelDrafter):
        def propose(self, row, k):
            draft.place = 0
            return super().propose(row, k)

    # Both caches are compared with a cold prefill after each round; what the draft says then does not matter.
    rounds = Rounds(model, draft, prompt, k, drafter=Restarted, max_tokens=max_tokens, temperature=0)
    assert rounds.row.ids == right[: len(prompt) + max_tokens]
    full = [result for result in rounds.results if result[0] == k]
    assert len(full) >= 5 and all(result == (k, n + 1) for result in full)
    assert [step.from_draft for step in rounds.steps[: 5 * (n + 1)]] == ([True] * n + [False]) * 5
    if n == k:
        # The draft is fed every token once, the last one of each round too, which it had proposed but not yet read.
        fed = [token for chunk in rounds.fed for token in chunk]
        assert fed == right[: len(fed)] and len(fed) > len(prompt) + max_tokens - 2 * k
    else:
        assert {len(chunk) for chunk in rounds.fed[2:]} == {1}
    done = rounds.steps[-1].completion
    assert done.speculation.target_passes + done.speculation.accepted == max_tokens


# ---------------------------------------------------------------------------------------------------------------------
# Where a text ends


def oracle(V, seed, eos_token_id=None, n_positions=100_000):
    """A target whose greedy text does not repeat itself: logits from a generator seeded with all the ids."""
    return StandIn(
        lambda ids: np.random.default_rng([seed, *map(int, ids)]).normal(0, 2, V).astype(np.float32),
        V,
        n_positions,
        eos_token_id,
    )


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
        for k in (1, 2, 3, 5, 8):
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


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3, 4, 5, 6, 7, 10])
def test_max_tokens_inside_a_block(max_tokens):
    """S12: no or few new tokens with speculation."""
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
    letters = Letters(61)
    for n_target, n_draft, n_prompt, max_tokens, k in itertools.product(
        (16,), (8, 16, 24), (1, 7, 12, 16), (1, 2, 5, 40), (1, 4, 30)
    ):
        model, draft = tiny_model(8, n_positions=n_target), tiny_model(8, n_positions=n_draft)
        prompt = [2 + n for n in range(n_prompt)]
        options = dict(temperature=0, max_tokens=max_tokens)
        begins = []

        class Watched(ModelDrafter):
            def propose(self, row, k, begins=begins):
                tokens, distributions = super().propose(row, k)
                begins.append((k, len(tokens), row.n_generated, len(row.context)))
                return tokens, distributions

        plain = generate_one(model, letters, prompt, **options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(api, "ModelDrafter", Watched)
            done = generate_one(model, letters, prompt, draft_model=(draft, letters), num_draft_tokens=k, **options)
        assert same_outcome(done, plain)
        for asked, given_, n_generated, n_context in begins:
            # A round may be all accepted, and then gives one token more.
            assert given_ <= asked == min(k, max_tokens - n_generated - 1, n_target - n_context)
            # What the draft was fed: the context and all but the last of what it proposed.
            assert given_ == max(min(asked, n_draft - n_context + 1), 0)
        assert done.speculation.drafted == sum(given_ for _, given_, _, _ in begins)
        assert plain.finish_reason == ("context" if n_prompt + max_tokens > n_target + 1 else "length")


def test_a_prompt_that_fills_the_context():
    model, letters = tiny_model(9, n_positions=12), Letters(61)
    for options in (dict(draft_model=(model, letters)), dict(prompt_lookup_num_tokens=3)):
        done = generate_one(model, letters, [1, 2] * 6, temperature=0, max_tokens=9, **options)
        assert (len(done.token_ids), done.finish_reason) == (1, "context")
        assert done.token_ids == [int(model.forward([[1, 2] * 6])[0].argmax())]


def test_a_single_token_costs_the_draft_nothing():
    model, draft, letters = tiny_model(8), tiny_model(9), Letters(61)
    draft.forward = None  # a call would raise TypeError
    done = generate_one(model, letters, [1, 2, 3], draft_model=(draft, letters), temperature=0, max_tokens=1)
    assert done.token_ids == [int(model.forward([[1, 2, 3]])[0].argmax())]


def test_a_draft_with_a_short_context_still_helps_while_it_lasts():
    """X07: a draft with a shorter context."""
    model, letters = tiny_model(8, n_positions=40), Letters(61)
    short = GPT2(
        GPT2Config.from_dict(tiny_config(vocab_size=61, n_positions=16)),
        {**as_stored(model), "wpe.weight": model.params["wpe.weight"][:16]},
    )
    steps = list(stream(model, letters, [[1, 2, 3]], draft_model=(short, letters), temperature=0, max_tokens=30))
    # The context grows from 3 by 5 to 8 and 13; then 4 more can be drafted (positions up to 15), and none after.
    assert [step.from_draft for step in steps] == ([True] * 4 + [False]) * 3 + [False] * 15


@pytest.mark.parametrize("window", [1, 2, 3, 7, 20, 400])
def test_window_together_with_speculation(window):
    letters = Letters(61)
    model, other = tiny_model(10, n_positions=200), tiny_model(11, n_positions=200)
    prompt = [n % 61 for n in range(90)]  # the ring of 64 slots more than the window wraps
    options = dict(temperature=0, max_tokens=50, window=window)
    plain = generate_one(model, letters, prompt, **options)
    for drafter in (
        dict(draft_model=(model, letters)),
        dict(draft_model=(other, letters), num_draft_tokens=9),
        dict(prompt_lookup_num_tokens=6),
    ):
        done = generate_one(model, letters, prompt, **options, **drafter)
        assert same_outcome(done, plain)
        if drafter.get("draft_model", (None,))[0] is model:
            assert done.speculation.accepted == done.speculation.drafted > 0


def test_no_more_is_drafted_than_the_ring_takes_back():
    letters = Letters(61)
    model, other = tiny_model(10, n_positions=200), tiny_model(11, n_positions=200)
    prompt = [n % 61 for n in range(90)]
    options = dict(temperature=0, max_tokens=67, window=5)
    plain = generate_one(model, letters, prompt, **options)
    for draft in (model, other):
        done = generate_one(model, letters, prompt, draft_model=(draft, letters), num_draft_tokens=66, **options)
        assert same_outcome(done, plain)


def test_a_window_that_nothing_reaches_changes_nothing():
    model, letters = tiny_model(10, n_positions=200), Letters(61)
    options = dict(temperature=0, max_tokens=30, draft_model=(model, letters))
    ours = generate_one(model, letters, [1, 2, 3], window=199, **options).speculation
    theirs = generate_one(model, letters, [1, 2, 3], **options).speculation
    assert (ours.drafted, ours.accepted, ours.target_passes) == (theirs.drafted, theirs.accepted, theirs.target_passes)


@pytest.mark.parametrize("keep", [0, 7])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("k", [1, 4, 15])
def test_context_shift_together_with_speculation(k, window, keep):
    letters = Letters(61)
    model = tiny_model(12, n_positions=16)
    for n_prompt in (1, 5, 16):
        prompt = [12 + n for n in range(n_prompt)]
        options = dict(temperature=0, max_tokens=30, context_shift=True, keep=keep, window=window)
        options |= dict(repetition_penalty=1.2, frequency_penalty=0.1) if n_prompt == 5 else {}
        plain = generate_one(model, letters, prompt, **options)
        for drafter in (
            dict(draft_model=(model, letters), num_draft_tokens=k),
            dict(draft_model=(tiny_model(12, n_positions=11), letters), num_draft_tokens=k),
            dict(prompt_lookup_num_tokens=k),
        ):
            done = generate_one(model, letters, prompt, **options, **drafter)
            assert len(done.token_ids) == 30
            assert same_outcome(done, plain)
            if drafter.get("draft_model", (None,))[0] is model:  # also after a shift, with penalties on dropped tokens
                assert done.speculation.accepted == done.speculation.drafted > 0


@pytest.mark.parametrize("n_positions", [2, 3, 4])
def test_shifts_that_drop_one_or_two_tokens(n_positions):
    letters, model = Letters(61), tiny_model(12, n_positions=n_positions)
    for keep in {0, (n_positions - 1) // 2}:
        options = dict(temperature=0, max_tokens=40, context_shift=True, keep=keep, frequency_penalty=0.5)  # no loops
        plain = generate_one(model, letters, [5], **options)
        for k in (1, 2, 3):
            done = generate_one(model, letters, [5], draft_model=(model, letters), num_draft_tokens=k, **options)
            assert same_outcome(done, plain)


def test_caches_are_empty_after_a_shift():
    for k in (2, 4, 14):
        model = tiny_model(12, n_positions=16)
        rounds = Rounds(model, model, [3, 1], k, max_tokens=90, temperature=0, context_shift=True)
        assert len(rounds.results) > 5


# ---------------------------------------------------------------------------------------------------------------------
# Vocabularies


@pytest.fixture(scope="module")
def byte_vocab(tmp_path_factory):
    return write_byte_vocab(tmp_path_factory.mktemp("bytes"))


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
    model = tiny_model(0, vocab_size=257)
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
    other = (tiny_model(0, vocab_size=257), Tokenizer.from_folder(byte_vocab, 257))
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
def test_vocabularies_of_other_sizes(sizes, target, draft, monkeypatch):
    """X07: added or padded tokens in one of the two."""
    (model, tokenizer), (draft_model, _) = sizes[target], sizes[draft]
    shared = min(model.config.vocab_size, draft_model.config.vocab_size)
    proposed = []
    honest_propose = ModelDrafter.propose

    def propose(self, row, k):
        tokens, distributions = honest_propose(self, row, k)
        proposed.extend(tokens)
        assert all(q.shape == (model.config.vocab_size,) for q in distributions)
        assert not any(q[shared:].any() for q in distributions)
        return tokens, distributions

    monkeypatch.setattr(ModelDrafter, "propose", propose)
    for seed in range(5):
        greedy = dict(temperature=0, max_tokens=20, no_repeat_ngram_size=2)
        plain = generate_one(model, tokenizer, f"prompt {seed}", **greedy)
        done = generate_one(model, tokenizer, f"prompt {seed}", draft_model=sizes[draft], **greedy)
        assert done.token_ids == plain.token_ids
        sampled = generate_one(
            model, tokenizer, f"prompt {seed}", draft_model=sizes[draft], seed=seed, max_tokens=20, **OFF
        )
        assert max(sampled.token_ids) < model.config.vocab_size
    assert proposed and max(proposed) < shared


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


def propose(ids, k, longest, V=10):
    return PromptLookupDrafter(V, longest).propose(SimpleNamespace(context=ids), k)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(0, 6), st.integers(1, 5))
@settings(deadline=None, derandomize=True, database=None, max_examples=400)
def test_ngram_drafter_against_a_slow_definition(ids, k, longest):
    before = list(ids)
    tokens, distributions = propose(ids, k, longest)
    assert tokens == slow_lookup(ids, k, longest)
    assert ids == before
    assert [q.tolist() for q in distributions] == np.eye(10)[tokens].tolist() if tokens else distributions == []


def test_ngram_drafter_by_hand():
    assert propose([1, 2, 3, 1, 2, 4, 1, 2], 5, 2)[0] == [4, 1, 2]  # the latest occurrence, to the end of the text
    assert propose([1, 2, 3, 9, 2, 4, 1, 2], 2, 2)[0] == [3, 9]  # the longer match, though an earlier one
    assert propose([1, 2, 3, 9, 2, 4, 1, 2], 2, 1)[0] == [4, 1]
    assert propose([5, 5, 5], 4, 3)[0] == [5]  # a match may overlap the end
    assert propose([1, 2, 3], 4, 3) == ([], [])
    assert propose([1], 4, 3) == ([], [])
    assert propose([7, 8, 7], 0, 2)[0] == []


def test_the_longest_end_to_look_up_is_an_option():
    # After 1 2 stood 3 9, and 3 9 is what the target says; the last 2 alone was followed by 4.
    target = StandIn(lambda ids: np.eye(10, dtype=np.float32)[3 if ids[-2:] == (1, 2) else 9], 10)
    for size, accepted in ((1, 0), (2, 1), (3, 1)):
        done = generate_one(
            target,
            Letters(10),
            [1, 2, 3, 9, 2, 4, 1, 2],
            temperature=0,
            max_tokens=2,
            prompt_lookup_num_tokens=3,
            max_matching_ngram_size=size,
        )
        assert done.token_ids == [3, 9] and done.speculation.accepted == accepted


def test_ngram_drafts_of_a_repeating_text_are_accepted():
    # A target that goes round in a circle of 5 ids.
    circle = StandIn(lambda ids: constant_logits(np.eye(5)[(ids[-1] + 1) % 5] * 0.9 + 0.02)(ids), 5)
    done = generate_one(
        circle, Letters(5), [0, 1, 2, 3, 4, 0], temperature=0, prompt_lookup_num_tokens=4, max_tokens=40
    )
    assert done.token_ids == [(1 + n) % 5 for n in range(40)]
    assert done.speculation.target_passes == 8 and done.speculation.accepted == 32


# ---------------------------------------------------------------------------------------------------------------------
# num_draft_tokens="auto"


class Clock:
    """Time that passes only where a model says so, in place of the module `time`."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


def timed(model, clock, a_pass, a_token=0.0):
    """The stand-in, its passes costing `a_pass` seconds and `a_token` for each token."""

    class Timed(StandIn):
        def forward(self, ids, cache, **kwargs):
            clock.now += a_pass + a_token * len(ids[0])
            return super().forward(ids, cache, **kwargs)

    return Timed(model.logits_of, model.config.vocab_size)


def auto_rounds(monkeypatch, model, draft, *, target_cost, draft_cost, prompt=(0, 1), max_tokens=200, **options):
    """(completion, the number of tokens drafted in each round), the costs being (seconds a pass, seconds a token)."""
    clock, rounds = Clock(), []
    monkeypatch.setattr(speculative, "time", clock)
    honest_record = AdaptiveDraftLength.record

    def record(self, drafted, *args):
        rounds.append(drafted)
        honest_record(self, drafted, *args)

    monkeypatch.setattr(AdaptiveDraftLength, "record", record)
    letters = Letters(model.config.vocab_size)
    plain = generate_one(model, letters, list(prompt), temperature=0, max_tokens=max_tokens, **options)
    done = generate_one(
        timed(model, clock, *target_cost),
        letters,
        list(prompt),
        draft_model=(timed(draft, clock, *draft_cost), letters),
        num_draft_tokens="auto",
        temperature=0,
        max_tokens=max_tokens,
        **options,
    )
    assert same_outcome(done, plain)
    monkeypatch.undo()
    return done, rounds


def test_seconds_are_those_of_all_drafts_and_all_passes(monkeypatch):
    clock, letters, model = Clock(), Letters(8), oracle(8, 1)
    monkeypatch.setattr(speculative, "time", clock)
    draft = timed(model, clock, 0.5), letters
    target = timed(model, clock, 10)
    done = generate_one(target, letters, [0, 1], draft_model=draft, num_draft_tokens=3, temperature=0, max_tokens=50)
    stats = done.speculation
    assert stats.target_passes > 5 and stats.drafted > 20
    assert stats.target_seconds == 10 * stats.target_passes  # without the prompt's
    assert stats.draft_seconds == 0.5 * stats.drafted


def test_auto_drafts_much_where_drafts_are_right_and_cheap(monkeypatch):
    model = oracle(8, 1)
    done, rounds = auto_rounds(monkeypatch, model, model, target_cost=(10,), draft_cost=(0.5,))
    assert rounds[:2] == [0, 4]  # one of each is measured first
    assert set(rounds[5:-1]) == {AdaptiveDraftLength.MOST}
    assert done.speculation.accepted + done.speculation.target_passes == 200


def test_auto_gives_up_where_drafts_are_wrong(monkeypatch):
    model = oracle(8, 1)
    _, rounds = auto_rounds(monkeypatch, model, worst_of(model), target_cost=(10,), draft_cost=(0.5,))
    assert len([n for n in rounds[50:] if n]) <= len(rounds) // AdaptiveDraftLength.RETRY_INTERVAL + 1
    assert any(rounds[50:])  # but tries again


def test_auto_gives_up_where_drafts_cost_as_much_as_they_save(monkeypatch):
    model = oracle(8, 1)
    _, rounds = auto_rounds(monkeypatch, model, model, target_cost=(10,), draft_cost=(11,))
    assert len([n for n in rounds[50:] if n]) <= len(rounds) // AdaptiveDraftLength.RETRY_INTERVAL + 1


def test_auto_drafts_little_where_checking_is_dear(monkeypatch):
    # Checking a token costs as much as generating it: drafts, though right, do not pay.
    model = oracle(8, 1)
    _, rounds = auto_rounds(monkeypatch, model, model, target_cost=(0.1, 10), draft_cost=(0.5,))
    assert len([n for n in rounds[50:] if n]) <= len(rounds) // AdaptiveDraftLength.RETRY_INTERVAL + 1


def worst_of(stand_in):
    return StandIn(lambda ids: -stand_in.logits_of(ids), stand_in.config.vocab_size)


def test_auto_comes_back_when_drafts_get_better(monkeypatch):
    model = oracle(8, 1)
    late = StandIn(lambda ids: model.logits_of(ids) * (1 if len(ids) > 150 else -1), 8)
    _, rounds = auto_rounds(monkeypatch, model, late, target_cost=(10,), draft_cost=(0.5,), max_tokens=500)
    assert len([n for n in rounds[50:140] if n]) <= 3
    assert set(rounds[-5:-1]) == {AdaptiveDraftLength.MOST}


def test_auto_does_not_charge_the_drafts_prompt_to_its_drafts(monkeypatch):
    # In its first round a draft also reads the prompt, once. That must not make it look dear for a long time.
    model = oracle(8, 1)
    _, rounds = auto_rounds(
        monkeypatch, model, model, target_cost=(10, 0.1), draft_cost=(0.5, 0.1), prompt=[0, 1] * 250, max_tokens=100
    )
    assert sum(n > 0 for n in rounds) > len(rounds) / 2


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("draft_cost", [0.02, 0.1, 0.3, 0.7])
def test_auto_chooses_what_gives_most_tokens_a_second(acceptance, draft_cost):
    # From Leviathan et al. 2023, equation 1: (1 - a^(k+1)) / (1 - a) tokens for 1 + c k. The running mean of what was
    # accepted wanders about a, so the choice may miss the best k, but not by more than a tenth of its speed on average.
    length, rng = AdaptiveDraftLength(), np.random.default_rng(0)

    def speed(k):
        return sum(acceptance**i for i in range(k + 1)) / (1 + draft_cost * k)

    tokens = seconds = 0.0
    for n in range(1500):
        k = length.choose()
        assert 0 <= k <= AdaptiveDraftLength.MOST
        accepted = 0
        while accepted < k and rng.random() < acceptance:
            accepted += 1
        length.record(k, accepted, draft_cost * k, 1.0)
        if n >= 100:
            tokens, seconds = tokens + accepted + 1, seconds + 1 + draft_cost * k
    assert tokens / seconds > 0.9 * max(map(speed, range(AdaptiveDraftLength.MOST + 1)))


def test_auto_keeps_running_means():
    # By hand: the first value as it is, then nine parts of the old and one of the new. Acceptance starts at 0.7 and
    # takes a 1 for each accepted draft and a 0 for the first rejected one.
    length = AdaptiveDraftLength()
    length.record(0, 0, 5.0, 8.0)
    assert (length.acceptance, length.draft_seconds, length.target_seconds) == (0.7, 0.0, {0: 8.0})
    length.record(4, 2, 4.0, 10.0)
    assert length.acceptance == pytest.approx(((0.7 * 0.9 + 0.1) * 0.9 + 0.1) * 0.9)
    assert (length.draft_seconds, length.target_seconds) == (1.0, {0: 8.0, 4: 10.0})
    before = length.acceptance
    length.record(4, 4, 8.0, 20.0)
    assert length.acceptance == pytest.approx(1 - (1 - before) * 0.9**4)
    assert length.draft_seconds == pytest.approx(0.9 * 1.0 + 0.1 * 2.0)
    assert length.target_seconds == pytest.approx({0: 8.0, 4: 11.0})
    length.record(0, 0, 5.0, 18.0)
    assert length.acceptance == pytest.approx(1 - (1 - before) * 0.9**4)
    assert length.draft_seconds == pytest.approx(1.1)
    assert length.target_seconds == pytest.approx({0: 9.0, 4: 11.0})


@pytest.mark.parametrize("seed", range(40))
def test_auto_chooses_the_best_of_the_formula(seed):
    # Seconds of passes that were not measured lie on a line between those that were; beyond them, they stay the same.
    rng = np.random.default_rng(seed)
    length, plain, four = AdaptiveDraftLength(), *rng.uniform(1, 3, 2)
    assert length.choose() == 0
    length.record(0, 0, 0.0, plain)
    assert length.choose() == 4
    length.record(4, 4, 4 * rng.uniform(0.01, 0.5), four)
    length.acceptance = a = rng.uniform(0.3, 1)
    seconds = [plain + (four - plain) * min(k, 4) / 4 + k * length.draft_seconds for k in range(9)]
    speeds = [sum(a**i for i in range(k + 1)) / seconds[k] for k in range(9)]
    first, second = sorted(speeds)[-1:-3:-1]
    assert first > second * 1.0001, "too near to tell"
    assert length.choose() == speeds.index(first)


def test_auto_tries_drafts_again_after_every_32nd_plain_round():
    length = AdaptiveDraftLength()
    length.record(0, 0, 0.0, 1.0)
    length.record(4, 0, 40.0, 1.0)  # a draft that is dear
    assert [length.choose() for _ in range(192)] == ([0] * 31 + [4]) * 6
    length.draft_seconds, length.acceptance = 0.001, 1.0
    assert length.choose() == 8
    length.draft_seconds = 10.0
    assert [n for n in range(1, 100) if length.choose()] == [32, 64, 96]  # counted from the last draft


def test_auto_on_the_bundled_pair(pair):
    (model, tokenizer), draft = pair
    options = dict(temperature=0, max_tokens=40)
    plain = generate_one(model, tokenizer, STORY[:80], **options)
    done = generate_one(model, tokenizer, STORY[:80], draft_model=draft, num_draft_tokens="auto", **options)
    assert done.token_ids == plain.token_ids


# ---------------------------------------------------------------------------------------------------------------------
# Seeds, counts, timings, refusals


@pytest.mark.parametrize(
    "drafter", [dict(num_draft_tokens=1), dict(num_draft_tokens=4), dict(prompt_lookup_num_tokens=3)]
)
def test_a_seed_repeats_a_text(drafter):
    model, letters = tiny_model(21), Letters(61)
    if "num_draft_tokens" in drafter:
        drafter = drafter | dict(draft_model=(tiny_model(22), letters))
    texts = [
        tuple(generate_one(model, letters, [1, 2, 1], seed=seed, max_tokens=20, **OFF, **drafter).token_ids)
        for seed in (1, 1, 2, 3)
    ]
    assert texts[0] == texts[1] and len(set(texts)) == 3


def test_counts_add_up():
    letters = Letters(8)
    for seed in range(40):
        target, draft = stand_in_pair(seed, V=8)
        target.config = GPT2Config(
            vocab_size=8, n_positions=60, n_embd=1, n_head=1, bos_token_id=0, eos_token_id=seed % 8
        )
        k = 1 + seed % 6
        steps = list(
            stream(
                target,
                letters,
                [[1]],
                draft_model=(draft, letters),
                num_draft_tokens=k,
                seed=seed,
                max_tokens=40,
                **OFF,
            )
        )
        done = steps[-1].completion
        stats = done.speculation
        assert stats.accepted == sum(step.from_draft for step in steps)
        assert stats.accepted + stats.target_passes == len(done.token_ids) + steps[-1].from_draft
        assert stats.accepted <= stats.drafted <= k * stats.target_passes
        assert stats.draft_seconds > 0 and stats.target_seconds > 0
        assert done.timings.tokens == len(done.token_ids)


@pytest.mark.parametrize("prompt", [[5], [5, 6, 7]])
def test_timings_have_a_prompt_and_a_rest(prompt):
    model, letters = tiny_model(23), Letters(61)
    done = generate_one(model, letters, prompt, draft_model=(model, letters), max_tokens=20)
    assert done.timings.prompt_tokens == len(prompt)
    assert done.timings.prompt_seconds > 0 and done.timings.seconds > 0
    assert done.timings.cache_bytes == model.new_cache(1, len(prompt) + 20).nbytes


def test_plain_decoding_has_no_counts():
    assert generate_one(tiny_model(23), Letters(61), [5], max_tokens=2).speculation is None


REFUSED = {
    "two prompts": (dict(prompts=["a", "b"]), "number of prompts"),
    "several continuations": (dict(num_return_sequences=2), "num_return_sequences"),
    "beams": (dict(num_beams=2), "num_beams"),
    "no cache": (dict(use_cache=False), "use_cache"),
    "both kinds": (dict(prompt_lookup_num_tokens=2), "prompt_lookup_num_tokens"),
    "no drafts": (dict(num_draft_tokens=0), "num_draft_tokens"),
    "negative": (dict(num_draft_tokens=-1), "num_draft_tokens"),
    "fraction": (dict(num_draft_tokens=2.5), "num_draft_tokens"),
    "truth": (dict(num_draft_tokens=True), "num_draft_tokens"),
    "another word": (dict(num_draft_tokens="many"), "num_draft_tokens"),
}


@pytest.mark.parametrize(("options", "named"), REFUSED.values(), ids=REFUSED)
def test_refusals(options, named):
    model, letters = tiny_model(24, vocab_size=8), Letters(8)
    options = dict(options)
    prompts = options.pop("prompts", "a")
    with pytest.raises(ValueError, match=named):
        stream(model, letters, prompts, draft_model=(model, letters), **options)  # before the first step
    with pytest.raises(ValueError, match=named):
        generate(model, letters, prompts, draft_model=(model, letters), **options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (dict(num_draft_tokens=4), "num_draft_tokens"),
        (dict(num_draft_tokens="auto"), "num_draft_tokens"),
        (dict(num_draft_tokens=4, prompt_lookup_num_tokens=2), "num_draft_tokens"),
        (dict(prompt_lookup_num_tokens=-1), "prompt_lookup_num_tokens"),
        (dict(prompt_lookup_num_tokens=2, max_matching_ngram_size=0), "max_matching_ngram_size"),
        (dict(prompt_lookup_num_tokens=2, num_return_sequences=2), "num_return_sequences"),
        (dict(prompt_lookup_num_tokens=2, use_cache=False), "use_cache"),
        (dict(prompt_lookup_num_tokens=2, num_beams=2), "num_beams"),
        (dict(prompt_lookup_num_tokens=2, prompts=["a", "b"]), "number of prompts"),
    ],
)
def test_refusals_without_a_draft_model(options, named):
    model, letters = tiny_model(24, vocab_size=8), Letters(8)
    options = {"prompts": "a"} | options
    with pytest.raises(ValueError, match=named):
        stream(model, letters, **options)


@pytest.mark.parametrize("name", ["num_draft_tokens", "prompt_lookup_num_tokens", "max_matching_ngram_size"])
@pytest.mark.parametrize("value", [-1, 0, 1, 2.5, True, "many", None, "auto"])
def test_config_says_what_it_refuses(name, value):
    least = 0 if name == "prompt_lookup_num_tokens" else 1
    if (type(value) is int and value >= least) or (name, value) == ("num_draft_tokens", "auto"):
        assert getattr(SpeculationConfig(**{name: value}), name) == value
        return
    with pytest.raises(ValueError) as error:
        SpeculationConfig(**{name: value})
    start, allowed = f"{name} is {value!r}; ", str(error.value).partition("; ")[2]
    assert str(error.value).startswith(start) and f" {least} or more" in allowed
    assert ("auto" in allowed) == (name == "num_draft_tokens")


def test_config_takes_what_it_should():
    assert SpeculationConfig(num_draft_tokens="auto", prompt_lookup_num_tokens=9, max_matching_ngram_size=3)
    assert SpeculationConfig() == SpeculationConfig(4, 0, 2)


# ---------------------------------------------------------------------------------------------------------------------
# The command line


def run_cli(monkeypatch, capsys, *args):
    """(exit code, stdout, stderr) of one run in this process."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # main replaces it: put it back afterwards
    code = cli.main([*args])
    out, err = capsys.readouterr()
    return code, out, err


CLI_PROMPT = "The king said to his daughter"
GREEDY = ("--temperature", "0", "--max-tokens", "20")


@pytest.mark.parametrize(
    "args",
    [
        ("--speculative",),
        ("--draft-model", "distilfairytale"),
        ("--draft-model", "distilfairytale", "--num-draft-tokens", "2"),
        ("--speculative", "--num-draft-tokens", "auto"),
        ("--prompt-lookup-num-tokens", "3", "--max-matching-ngram-size", "1"),
    ],
)
def test_command_line(monkeypatch, capsys, pair, args):
    (model, tokenizer), _ = pair
    plain = generate_one(model, tokenizer, CLI_PROMPT, temperature=0, max_tokens=20)
    code, out, err = run_cli(monkeypatch, capsys, CLI_PROMPT, *GREEDY, *args)
    assert code == 0
    assert out == CLI_PROMPT + plain.text + "\n"
    header, closing = err.splitlines()
    assert ("drafts by distilfairytale" in header) == ("--prompt-lookup-num-tokens" not in args)
    code, out, _ = run_cli(monkeypatch, capsys, CLI_PROMPT, *GREEDY, *args, "--json")
    assert code == 0
    record = json.loads(out)
    assert record["text"] == plain.text and record["token_ids"] == plain.token_ids
    stats = record["speculation"]
    assert set(stats) == {"drafted", "accepted", "target_passes", "draft_seconds", "target_seconds"}
    assert stats["target_passes"] + stats["accepted"] - 20 in (0, 1)
    if "auto" not in args:  # counts of a run that repeats
        share = stats["accepted"] / stats["drafted"]
        assert f"accepted {stats['accepted']} of {stats['drafted']} drafts ({share:.0%})" in closing
        assert f"{20 / stats['target_passes']:.2f} tokens a pass" in closing
        assert "s drafting" in closing and "s checking" in closing


def test_command_line_without_drafts(monkeypatch, capsys):
    code, out, err = run_cli(monkeypatch, capsys, CLI_PROMPT, "--max-tokens", "2", "--seed", "1", "--json")
    assert code == 0 and json.loads(out)["speculation"] is None
    assert "drafts" not in err


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--num-draft-tokens", "4"), "--num-draft-tokens"),
        (("--speculative", "--num-draft-tokens", "0"), "--num-draft-tokens"),
        (("--speculative", "--num-draft-tokens", "many"), "--num-draft-tokens"),
        (("--speculative", "--prompt-lookup-num-tokens", "3"), "--prompt-lookup-num-tokens"),
        (("--speculative", "--num-beams", "2"), "--num-beams"),
        (("--speculative", "--num-return-sequences", "2"), "--num-return-sequences"),
        (("--speculative", "--no-cache"), "--no-cache"),
        (("--speculative",), "number of prompts"),
        (("--speculative", "--model", "distilfairytale"), "distilfairytale"),
        (("--draft-model", "no such model"), "no such model"),
    ],
)
def test_command_line_refuses(monkeypatch, capsys, args, named):
    prompts = [CLI_PROMPT] * (2 if named == "number of prompts" else 1)
    code, out, err = run_cli(monkeypatch, capsys, *prompts, "--quiet", *args)
    assert code == 2 and out == ""
    assert named in err and err.startswith("minigen: ") and err.count("\n") == 1
