"""generate and stream against the float64 reference, and against what their documentation promises.

`assert_greedy` is the oracle of greedy ids. Outcomes that a random model would seldom produce (end-of-text, stop
strings, characters of several tokens) are forced through the public `logits_processors`: see `force`.
"""

import codecs
import math
import random
import threading
from collections import Counter

import numpy as np
import pytest

import minigen
from minigen import GPT2, generate, stream
from tests.oracles.chi_square import assert_follows
from tests.oracles.models import Tiny, gpt2
from tests.oracles.reference import reference_logits, reference_logprobs
from tests.oracles.tiny import BYTE_OF_ID, as_stored, tiny_config, tiny_params, write_byte_vocab, write_checkpoint

VOCAB, EOS = 257, 256  # the byte vocabulary of tests.oracles.tiny: 256 bytes and end-of-text
TIE = 1e-4  # logits closer than this may change places between float32 and float64
GREEDY = {"temperature": 0}
FLAT = {"temperature": 1.0, "top_p": 1.0}
PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [9, 9], [200, 3, 77, 100], [42, 17, 8, 99, 3, 250, 7]]  # ragged


def tiny(seed=0, *, std=0.5, **overrides):
    """A tiny model with the byte vocabulary, in which position and attention weigh more than they do by themselves.

    Otherwise its greedy texts soon repeat one token, and hide what goes wrong in a cache.
    """
    config = tiny_config(vocab_size=VOCAB, **overrides)
    params = tiny_params(config, seed, std)
    params["wpe.weight"] *= np.float32(3)
    for layer in range(config["n_layer"]):
        params[f"h.{layer}.attn.c_proj.weight"] *= np.float32(4)
    exact = {name: p.astype(float) for name, p in params.items()}  # so that the reference need not convert them
    return Tiny(config, exact, gpt2(config, params))


@pytest.fixture(scope="module")
def tok(byte_tokenizer):
    return byte_tokenizer


# ---- oracles and helpers -----------------------------------------------------------------------------------------


