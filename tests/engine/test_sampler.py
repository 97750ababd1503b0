"""minigen.engine.sampler against transformers' outcomes, slow float64 definitions, properties and statistics.

Oracles: golden/sampler.npz (transformers' own processors and warpers, see golden/make_sampler.py), the ref_* functions
below (float64, written from the definitions), exact probabilities that were worked out by hand, and chi-square tests
with fixed seeds. Outcomes that hang on rounding are left out of the inputs instead of loosening a comparison.
"""

import functools
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from minigen.engine import sampler
from minigen.engine.sampler import (
    History,
    Noise,
    apply_logit_bias,
    apply_logits_processors,
    apply_presence_frequency,
    apply_repetition_penalty,
    apply_temperature,
    ban_repeated_ngrams,
    log_softmax,
    next_token_probs,
    one_hot,
    sample_token,
    top_ids,
)
from minigen.options import SamplingConfig
from tests.golden.sampler_cases import COLUMNS, OPTIONS, VOCABULARIES, WARPERS, best_ids, columns, make_case, moments
from tests.oracles.chi_square import assert_frequencies
from tests.oracles.splitmix64 import FACTORS, MASK, SHIFTS, splitmix64


def masking(keep):
    """A filter as a function from logits to logits, -inf for the tokens that it removes."""
    return lambda logits, value: np.where(np.isin(np.arange(len(logits)), keep(logits, value)), logits, -np.inf)


keep_top_k, keep_top_p = masking(sampler.keep_top_k), masking(sampler.keep_top_p)
keep_min_p, keep_typical_p = masking(sampler.keep_min_p), masking(sampler.keep_typical_p)

pytestmark = pytest.mark.filterwarnings("error")  # no overflow or invalid value on the way to a good result

INF = math.inf
NAN = math.nan
OFF = dict(temperature=1.0, top_p=1.0)  # the other options' defaults are "off"
EMPTY = History([], 0)

fixed = settings(deadline=None, derandomize=True, database=None, max_examples=40)  # the same examples in every run


def read_only(values):
    """float32 [V] that nothing may write to."""
    values = np.array(values, dtype=np.float32)
    values.setflags(write=False)
    return values


def row(*values):
    return read_only(values)


def kept_ids(logits):
    return np.flatnonzero(np.asarray(logits) > -INF).tolist()


def run(logits, ids=(), n_prompt=0, **options):
    """next_token_probs() with everything off but the given options."""
    return next_token_probs(read_only(logits), History(list(ids), n_prompt), SamplingConfig(**OFF | options))


def treat(logits, ids=(), n_prompt=0, **options):
    """apply_logits_processors() with everything off but the given options, as a list."""
    return apply_logits_processors(
        read_only(logits), History(list(ids), n_prompt), SamplingConfig(**OFF | options)
    ).tolist()


# ---------------------------------------------------------------------------------------------------------------------
# The definitions, slow and in float64. x: float64 [V] -> float64 [V], removed = -inf.


def ref_softmax(x):
    best = max(x)
    weights = [math.exp(v - best) for v in x]
    total = math.fsum(weights)
    return [w / total for w in weights]


def ref_repetition(x, ids, penalty):
    seen = set(ids)
    return np.array([v if i not in seen else v * penalty if v < 0 else v / penalty for i, v in enumerate(x)])


def ref_presence_frequency(x, output, presence, frequency):
    output = list(output)
    return np.array([v - frequency * output.count(i) - presence * (i in output) for i, v in enumerate(x)])


def ref_ngrams(x, ids, size):
    ids, n = list(ids), len(ids)
    banned = {ids[i + size - 1] for i in range(n - size + 1) if ids[i : i + size - 1] == ids[n - size + 1 :]}
    return np.array([-INF if i in banned else v for i, v in enumerate(x)])


def ref_bias(x, bias):
    return np.array([v + bias.get(i, 0.0) for i, v in enumerate(x)])


def ref_keep(x, ids):
    ids = set(ids)
    return np.array([v if i in ids else -INF for i, v in enumerate(x)])


def ref_nucleus(order, p, mass):
    """The ids of `order` whose mass before them is < mass. Second result: how near a border lies."""
    before = [math.fsum(p[i] for i in order[:n]) for n in range(min(len(order), 64))]
    before += list(np.cumsum([p[i] for i in order])[len(before) - 1 : -1])
    return [i for i, b in zip(order, before, strict=True) if b < mass], min(abs(b - mass) for b in before)


def ref_top_k(x, k):
    return ref_keep(x, sorted(range(len(x)), key=lambda i: (-x[i], i))[:k])


def ref_top_p(x, mass):
    return ref_keep(x, ref_nucleus(sorted(range(len(x)), key=lambda i: (-x[i], i)), ref_softmax(x), mass)[0])


def ref_min_p(x, fraction):
    border = max(x) + math.log(fraction)
    return ref_keep(x, [i for i, v in enumerate(x) if v >= border])


def ref_distance(x):
    """How far each token's surprise -log p lies from the expected one, the entropy (Meister et al., 2022)."""
    p = ref_softmax(x)
    surprise = [-math.log(q) if q > 0 else INF for q in p]
    entropy = math.fsum(q * s for q, s in zip(p, surprise, strict=True) if q > 0)
    return [abs(s - entropy) for s in surprise]


