"""The K/V cache: the keys and values of the tokens a model has already seen, in a ring of slots.

Shapes (the capitals are defined in model.py):

    keys[l], values[l]   float32 [B, H, D, C]   one pair for each layer l
    slot_pos             int     [B, C]         the position whose key a slot holds, -1 where there is none to see
    length               int     [B]            the position of each row's next token

Position p lives in slot p % C. What a query may see follows from positions alone:

    visible = (slot_pos >= 0) & (slot_pos <= query_pos) & (slot_pos > query_pos - window)

Causality, the wrap of the ring, rows of different lengths and rejected drafts all follow from that line (padding is
never stored). Attention does not care in which order its keys come, so the ring is never unrolled: attention reads a
view of the slots in use. Bytes for a cache: 2 * n_layer * n_head * d_head * capacity * 4 for each row.

Slots come last because a step multiplies one query by all keys. In this order that is D long runs through memory, in
[B, H, C, D] C short ones: at 1,000 slots of gpt2's shape the two products of a layer take 0.44 ms on one core instead
of 0.74.
"""

from typing import Any, NamedTuple

import numpy as np

from minigen.engine.validation import is_int, require


class PassPlan(NamedTuple):
    """What one forward pass writes and sees: made once by `KVCache.allocate`, used by every layer."""

    source: Any  # index into the new keys [B, H, D, T]: the tokens to store, padding left out
    target: Any  # index into a layer's slots [B, H, D, C]: where they go
    used: int  # S: slots 0..S-1 hold all there is to see
    mask: np.ndarray | None  # bool [B, 1, T, S], True where a query may look; None where it may look everywhere