def assert_greedy(t, prompt, done, max_tokens, *, window=None, keep=None, banned=()):
    """Assert that each id is the reference's best after the ids before it, up to rounding, and that it ends rightly.

    keep: how many ids a full context keeps besides the last half of the others; None if the text ends there.
    """
    n_positions, eos = t.config["n_positions"], t.config["eos_token_id"]
    context, ids = list(prompt), list(done.token_ids)
    while ids:
        new, ids = ids[: n_positions + 1 - len(context)], ids[n_positions + 1 - len(context) :]
        logits = reference_logits(t.config, t.params, context + new[:-1], window)[len(context) - 1 :]
        logits[:, list(banned)] = -math.inf
        assert (logits[range(len(new)), new] > logits.max(axis=-1) - TIE).all()
        context += new
        if ids:
            assert keep is not None
            rest = context[keep:]
            context = context[:keep] + rest[len(rest) - len(rest) // 2 :]
    *inner, last = done.token_ids
    assert eos not in inner
    reason = "eos" if last == eos else "length" if len(inner) + 1 == max_tokens else "context"
    assert done.finish_reason == reason
    assert reason != "context" or (keep is None and len(context) == n_positions + 1)


def text_ids(text):
    """The ids of a text in the byte vocabulary, one a byte."""
    return [BYTE_OF_ID.index(byte) for byte in text.encode()]


def force(*scripts):
    """A processor under which the prompt whose first id is i is continued by scripts[i], a text or ids."""
    scripts = [text_ids(script) if isinstance(script, str) else script for script in scripts]

    def processor(history, logits):
        return one_hot(scripts[history.ids[0]][len(history.ids) - history.n_prompt])

    return [processor]


def one_hot(*tokens):
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[list(tokens)] = 0
    return logits


def ids_of(completions):
    return [done.token_ids for done in completions]


# ---- greedy ids --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 2, 16])
def test_greedy_ids_are_the_references(tok, window):
    """K01, K03: cached steps, alone and in a ragged batch, with and without a window."""
    n_different = 0
    for seed in range(2):
        t = tiny(seed, n_positions=32)
        batch = generate(t.model, tok, PROMPTS, max_tokens=20, window=window, **GREEDY)
        assert [done.prompt_index for done in batch] == [0, 1, 2, 3, 4]
        for prompt, in_batch in zip(PROMPTS, batch, strict=True):
            (done,) = generate(t.model, tok, [prompt], max_tokens=20, window=window, **GREEDY)
            assert done.token_ids == in_batch.token_ids
            assert_greedy(t, prompt, done, 20, window=window)
            n_different += len(set(done.token_ids))
    assert n_different > 45, "the models repeat themselves too much to show anything"


@pytest.mark.parametrize("context", [{}, {"window": 4}, {"context_shift": True, "keep": 2}], ids=str)
def test_with_and_without_a_cache_the_ids_are_the_same(tok, watch, context):
    t = tiny(1)
    shapes = watch(t.model)
    options = dict(seed=4, max_tokens=25, num_return_sequences=2, ignore_eos=True, **FLAT, **context)
    with_cache = generate(t.model, tok, PROMPTS, **options)
    n_cached = sum(rows * length for rows, length in shapes)
    del shapes[:]
    without = generate(t.model, tok, PROMPTS, use_cache=False, **options)
    assert ids_of(with_cache) == ids_of(without)
    assert [done.text for done in with_cache] == [done.text for done in without]
    assert sum(rows * length for rows, length in shapes) > 2 * n_cached  # it really ran the whole text every time


# ---- batches -----------------------------------------------------------------------------------------------------


def test_finished_rows_leave_the_batch(tok, watch):
    t = tiny()
    shapes = watch(t.model)
    scripts = force([EOS], [7, 7, 7, EOS], [7] * 5)
    done = generate(t.model, tok, [[0], [1], [2]], max_tokens=5, logits_processors=scripts)
    assert ids_of(done) == [[EOS], [7, 7, 7, EOS], [7] * 5]
    assert [d.finish_reason for d in done] == ["eos", "eos", "length"]
    # The prompts, then a pass for each further token, and none for the last one, which nothing follows.
    assert shapes == [(3, 1), (2, 1), (2, 1), (2, 1), (1, 1)]


def test_rows_that_stay_go_on_undisturbed(tok):
    t = tiny(3, n_positions=32)
    leaving = {0: 2, 1: 4, 2: 4}  # first id of a prompt -> the generated token at which it ends

    def processor(history, logits):
        n_generated = len(history.ids) - history.n_prompt
        return one_hot(EOS) if leaving.get(history.ids[0]) == n_generated + 1 else logits

    prompts = [[0, 9, 9, 9], [50, 3], [1], [60, 1, 2, 3, 4, 5], [2, 2], [70, 8, 8]]
    batch = generate(t.model, tok, prompts, max_tokens=14, logits_processors=[processor], **GREEDY)
    assert [len(done.token_ids) for done in batch[::2]] == [2, 4, 4]
    for prompt, done in list(zip(prompts, batch, strict=True))[1::2]:
        assert_greedy(t, prompt, done, 14)


def test_num_return_sequences(tok, watch):
    t = tiny(1)
    shapes = watch(t.model)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    done = generate(t.model, tok, prompts, num_return_sequences=3, max_tokens=6, seed=2, ignore_eos=True, **FLAT)
    assert [d.prompt_index for d in done] == [0, 0, 0, 1, 1, 1]
    assert len({tuple(ids) for ids in ids_of(done)}) == 6
    assert shapes == [(2, 5)] + [(6, 1)] * 5  # each prompt is computed once, not once for each continuation
    assert all(d.timings.prompt_tokens == len(prompts[d.prompt_index]) for d in done)
    for d in generate(t.model, tok, prompts, num_return_sequences=3, max_tokens=6, **GREEDY):
        assert_greedy(t, prompts[d.prompt_index], d, 6)


# ---- where a text ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "eos, script, n, reason",
    [
        (EOS, [7, 8, EOS, 9], 3, "eos"),
        (0, [7, 8, 0, 9], 3, "eos"),
        ([0], [7, 0, 9, 9], 2, "eos"),
        ([30, 0, EOS], [7, 8, 0, 9], 3, "eos"),
        ([30, 0, EOS], [7, 30, 8, 9], 2, "eos"),
        (None, [7, EOS, 0, EOS], 4, "length"),
    ],
)
def test_any_id_can_end_a_text(tok, eos, script, n, reason):
    """T12: end-of-text printed, or gone past; id 0 or null taken for another; lists of ids."""
    t = tiny(eos_token_id=eos)
    (done,) = generate(t.model, tok, [[0]], max_tokens=4, min_tokens=1, logits_processors=force(script))
    assert (done.token_ids, done.finish_reason, done.stop_sequence) == (script[:n], reason, None)
    # Whatever the end's own spelling is, it is not a part of the text.
    assert done.text == tok.decode(script[: n - 1] if reason == "eos" else script)