def ref_typical_p(x, mass):
    distance = ref_distance(x)
    return ref_keep(x, ref_nucleus(sorted(range(len(x)), key=lambda i: (distance[i], i)), ref_softmax(x), mass)[0])


REF_WARPERS = {
    "temperature": lambda x, t: x / t,
    "top_k": ref_top_k,
    "top_p": ref_top_p,
    "min_p": ref_min_p,
    "typical_p": ref_typical_p,
}


def ref_process(logits, ids, n_prompt, options):
    x = np.asarray(logits, dtype=np.float64)
    x = ref_repetition(x, ids, options.get("repetition_penalty", 1.0))
    presence, frequency = options.get("presence_penalty", 0.0), options.get("frequency_penalty", 0.0)
    x = ref_presence_frequency(x, ids[n_prompt:], presence, frequency)
    if options.get("no_repeat_ngram_size"):
        x = ref_ngrams(x, ids, options["no_repeat_ngram_size"])
    return ref_bias(x, options.get("logit_bias", {}))


def ref_logits(logits, ids, n_prompt, options):
    """The whole chain in the documented order."""
    x = ref_process(logits, ids, n_prompt, options)
    for name in WARPERS:
        if name in options:
            x = REF_WARPERS[name](x, options[name])
    return x


# ---------------------------------------------------------------------------------------------------------------------
# transformers


def golden():
    """Yields (Case, option or None, kept bool [V], tie, stored numbers) of every golden case."""
    with np.load(Path(__file__).parents[1] / "golden" / "sampler.npz") as file:
        data = dict(file)
    at_bits = at_few = at_wide = 0
    for vocab, option, seed, tie in data["cases"].tolist():
        only = None if option < 0 else OPTIONS[option]
        case = make_case(vocab, seed, only)
        case.logits.setflags(write=False)
        n_bytes = (vocab + 7) // 8
        ranks = np.flatnonzero(np.unpackbits(data["bits"][at_bits : at_bits + n_bytes], count=vocab))
        order = best_ids(case.logits, ranks[-1] + 1)[ranks]  # the kept ids, best first
        kept = np.zeros(vocab, dtype=bool)
        kept[order] = True
        at_bits += n_bytes
        n = len(ranks)
        if n <= COLUMNS:
            p = np.zeros(vocab)
            p[order] = data["few"][at_few : at_few + n]
            at_few += n
            stored = (p,)
        else:
            stored = (data["columns"][at_wide], data["moments"][at_wide])
            at_wide += 1
        yield case, only, kept, None if tie < 0 else WARPERS[tie], stored
    assert (at_bits, at_few, at_wide) == (len(data["bits"]), len(data["few"]), len(data["columns"]))


@functools.cache  # and no fixture: tests.mutation then makes it once for all mutants
def golden_of():
    """Size of the vocabulary -> what `golden` yields for it."""
    entries = {vocab: [] for vocab in VOCABULARIES}
    for entry in golden():
        entries[len(entry[0].logits)].append(entry)
    return entries


@pytest.mark.slow
def test_golden_covers_what_it_should():
    counts = {vocab: len(entries) for vocab, entries in golden_of().items()}
    assert sum(counts.values()) >= 600 and all(count >= 100 for count in counts.values()), counts
    combined = [e for entries in golden_of().values() for e in entries if e[1] is None]
    for a, b in itertools.combinations(OPTIONS, 2):
        assert sum(a in e[0].options and b in e[0].options for e in combined) >= 50, (a, b)
    ties = [e[3] for entries in golden_of().values() for e in entries]
    assert all(ties.count(name) >= 5 for name in ("top_k", "top_p", "typical_p"))


def assert_lowest_ids(kept, theirs, value, tie, options):
    """transformers' set `theirs`, minigen's set `kept`, and the value (float64 [V], larger is better) the filter ranks.

    The rule, stated: better tokens than the border's are kept by both; among those equal to the border's, minigen
    keeps the lowest ids; how many it keeps is k for top_k, transformers' number for top_p, and for typical_p (where
    transformers keeps every equal token) all that are needed to reach the mass.
    """
    border = value[theirs].min()
    assert np.array_equal(kept[value != border], theirs[value != border])
    equal = np.flatnonzero(value == border)
    n = int(kept[equal].sum())
    assert n >= 1 and kept[equal[:n]].all() and not kept[equal[n:]].any()
    if tie == "top_k":
        assert kept.sum() == options["top_k"] < theirs.sum()
    elif tie == "top_p":
        assert kept.sum() == theirs.sum()
    else:
        assert not np.any(kept & ~theirs)


