"""Turns: what each one continues, that it is the text a run without any memory gives, and what need not be run again.

The oracle is `generate` on the whole text so far, put together here from the turns' texts and the tokens they gave;
test_decode.py judges `generate` itself.
"""

import math

import numpy as np
import pytest

import minigen
from minigen.engine.decode import PrefixCache
from minigen.engine.model import Block
from minigen.session import Session

N_POSITIONS = 64  # of conftest's `tiny`, which has one token per byte; 256 is end-of-text


@pytest.fixture
def fed(tiny, watch):
    """The [B, T] of the ids of each forward pass, in a list that grows."""
    return watch(tiny[0])


def last(steps):
    *_, step = steps
    return step.completion


def cold(tiny, ids, **options):
    (done,) = minigen.generate(*tiny, [ids], **options)
    return done


# ---- turns -------------------------------------------------------------------------------------------------------


def test_turns_are_the_text_run_cold_and_run_nothing_twice(tiny, fed):
    _, tokenizer = tiny
    options = dict(max_tokens=7, temperature=1.0, top_p=1.0, ignore_eos=True)
    session, so_far = Session(*tiny, seed=5, **options), []
    for turn, (text, added) in enumerate([("one", "one"), ("two é", "\ntwo é"), ("", ""), ("four", "\nfour")]):
        new = tokenizer.encode(added)
        fed.clear()
        done = last(session.turn(text))
        # Of the text before, only the last token had not been run; of the new ones, all but the last are.
        assert sum(map(math.prod, fed)) == len(new) + 6 + (turn > 0)
        assert math.prod(fed[0]) == len(new) + (turn > 0)
        expected = cold(tiny, so_far + new, seed=5, **options)
        assert (done.token_ids, done.text) == (expected.token_ids, expected.text)
        assert done.timings.reused_tokens == max(len(so_far) - 1, 0)
        so_far += new + done.token_ids
        assert session.context == so_far


def test_a_seed_repeats_a_session(tiny):
    options = dict(max_tokens=12, temperature=1.0, top_p=1.0, ignore_eos=True)

    def texts(seed):
        session, found = Session(*tiny, seed=seed, **options), []
        for _ in range(4):
            session.context = []
            found.append(last(session.turn("the same")).text)
        return found

    assert texts(3) == texts(3) != texts(None)
    assert len(set(texts(3))) == 1  # a text depends on the seed and the prompt alone
    assert texts(3)[0] == cold(tiny, tiny[1].encode("the same"), seed=3, **options).text


@pytest.mark.parametrize(
    "options, visible",
    [
        ({"logit_bias": {256: 90.0}}, ""),  # end-of-text at once
        ({"logit_bias": {64: 90.0}, "stop": ["aaa"]}, ""),
        ({"logit_bias": {64: 90.0}, "stop": ["\n"], "max_tokens": 3}, "aaa"),
        ({"max_tokens": 0}, ""),
    ],
)
def test_the_next_turn_continues_what_was_shown(tiny, options, visible):
    """Not what stands in the tokens behind it: an end-of-text in the middle would begin another text."""
    _, tokenizer = tiny
    session = Session(*tiny, seed=1, **options)
    assert last(session.turn("ab")).text == visible
    assert session.context == tokenizer.encode("ab" + visible)
    done = last(session.turn("cd"))
    assert done.token_ids == cold(tiny, tokenizer.encode(f"ab{visible}\ncd"), seed=1, **options).token_ids


@pytest.fixture
def interrupt(monkeypatch):
    """Lets the n-th MLP of a condition raise: its layer has stored the new keys then, and those after it lack them."""
    mlp = Block.mlp

    def arm(at, counts=lambda x: True):
        calls = []

        def interrupted(self, x):
            if counts(x):
                calls.append(x)
            if len(calls) == at:
                monkeypatch.setattr(Block, "mlp", mlp)
                raise KeyboardInterrupt
            return mlp(self, x)

        monkeypatch.setattr(Block, "mlp", interrupted)

    return arm