def test_generation_config_names_the_end(tmp_path):
    """T12: generation_config.json goes before config.json."""
    t = tiny(eos_token_id=EOS)
    write_byte_vocab(write_checkpoint(tmp_path, t.config, t.params))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 40]}')
    model, tokenizer = minigen.load(str(tmp_path))
    (done,) = generate(model, tokenizer, [[0]], logits_processors=force([EOS, 7, 40]))
    assert (done.token_ids, done.finish_reason) == ([EOS, 7, 40], "eos")


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 7])
def test_max_tokens(tok, max_tokens):
    """S12: no new tokens, and one."""
    t = tiny()
    for options in (GREEDY, FLAT, {"use_cache": False}, {"window": 3}):
        done = generate(t.model, tok, PROMPTS[::2], max_tokens=max_tokens, min_tokens=20, **options)
        assert [len(d.token_ids) for d in done] == [max_tokens] * 3
        assert [d.finish_reason for d in done] == ["length"] * 3
        assert [d.timings.tokens for d in done] == [max_tokens] * 3
        assert max_tokens or [d.text for d in done] == [""] * 3
    steps = list(stream(t.model, tok, [[1]], max_tokens=max_tokens, min_tokens=20))
    assert len([step for step in steps if step.token is not None]) == max_tokens
    assert steps[-1].completion.finish_reason == steps[-1].finish_reason == "length"


def test_ends_where_the_context_is_full(tok):
    """K05: past the limit of learned positions."""
    t = tiny()  # 16 positions
    for n_prompt in (1, 10, 15, 16):  # the last one leaves no room to feed what it generates, but is legal
        prompt = list(range(20, 20 + n_prompt))
        (done,) = generate(t.model, tok, [prompt], max_tokens=40, ignore_eos=True, **GREEDY)
        assert (len(done.token_ids), done.finish_reason) == (17 - n_prompt, "context")
        assert_greedy(t, prompt, done, 40, banned=[EOS])
        # The budget runs out with the context: it is the budget that is named.
        (done,) = generate(t.model, tok, [prompt], max_tokens=17 - n_prompt, ignore_eos=True, **GREEDY)
        assert (len(done.token_ids), done.finish_reason) == (17 - n_prompt, "length")


def test_rows_of_a_batch_fill_the_context_one_by_one(tok):
    t = tiny(5)
    prompts = [[3] * 16, [4] * 2, [5] * 9]
    batch = generate(t.model, tok, prompts, max_tokens=40, ignore_eos=True, seed=1, **FLAT)
    assert [(len(done.token_ids), done.finish_reason) for done in batch] == [
        (1, "context"),
        (15, "context"),
        (8, "context"),
    ]


@pytest.mark.parametrize("max_tokens", [0, 5])
@pytest.mark.parametrize("options", [{}, {"window": 4}, {"use_cache": False}], ids=str)
def test_a_prompt_too_long_is_refused_before_anything_runs(tok, watch, max_tokens, options):
    """K08: a prompt longer than the context."""
    t = tiny()
    shapes = watch(t.model)
    for prompts in ([[1] * 17], "a" * 17, ["ok", "a" * 17]):
        with pytest.raises(ValueError, match=r"prompt \d.*\b17\b.*\b16\b"):
            stream(t.model, tok, prompts, max_tokens=max_tokens, **options)  # at once, not at the first step
    assert shapes == []


def test_min_tokens_and_ignore_eos(tok):
    """T12: end-of-text to be ignored."""
    t = tiny(eos_token_id=[EOS, 30], n_positions=64)
    wanted = {"logit_bias": {EOS: 1000.0, 30: 999.0}}  # end-of-text is all the model wants to say
    assert ids_of(generate(t.model, tok, [[1]], **wanted)) == [[EOS]]
    for min_tokens in (1, 3):
        (done,) = generate(t.model, tok, [[1]], min_tokens=min_tokens, **wanted)
        assert done.token_ids[-1] == EOS and not {EOS, 30} & set(done.token_ids[:-1])
        assert (len(done.token_ids), done.finish_reason) == (min_tokens + 1, "eos")
    (done,) = generate(t.model, tok, [[1]], min_tokens=9, max_tokens=4, **wanted)
    assert (len(done.token_ids), done.finish_reason) == (4, "length")
    (done,) = generate(t.model, tok, [[1]], ignore_eos=True, max_tokens=30, **wanted)
    assert not {EOS, 30} & set(done.token_ids)
    assert (len(done.token_ids), done.finish_reason) == (30, "length")


def test_which_reason_wins(tok):
    t = tiny()
    (done,) = generate(t.model, tok, [[0]], max_tokens=3, logits_processors=force([7, 8, EOS]))
    assert done.finish_reason == "eos"  # with the budget's last token
    (done,) = generate(t.model, tok, [[0]], max_tokens=3, stop="cd", logits_processors=force("bcd"))
    assert (done.text, done.finish_reason, done.stop_sequence) == ("b", "stop", "cd")
    (done,) = generate(t.model, tok, [[0] * 16], stop="b", logits_processors=force("b"))
    assert (done.text, done.finish_reason) == ("", "stop")  # with the context's last token


# ---- stop strings and the stream of text -------------------------------------------------------------------------


