"""The K/V cache: a ring buffer of the keys and values of the tokens that a model has already processed.

Shapes (model.py defines the capitals):

    keys[l], values[l]   float32 [B, H, D, C]   one pair per layer l
    slot_pos             int     [B, C]         the position whose key a slot holds; -1: empty or rolled back
    length               int     [B]            the position of each row's next token

Position p is stored in slot p % C. The attention mask follows from positions alone:

    visible = (slot_pos >= 0) & (slot_pos <= query_pos)
    visible &= slot_pos > query_pos - window    # with a window only

Causal masking, ring wrap-around, rows of different lengths and rollback of rejected drafts all follow from that mask: a
rejected draft's slot is marked -1, so no later query can see it. Padding is never stored. Attention does not depend on
the order of its keys, so the ring is never unrolled: attention reads a view of the slots in use.

Memory: 2 * n_layer * n_head * d_head * capacity * 4 bytes per row. (With batch invariance, the slots are rounded up to
a multiple of 64.)

The slots are the last axis because a decoding step multiplies one query by all keys. In this layout that reads D long
runs of memory; in [B, H, C, D] it reads C short ones, which takes 1.7 times as long at 1,000 slots of gpt2's shape.

The cache cannot slide past n_positions: GPT-2 adds a learned position to each token before the first layer, so the
position is part of every key. Dropping old tokens changes the position of the others; they have to be run again.
"""

from typing import Any, NamedTuple

import numpy as np

from minigen.engine.validation import is_int, require
from minigen.kernels.batch_invariant import padded_length


class PassPlan(NamedTuple):
    """What one forward pass writes and sees: made once by `KVCache.allocate`, used by every layer."""

    source: Any  # index into the new keys [B, H, D, T]: the tokens to store, without padding (`...`: all)
    target: Any  # index into a layer's slots [B, H, D, C]: where they go
    used: int  # S: slots 0..S-1 hold everything a query may attend to
    mask: np.ndarray | None  # bool [B, 1, T, S], True where a query may attend; None if it may attend everywhere


