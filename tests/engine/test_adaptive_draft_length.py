"""num_draft_tokens="auto": how many tokens are drafted, by what rounds cost and gave."""

import numpy as np
import pytest

from minigen import generate, stream
from minigen.api import completions
from minigen.engine.hooks import Hooks
from minigen.engine.speculative import AdaptiveDraftLength
from tests.engine.test_speculative import outcome, text_model
from tests.oracles.lookup import Letters, LookupModel


class Drafted(Hooks):
    """Notes the tokens proposed in each round."""

    def __init__(self):
        self.rounds = []

    def on_draft(self, row, tokens):
        self.rounds.append(list(tokens))


class Clock:
    """Time that passes only where a model says so."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def timed(self, model, a_pass, a_token=0.0):
        """The stand-in, its passes costing `a_pass` seconds and `a_token` for each token."""
        clock = self

        class Timed(LookupModel):
            def forward(self, ids, cache, **kwargs):
                clock.now += a_pass + a_token * len(ids[0])
                return super().forward(ids, cache, **kwargs)

        return Timed(model.logits_of, model.config.vocab_size)


def auto_rounds(monkeypatch, model, draft, *, target_cost, draft_cost, prompt=(0, 1), max_tokens=200):
    """(completion, the number of tokens drafted in each round), the costs being (seconds a pass, seconds a token)."""
    letters, drafted = Letters(model.config.vocab_size), Drafted()
    options = dict(temperature=0, max_tokens=max_tokens)
    (plain,) = generate(model, letters, [list(prompt)], **options)
    with monkeypatch.context() as patch:
        clock = Clock(patch)
        drafter = dict(draft_model=(clock.timed(draft, *draft_cost), letters), num_draft_tokens="auto", hooks=drafted)
        target = clock.timed(model, *target_cost)
        (done,) = completions(stream(target, letters, [list(prompt)], **drafter, **options))
    assert outcome(done) == outcome(plain)
    return done, list(map(len, drafted.rounds))


def test_seconds_are_those_of_all_drafts_and_all_passes(monkeypatch):
    clock, letters, model = Clock(monkeypatch), Letters(8), text_model(8, 1)
    options = dict(draft_model=(clock.timed(model, 0.5), letters), num_draft_tokens=3, temperature=0, max_tokens=50)
    (done,) = generate(clock.timed(model, 10), letters, [[0, 1]], **options)
    stats = done.speculation
    assert stats.target_passes > 5 and stats.drafted > 20
    assert stats.target_seconds == 10 * stats.target_passes  # without the prompt's
    assert stats.draft_seconds == 0.5 * stats.drafted


def test_auto_drafts_much_if_drafts_are_right_and_cheap(monkeypatch):
    model = text_model(8, 1)
    done, rounds = auto_rounds(monkeypatch, model, model, target_cost=(10,), draft_cost=(0.5,))
    assert rounds[:2] == [0, 2]  # one of each is measured first
    assert set(rounds[2:-1]) == {AdaptiveDraftLength.MAX_DRAFT}
    assert done.speculation.accepted + done.speculation.target_passes == 200


def test_auto_gives_up_if_drafts_do_not_pay(monkeypatch):
    model = text_model(8, 1)
    wrong = LookupModel(lambda ids: -model.logits_of(ids), 8)
    for draft, target_cost, draft_cost in (
        (wrong, (10,), (0.5,)),
        (model, (10,), (11,)),  # right, but each costs as much as it saves
        (model, (0.1, 10), (0.5,)),  # right, but to check a token costs as much as to generate it
    ):
        done, rounds = auto_rounds(monkeypatch, model, draft, target_cost=target_cost, draft_cost=draft_cost)
        stats = done.speculation
        assert stats.draft_seconds + stats.target_seconds < 200 * sum(target_cost) / 0.95
        assert set(rounds[50:]) <= {0, 1}


def test_auto_does_not_charge_the_drafts_prompt_to_its_drafts(monkeypatch):
    # In its first round a draft also reads the prompt, once. That must not make it look dear for a long time.
    model, costs = text_model(8, 1), dict(target_cost=(10, 0.1), draft_cost=(0.5, 0.1))
    _, rounds = auto_rounds(monkeypatch, model, model, prompt=[0, 1] * 250, max_tokens=100, **costs)
    assert sum(n > 0 for n in rounds) > len(rounds) / 2


def rounds_of(length, n_rounds, acceptance, draft_cost, pass_cost, rng):
    """(tokens, seconds) of rounds whose costs are given: of a draft token, and of the pass that verifies k."""
    tokens = seconds = 0.0
    for _ in range(n_rounds):
        k = length.choose()
        assert type(k) is int and 0 <= k <= AdaptiveDraftLength.MAX_DRAFT
        accepted = 0
        while accepted < k and rng.random() < acceptance:
            accepted += 1
        length.record(k, accepted, draft_cost * k, pass_cost(k))
        tokens, seconds = tokens + accepted + 1, seconds + draft_cost * k + pass_cost(k)
    return tokens, seconds


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("draft_cost", [0.0, 0.02, 0.1, 0.3, 0.7])
@pytest.mark.parametrize("slope", [0.02, 0.12, 0.5])
def test_auto_is_near_the_best_fixed_length(acceptance, draft_cost, slope):
    def speed(k):  # Leviathan et al. 2023, equation 1
        return sum(acceptance**i for i in range(k + 1)) / (1 + slope * k + draft_cost * k)

    tokens, seconds = rounds_of(
        AdaptiveDraftLength(), 400, acceptance, draft_cost, lambda k: 1 + slope * k, np.random.default_rng(0)
    )
    assert tokens / seconds > 0.95 * speed(0)
    assert tokens / seconds > 0.9 * max(map(speed, range(1, 9)))


def test_auto_recovers_from_interruptions():
    # One pass in ten takes 20 times as long; the choice must be that without them.
    rng = np.random.default_rng(1)
    for acceptance, right in ((0.0, {0, 1}), (1.0, {8})):
        length = AdaptiveDraftLength()
        rounds_of(length, 100, acceptance, 0.05, lambda k: (1 + 0.1 * k) * (20 if rng.random() < 0.1 else 1), rng)
        assert {length.choose() for _ in range(5)} <= right


def test_auto_gives_up_and_comes_back():
    length, rng = AdaptiveDraftLength(), np.random.default_rng(2)
    costs = 0.1, lambda k: 1 + 0.1 * k
    tokens, seconds = rounds_of(length, 500, 0.0, *costs, rng)
    assert 0.97 < tokens / seconds < 1  # still tries
    rounds_of(length, 100, 1.0, *costs, rng)
    assert length.choose() == 8
    rounds_of(length, 60, 0.0, *costs, rng)
    assert length.choose() <= 1


def test_auto_on_the_bundled_pair(fairytale, distilfairytale):
    options = dict(temperature=0, max_tokens=25)
    (plain,) = generate(*fairytale, "Once upon a time, in a little house", **options)
    drafter = dict(draft_model=distilfairytale, num_draft_tokens="auto")
    (done,) = generate(*fairytale, "Once upon a time, in a little house", **drafter, **options)
    assert done.token_ids == plain.token_ids