STOPS = [  # script, stops, text, stop_sequence
    ("abcdef", "cde", "ab", "cde"),
    ("abcdef", ["cde"], "ab", "cde"),
    ("abcdef", ("zz", "cde", "f"), "ab", "cde"),
    ("aab", ["ab"], "a", "ab"),
    ("aaab", ["aab"], "a", "aab"),
    ("abababc", ["ababc"], "ab", "ababc"),
    ("xabc", ["abc", "ab"], "x", "ab"),  # one is a beginning of the other: the shorter is complete first
    ("xabc", ["abc", "bc", "c"], "x", "abc"),  # complete at the same character: the longest
    ("xabcd", ["bcd", "ab"], "x", "ab"),
    ("Hi\nUser: x", ["\nUser:"], "Hi", "\nUser:"),
    ("ok😀no", ["😀"], "ok", "😀"),
    ("é😀no", ["😀n"], "é", "😀n"),
    ("stop", ["stop"], "", "stop"),
    ("stop", ["s"], "", "s"),
    ("abcab", ["abd", "bca "], "abcab", None),
    ("ab\n", ["\n\n"], "ab\n", None),  # held back to the end, and then shown
]


@pytest.mark.parametrize("script, stops, text, sequence", STOPS)
@pytest.mark.parametrize("ending", ["length", "eos", "context"])
def test_stop_strings(tok, script, stops, text, sequence, ending):
    """T11: the beginning of a stop string shown, or what follows it, or held text lost at the end."""
    ids = text_ids(script)
    t = tiny(n_positions=max(len(ids), 16))
    prompt, budget = [0], len(ids)
    if ending == "eos":
        ids, budget = [*ids, EOS], 100
    elif ending == "context":
        prompt, budget = [0] * (t.config["n_positions"] + 1 - len(ids)), 100
    steps = list(stream(t.model, tok, [prompt], max_tokens=budget, stop=stops, logits_processors=force(ids)))
    done = steps[-1].completion
    assert "".join(step.text for step in steps) == done.text == text
    assert (done.finish_reason, done.stop_sequence) == ("stop" if sequence else ending, sequence)
    n = len(text_ids(text + sequence)) if sequence else len(ids)
    assert done.token_ids == ids[:n]  # all that was generated, the stop's own tokens included


@pytest.mark.slow
def test_streamed_text_holds_back_no_more_than_it_must(tok):
    """Every step of random texts with random stops, against a definition that looks at one character at a time."""
    rng = random.Random(0)
    t = tiny(n_positions=64)
    n_stopped = 0
    for _ in range(60):
        script = "".join(rng.choices("aab\né😀", k=rng.randrange(1, 12)))
        stops = ["".join(rng.choices("aab\né😀", k=rng.randrange(1, 4))) for _ in range(rng.randrange(4))]
        ids, shown, expected = text_ids(script), "", []
        decoder, seen, matched = codecs.getincrementaldecoder("utf-8")("replace"), "", None
        for i, token in enumerate(ids):
            seen += decoder.decode(bytes([BYTE_OF_ID[token]]))
            matched = max((stop for stop in stops if seen.endswith(stop)), key=len, default=None)
            if matched:
                visible = seen[: len(seen) - len(matched)]
            elif i == len(ids) - 1:
                visible = seen
            else:
                visible = min(
                    (seen[: len(seen) - k] for s in stops for k in range(len(s)) if seen.endswith(s[:k])),
                    key=len,
                    default=seen,
                )
            expected.append(visible[len(shown) :])
            shown = visible
            if matched:
                break
        steps = list(stream(t.model, tok, [[0]], max_tokens=len(ids), stop=stops, logits_processors=force(ids)))
        assert [step.text for step in steps] == expected, (script, stops)
        assert (steps[-1].completion.text, steps[-1].completion.stop_sequence) == (shown, matched), (script, stops)
        n_stopped += matched is not None
    assert 15 < n_stopped < 50


def test_the_prompt_is_not_searched_for_stops(tok):
    """T11: a stop string that only the prompt holds."""
    t = tiny()
    (done,) = generate(t.model, tok, "!ab", max_tokens=3, stop=["ab", "bc"], logits_processors=force("cbd"))
    assert (done.text, done.finish_reason) == ("cbd", "length")


def test_each_row_has_stops_of_its_own(tok):
    t = tiny()
    scripts = force("xab", "ybx", "zxa")
    done = generate(t.model, tok, [[0], [1], [2]], max_tokens=3, stop="ab", logits_processors=scripts)
    assert [(d.text, d.finish_reason) for d in done] == [("x", "stop"), ("ybx", "length"), ("zxa", "length")]


