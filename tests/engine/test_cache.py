"""The K/V cache against plain lists: what each query sees, after any series of writes, rollbacks and reorderings."""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minigen.engine.cache import KVCache
from tests.oracles.models import assert_unchanged, cache_state, feed, left_padded, tiny_model
from tests.oracles.reference import reference_logits

# Overflow, NaN and the like are faults even if nobody reads the number.
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

CONFIG, PARAMS, MODEL = tiny_model(n_positions=64)


# ---- helpers -----------------------------------------------------------------------------------------------------


def random_ids(*shape, seed=0):
    return np.random.default_rng(seed).integers(97, size=shape)


def assert_last_logits(logits, texts, window=None):
    """Logits [B, T, V] are the float64 reference's after the last T tokens of each text."""
    for row, text in zip(logits, texts, strict=True):
        expected = reference_logits(CONFIG, PARAMS, text, window)[-len(row) :]
        assert np.abs(row - expected).max() < 1e-5  # NaN fails too


def assert_refused(cache, words, call):
    """Assert that a call raises ValueError and leaves the cache as it was."""
    before = cache_state(cache)
    with pytest.raises(ValueError, match=words):
        call()
    assert_unchanged(cache, before)


# ---- any series of calls -----------------------------------------------------------------------------------------


class Rows:
    """What a cache has to be, without slots: per row the tokens fed, and of which of them the keys are still there.

    A new key costs the row the key `capacity` positions before it, for good.
    """

    def __init__(self, batch, capacity, window):
        self.capacity, self.window = capacity, window
        self.tokens = [[] for _ in range(batch)]
        self.kept = [set() for _ in range(batch)]

    def visible(self, query):
        """The positions that a query at this position sees."""
        return [p for p in range(query + 1) if self.window is None or query - p < self.window]

    def may_extend(self, row, count):
        at = len(self.tokens[row])
        new = range(at, at + count)
        lost = {q - self.capacity for q in new}
        return not any(p in lost for query in new for p in self.visible(query))

    def may_truncate(self, row, length):
        if not 0 <= length <= len(self.tokens[row]):
            return False
        # The next token is a query at `length`; its own key will be new.
        return set(self.visible(length)) - {length} <= self.kept[row]

    def extend(self, row, tokens):
        for token in tokens:
            self.kept[row].discard(len(self.tokens[row]) - self.capacity)
            self.kept[row].add(len(self.tokens[row]))
            self.tokens[row].append(token)

    def truncate(self, row, length):
        del self.tokens[row][length:]
        self.kept[row] = {p for p in self.kept[row] if p < length}

    def reorder(self, rows):
        self.tokens = [list(self.tokens[row]) for row in rows]
        self.kept = [set(self.kept[row]) for row in rows]

    def same(self):
        return all(tokens == self.tokens[0] for tokens in self.tokens)

    def shared(self):
        """How many first positions are the same in all rows."""
        columns = zip(*self.tokens, strict=False)
        return next((i for i, column in enumerate(columns) if len(set(column)) > 1), min(map(len, self.tokens)))