class KVCache:
    """Keys and values of `batch` rows, up to `capacity` slots each.

    With `window=None` every token sees all before it, and `capacity` bounds the length of a row. With `window=W` every
    token sees the last W positions, its own included; the ring then overwrites what no later query can see, and a row
    can be of any length. Once the ring is full a call may bring at most capacity - window + 1 tokens, and `truncate`
    can take back as many: the slots beyond W are the slack for both.

    Raises ValueError where capacity or window is not positive or the window does not fit the capacity.
    """

    def __init__(self, n_layer, n_head, d_head, capacity, batch=1, window=None):
        require(is_int(capacity, 1), "capacity", capacity, "a whole number of 1 or more")
        ok = window is None or (is_int(window, 1) and window <= capacity)
        require(ok, "window", window, f"None or a whole number from 1 to the capacity, {capacity}")
        self.capacity = capacity
        self.window = window
        # Zeros, not np.empty: attention multiplies the masked slots of a short row by 0, and NaN * 0 is NaN.
        shape = (batch, n_head, d_head, capacity)
        self.keys = [np.zeros(shape, np.float32) for _ in range(n_layer)]
        self.values = [np.zeros(shape, np.float32) for _ in range(n_layer)]
        self.slot_pos = np.full((batch, capacity), -1)
        self.length = np.zeros(batch, int)

    @property
    def batch(self):
        return len(self.length)

    @property
    def nbytes(self):
        """Bytes of all keys and values."""
        return sum(slots.nbytes for slots in self.keys + self.values)

    def _oldest_needed(self, query_pos):
        """The first position that a query at `query_pos` sees."""
        return np.maximum(query_pos - self.window + 1, 0) if self.window else np.zeros_like(query_pos)

    @property
    def max_chunk(self):
        """The most tokens that the next `extend` may bring to every row."""
        # The first new query still needs the oldest keys; each new key overwrites the position `capacity` before it.
        return int((self._oldest_needed(self.length) + self.capacity - self.length).min())

    def allocate(self, positions):
        """Give the next tokens their slots and return the `PassPlan` of this forward pass.

        positions: int [B, T]; each row continues at its own `length`. Negative positions are padding: never stored,
        and never seen. Raises ValueError, with nothing changed, where a row would overwrite a key that one of its
        queries still has to see.
        """
        real = positions >= 0
        length = self.length + real.sum(axis=1)
        too_long = length - self.capacity > self._oldest_needed(self.length)
        if too_long.any():
            row = too_long.argmax()
            limit = f"a window of {self.window} of" if self.window else "a cache of"
            raise ValueError(
                f"{length[row] - self.length[row]} more tokens after {self.length[row]} do not fit {limit} "
                f"{self.capacity} slots: ask for a larger capacity or pass fewer tokens at a time"
            )
        slots = positions % self.capacity
        rows, columns = np.nonzero(real)
        self.slot_pos[rows, slots[rows, columns]] = positions[rows, columns]
        self.length = length

        first, last = slots[0, 0], slots[0, -1]
        if (positions == positions[0]).all() and real.all() and first <= last:
            # All rows write the same run of slots, as in every step of a single row: a slice is quicker than an index.
            source, target = ..., np.s_[..., first : last + 1]
        else:
            source, target = np.s_[rows, ..., columns], np.s_[rows, ..., slots[rows, columns]]

        used = min(length.max(), self.capacity)
        slot_pos = self.slot_pos[:, None, None, :used]  # [B, C] -> [B, 1, 1, S]
        query_pos = positions[:, None, :, None]  # [B, T] -> [B, 1, T, 1]
        mask = (slot_pos >= 0) & (slot_pos <= query_pos)
        if self.window:
            mask &= slot_pos > query_pos - self.window
        # What padding computes is never read, but the softmax of a query that sees nothing would be NaN.
        mask |= query_pos < 0
        return PassPlan(source, target, used, None if mask.all() else mask)

    def store(self, layer, plan, k, v):
        """Write one layer's new keys and values; return views of all that its queries may look at.

        k, v: [B, H, D, T] -> keys, values: [B, H, D, S]
        """
        keys, values = self.keys[layer], self.values[layer]
        keys[plan.target] = k[plan.source]
        values[plan.target] = v[plan.source]
        return keys[..., : plan.used], values[..., : plan.used]

    def prefix(self, layer, length):
        """Views of one layer's keys and values at the first `length` positions: [B, H, D, length] each.

        Raises ValueError where a row does not hold all of these, or no longer does.
        """
        if length > self.capacity or (self.slot_pos[:, :length] != np.arange(length)).any():
            raise ValueError(f"not all rows hold the first {length} positions; they hold {self.length.tolist()} tokens")
        return self.keys[layer][..., :length], self.values[layer][..., :length]

    def truncate(self, length):
        """Forget every position from `length` on (one int, or one for each row), as if it had never been fed.

        Nothing is erased: a slot whose position is forgotten is simply invisible until it is written again. Raises
        ValueError, with nothing changed, where `length` lies beyond what the cache holds or where the ring has
        already overwritten a key that the token at `length` would need.
        """
        require(np.asarray(length).dtype.kind in "iu", "length", length, "a whole number, or one for each row")
        length = np.broadcast_to(length, self.length.shape)
        if (length < 0).any() or (length > self.length).any():
            raise ValueError(f"cannot truncate to {length.tolist()}: the rows hold {self.length.tolist()} tokens")
        oldest = self._oldest_needed(length)
        needed = (self.slot_pos >= oldest[:, None]) & (self.slot_pos < length[:, None])
        lost = needed.sum(axis=1) < length - oldest
        if lost.any():
            row = lost.argmax()
            raise ValueError(
                f"cannot truncate row {row} from {self.length[row]} to {length[row]} tokens: the ring of "
                f"{self.capacity} slots has overwritten a part of the window of {self.window} before it"
            )
        self.slot_pos[self.slot_pos >= length[:, None]] = -1
        self.length = length.copy()

    def reorder(self, rows, shared=0):
        """Row i becomes what row rows[i] was: reorders, repeats and drops rows.

        `shared` promises that the first `shared` positions are the same in all rows (the prompt that beams have in
        common); where the number of rows stays they are not copied, and neither are rows that stay in place. Raises
        ValueError for a row that is not there.
        """
        rows = np.asarray(rows if len(rows) else np.arange(0))
        ok = rows.dtype.kind in "iu" and ((rows >= 0) & (rows < self.batch)).all()
        require(ok, "rows", rows.tolist(), f"row numbers from 0 to {self.batch - 1}")
        used = min(self.length.max(initial=0), self.capacity)
        moved = np.flatnonzero(rows != np.arange(len(rows)))
        # Once a row has wrapped, its first slots held later positions, and hold nothing of use after a truncate.
        start = min(shared, self.capacity)
        if (self.slot_pos[:, :start] != np.arange(start)).any():
            start = 0
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            if len(rows) == self.batch:
                # The right-hand sides are copies made before anything is written, so rows may swap.
                keys[moved, ..., start:used] = keys[rows[moved], ..., start:used]
                values[moved, ..., start:used] = values[rows[moved], ..., start:used]
            else:
                self.keys[layer], self.values[layer] = keys[rows], values[rows]
        self.slot_pos = self.slot_pos[rows]
        self.length = self.length[rows]