def test_a_turn_whose_iterator_is_closed(tiny, fed):
    options = dict(seed=1, max_tokens=9, temperature=1.0, top_p=1.0, ignore_eos=True, logit_bias={64: 90.0})
    session = Session(*tiny, **options)
    steps = session.turn("bcd")
    assert [next(steps).text for _ in range(3)] == ["a"] * 3
    steps.close()
    assert session.context == tiny[1].encode("bcdaaa")
    fed.clear()
    done = last(session.turn("e"))
    assert math.prod(fed[0]) == 1 + 2
    assert done.token_ids == cold(tiny, tiny[1].encode("bcdaaa\ne"), **options).token_ids


@pytest.mark.parametrize("at, kept", [(1, 5), (3, 6)], ids=["in the prompt", "in a step"])
def test_a_turn_interrupted_in_the_middle_of_a_pass(tiny, fed, interrupt, at, kept):
    _, tokenizer = tiny
    options = dict(max_tokens=3, temperature=1.0, top_p=1.0, ignore_eos=True, logit_bias={64: 90.0})
    session = Session(*tiny, seed=1, **options)
    assert last(session.turn("bcd")).text == "aaa"  # all but the last of the six are in the cache
    interrupt(at)
    with pytest.raises(KeyboardInterrupt):
        list(session.turn("ef"))
    before = list(session.context)
    assert before == tokenizer.encode("bcdaaa\nef" + "a" * (at > 1))
    fed.clear()
    done = last(session.turn("g"))
    # What the interrupted pass was about to add is run again, and nothing else.
    assert math.prod(fed[0]) == len(before) + 2 - (kept if at == 1 else 9)
    # No bias here: the logits themselves must not show that something was interrupted.
    del options["logit_bias"]
    session.options = options
    expected = cold(tiny, session.context + tokenizer.encode("\nh"), seed=1, **options)
    assert last(session.turn("h")).token_ids == expected.token_ids
    assert done.text == "aaa"


def test_a_full_context_loses_nothing(tiny):
    options = dict(max_tokens=100, ignore_eos=True)
    session = Session(*tiny, seed=1, **options)
    done = last(session.turn("x" * 50))
    assert done.finish_reason == "context"
    context = list(session.context)
    for text in ("more", ""):
        with pytest.raises(ValueError, match=r"6\d tokens.*at most 64.*context_shift"):
            list(session.turn(text))
    assert session.context == context
    session.context = []
    expected = cold(tiny, session.tokenizer.encode("y"), seed=1, **options)
    assert last(session.turn("y")).token_ids == expected.token_ids


@pytest.mark.slow
def test_a_session_shifts_as_a_run_does(tiny, fed):
    options = dict(max_tokens=30, temperature=1.0, top_p=1.0, ignore_eos=True, context_shift=True, keep=4)
    session, context, whole = Session(*tiny, seed=1, **options), [], []

    def add(ids):
        for token in ids:
            whole.append(token)
            context.append(token)
            if len(context) > N_POSITIONS:
                del context[4 : 4 + (N_POSITIONS + 1 - 4 + 1) // 2]

    for turn in range(6):
        added = "\n" * (turn > 0) + f"turn {turn}"
        add(tiny[1].encode(added))
        expected = cold(tiny, list(whole), seed=1, **options)
        fed.clear()
        done = last(session.turn(f"turn {turn}"))
        assert done.token_ids == expected.token_ids
        assert math.prod(fed[0]) < 40  # never the whole text
        add(done.token_ids)
        assert session.context == context
    assert last(session.turn("x" * 70)).token_ids == cold(tiny, session.ids[:-30], seed=1, **options).token_ids


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"use_cache": False, "temperature": 0.0},
        {"window": 8, "temperature": 0.0},
        {"prompt_lookup_num_tokens": 3, "temperature": 0.0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_cannot_keep_the_cache_works_without(tiny, options):
    session = Session(*tiny, seed=1, max_tokens=5, **options)
    first = last(session.turn("abab"))
    second = last(session.turn("cd"))
    ids = tiny[1].encode("abab") + first.token_ids + tiny[1].encode("\ncd")
    assert second.token_ids == cold(tiny, ids, seed=1, max_tokens=5, **options).token_ids


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"draft_model": True}],
    ids=lambda options: next(iter(options)),
)
def test_beams_and_drafts_keep_the_cache_between_turns(tiny, fed, options):
    if "draft_model" in options:
        options = {"draft_model": tiny}  # the model itself: each pass of the draft is counted as well
    session = Session(*tiny, seed=1, max_tokens=5, ignore_eos=True, **options)
    first = last(session.turn("a" * 30))
    fed.clear()
    second = last(session.turn("b"))
    assert math.prod(fed[0]) < 10  # the new tokens, not the 35 before them
    if "draft_model" in options:
        assert max(map(math.prod, fed)) < 10
    ids = tiny[1].encode("a" * 30) + first.token_ids + tiny[1].encode("\nb")
    assert second.token_ids == cold(tiny, ids, seed=1, max_tokens=5, ignore_eos=True, **options).token_ids