class CacheMachine(RuleBasedStateMachine):
    """Drives a cache and `Rows` through the same random calls. Subclasses say how tokens are made and compared."""

    MOST_ROWS = 3
    LONGEST = 10**6

    def begin(self, batch, capacity, window):
        self.rows = Rows(batch, capacity, window)

    @initialize(batch=st.integers(1, 3), capacity=st.integers(1, 7), window=st.sampled_from([None, 1, 2, 3, 4, 5, 7]))
    def start(self, batch, capacity, window):
        self.begin(batch, capacity, window and min(window, capacity))

    @property
    def lengths(self):
        return [len(tokens) for tokens in self.rows.tokens]

    def feed(self, counts, padding=0):
        """Feed counts[row] new tokens to each row, or see that the cache refuses them and stays as it was."""
        counts = [min(count, self.LONGEST - length) for count, length in zip(counts, self.lengths, strict=True)]
        if not any(counts):
            return
        if all(self.rows.may_extend(row, count) for row, count in enumerate(counts)):
            self.extend(counts, max(counts) + padding)
        else:
            assert_refused(self.cache, "do not fit", lambda: self.extend(counts, max(counts) + padding))

    # One rule for all calls: hypothesis leaves rules out at random, and a run without one of them shows little.
    @rule(data=st.data(), name=st.sampled_from(["extend", "extend", "extend", "take back", "take back", "reorder"]))
    def call(self, data, name):
        {"extend": self.extend_rows, "take back": self.take_tokens_back, "reorder": self.reorder_rows}[name](data)

    def extend_rows(self, data):
        manner = data.draw(st.sampled_from(["each row its own", "each row its own", "alike", "the most", "too many"]))
        n, most, padding = len(self.rows.tokens), self.cache.max_chunk, data.draw(st.integers(0, 2))
        if manner == "each row its own":
            limit = data.draw(st.sampled_from([2, 2, 4, 9]))
            self.feed(data.draw(st.lists(st.integers(0, limit), min_size=n, max_size=n)), padding)
        else:
            alike = data.draw(st.integers(1, 3))
            count = {"alike": alike, "the most": most, "too many": most + 1}[manner]
            self.feed([count] * n, padding if manner == "alike" else 0)

    def take_tokens_back(self, data):
        manner = data.draw(st.sampled_from(["a few", "a few", "any", "all alike"]))
        if manner == "all alike":
            length = data.draw(st.integers(0, max(self.lengths)))
            self.truncate([length] * len(self.lengths), length)
        else:
            least = 2 if manner == "a few" else 8
            more = 0 if manner == "a few" else 1
            lengths = [data.draw(st.integers(max(n - least, -more), n + more)) for n in self.lengths]
            self.truncate(lengths, np.array(lengths))

    def truncate(self, lengths, argument):
        if all(self.rows.may_truncate(row, length) for row, length in enumerate(lengths)):
            self.cache.truncate(argument)
            for row, length in enumerate(lengths):
                self.rows.truncate(row, length)
            if isinstance(argument, np.ndarray):
                argument += 1  # the cache keeps a copy
        else:
            assert_refused(self.cache, "cannot truncate", lambda: self.cache.truncate(argument))

    def reorder_rows(self, data):
        batch, shares, stays = len(self.rows.tokens), data.draw(st.booleans()), data.draw(st.booleans())
        size = batch if stays else data.draw(st.integers(1, self.MOST_ROWS))
        rows = data.draw(st.lists(st.integers(0, batch - 1), min_size=size, max_size=size))
        self.cache.reorder(rows, **{"shared": self.rows.shared()} if shares else {})
        self.rows.reorder(rows)

    @precondition(lambda self: hasattr(self, "rows"))
    @invariant()
    def sizes_agree(self):
        assert self.cache.batch == len(self.rows.tokens)
        assert self.cache.length.tolist() == self.lengths
        fits = [n for n in range(10) if all(self.rows.may_extend(row, n) for row in range(self.cache.batch))]
        assert self.cache.max_chunk == max(fits)