def test_characters_of_several_tokens_come_whole(tok):
    """T01: half characters in a streamed text."""
    t = tiny(n_positions=64)
    text = "a😀😀é你b\r\n\x00\ufeff"
    steps = list(stream(t.model, tok, [[0]], max_tokens=len(text_ids(text)), logits_processors=force(text)))
    assert [step.text for step in steps if step.text] == list(text)  # each at once with its last byte
    assert steps[-1].completion.text == text


@pytest.mark.parametrize("stop, text, reason", [((), "a\ufffd", "length"), ("\ufffd", "a", "stop")])
def test_half_a_character_at_the_end(tok, stop, text, reason):
    t = tiny()
    steps = list(stream(t.model, tok, [[0]], max_tokens=3, stop=stop, logits_processors=force(text_ids("a😀")[:3])))
    assert "".join(step.text for step in steps) == steps[-1].completion.text == text
    assert steps[-1].finish_reason == steps[-1].completion.finish_reason == reason


def test_steps(tok):
    t = tiny(1)
    options = dict(max_tokens=5, num_return_sequences=2, seed=7, logprobs=1, **FLAT)
    steps = list(stream(t.model, tok, ["ab", "c"], **options))
    completions = generate(t.model, tok, ["ab", "c"], **options)
    for row, done in enumerate(completions):
        mine = [step for step in steps if step.row == row]
        assert [step.token for step in mine] == done.token_ids
        assert [step.logprob for step in mine] == done.logprobs
        assert "".join(step.text for step in mine) == done.text
        assert [step.finish_reason for step in mine] == [None] * (len(mine) - 1) + [done.finish_reason]
        assert [step.completion is None for step in mine] == [True] * (len(mine) - 1) + [False]
        assert mine[-1].completion.token_ids == done.token_ids
        assert not any(step.from_draft for step in mine)
        assert (done.prompt_index, done.score) == (row // 2, None)
        assert (done.timings.prompt_tokens, done.timings.tokens) == ([2, 1][row // 2], len(done.token_ids))
        assert done.timings.prompt_seconds > 0 and done.timings.seconds >= 0


def test_a_stream_computes_no_further_than_it_is_read(tok, watch):
    t = tiny()
    shapes = watch(t.model)
    steps = stream(t.model, tok, [[1, 2]], max_tokens=10, ignore_eos=True)
    assert shapes == []
    next(steps), next(steps)
    assert shapes == [(1, 2), (1, 1)]
    steps.close()


# ---- chance ------------------------------------------------------------------------------------------------------


def test_seeds(tok):
    """S10: a seed that does not repeat a run, or 0 taken for none."""
    t = tiny(n_positions=64)

    def ids(seed, **options):
        return ids_of(generate(t.model, tok, [[1], [2]], seed=seed, max_tokens=20, ignore_eos=True, **FLAT, **options))

    first = ids(0)
    ids(5)
    assert ids(0) == first  # whatever ran before
    streamed = list(stream(t.model, tok, [[1], [2]], seed=0, max_tokens=20, ignore_eos=True, **FLAT))
    assert [[step.token for step in streamed if step.row == row] for row in (0, 1)] == first
    runs = [first, ids(1), ids(2**63), ids(None), ids(None)]  # 0 is a seed like any other; None is a new one each time
    assert len({str(run) for run in runs}) == 5
    # Continuation 1 of one seed is not continuation 0 of the next.
    options = dict(num_return_sequences=3, max_tokens=20, ignore_eos=True)
    same = ids_of(generate(t.model, tok, [[1]], seed=8, **options, **FLAT))
    following = ids_of(generate(t.model, tok, [[1]], seed=9, **options, **FLAT))
    assert len({str(row) for row in same + following}) == 6


def test_global_generators_are_left_alone(tok):
    """S10: shared state."""
    t = tiny()
    np.random.seed(1)
    random.seed(1)
    before = np.random.get_state()[1].tolist(), random.getstate()
    first = generate(t.model, tok, "ab", seed=4, **FLAT)
    generate(t.model, tok, "ab", **FLAT)
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before
    np.random.seed(2)
    assert ids_of(generate(t.model, tok, "ab", seed=4, **FLAT)) == ids_of(first)


@pytest.mark.slow
def test_draws_are_independent(tok):
    """S10: 4,800 draws from four equally likely tokens: counts, and pairs along a row and across neighbouring rows."""
    t = tiny(n_positions=512, n_layer=1)
    uniform = one_hot(0, 1, 2, 3)
    options = dict(max_tokens=240, seed=0, logits_processors=[lambda history, logits: uniform], **FLAT)
    ids = np.array(ids_of(generate(t.model, tok, [[9]], num_return_sequences=20, **options)))  # [rows, steps]
    assert_follows(Counter(ids.ravel().tolist()), dict.fromkeys(range(4), 1 / 4))
    for pairs in (4 * ids[:, :-1] + ids[:, 1:], 4 * ids[:-1] + ids[1:]):
        assert_follows(Counter(pairs.ravel().tolist()), dict.fromkeys(range(16), 1 / 16))


@pytest.mark.slow
def test_sampled_tokens_have_the_models_distribution(tok):
    """First and second token of 2,000 continuations, against the float64 reference's own probabilities."""
    t = tiny(4)
    prompt, n = [11, 12, 13], 2000

    def distribution(ids):
        logits = reference_logits(t.config, t.params, ids)[-1] / 0.8
        best = np.argsort(-logits)[:3]
        p = np.exp(logits[best] - logits[best].max())
        return dict(zip(best.tolist(), p / p.sum(), strict=True))

    expected = {(a, b): p * q for a, p in distribution(prompt).items() for b, q in distribution([*prompt, a]).items()}
    assert len(expected) == 9 and min(expected.values()) * n > 5
    options = dict(temperature=0.8, top_k=3, top_p=1.0, seed=0, ignore_eos=True, max_tokens=2)
    ids = [tuple(row) for row in ids_of(generate(t.model, tok, [prompt], num_return_sequences=n, **options))]
    assert_follows(Counter(ids), expected)


@pytest.mark.slow
def test_threads_do_not_disturb_each_other(tok, fairytale):
    model, tokenizer = fairytale
    t = tiny(n_positions=128)
    jobs = [
        lambda: generate(model, tokenizer, ["Once", "The old man said"], max_tokens=6, seed=1),
        lambda: generate(model, tokenizer, "A long time ago there", max_tokens=12, window=8, seed=2),
        lambda: generate(t.model, tok, PROMPTS, max_tokens=30, seed=3),
    ]
    alone = [ids_of(job()) for job in jobs]
    barrier, results = threading.Barrier(2 * len(jobs)), {}

    def run(index):
        barrier.wait()
        results[index] = ids_of(jobs[index % len(jobs)]())

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2 * len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[index] for index in range(2 * len(jobs))] == alone * 2


# ---- log-probabilities, biases and processors --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "n_top, options",
    [
        (0, GREEDY),
        (4, dict(temperature=0.3, top_k=5, repetition_penalty=2.0, presence_penalty=1.0, logit_bias={3: 5.0})),
        (1000, {**FLAT, "window": 3}),
        (1, {**FLAT, "use_cache": False}),
    ],
    ids=str,
)
def test_logprobs_are_the_models_own(tok, options, n_top):
    """Natural logarithms of the model's probabilities at temperature 1, whatever the token was chosen by."""
    t = tiny(6)
    done = generate(t.model, tok, PROMPTS, max_tokens=5, seed=5, logprobs=n_top, **options)
    for prompt, d in zip(PROMPTS, done, strict=True):
        assert len(d.logprobs) == len(d.token_ids)
        rows = reference_logprobs(t.config, t.params, prompt, d.token_ids, options.get("window"))
        for token, entry, expected in zip(d.token_ids, d.logprobs, rows, strict=True):
            assert (entry.token, entry.text) == (token, tok.decode([token]))
            assert entry.logprob == pytest.approx(expected[token], abs=1e-4)
            tokens, texts, values = zip(*entry.top, strict=True) if entry.top else ((), (), ())
            assert len(tokens) == len(set(tokens)) == min(n_top, VOCAB)
            assert list(texts) == [tok.decode([other]) for other in tokens]
            assert list(values) == sorted(values, reverse=True)
            np.testing.assert_allclose(values, np.sort(expected)[::-1][: len(values)], atol=1e-4)
            np.testing.assert_allclose(values, expected[list(tokens)], atol=1e-4)


def test_logprobs_are_off_unless_asked_for(tok):
    t = tiny()
    steps = list(stream(t.model, tok, "a", max_tokens=2))
    assert [step.logprob for step in steps] == [None, None]
    assert steps[-1].completion.logprobs is None
    (done,) = generate(t.model, tok, [[0]], logprobs=0, logits_processors=force([7, EOS]))
    assert [(entry.token, entry.top) for entry in done.logprobs] == [(7, []), (EOS, [])]


def test_logits_processors_get_the_history_and_work_in_turn(tok):
    t = tiny(1)
    seen = []

    def first(history, logits):
        seen.append((list(history.ids), history.n_prompt, logits.shape, logits.dtype))
        return one_hot(3, 4, 5)

    def second(history, logits):
        assert np.flatnonzero(logits == 0).tolist() == [3, 4, 5]
        return logits.astype(float) + np.arange(VOCAB)  # another dtype is welcome

    done = generate(t.model, tok, [[1, 2], [6]], max_tokens=3, logits_processors=[first, second], **GREEDY)
    assert ids_of(done) == [[5, 5, 5]] * 2
    histories = [([1, 2], 2), ([6], 1), ([1, 2, 5], 2), ([6, 5], 1), ([1, 2, 5, 5], 2), ([6, 5, 5], 1)]
    assert seen == [(ids, n_prompt, (VOCAB,), np.float32) for ids, n_prompt in histories]


def test_the_history_holds_what_a_context_shift_dropped(tok):
    t = tiny()
    seen = []
    processor = lambda history, logits: seen.append((len(history.ids), history.n_prompt)) or logits  # noqa: E731
    generate(
        t.model, tok, [[1, 2, 3]], max_tokens=40, ignore_eos=True, context_shift=True, logits_processors=[processor]
    )
    assert seen == [(3 + i, 3) for i in range(40)]


def test_a_step_that_leaves_no_choice_is_an_error_that_names_it(tok):
    t = tiny()
    for bad in (lambda logits: logits * np.nan, lambda logits: np.full(VOCAB, -np.inf), lambda logits: logits[:-1]):
        processor = lambda history, logits, bad=bad: bad(logits) if len(history.ids) == 4 else logits  # noqa: E731
        steps = stream(t.model, tok, [[1, 2]], ignore_eos=True, logits_processors=[processor])
        assert next(steps).token is not None and next(steps).token is not None
        with pytest.raises(ValueError, match=r"\b3\b"):  # the third generated token
            next(steps)


def test_logit_bias(tok):
    t = tiny()
    # Sum of both: the largest wins, by id or by text.
    assert generate(t.model, tok, "x", max_tokens=2, logit_bias={"é".encode()[0]: 50.0, "a": 90.0})[0].text == "aa"
    assert ids_of(generate(t.model, tok, "x", max_tokens=2, logit_bias={7: 90.0, "a": 50.0})) == [[7, 7]]
    (done,) = generate(t.model, tok, "x", logit_bias={"<|endoftext|>": 500.0})
    assert done.finish_reason == "eos"
    (free,) = generate(t.model, tok, [[1]], max_tokens=1, **GREEDY)
    (banned,) = generate(t.model, tok, [[1]], max_tokens=9, logit_bias={free.token_ids[0]: -math.inf}, **GREEDY)
    assert_greedy(t, [1], banned, 9, banned=free.token_ids)


# ---- windows and context shifts ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 7, 40])
def test_window_far_beyond_the_cache(tok, window):
    """Texts many times as long as the ring: rows that wrap at different times, and prompts run in several chunks."""
    t = tiny(2, n_positions=240, n_head=4)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, size).tolist() for size in (3, 200, 64, 65, 131)]
    batch = generate(t.model, tok, prompts, max_tokens=1000, window=window, ignore_eos=True, **GREEDY)
    capacity = window + 63  # of which 63 are slack for prompts and drafts
    for prompt, done in zip(prompts, batch, strict=True):
        assert (len(done.token_ids), done.finish_reason) == (241 - len(prompt), "context")
        assert_greedy(t, prompt, done, 1000, window=window, banned=[EOS])
        # 2 * n_layer * n_head * d_head * capacity * 4 bytes a row: bounded by the window, not by the text.
        assert done.timings.cache_bytes == 5 * 2 * 2 * 4 * 2 * capacity * 4
    (alone,) = generate(t.model, tok, [prompts[1]], max_tokens=30, window=window, ignore_eos=True, **GREEDY)
    assert alone.token_ids == batch[1].token_ids[:30]
    assert alone.timings.cache_bytes == 2 * 2 * 4 * 2 * capacity * 4