@pytest.mark.slow
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_same_tokens_and_probabilities_as_transformers(vocab):
    for number, (case, _, kept, tie, stored) in enumerate(golden_of()[vocab]):
        logits, ids, n_prompt, options = case
        p = run(logits, ids, n_prompt, **options)
        mine = p > 0
        where = f"case {number}: {options}, ids {ids}, n_prompt {n_prompt}"
        assert p.dtype == np.float64 and p.shape == (vocab,) and abs(p.sum() - 1) < 1e-12, where
        if tie is None:
            assert np.array_equal(mine, kept), f"{where}: kept {mine.sum()} tokens, transformers {kept.sum()}"
            if len(stored) == 1:
                np.testing.assert_allclose(p, stored[0], rtol=0, atol=1e-6, err_msg=where)
            else:
                np.testing.assert_allclose(p[columns(vocab)], stored[0], rtol=0, atol=1e-6, err_msg=where)
                np.testing.assert_allclose(moments(p), stored[1], rtol=0, atol=2e-6, err_msg=where)
        else:
            before = ref_logits(logits, ids, n_prompt, {k: v for k, v in options.items() if k != tie})
            value = before if tie != "typical_p" else -np.array(ref_distance(before))
            assert_lowest_ids(mine, kept, value, tie, options)
            assert np.array_equal(mine, REF_WARPERS[tie](before, options[tie]) > -INF), where  # the last one that is on
            theirs = np.sort(stored[0])[::-1][: mine.sum()] if tie == "top_p" else stored[0][mine]
            ours = np.sort(p)[::-1][: mine.sum()] if tie == "top_p" else p[mine]
            np.testing.assert_allclose(ours, theirs / theirs.sum(), rtol=0, atol=1e-6, err_msg=where)


FILTERS = {  # option -> its function on (logits, ids, n_prompt, value)
    "repetition_penalty": lambda x, ids, n, v: apply_repetition_penalty(x, ids, v),
    "presence_penalty": lambda x, ids, n, v: apply_presence_frequency(x, ids[n:], v, 0.0),
    "frequency_penalty": lambda x, ids, n, v: apply_presence_frequency(x, ids[n:], 0.0, v),
    "no_repeat_ngram_size": lambda x, ids, n, v: ban_repeated_ngrams(x, ids, v),
    "logit_bias": lambda x, ids, n, v: apply_logit_bias(x, v),
    "temperature": lambda x, ids, n, v: apply_temperature(x, v),
    "top_k": lambda x, ids, n, v: keep_top_k(x, v),
    "top_p": lambda x, ids, n, v: keep_top_p(x, v),
    "min_p": lambda x, ids, n, v: keep_min_p(x, v),
    "typical_p": lambda x, ids, n, v: keep_typical_p(x, v),
}


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_single_filters_keep_what_transformers_keeps(option):
    seen = 0
    for case, only, kept, tie, _ in itertools.chain(*golden_of().values()):
        if only == option and tie is None:
            after = FILTERS[option](case.logits, case.ids, case.n_prompt, case.options[option])
            assert np.array_equal(after > -INF, kept), case.options
            if option in WARPERS[1:]:  # a filter removes or leaves alone
                assert np.array_equal(after[kept], case.logits[kept])
            seen += 1
    assert seen >= 25


# ---------------------------------------------------------------------------------------------------------------------
# Filters against their definitions, each alone and all together. Quarter steps make ties common and sums exact.

quarters = st.integers(-24, 24).map(lambda n: n / 4)
banned_or_quarters = st.one_of(quarters, quarters, quarters, st.just(-INF))
any_floats = st.floats(-20, 20, width=32)
rows = (
    st.one_of(
        st.lists(banned_or_quarters, min_size=1, max_size=12),
        st.lists(any_floats, min_size=1, max_size=12),
        st.lists(st.sampled_from([0.0, 0.5, -INF]), min_size=1, max_size=12),
    )
    .map(read_only)
    .filter(lambda x: np.any(x > -INF))
)
fractions = st.one_of(st.sampled_from([0.1, 0.25, 0.5, 0.75, 0.9]), st.floats(0.001, 0.999))
VALUES = {
    "repetition_penalty": st.sampled_from([0.5, 0.75, 1.1, 1.5, 2.0, 4.0]),
    "presence_penalty": st.sampled_from([-1.5, -0.5, 0.25, 1.0, 2.0]),
    "frequency_penalty": st.sampled_from([-0.5, -0.25, 0.5, 1.0]),
    "no_repeat_ngram_size": st.integers(1, 4),
    "logit_bias": st.dictionaries(st.integers(0, 11), st.one_of(quarters, st.just(-INF)), max_size=4),
    "temperature": st.sampled_from([0.01, 0.5, 0.7, 2.0, 50.0]),
    "top_k": st.integers(1, 14),
    "top_p": fractions,
    "min_p": st.one_of(fractions, st.just(1.0)),
    "typical_p": fractions,
}


@st.composite
def situations(draw_from, options):
    """(logits, ids, n_prompt, options)"""
    x = draw_from(rows)
    options = draw_from(options)
    if "logit_bias" in options:
        options = options | {"logit_bias": {i: v for i, v in options["logit_bias"].items() if i < len(x)}}
    ids = draw_from(st.lists(st.integers(0, draw_from(st.sampled_from([len(x), min(3, len(x))])) - 1), max_size=12))
    return x, ids, draw_from(st.integers(0, len(ids))), options


