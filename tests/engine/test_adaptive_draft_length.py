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
    assert rounds[:2] == [0, 4]  # one of each is measured first
    assert set(rounds[5:-1]) == {AdaptiveDraftLength.MAX_DRAFT}
    assert done.speculation.accepted + done.speculation.target_passes == 200


def test_auto_gives_up_if_drafts_do_not_pay(monkeypatch):
    model = text_model(8, 1)
    wrong = LookupModel(lambda ids: -model.logits_of(ids), 8)
    for draft, target_cost, draft_cost in (
        (wrong, (10,), (0.5,)),
        (model, (10,), (11,)),  # right, but each costs as much as it saves
        (model, (0.1, 10), (0.5,)),  # right, but to check a token costs as much as to generate it
    ):
        _, rounds = auto_rounds(monkeypatch, model, draft, target_cost=target_cost, draft_cost=draft_cost)
        # Only every 32nd round tries again.
        assert len([n for n in rounds[50:] if n]) <= len(rounds) // AdaptiveDraftLength.RETRY_INTERVAL + 1
        assert any(rounds[50:])


def test_auto_comes_back_when_drafts_get_better(monkeypatch):
    model = text_model(8, 1)
    late = LookupModel(lambda ids: model.logits_of(ids) * (1 if len(ids) > 150 else -1), 8)
    _, rounds = auto_rounds(monkeypatch, model, late, target_cost=(10,), draft_cost=(0.5,), max_tokens=400)
    assert len([n for n in rounds[50:140] if n]) <= 3
    assert set(rounds[-5:-1]) == {AdaptiveDraftLength.MAX_DRAFT}


def test_auto_does_not_charge_the_drafts_prompt_to_its_drafts(monkeypatch):
    # In its first round a draft also reads the prompt, once. That must not make it look dear for a long time.
    model, costs = text_model(8, 1), dict(target_cost=(10, 0.1), draft_cost=(0.5, 0.1))
    _, rounds = auto_rounds(monkeypatch, model, model, prompt=[0, 1] * 250, max_tokens=100, **costs)
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
        assert 0 <= k <= AdaptiveDraftLength.MAX_DRAFT
        accepted = 0
        while accepted < k and rng.random() < acceptance:
            accepted += 1
        length.record(k, accepted, draft_cost * k, 1.0)
        if n >= 100:
            tokens, seconds = tokens + accepted + 1, seconds + 1 + draft_cost * k
    assert tokens / seconds > 0.9 * max(map(speed, range(AdaptiveDraftLength.MAX_DRAFT + 1)))


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


def test_auto_on_the_bundled_pair(fairytale, distilfairytale):
    options = dict(temperature=0, max_tokens=25)
    (plain,) = generate(*fairytale, "Once upon a time, in a little house", **options)
    drafter = dict(draft_model=distilfairytale, num_draft_tokens="auto")
    (done,) = generate(*fairytale, "Once upon a time, in a little house", **drafter, **options)
    assert done.token_ids == plain.token_ids