@pytest.mark.parametrize(
    "n_prompt, options, rows, capacity",
    [
        (4, dict(max_tokens=10), 1, 14),
        (4, dict(max_tokens=100), 1, 16),  # no more than there are positions
        (4, dict(max_tokens=10, num_return_sequences=3), 3, 14),
        (4, dict(max_tokens=5, window=2), 1, 9),  # no more than the text
    ],
)
def test_the_cache_is_as_large_as_asked_for(tok, n_prompt, options, rows, capacity):
    t = tiny()
    done = generate(t.model, tok, [[1] * n_prompt], **options)
    assert {d.timings.cache_bytes for d in done} == {rows * 2 * 2 * 2 * 4 * capacity * 4}


@pytest.mark.slow
@pytest.mark.parametrize("keep, window", [(0, None), (3, 4), (7, None)])
def test_context_shift(tok, keep, window):
    """K05: a full context becomes its first `keep` ids and the last half of the others, encoded from position 0."""
    options = dict(max_tokens=40, context_shift=True, keep=keep, window=window, ignore_eos=True)
    for seed in range(2):
        t, prompts = tiny(seed), [*PROMPTS, [8] * 16]  # rows that shift at different times
        for prompt, done in zip(prompts, generate(t.model, tok, prompts, **options, **GREEDY), strict=True):
            assert_greedy(t, prompt, done, 40, keep=keep, window=window, banned=[EOS])