def clear_nucleus(x, mass, by_distance):
    """False if the outcome hangs on rounding: a cumulated mass at the border, or two nearly equal tokens at it."""
    p = ref_softmax(x)
    key = ref_distance(x) if by_distance else [-v for v in x]
    order = sorted(range(len(x)), key=lambda i: (key[i], i))
    ids, slack = ref_nucleus(order, p, mass)
    # Equal tokens whose number is a power of two weigh exactly 2**-n each, so there the border itself is clear.
    n = int(np.sum(x > -INF))
    exact = not by_distance and len(set(x[x > -INF].tolist())) == 1 and n & (n - 1) == 0
    if slack < 1e-6 and not exact:
        return False
    if len(ids) == len(order):
        return True
    last, first = order[len(ids) - 1], order[len(ids)]
    return x[last] == x[first] or abs(key[last] - key[first]) > 1e-5


def clear_chain(x, ids, n_prompt, options):
    """`ref_logits`, but gives the example up if the outcome hangs on rounding or nothing is left."""
    chain = ref_process(x, ids, n_prompt, options)
    assume(np.any(chain > -INF))
    for name in WARPERS:
        if name in options:
            if name in ("top_p", "typical_p"):
                assume(clear_nucleus(chain, options[name], by_distance=name == "typical_p"))
            elif name == "min_p":
                best = max(chain)
                assume(all(v == best or abs(v - best - math.log(options[name])) > 1e-5 for v in chain))
            chain = REF_WARPERS[name](chain, options[name])
    return chain


@pytest.mark.parametrize("name", VALUES)
@fixed
@given(data=st.data())
def test_each_filter_is_its_definition(name, data):
    situation = x, ids, n_prompt, options = data.draw(situations(st.fixed_dictionaries({name: VALUES[name]})))
    expected = clear_chain(*situation)
    after = FILTERS[name](x, ids, n_prompt, options[name])
    if name == "temperature":  # only differences count: the filter may shift the row
        after, expected = after - after.max(), expected - expected.max()
    np.testing.assert_allclose(after, expected, rtol=2e-6, atol=4e-6 / min(options.get("temperature", 1), 1))


@pytest.mark.slow
@settings(fixed, max_examples=200)
@given(situations(st.fixed_dictionaries({}, optional=VALUES)))
def test_any_combination_is_the_chain_of_definitions(situation):
    """In the documented order, as a distribution, and without a trace in the arguments."""
    chain = clear_chain(*situation)
    x, ids, n_prompt, options = situation
    before = x.tobytes(), list(ids), dict(options.get("logit_bias", {}))
    p = run(x, ids, n_prompt, **options)
    assert p.dtype == np.float64 and abs(p.sum() - 1) < 1e-12
    assert np.flatnonzero(p).tolist() == kept_ids(chain)
    np.testing.assert_allclose(p, ref_softmax(chain), rtol=0, atol=2e-6)
    greedy = run(x, ids, n_prompt, **options | {"temperature": 0.0})
    assert greedy.tolist() == one_hot(np.argmax(ref_process(x, ids, n_prompt, options)), len(x)).tolist()
    assert before == (x.tobytes(), ids, options.get("logit_bias", {}))


# ---------------------------------------------------------------------------------------------------------------------
# Values worked out by hand


def test_temperature_zero_is_the_first_maximum():
    """S01: division by a temperature of 0."""
    assert run([1.0, 2.0, -1.0], temperature=0).tolist() == [0.0, 1.0, 0.0]
    assert run([1.0, 2.0, 2.0], temperature=0.0).tolist() == [0.0, 1.0, 0.0]
    assert run([-INF, -INF, -80.0, -80.0], temperature=0.0, top_p=0.5, min_p=0.3).tolist() == [0.0, 0.0, 1.0, 0.0]
    # The penalties and bans come first: 2 / 2 < 1.5.
    assert run([1.5, 2.0, -1.0], [1], 1, temperature=0, repetition_penalty=2.0).tolist() == [1.0, 0.0, 0.0]
    assert run([1.0, 2.0, -1.0], temperature=0, logit_bias={1: -INF}).tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-38, 1e-45, 1e-300])
def test_tiny_temperatures_are_greedy(temperature):
    """S01: temperatures so small that all quotients overflow."""
    for logits in ([1.0, 2.0, -1.0], [-80.0, -75.0, -90.0], [80.0, 75.0, 90.0], [-INF, -3e4, -4e4]):
        p = run(logits, temperature=temperature)
        assert np.all(np.isfinite(p)) and p.sum() == 1.0 and p[int(np.argmax(logits))] == 1.0
    assert run([3.0, 5.0, 5.0], temperature=temperature).tolist() == [0.0, 0.5, 0.5]


@pytest.mark.parametrize("top_p, n", [(0.49, 1), (0.51, 2), (0.6, 2), (0.79, 2), (0.81, 3), (0.9, 3), (0.96, 4)])
def test_the_token_that_crosses_top_p_is_kept(top_p, n):
    """S03: the token that crosses top_p dropped."""
    p = np.array([0.5, 0.3, 0.15, 0.05])
    for order in itertools.permutations(range(4)):
        logits = np.log(p[list(order)]).astype(np.float32)
        expected = np.where(np.array(order) < n, p[list(order)] / p[:n].sum(), 0.0)
        assert kept_ids(keep_top_p(logits, top_p)) == np.flatnonzero(expected).tolist()
        np.testing.assert_allclose(run(logits, top_p=top_p), expected, rtol=0, atol=1e-6)