class KeysAndValues(CacheMachine):
    """Every token is a number of its own, and its keys and values say which one it is, in which layer and head."""

    def begin(self, batch, capacity, window):
        super().begin(batch, capacity, window)
        self.cache = KVCache(2, 2, 1, capacity, batch, window)
        self.n_tokens = 0

    def extend(self, counts, width):
        new = [[0] * (width - count) + list(range(self.n_tokens + 1, self.n_tokens + 1 + count)) for count in counts]
        # Rows that are the same may stay so, and have a prompt to share; otherwise the row can be seen in a token.
        alike = self.rows.same() and self.n_tokens % 2 == 0
        new = np.array(new) * 10 + (0 if alike else np.arange(len(counts))[:, None])
        self.n_tokens += width
        columns = np.arange(width) - (width - np.array(counts))[:, None]
        starts = self.lengths
        positions = np.where(columns < 0, -1, np.array(starts)[:, None] + columns)
        plan = self.cache.allocate(positions)
        for row, count in enumerate(counts):
            self.rows.extend(row, new[row, width - count :].tolist())
        for layer in range(2):
            heads = np.stack([new, -new], axis=1)[:, :, None].astype(np.float32)  # [B, T] -> [B, 2, 1, T]
            keys, values = self.cache.store(layer, plan, heads + layer / 4, heads * 2 + layer / 4)
            S = keys.shape[3]
            assert keys.shape == values.shape == (len(counts), 2, 1, S)
            assert S <= min(self.cache.capacity, max(self.lengths))  # no more than is in use
            assert np.shares_memory(keys, self.cache.keys[layer]) and np.shares_memory(values, self.cache.values[layer])
            mask = np.broadcast_to(True if plan.mask is None else plan.mask, (len(counts), 1, width, S))[:, 0]
            assert mask.any(axis=2).all()  # a softmax over nothing is NaN, of padding too
            for row, t in zip(*np.nonzero(positions >= 0), strict=True):
                expected = [self.rows.tokens[row][p] for p in self.rows.visible(positions[row, t])]
                for head, sign in enumerate((1, -1)):
                    for slots, factor in ((keys, 1), (values, 2)):
                        seen = (slots[row, head, 0, mask[row, t]] - layer / 4) / (sign * factor)
                        assert sorted(seen) == sorted(expected)
                    # And each value stands beside its key.
                    key, value = (slots[row, head, 0, mask[row, t]] - layer / 4 for slots in (keys, values))
                    assert (value == 2 * key).all()


class Logits(CacheMachine):
    """Tokens are ids; after every call the tiny model's logits are the float64 reference's under the same band."""

    LONGEST = 24  # so that the reference is quick

    def begin(self, batch, capacity, window):
        super().begin(batch, capacity, window)
        self.cache = MODEL.new_cache(batch, capacity, window)
        self.rng = np.random.default_rng(0)

    def extend(self, counts, width):
        ids = self.rng.integers(97, size=(len(counts), width))
        if self.rows.same() and self.rng.random() < 0.5:
            ids[:] = ids[0]  # rows that are the same may stay so, and have a prompt to share
        pad = width - np.array(counts)
        logits = MODEL.forward(ids, self.cache, pad=pad, last_only=False)
        assert np.isfinite(logits).all()
        for row, count in enumerate(counts):
            self.rows.extend(row, ids[row, pad[row] :].tolist())
            if count:
                expected = reference_logits(CONFIG, PARAMS, self.rows.tokens[row], self.rows.window)
                np.testing.assert_allclose(logits[row, pad[row] :], expected[-count:], rtol=0, atol=1e-4)


def cases(machine, examples, steps):
    """The pytest class of a machine."""
    machine.TestCase.settings = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    return machine.TestCase


TestKeysAndValues = cases(KeysAndValues, 70, 25)
TestLogits = cases(Logits, 15, 20)


# ---- the ring ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "chunks"),
    [(4, (5, 5)), (8, (8, 1)), (7, (7, 2)), (6, (3, 3, 3)), (8, (1,) * 20), (1, (8,) * 4), (5, (4,) * 7)],
    ids=str,
)
def test_a_ring_of_eight_equals_a_plain_list_at_its_boundary(window, chunks):
    """K06: a piece that straddles the end of the ring; capacity, write index and length confused."""
    machine = KeysAndValues()
    machine.begin(1, 8, window)
    for count in chunks:
        machine.extend([count], count)
    # The ring holds the last 8 positions, each in the slot that its position names.
    held = range(sum(chunks))[-8:]
    assert sorted(p for p in machine.cache.slot_pos[0].tolist() if p >= 0) == list(held)
    assert all(machine.cache.slot_pos[0, p % 8] == p for p in held)