def test_a_shift_with_ends_and_smallest_contexts(tok):
    for n_positions in (1, 2, 3, 4):
        t = tiny(n_positions=n_positions)
        (done,) = generate(t.model, tok, [[1]], max_tokens=12, context_shift=True, ignore_eos=True, **GREEDY)
        assert_greedy(t, [1], done, 12, keep=0, banned=[EOS])
    t = tiny()
    (done,) = generate(t.model, tok, [[0] * 15], context_shift=True, stop="fg", logits_processors=force("abcdefgh"))
    assert (done.text, done.finish_reason) == ("abcde", "stop")


def test_keep_must_leave_room_to_shift(tok):
    t = tiny()
    for keep in (8, 16, 100):
        with pytest.raises(ValueError, match=rf"keep is {keep}\b"):
            stream(t.model, tok, "a", context_shift=True, keep=keep)
    generate(t.model, tok, "a", context_shift=True, keep=7, max_tokens=1)


# ---- prompts -----------------------------------------------------------------------------------------------------


def prompt_ids(t, tok, prompts):
    """The ids that the model gets for prompts, as a processor sees them."""
    seen = []
    processor = lambda history, logits: seen.append(list(history.ids)) or logits  # noqa: E731
    generate(t.model, tok, prompts, max_tokens=1, logits_processors=[processor])
    return seen