def test_top_p_at_exact_borders():
    # Four equal tokens weigh exactly 1/4 each, in any precision.
    for top_p, n in [(1e-9, 1), (0.2, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.51, 3), (0.75, 3), (0.76, 4), (1.0, 4)]:
        assert kept_ids(keep_top_p(row(2, 2, 2, 2), top_p)) == list(range(n))
        assert kept_ids(keep_top_p(row(-INF, 2, 2, -INF, 2, 2), top_p)) == [1, 2, 4, 5][:n]


@pytest.mark.parametrize("spread", [1, 3, 8, 15])
@pytest.mark.parametrize("p", [0.999, 1 - 1e-6, 1 - 1e-9, 1 - 1e-12, math.nextafter(1, 0)])
def test_top_p_near_1_is_met_to_float32_precision(spread, p):
    """F22: rounding decides which tokens of the tail are cut so close to 1; together they are at most 1 - p + 1e-7."""
    logits = np.random.default_rng(0).normal(0, spread, 50_257).astype(np.float32)
    kept = keep_top_p(logits, p) > -INF
    exact = np.exp(logits.astype(np.longdouble) - logits.max())
    exact /= exact.sum()
    assert exact[~kept].sum() <= 1 - p + 1e-7  # enough is kept
    assert exact[kept].sum() - exact[kept].min() < p + 1e-7  # and no token too many
    assert logits[~kept].max(initial=-INF) <= logits[kept].min()


@pytest.mark.parametrize("k, kept", [(0, 5), (1, 1), (2, 2), (4, 4), (5, 5), (6, 5), (100_000, 5)])
def test_top_k_in_and_out_of_range(k, kept):
    """S04: top_k beyond the vocabulary."""
    logits = row(0.5, 3, -2, 2, 1)
    best = [1, 3, 4, 0, 2]
    assert kept_ids(keep_top_k(logits, k)) == sorted(best[:kept])
    assert np.flatnonzero(run(logits, top_k=k)).tolist() == sorted(best[:kept])


def test_repetition_penalty_on_either_sign():
    """S06: a penalty that raises negative logits."""
    after = apply_repetition_penalty(row(2, -2, 0), [0, 1, 2], 1.5)
    np.testing.assert_allclose(after, [4 / 3, -3.0, 0.0], rtol=1e-6)
    assert apply_repetition_penalty(row(2, -2, -INF, 4), [2, 3], 2.0).tolist() == [2, -2, -INF, 2]
    # Below 1 it rewards, again on either side of zero.
    assert apply_repetition_penalty(row(2, -2), [0, 1], 0.5).tolist() == [4, -1]


def test_which_part_of_the_history_each_penalty_sees():
    x, ids = [2.0, 2.0, 2.0], [0, 0, 1]
    assert treat(x, ids, 2, repetition_penalty=2.0) == [1, 1, 2]  # the prompt is 0 0, the output 1
    assert treat(x, ids, 2, presence_penalty=0.5) == [2, 1.5, 2]
    assert treat(x, ids, 2, frequency_penalty=0.5) == [2, 1.5, 2]
    assert treat(x, ids, 0, frequency_penalty=0.5) == [1, 1.5, 2]  # no prompt
    assert treat(x, ids, 3, frequency_penalty=0.5, presence_penalty=0.5) == [2, 2, 2]  # no output
    assert treat(x, [0, 0, 1, 0], 2, no_repeat_ngram_size=2) == [-INF, -INF, 2]  # 0 0 lies in the prompt


def test_temperature_comes_before_top_p():
    """S08: truncation before temperature."""
    p = run([3.0, 2.0, 1.0], temperature=0.5, top_p=0.8)  # top_p first would keep two
    assert p.tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "min_p, kept", [(0.0, [0, 1, 2, 3]), (0.01, [0, 1, 2, 3]), (0.1, [1, 2]), (0.4, [1]), (1.0, [1])]
)
def test_min_p_is_measured_from_the_best_probability(min_p, kept):
    """S09: min_p measured from the first token."""
    for shift in (0.0, 8.0, -64.0):
        assert kept_ids(keep_min_p(row(-4, 0, -1, -3) + np.float32(shift), min_p)) == kept
        assert np.flatnonzero(run(row(-4, 0, -1, -3) + np.float32(shift), min_p=min_p)).tolist() == kept