def test_a_branch_goes_on_by_itself(tiny, fed):
    options = dict(seed=1, max_tokens=5, ignore_eos=True)
    session = Session(*tiny, **options)
    last(session.turn("a" * 20))
    branch = session.copy()
    fed.clear()
    results = [last(one.turn(text)).token_ids for one, text in ((session, "b"), (branch, "c"))]
    assert sum(map(math.prod, fed)) < 2 * 10  # both go on from the cache
    for one, ids in zip((session, branch), results, strict=True):
        assert ids == cold(tiny, one.ids[:-5], **options).token_ids
    branch.context = tiny[1].encode("xyz")
    assert last(branch.turn("")).token_ids == cold(tiny, tiny[1].encode("xyz"), **options).token_ids


def test_options_of_a_session_are_checked_at_once(tiny):
    for options, words in (
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"temperature": -1}, "temperature"),
        ({"context_shift": True, "keep": 40}, "keep is 40"),
        ({"logit_bias": {"two tokens": 1.0}}, "logit_bias"),
    ):
        with pytest.raises(ValueError, match=words):
            Session(*tiny, **options)


# ---- the cache that lives on -------------------------------------------------------------------------------------


def test_a_prefix_cache_serves_any_prompt(tiny, fed):
    """Texts that begin alike, that are shorter than the last, and that have nothing in common with it."""
    rng, cache = np.random.default_rng(0), PrefixCache(tiny[0])
    options = dict(max_tokens=4, temperature=1.0, top_p=1.0, ignore_eos=True)
    ids, known = [1, 2, 3], []
    for seed in range(30):
        common = next(
            (i for i, (a, b) in enumerate(zip(known, ids, strict=False)) if a != b), min(len(known), len(ids))
        )
        fed.clear()
        (done,) = minigen.generate(*tiny, [ids], cache=cache, seed=seed, **options)
        assert math.prod(fed[0]) == len(ids) - min(common, len(ids) - 1)
        assert done.token_ids == cold(tiny, ids, seed=seed, **options).token_ids
        known = ids + done.token_ids[:-1]
        cut = rng.integers(0, len(known) + 1)
        ids = (known[:cut] + rng.integers(0, 256, rng.integers(1, 9)).tolist())[-40:]


def test_a_prefix_cache_after_an_interrupted_shift(tiny, interrupt):
    """The cache then holds some of the shifted context, in some layers; what it held before is gone."""
    cache, ids = PrefixCache(tiny[0]), [*range(60)]
    options = dict(max_tokens=20, seed=1, temperature=1.0, top_p=1.0, ignore_eos=True)
    (done,) = minigen.generate(*tiny, [ids], **options)
    interrupt(1 + 1, lambda x: x.shape[1] > 1)  # the first layer of the prompt, and that of the shifted context
    with pytest.raises(KeyboardInterrupt):
        minigen.generate(*tiny, [ids], cache=cache, context_shift=True, **options)
    (again,) = minigen.generate(*tiny, [ids], cache=cache, **options)
    assert again.token_ids == done.token_ids


@pytest.mark.parametrize("longer", [0, 15])
def test_a_cache_after_an_interrupted_pass_of_another_text(tiny, interrupt, longer):
    """The interrupted pass overwrites what the cache held, so the first text must be run again."""
    cache, options = PrefixCache(tiny[0]), dict(max_tokens=9, temperature=0, ignore_eos=True)
    first, other = [*range(20)], [*range(60, 80 + longer)]
    (expected,) = minigen.generate(*tiny, [first], cache=cache, **options)
    interrupt(1)
    with pytest.raises(KeyboardInterrupt):
        minigen.generate(*tiny, [other], cache=cache, **options)
    (again,) = minigen.generate(*tiny, [first], cache=cache, **options)
    assert again.token_ids == expected.token_ids