class KVCache:
    """Keys and values of `batch` rows, with `capacity` slots per row.

    With `window=None` every token attends to all tokens before it, and a row holds at most `capacity` tokens. With
    `window=W` every token attends to the last W positions, its own included (sliding-window attention); the ring then
    overwrites what no later query can see, and the cache takes rows of any length. Once the ring is full, one pass may
    bring at most capacity - window + 1 tokens, and `truncate` may drop as many.

    Raises ValueError if capacity or window is not positive, or the window is larger than the capacity.
    """

    def __init__(self, n_layer, n_head, d_head, capacity, batch=1, window=None):
        require(is_int(capacity, 1), "capacity", capacity, "a whole number of 1 or more")
        ok = window is None or (is_int(window, 1) and window <= capacity)
        require(ok, "window", window, f"None or a whole number from 1 to the capacity, {capacity}")
        self.capacity = int(capacity)  # with a NumPy uint64, negative positions would become floats
        self.window = window and int(window)
        # Zeros, not np.empty: attention multiplies the masked slots of a short row by 0, and NaN * 0 is NaN.
        n_slots = padded_length(self.capacity)
        shape = (batch, n_head, d_head, n_slots)
        self.keys = [np.zeros(shape, np.float32) for _ in range(n_layer)]
        self.values = [np.zeros(shape, np.float32) for _ in range(n_layer)]
        self.slot_pos = np.full((batch, n_slots), -1)
        self.length = np.zeros(batch, int)

    def __repr__(self):
        _, H, D, _ = self.keys[0].shape
        window = f", window {self.window}" if self.window else ""
        return (
            f"<KVCache: {len(self.keys)} layers x {H} heads x {D}, {self.batch} rows of {self.capacity} slots{window}, "
            f"{self.nbytes / 2**20:.1f} MiB, lengths {self.length.tolist()}>"
        )

    @property
    def batch(self):
        return len(self.length)

    @property
    def nbytes(self):
        """Bytes of all keys and values."""
        return sum(slots.nbytes for slots in self.keys + self.values)

    def _oldest_visible(self, query_pos):
        """The first position that a query at `query_pos` attends to."""
        return np.maximum(query_pos - self.window + 1, 0) if self.window else np.zeros_like(query_pos)

    def _room(self):
        """The largest number of tokens that the next `allocate` accepts, for each row."""
        # The first new query still needs the oldest keys; each new key overwrites the position `capacity` before it.
        return self._oldest_visible(self.length) + self.capacity - self.length

    @property
    def max_chunk(self):
        """The largest number of tokens that the next `allocate` accepts for every row."""
        return int(self._room().min())

    def allocate(self, positions):
        """Assign slots to the next tokens and return the `PassPlan` of this forward pass.

        positions: int [B, T]; each row continues at its own `length`. Negative positions are left padding: never
        stored and never attended to. Raises ValueError, with nothing changed, if a row would overwrite a key that one
        of its queries still needs.
        """
        real = positions >= 0
        n_new = real.sum(axis=1)  # [B, T] -> [B]
        too_many = n_new > self._room()
        if too_many.any():
            row = too_many.argmax()
            limit = f"a window of {self.window} in a cache of" if self.window else "a cache of"
            raise ValueError(
                f"{n_new[row]} more tokens after {self.length[row]} do not fit {limit} "
                f"{self.capacity} slots: use a larger capacity or pass fewer tokens at a time"
            )
        slots = positions % self.capacity  # [B, T]
        rows, columns = np.nonzero(real)  # of each real token
        self.slot_pos[rows, slots[rows, columns]] = positions[rows, columns]
        self.length = self.length + n_new

        first, last = slots[0, 0], slots[0, -1]
        if (positions == positions[0]).all() and real.all() and first <= last:
            # All rows write the same run of slots, as in every step of a single row: a slice is faster than an index.
            source, target = ..., np.s_[..., first : last + 1]
        else:
            source, target = np.s_[rows, ..., columns], np.s_[rows, ..., slots[rows, columns]]

        used = padded_length(min(self.length.max(), self.capacity))
        slot_pos = self.slot_pos[:, None, None, :used]  # [B, C] -> [B, 1, 1, S]
        query_pos = positions[:, None, :, None]  # [B, T] -> [B, 1, T, 1]
        mask = (slot_pos >= 0) & (slot_pos <= query_pos)  # [B, 1, T, S]
        if self.window:
            mask &= slot_pos > query_pos - self.window
        # The output at padding is never read, but the softmax of a query that attends to nothing would be NaN.
        mask |= query_pos < 0
        return PassPlan(source, target, used, None if mask.all() else mask)

    def store(self, layer, plan, k, v):
        """Write one layer's new keys and values; return views of all slots that its queries may attend to.

        k, v: [B, H, D, T] -> keys, values: [B, H, D, S]
        """
        keys, values = self.keys[layer], self.values[layer]
        keys[plan.target] = k[plan.source]
        values[plan.target] = v[plan.source]
        return keys[..., : plan.used], values[..., : plan.used]

    def prefix(self, layer, length):
        """Views of one layer's keys and values at the first `length` positions: [B, H, D, length] each.

        Raises ValueError if a row does not hold all of them, or no longer does.
        """
        if length > self.capacity or (self.slot_pos[:, :length] != np.arange(length)).any():
            raise ValueError(f"not all rows hold the first {length} positions; they hold {self.length.tolist()} tokens")
        return self.keys[layer][..., :length], self.values[layer][..., :length]

    def can_truncate(self, length):
        """Whether the ring still holds all that a query at `length` attends to, bool [B]; length: int [B]."""
        oldest = self._oldest_visible(length)
        needed = (self.slot_pos >= oldest[:, None]) & (self.slot_pos < length[:, None])
        return needed.sum(axis=1) == length - oldest

    def truncate(self, length):
        """Roll back: drop every position from `length` on (one int, or one per row), as if it had never been run.

        Nothing is erased: a slot whose position is dropped is invisible until it is written again. Raises ValueError,
        with nothing changed, if `length` is more than the cache holds, or if the ring has already overwritten a key
        that the token at `length` needs.
        """
        require(np.asarray(length).dtype.kind in "iu", "length", length, "a whole number, or one for each row")
        length = np.broadcast_to(np.asarray(length, int), self.length.shape)
        if (length < 0).any() or (length > self.length).any():
            raise ValueError(f"cannot truncate to {length.tolist()}: the rows hold {self.length.tolist()} tokens")
        lost = ~self.can_truncate(length)
        if lost.any():
            row = lost.argmax()
            raise ValueError(
                f"cannot truncate row {row} from {self.length[row]} to {length[row]} tokens: the ring of "
                f"{self.capacity} slots has overwritten part of the window of {self.window} before it"
            )
        self.slot_pos[self.slot_pos >= length[:, None]] = -1
        self.length = length.copy()

    def reorder(self, rows, shared=0):
        """Row i becomes what row rows[i] was: reorders, repeats and drops rows.

        shared: the caller's promise that each row i agrees with row rows[i] in its first `shared` positions. If the
        number of rows stays the same, these are not copied, nor are rows that stay in place. Raises ValueError if a row
        does not exist.
        """
        rows = np.asarray(rows if len(rows) else np.arange(0))  # NumPy makes an empty list an array of floats
        ok = rows.dtype.kind in "iu" and ((rows >= 0) & (rows < self.batch)).all()
        require(ok, "rows", rows.tolist(), f"row numbers from 0 to {self.batch - 1}")
        used = min(self.length.max(initial=0), self.capacity)
        moved = np.flatnonzero(rows != np.arange(len(rows)))
        # Once a row has wrapped, slot p no longer holds position p, so everything is copied.
        start = min(shared, self.capacity)
        if (self.slot_pos[:, :start] != np.arange(start)).any():
            start = 0
        if len(rows) == self.batch:
            for slots in self.keys + self.values:
                # The right-hand side is a copy made before anything is written, so rows may swap.
                slots[moved, ..., start:used] = slots[rows[moved], ..., start:used]
        else:

            def resized(slots):
                new = np.zeros((len(rows), *slots.shape[1:]), np.float32)
                new[..., :used] = slots[rows, ..., :used]
                return new

            self.keys, self.values = list(map(resized, self.keys)), list(map(resized, self.values))
        self.slot_pos, self.length = self.slot_pos[rows], self.length[rows]