def test_log_softmax():
    x = row(3, 2, 1, 0.5, -INF)
    logp = log_softmax(x)
    assert logp.dtype == np.float64 and logp[4] == -INF
    expected = [math.log(p) for p in ref_softmax(x.astype(np.float64))[:4]]
    np.testing.assert_allclose(logp[:4], expected, rtol=0, atol=2e-7)
    np.testing.assert_allclose(log_softmax(row(0, -300, 88)), [-88, -388, 0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(log_softmax(row(3e4, 3e4, -3e4)), [-math.log(2)] * 2 + [-6e4 - math.log(2)], rtol=1e-10)
    many = (np.random.default_rng(2).standard_normal(50_257) * 4 + 30).astype(np.float32)
    wide = many.astype(np.float64)
    expected = wide - 30 - math.log(math.fsum(np.exp(wide - 30)))
    np.testing.assert_allclose(log_softmax(many), expected, rtol=0, atol=2e-7)
    for seed in range(8):  # a sum in float32 would be off by up to 3.5e-8 here
        x = (np.random.default_rng(seed).normal(0, 3, 50_257)).astype(np.float32)
        wide = x.astype(np.float64)
        assert abs(log_softmax(x)[0] - (wide[0] - math.log(math.fsum(np.exp(wide))))) < 1.5e-8


# ---------------------------------------------------------------------------------------------------------------------
# What changes nothing

NEUTRAL = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "no_repeat_ngram_size": 0,
    "logit_bias": {},
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "min_tokens": 0,
    "logits_processors": (),
}


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "temperature"])
def test_the_neutral_value_of_each_filter_changes_no_bit(name):
    """S06: a penalty of 1 that changes bits."""
    for x in (row(2, -2, 0, -INF, 0.3), row(0), row(1, 1, 1, 1), row(1e38, -1e38, 1e-38)):
        for ids in ([], [0], [0, 0, 0], [0, 0, 0, 0, 0, 0]):
            assert FILTERS[name](x, ids, 1, NEUTRAL[name]).tobytes() == x.tobytes()


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


def test_logit_bias_outside_the_vocabulary_is_refused():
    assert run([0.0, 1.0], logit_bias={1: -INF}).tolist() == [1.0, 0.0]
    for token in (2, 100):
        with pytest.raises(ValueError, match=f"logit_bias.* {token}, .* 0 to 1$"):
            run([0.0, 1.0], logit_bias={token: 1.0})


def test_defaults():
    config = SamplingConfig()
    assert (config.temperature, config.top_p) == (0.7, 0.9)
    for name, value in NEUTRAL.items():
        if name not in ("temperature", "top_p"):
            assert getattr(config, name) == value, name


@pytest.mark.parametrize("n_generated", [0, 1, 4])
def test_the_error_names_the_token_and_what_is_wrong(n_generated):
    """Tokens are counted from 1: with none generated, it is the first that cannot be chosen."""
    ids = [0] * (2 + n_generated)
    for logits, fault in (([-INF, -INF], "-inf"), ([1, NAN], "nan"), ([NAN, -INF], "nan"), ([INF, 1], " inf")):
        for options in (dict(temperature=0), dict(temperature=1e-30), dict(top_k=1), dict(top_p=0.5, typical_p=0.5)):
            with pytest.raises(ValueError, match=rf"\btoken {n_generated + 1}\b.*{fault}"):
                run(logits, ids, 2, **options)
    for result in (np.zeros(3, np.float32), [0.0, 0.0], np.array(["a", "b"]), np.array([1j, 2j]), None):
        with pytest.raises(ValueError) as error:
            run([1.0, 2.0], ids, 2, logits_processors=(lambda history, logits, result=result: result,))
        message = str(error.value)
        assert f"token {n_generated + 1}:" in message and repr(result) in message and " 2 logits" in message


# ---------------------------------------------------------------------------------------------------------------------
# The ban on end-of-text


def test_end_of_text_is_banned_until_min_tokens():
    x, ends = [1.0, 3.0, 2.0, 0.0], (1, 2)
    for n_generated in range(5):  # the token to choose is number n_generated + 1
        ids = [0] * (2 + n_generated)
        expected = [1, -INF, -INF, 0] if n_generated < 3 else x
        assert treat(x, ids, 2, min_tokens=3, eos_ids=ends) == expected
        assert treat(x, ids, 2, ignore_eos=True, eos_ids=ends) == [1, -INF, -INF, 0]
        assert treat(x, ids, 2, eos_ids=ends) == treat(x, ids, 2, min_tokens=3) == x
    # A bias does not lift the ban; the caller's processors see it.
    assert treat(x, ignore_eos=True, eos_ids=(1,), logit_bias={1: 9.0}) == [1, -INF, 2, 0]
    lift = lambda history, logits: np.where(logits == -INF, 7, logits)  # noqa: E731
    assert treat(x, ignore_eos=True, eos_ids=(1,), logits_processors=(lift,)) == [1, 7, 2, 0]


# ---------------------------------------------------------------------------------------------------------------------
# The caller's processors


def test_processors_run_in_order_after_the_bias_and_before_temperature():
    seen = []

    def first(history, logits):
        seen.append((list(history.ids), history.n_prompt, logits.tolist(), logits.dtype))
        return logits + np.float32(1)

    def second(history, logits):
        seen.append(logits.tolist())
        return logits * np.float32(2)

    options = dict(repetition_penalty=2.0, presence_penalty=1.0, logit_bias={2: 0.5}, logits_processors=(first, second))
    x = row(4, 2, 1)
    config = SamplingConfig(**OFF | options | {"temperature": 0.5, "top_k": 1})
    # 4 / 2 = 2, 2 / 2 - 1 = 0, 1 + 0.5 = 1.5; then + 1, then * 2
    assert apply_logits_processors(x, History([0, 1], 1), config).tolist() == [6, 2, 5]
    assert seen == [([0, 1], 1, [2, 0, 1.5], np.float32), [3, 1, 2.5]]
    assert next_token_probs(x, History([0, 1], 1), config).tolist() == [1, 0, 0]
    np.testing.assert_allclose(
        run([0.0, 0.0], temperature=0.5, logits_processors=(lambda h, x: x + np.log([1, 3]),)), [0.1, 0.9], atol=1e-7
    )