def test_an_interrupted_beam_search_leaves_a_cache_that_can_be_used(tiny, interrupt):
    cache, options = PrefixCache(tiny[0]), dict(max_tokens=6, num_beams=3)
    (expected,) = minigen.generate(*tiny, [[*range(9)]], **options)
    interrupt(5)  # the prompt and the first step have two layers each
    with pytest.raises(KeyboardInterrupt):
        minigen.generate(*tiny, [[*range(9)]], cache=cache, **options)
    (again,) = minigen.generate(*tiny, [[*range(9)]], cache=cache, **options)
    assert again.token_ids == expected.token_ids


def test_a_prefix_cache_has_room_no_window_and_the_right_draft_model(tiny):
    model, tokenizer = tiny
    for cache in (PrefixCache(model, capacity=5), PrefixCache(model, window=4)):
        with pytest.raises(ValueError, match=r"cache is .*without a window, of at least 7 slots"):
            minigen.stream(model, tokenizer, [[1, 2, 3]], max_tokens=4, cache=cache)
    cache, options = PrefixCache(model), dict(max_tokens=9, temperature=0, ignore_eos=True)
    shapes = model.config.parameter_shapes()
    other = minigen.GPT2(model.config, {name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
    for draft in (other, model):
        (done,) = minigen.generate(model, tokenizer, [[1, 2]], cache=cache, draft_model=(draft, tokenizer), **options)
    assert done.speculation.accepted == done.speculation.drafted
    with pytest.raises(ValueError, match="hooks is"):
        minigen.stream(model, tokenizer, "a", hooks=None)
    for draft in ((1, 2), (model, None), (tokenizer, model)):
        with pytest.raises(ValueError, match="draft_model is"):
            minigen.stream(model, tokenizer, "a", draft_model=draft)


def test_where_a_prefix_cache_does_not_go(tiny):
    model, tokenizer = tiny
    cache = PrefixCache(model)
    for prompts, options, words in (
        (["a", "b"], {}, "number of prompts"),
        (["a"], {"num_return_sequences": 2}, "num_return_sequences"),
    ):
        with pytest.raises(ValueError, match=words):
            minigen.stream(model, tokenizer, prompts, cache=cache, **options)
    shapes = model.config.parameter_shapes()
    other = minigen.GPT2(model.config, {name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
    with pytest.raises(ValueError, match="same model"):
        minigen.stream(other, tokenizer, "a", cache=cache)


# ---- one run at a time -------------------------------------------------------------------------------------------


def test_a_cache_that_a_run_still_uses_is_refused_to_others(tiny):
    cache = PrefixCache(tiny[0])
    options = {"cache": cache, "seed": 1, "max_tokens": 12, "ignore_eos": True}
    cold = [step.token for step in minigen.stream(*tiny, [[1, 2, 3]], **options | {"cache": None})]
    first = minigen.stream(*tiny, [[1, 2, 3]], **options)
    tokens = [next(first).token for _ in range(5)]
    with pytest.raises(ValueError, match="PrefixCache is used by a run that has not ended"):
        next(minigen.stream(*tiny, [[4, 5]], **options))
    assert tokens + [step.token for step in first] == cold
    # Another one may follow, also after one that was left; and it gets what it would have got alone.
    left = minigen.stream(*tiny, [[7, 8]], **options)
    next(left)
    left.close()
    assert [step.token for step in minigen.stream(*tiny, [[1, 2, 3]], **options)] == cold


def test_a_turn_waits_for_the_end_of_the_one_before(tiny):
    session = Session(*tiny, seed=1, max_tokens=6, ignore_eos=True)
    first = session.turn("ab")
    next(first)
    with pytest.raises(ValueError, match="the session is used by a run that has not ended"):
        next(session.turn("cd"))
    first.close()
    before = list(session.context)
    assert before[:2] == tiny[1].encode("ab") and len(before) == 3
    list(session.turn("cd"))
    assert session.context[: len(before)] == before and len(session.context) == len(before) + 3 + 6
    for text in (None, 3, b"x", ["a"]):
        with pytest.raises(ValueError, match="text is"):
            next(session.turn(text))