@pytest.mark.parametrize(("batch", "capacity", "window"), [(1, 5, None), (3, 7, None), (4, 9, 3)])
def test_a_cache_is_float32_zeros_of_the_size_that_was_asked_for(batch, capacity, window):
    cache = KVCache(3, 2, 4, capacity, batch, window)
    assert len(cache.keys) == len(cache.values) == 3
    for slots in cache.keys + cache.values:
        assert slots.shape == (batch, 2, 4, capacity) and slots.dtype == np.float32 and not slots.any()
    assert cache.nbytes == 2 * 3 * 2 * 4 * capacity * 4 * batch
    assert (cache.capacity, cache.window, cache.batch, cache.max_chunk) == (capacity, window, batch, capacity)
    assert cache.length.tolist() == [0] * batch
    cache.allocate(np.arange(4)[None].repeat(batch, 0))
    cache.reorder([0])
    assert cache.nbytes == 2 * 3 * 2 * 4 * capacity * 4


@pytest.mark.slow
@pytest.mark.parametrize("window, slack", [(1, 0), (3, 1), (8, 5), (3, 60)])
def test_a_window_equals_the_reference_with_that_band_wrapped_or_not(window, slack):
    """Texts longer than the machines', in single tokens, in chunks of the most that fits, and in irregular ones."""
    ids = random_ids(2, 50, seed=window)
    largest = slack + 1  # a slack of 60 never wraps within 50 tokens
    chunks, rng = [], np.random.default_rng(0)
    while sum(chunks) < 50:
        chunks.append(min(int(rng.integers(1, largest + 1)), 50 - sum(chunks)))
    expected = np.stack([reference_logits(CONFIG, PARAMS, row, window) for row in ids])
    for sizes in ([1] * 50, [largest] * (50 // largest) + [50 % largest] * bool(50 % largest), chunks):
        cache = MODEL.new_cache(batch=2, capacity=window + slack, window=window)
        np.testing.assert_allclose(feed(MODEL, ids, cache, sizes), expected, rtol=0, atol=1e-5)


def test_what_a_cache_refuses_is_named():
    """The value, or the row at fault, what it holds and what would fit."""
    for capacity, window, words in (
        (0, None, "capacity is 0;.*1 or more"),
        (2.5, None, r"capacity is 2\.5;.*1 or more"),
        (True, None, "capacity is True;.*1 or more"),
        (8, 0, "window is 0;.*from 1 to .* 8"),
        (8, 9, "window is 9;.*from 1 to .* 8"),
        (8, 2.5, r"window is 2\.5;.*from 1 to .* 8"),
    ):
        with pytest.raises(ValueError, match=words):
            KVCache(2, 2, 4, capacity, window=window)

    cache = KVCache(1, 1, 1, capacity=6, batch=3)
    cache.allocate(np.array([[-1, -1, 0], [0, 1, 2], [-1, 0, 1]]))
    with pytest.raises(ValueError, match=r"\b4 more tokens after 3\b.*\bcache of 6 slots"):
        cache.allocate(np.array([[1, 2, 3, 4], [3, 4, 5, 6], [2, 3, 4, 5]]))
    for lengths in ([1, 3, 3], -1, 4):
        with pytest.raises(ValueError, match=r"\[1, 3, 2\]"):
            cache.truncate(lengths)
    for length in (1.0, [1.0, 1.0, 1.0], "1", True, float("nan")):
        with pytest.raises(ValueError) as error:
            cache.truncate(length)
        assert str(error.value).startswith(f"length is {length!r};") and "whole number" in str(error.value)
    for rows in ([0, 3], [-1], [0.0], [True]):
        with pytest.raises(ValueError) as error:
            cache.reorder(rows)
        assert str(error.value).startswith(f"rows is {rows};") and "from 0 to 2" in str(error.value)
    cache.reorder(np.array([2, 0], np.uint8))
    cache.truncate(np.uint8(1))
    assert cache.length.tolist() == [1, 1]
    cache.reorder([])
    assert cache.batch == 0 and cache.keys[0].shape == cache.values[0].shape == (0, 1, 1, 6)
    cache.reorder([])  # no rows of none

    ring = KVCache(1, 1, 1, capacity=5, batch=2, window=4)
    for at in range(8):
        ring.allocate(np.array([[-1], [at]]))
    with pytest.raises(ValueError, match=r"\b3 more tokens after 8\b.*window of 4 in a cache of 5 slots"):
        ring.allocate(np.array([[-1, -1, 0], [8, 9, 10]]))
    with pytest.raises(ValueError, match=r"row 1 from 8 to 5 tokens.* 5 slots.* window of 4\b"):
        ring.truncate([0, 5])


# ---- rubbish in the buffers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("window", [None, 5])
def test_slots_not_yet_written_are_never_read(batch, window):
    """K07: NaN in slots that were never written."""
    ids = random_ids(batch, 30)
    clean, dirty = (MODEL.new_cache(batch, 40 if window is None else 9, window) for _ in range(2))
    for slots in dirty.keys + dirty.values:
        slots[...] = np.nan
    chunks = [5, 1, 1, 3, 5, 5, 5, 1, 4]
    expected = feed(MODEL, ids, clean, chunks)
    np.testing.assert_array_equal(feed(MODEL, ids, dirty, chunks), expected)
    assert np.isfinite(expected).all()


@pytest.mark.parametrize("window", [None, 5])
def test_a_cache_reused_after_a_longer_text_gives_the_same_bits_as_a_new_one(window):
    """K07: what a longer text left behind."""
    used, new = (MODEL.new_cache(2, 40 if window is None else 9, window) for _ in range(2))
    feed(MODEL, random_ids(2, 30, seed=5), used, [5] * 6)
    used.truncate(0)  # nothing is needed before position 0, so this is legal even after the ring has wrapped
    assert used.length.tolist() == [0, 0]
    ids = random_ids(2, 20, seed=6)
    chunks = [5, 1, 1, 3, 5, 5]
    np.testing.assert_array_equal(feed(MODEL, ids, used, chunks), feed(MODEL, ids, new, chunks))


# ---- rollback and reordering: examples in which one thing goes wrong at a time -----------------------------------


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("rows", [[1, 0, 0, 2], [3, 0, 2], [0, 0, 1, 3, 2]])
@pytest.mark.parametrize("promise", [{}, {"shared": 4}], ids=str)
def test_reordered_rows_equal_computing_the_chosen_rows_anew(promise, rows, window):
    """B05: rows that swap, repeat and vanish; a prompt that all have; a ring that has wrapped."""
    first = random_ids(4, 11, seed=1)
    first[:, : promise.get("shared", 0)] = first[0, : promise.get("shared", 0)]
    second = random_ids(len(rows), 4, seed=2)
    cache = MODEL.new_cache(4, 20 if window is None else 8, window)
    feed(MODEL, first, cache, [4, 4, 3])
    cache.reorder(rows, **promise)
    texts = np.concatenate([first[rows], second], axis=1)
    assert_last_logits(feed(MODEL, second, cache, [1, 3]), texts, window)


def test_reorder_copies_shared_positions_to_a_row_that_has_lost_them():
    # Row 0 has wrapped over the shared positions and was then taken back; row 1 still holds and needs them.
    long, short = random_ids(12, seed=1).tolist(), random_ids(4, seed=2).tolist()
    short[:3] = long[:3]
    cache = MODEL.new_cache(batch=2, capacity=9, window=5)
    ids, pad = left_padded([long[:4], short])
    MODEL.forward(ids, cache, pad=pad)
    for token in long[4:]:
        MODEL.forward([[token], [0]], cache, pad=[0, 1])
    cache.truncate([9, 4])
    cache.reorder([1, 1], shared=3)
    logits = MODEL.forward([[20], [21]], cache, last_only=False)
    assert_last_logits(logits, [[*short, 20], [*short, 21]], 5)


def test_rows_that_stay_are_not_copied():
    # Reordering must cost what the rows that move take: the arrays stay, and so does what lies outside those rows.
    cache = KVCache(2, 2, 3, capacity=8, batch=4)
    plan = cache.allocate(np.arange(6)[None].repeat(4, 0))
    for layer in range(2):
        cache.store(layer, plan, *np.random.default_rng(layer).standard_normal((2, 4, 2, 3, 6)).astype(np.float32))
    arrays, before = cache.keys + cache.values, [array.copy() for array in cache.keys + cache.values]
    for array in arrays:
        array[0, ..., :2] = array[3] = np.nan  # the prompt of a row that moves, and a row that stays
    cache.reorder([1, 1, 2, 3], shared=2)
    for array, old in zip(arrays, before, strict=True):
        assert np.isnan(array[0, ..., :2]).all() and np.isnan(array[3]).all()
        np.testing.assert_array_equal(array[0, ..., 2:6], old[1, ..., 2:6])
        np.testing.assert_array_equal(array[1:3], old[1:3])
    assert all(array is now for array, now in zip(arrays, cache.keys + cache.values, strict=True))


# ---- the first positions -----------------------------------------------------------------------------------------


def test_a_full_cache_has_a_prefix_of_its_whole_capacity():
    cache = KVCache(1, 1, 2, 4)
    cache.allocate(np.arange(4)[None])
    assert cache.prefix(0, 4)[0].shape == (1, 1, 2, 4)
    with pytest.raises(ValueError, match="first 5"):
        cache.prefix(0, 5)


def test_what_a_cache_shows_of_itself():
    cache = KVCache(3, 2, 4, 1000, batch=2, window=9)
    cache.allocate(np.array([[0, 1], [-1, 0]]))
    # 2 * 3 layers * 2 heads * 4 * 1,000 slots * 2 rows * 4 bytes = 0.37 MiB
    assert repr(cache) == ("<KVCache: 3 layers x 2 heads x 4, 2 rows of 1000 slots, window 9, 0.4 MiB, lengths [2, 1]>")
    assert repr(KVCache(1, 2, 4, 5)) == "<KVCache: 1 layers x 2 heads x 4, 1 rows of 5 slots, 0.0 MiB, lengths [0]>"


def test_a_prefix_is_what_was_stored_at_the_first_positions():
    cache = KVCache(n_layer=2, n_head=2, d_head=3, capacity=8, batch=2, window=4)
    # layer, K or V, [B, H, D, T]
    stored = np.random.default_rng(0).standard_normal((2, 2, 2, 2, 3, 6)).astype(np.float32)
    for at in (0, 4):
        plan = cache.allocate(np.arange(at, min(at + 4, 6))[None].repeat(2, axis=0))
        for layer in range(2):
            cache.store(layer, plan, *stored[layer, ..., at : at + 4])
    for layer in range(2):
        for length in (0, 1, 4, 6):
            keys, values = cache.prefix(layer, length)
            np.testing.assert_array_equal(keys, stored[layer, 0, ..., :length])
            np.testing.assert_array_equal(values, stored[layer, 1, ..., :length])
            assert length == 0 or np.shares_memory(keys, cache.keys[layer])
    cache.truncate([6, 3])
    assert cache.prefix(0, 3)[0].shape == (2, 2, 3, 3)
    for length in (4, 7, 8, 9):
        with pytest.raises(ValueError, match=rf"first {length} positions.*\[6, 3\]"):
            cache.prefix(0, length)
    cache.allocate(np.array([[6, 7, 8], [-1, -1, -1]]))  # the ring overwrites position 0 of row 0
    for length in (1, 3):
        with pytest.raises(ValueError, match="positions"):
            cache.prefix(0, length)