# ---------------------------------------------------------------------------------------------------------------------
# The draw


class FixedNoise:
    """Noise whose exponentials are given by token; `asked` are the tokens that it was asked for."""

    def __init__(self, exponentials):
        self.given = np.asarray(exponentials, float)
        self.asked = None

    def exponentials(self, tokens):
        self.asked = list(tokens)
        return self.given[tokens]


class NoNoise:
    def exponentials(self, tokens):
        raise AssertionError("a certain outcome takes no noise")


def test_the_race_is_won_by_the_smallest_quotient():
    p = np.array([0.0, 0.5, 0.25, 0.0, 0.25])
    for exponentials, winner in (
        ([0.0, 1.0, 0.4, 0.0, 9.0], 2),  # 2 before 1.6
        ([0.0, 1.0, 0.6, 0.0, 9.0], 1),  # 2 before 2.4
        ([9.0, 9.0, 9.0, 9.0, 4.0], 4),
        ([0.0, 1.0, 0.5, 0.0, 0.5], 1),  # ties: lowest id
    ):
        noise = FixedNoise(exponentials)
        token = sample_token(p, noise)
        assert token == winner and type(token) is int
        assert noise.asked == [1, 2, 4]  # the others cost nothing


def test_logits_that_are_not_finite_are_refused_without_a_warning():
    """F23: NumPy's warning in front of the sentence, or in its place."""
    for bad in (INF, NAN):
        with pytest.raises(ValueError, match=f"the best logit is {bad}"):
            next_token_probs(read_only([bad, 1, 2]), EMPTY, SamplingConfig())


def test_a_huge_temperature_makes_all_tokens_equal():
    """F23: temperature 1e30 that keeps a single token."""
    for temperature in (1e10, 1e30, 1e39, 1e308):
        p = run([1, -INF, 50, -30], temperature=temperature)
        np.testing.assert_allclose(p, [1 / 3, 0, 1 / 3, 1 / 3], rtol=0, atol=1e-6)


def test_a_certain_outcome_takes_no_noise():
    """S01: temperature 0 depends on the seed."""
    for token in (0, 3, 6):
        assert sample_token(one_hot(token, 7), NoNoise()) == token
    logits = [1.0, 5.0, 2.0]
    for options in (dict(top_k=1), dict(temperature=0, top_p=0.9, min_p=0.1), dict(top_p=1e-6), dict(min_p=1.0)):
        assert sample_token(run(logits, **options), NoNoise()) == 1


@pytest.mark.parametrize(
    ("scores", "n", "ids"),
    [
        ([1.0, 3.0, 2.0], 2, [1, 2]),
        ([2.0, 1.0, 2.0, 2.0], 2, [0, 2]),  # ties: lowest id
        ([2.0, 1.0, 2.0, 2.0], 4, [0, 2, 3, 1]),
        ([1.0, 2.0, 1.0, 2.0, 1.0], 3, [1, 3, 0]),
        ([-INF, 0.0, -INF], 2, [1, 0]),
        ([1.0, 2.0], 5, [1, 0]),
        ([1.0, 2.0], 0, []),
    ],
)
def test_top_ids(scores, n, ids):
    assert top_ids(np.array(scores), n).tolist() == ids


# ---------------------------------------------------------------------------------------------------------------------
# The noise