def test_prompts_are_encoded_as_they_are(tok):
    """T08: the user's space stripped."""
    t = tiny()
    assert prompt_ids(t, tok, "ab ") == [text_ids("ab ")]  # a space at the end is the caller's wish
    assert prompt_ids(t, tok, ["a", "b\r\nc", "\ufeff"]) == [text_ids("a"), text_ids("b\r\nc"), text_ids("\ufeff")]
    assert prompt_ids(t, tok, "A<|endoftext|>B") == [[*text_ids("A"), EOS, *text_ids("B")]]
    assert prompt_ids(t, tok, "a\udbc0b") == [text_ids("a\ufffdb")]  # half of a surrogate pair
    assert prompt_ids(t, tok, [[3, 4], "a", (5,)]) == [[3, 4], text_ids("a"), [5]]
    assert prompt_ids(t, tok, [[np.int64(3), np.int32(4)]]) == [[3, 4]]


def test_an_empty_prompt_starts_from_the_begin_of_text(tok):
    t = tiny(bos_token_id=44, eos_token_id=EOS)
    assert prompt_ids(t, tok, "") == [[44]]
    assert prompt_ids(t, tok, ["", [], "a"]) == [[44], [44], text_ids("a")]
    (done,) = generate(t.model, tok, "", max_tokens=6, **GREEDY)
    assert_greedy(t, [44], done, 6)
    t = tiny(bos_token_id=None)
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        stream(t.model, tok, ["a", ""])


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_no_prompts_give_no_completions(tok, max_tokens):
    t = tiny()
    assert generate(t.model, tok, [], max_tokens=max_tokens) == []
    assert list(stream(t.model, tok, [], max_tokens=max_tokens)) == []


@pytest.mark.parametrize(
    "prompts",
    [
        None,
        5,
        b"ab",
        [5],
        [1, 2, 3],
        [None],
        ["a", None],
        [b"ab"],
        [["a"]],
        [[1.5]],
        [[True]],
        [[-1]],
        [[1], [VOCAB]],
        [[1, None]],
    ],
    ids=repr,
)
def test_prompts_that_are_none(tok, prompts):
    t = tiny()
    with pytest.raises((TypeError, ValueError), match="prompt"):
        stream(t.model, tok, prompts)


# ---- options -----------------------------------------------------------------------------------------------------


def test_arguments_are_not_changed(tok):
    t = tiny()
    bias, stops, prompts = {"a": 1.0}, ["zz"], [[1, 2], [3]]
    generate(t.model, tok, prompts, logit_bias=bias, stop=stops, max_tokens=5)
    assert (bias, stops, prompts) == ({"a": 1.0}, ["zz"], [[1, 2], [3]])
    assert all(np.array_equal(t.params[name], p) for name, p in as_stored(t.model).items())


def test_of_equal_tokens_those_with_the_lowest_ids_are_reported(tok):
    """F21: the top log-probabilities of a tie."""
    t = tiny()
    options = dict(max_tokens=1, logprobs=3, temperature=0, ignore_eos=True)
    model = GPT2(t.model.config, {name: np.zeros_like(value) for name, value in t.params.items()})
    (done,) = generate(model, tok, "a", **options)
    assert done.token_ids == [0] and [token for token, _, _ in done.logprobs[0].top] == [0, 1, 2]