def state_before(output):
    """The state from which SplitMix64's next output is this one."""
    z = output
    for shift, factor in zip(SHIFTS[::-1], FACTORS[::-1], strict=True):
        mixed = z = z * pow(factor, -1, 2**64) & MASK
        for _ in range(64 // shift):
            z = mixed ^ (z >> shift)
    return (z - 0x9E3779B97F4A7C15) & MASK


def start_from(monkeypatch, state):
    """Seed the noise with this state of SplitMix64 instead of one from its fields."""

    class Fixed:
        def __init__(self, fields):
            pass

        def generate_state(self, n_words, dtype):
            return np.full(n_words, state, dtype)

    monkeypatch.setattr(np.random, "SeedSequence", Fixed)


def test_uniforms_are_outputs_of_splitmix64(monkeypatch):
    # The outputs that the published implementation gives for seed 1234567.
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert splitmix64(1234567, 5) == known
    noise, (state,) = Noise(7, 1, 30, 2), np.random.SeedSequence((7, 1, 30, 2)).generate_state(1, np.uint64)
    expected = np.array(splitmix64(int(state), 1000)) / 2.0**64
    np.testing.assert_allclose(noise.uniforms(range(1000)), expected, rtol=0, atol=2.0**-52)
    np.testing.assert_array_equal(noise.uniforms([999, 3]), noise.uniforms(range(1000))[[999, 3]])
    start_from(monkeypatch, 1234567)
    np.testing.assert_allclose(Noise(0, 0, 0).uniforms(range(5)), np.array(known) / 2.0**64, rtol=0, atol=2.0**-52)


@pytest.mark.parametrize("output", [0, 1, 2**63 - 1, 2**63, MASK - 1, MASK])
def test_uniforms_are_never_0_or_1(monkeypatch, output):
    # At 0 a token could never win the race, and at 1 it would win whatever its probability.
    assert splitmix64(state_before(output), 1) == [output]
    start_from(monkeypatch, state_before(output))
    noise = Noise(0, 0, 0)
    (u,) = noise.uniforms([0])
    assert 0 < u < 1 and abs(u - output / 2.0**64) <= 2.0**-52
    (exponential,) = noise.exponentials([0])
    assert exponential == -np.log(u) and 0 < exponential < INF


def test_exponentials_are_exponential():
    numbers = Noise(3, 1, 4).exponentials(range(200_000))
    # 20 cells that are equally likely
    cells = (20 * -np.expm1(-numbers)).astype(int)
    assert_frequencies(cells, np.full(20, 1 / 20))


@pytest.mark.slow
@pytest.mark.parametrize("field", ["seed", "number", "position", "stream"])
def test_draws_of_neighbours_are_independent(field):
    p = np.array([0.4, 0.3, 0.2, 0.1])
    draws = np.array([sample_token(p, Noise(5, 0, 3, 0)._replace(**{field: value})) for value in range(3_001)])
    assert_frequencies(draws, p)
    assert_frequencies(4 * draws[:-1] + draws[1:], np.outer(p, p).ravel())
    assert_frequencies(4 * draws[:-2] + draws[2:], np.outer(p, p).ravel())


# ---------------------------------------------------------------------------------------------------------------------
# Frequencies


SKEWED = [1.5, -0.25, 3.0, 0.75, 2.5, -2.0, 1.0, 0.0, 2.25, -INF, 1.75, 0.5]
SEEN = ([2, 4, 2, 8, 4, 2], 3)  # ids, n_prompt
MIXES = {
    "temperature": dict(temperature=1.7),
    "no_repeat_ngram_size": dict(no_repeat_ngram_size=2),
    "typical_p": dict(typical_p=0.6),
    "usual": dict(temperature=0.7, top_k=8, top_p=0.93),
    "penalties": dict(temperature=1.3, repetition_penalty=1.2, frequency_penalty=0.4, min_p=0.06),
    "all": dict(
        temperature=1.5, top_k=9, top_p=0.97, min_p=0.03, typical_p=0.9, repetition_penalty=1.1, presence_penalty=0.3,
        frequency_penalty=0.2, no_repeat_ngram_size=3, logit_bias={7: 1.0},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def exponentials():
    """The noise of 100,000 races, [races, V]: of 10,000 positions, 10 at each, of which the first is the position's."""
    tokens = np.arange(10 * len(SKEWED))
    noise = [Noise(11, 0, position).exponentials(tokens) for position in range(10_000)]
    return np.reshape(noise, (-1, len(SKEWED)))


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXES)
def test_frequencies_of_100_000_draws(exponentials, name):
    ids, n_prompt = SEEN
    p = run(SKEWED, ids, n_prompt, **MIXES[name])
    exact = np.array(ref_softmax(ref_logits(SKEWED, ids, n_prompt, MIXES[name])))
    np.testing.assert_allclose(p, exact, rtol=0, atol=1e-6)
    # All races at once ...
    tokens = np.flatnonzero(p)
    draws = tokens[np.argmin(exponentials[:, tokens] / p[tokens], axis=1)]
    # ... which the sampler runs one by one.
    assert draws[:5000:10].tolist() == [sample_token(p, Noise(11, 0, position)) for position in range(500)]
    assert_frequencies(draws, exact)
    assert_frequencies(draws[::10], exact)


def test_frequencies_with_a_generator():
    p, rng = run(SKEWED, temperature=1.7), np.random.default_rng(0)
    assert_frequencies([sample_token(p, rng) for _ in range(20_000)], p)


@pytest.mark.parametrize("kind", [np.uint8, np.uint64, np.int8, np.int64])
def test_a_processor_may_return_whole_numbers(kind):
    """F19: unsigned integers wrap around below 0."""
    config = SamplingConfig(**OFF, logits_processors=[lambda history, logits: np.array([1, 3, 2, 0], kind)])
    p = next_token_probs(row(9, 9, 9, 9), History([0], 1), config)
    np.testing.assert_allclose(p, np.exp([1, 3, 2, 0]) / np.exp([1, 3, 2, 0]).sum(), rtol=1e-6)


def test_a_processor_cannot_change_the_run():
    """F19: its arguments are copies."""

    def processor(history, logits):
        history.ids.append(3)
        logits[:] = 0
        return logits

    history, logits = History([0, 1], 1), row(1, 2, 3, 4)
    next_token_probs(logits, history, SamplingConfig(**OFF, logits_processors=[processor, processor]))
    assert history == History([0, 1], 1) and logits.tolist() == [1, 2, 3, 4]
