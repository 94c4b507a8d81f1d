"""What a scripted model keeps in its caches: integer records that say whose they are.

A record belongs to one row: its position, the hash of the context up to and including it, and the
hash of the context before it. Records of neighbouring positions are links of a chain, so a record
of another sequence, or one left from an earlier owner of the same place, does not fit.

Shape letters: F = fields of a record, N = records. Pools are (F, N), so that one field is
contiguous.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from deepinfer.cache.layout import BLOCK_TOKENS, CacheLayout

__all__ = [
    "EMPTY",
    "HASH",
    "IS_IMAGE",
    "NULL",
    "NUM_FIELDS",
    "OFFSET",
    "POISON",
    "POSITION",
    "PREVIOUS",
    "SCRIPT",
    "TOKEN",
    "CacheCorruption",
    "Ints",
    "ScriptedCache",
    "hash_steps",
    "mixed",
    "null_records",
    "ragged",
    "shown_record",
]

Ints = npt.NDArray[np.int64]

POSITION, HASH, PREVIOUS, TOKEN, IS_IMAGE, SCRIPT, OFFSET = range(7)
NUM_FIELDS = 7
"""An entry of ratio 2 has the position of its first token, the hash behind its second one, and as
`PREVIOUS` the hash before its first one."""

NULL = -1
"""Every field of the null rows: slot 0 and block 0."""
POISON = -0x0BAD_0BAD_0BAD_0BAD
"""Every field of a row that nobody has written, or that a test has spoilt."""
EMPTY = 0x2545_F491_4F6C_DD1D
"""Hash of the context without a token."""


class CacheCorruption(AssertionError):
    """A forward was shown something in its caches that its sequences did not put there.

    Attributes:
        what: the thing that is wrong: `rows`, `address`, `write`, `window key`, `look-back`,
            `pair partner`, `block table`, `entry` (compressed).
        sequence: its number in the step, or -1 where no sequence can be told.
        row: row of the step, or -1.
        position: position in the sequence, or -1.
    """

    def __init__(
        self, what: str, *, sequence: int, row: int, position: int, read: str, expected: str
    ) -> None:
        self.what, self.sequence, self.row, self.position = what, sequence, row, position
        super().__init__(
            f"{what}: sequence {sequence} of the step (row {row}), position {position}: "
            f"read {read}, expected {expected}"
        )


class ScriptedCache:
    """The caches of a scripted model. New pools are poison; rows of slot 0 and block 0 are null.

    Attributes:
        windows: window rings of the encoder layers and of the decoder layers, which may run on
            fewer rows; addressed like a layer's ring in `deepinfer.cache.pools.CachePools`.
        entries: compressed entries per ratio, addressed like an owner's.
        states: compressor state of ratio 2, addressed like an owner's.
    """

    def __init__(self, layout: CacheLayout, *, num_slots: int, num_blocks: int) -> None:
        self.layout, self.num_slots, self.num_blocks = layout, num_slots, num_blocks
        slots, blocks = num_slots + 1, num_blocks + 1
        ratios = {layout.config.compress_ratios[layer] for layer in layout.entry_layers}
        self.windows = (_pool(slots, layout.ring_rows), _pool(slots, layout.ring_rows))
        self.entries = {ratio: _pool(blocks, BLOCK_TOKENS // ratio) for ratio in sorted(ratios)}
        self.states = _pool(slots, layout.state_rows)

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the state of slots to other slots, as `CachePools` does."""
        assert len({*targets}) == len(targets), f"two states for one slot: {targets}"
        for pool in (*self.windows, self.states):
            slots = pool.reshape(NUM_FIELDS, self.num_slots + 1, -1)
            slots[:, [*targets]] = slots[:, [*sources]]

    def poison(self, slots: Iterable[int] = (), blocks: Iterable[int] = ()) -> None:
        """Spoil what some slots and blocks hold, such as those that have just been freed."""
        for slot in slots:
            assert 1 <= slot <= self.num_slots, f"slot {slot} is not in 1..{self.num_slots}"
            for pool in self.windows:
                _rows_of(pool, slot, self.layout.ring_rows)[:] = POISON
            _rows_of(self.states, slot, self.layout.state_rows)[:] = POISON
        for block in blocks:
            assert 1 <= block <= self.num_blocks, f"block {block} is not in 1..{self.num_blocks}"
            for ratio, pool in self.entries.items():
                _rows_of(pool, block, BLOCK_TOKENS // ratio)[:] = POISON

    def num_bytes(self) -> int:
        """Bytes of all pools together."""
        return sum(p.nbytes for p in (*self.windows, *self.entries.values(), self.states))


def _pool(num_owners: int, rows_each: int) -> Ints:
    pool = np.full((NUM_FIELDS, num_owners * rows_each), POISON, dtype=np.int64)
    pool[:, :rows_each] = NULL
    return pool


def _rows_of(pool: Ints, owner: int, rows_each: int) -> Ints:
    return pool[:, owner * rows_each : (owner + 1) * rows_each]


def null_records(num: int) -> Ints:
    """(F, num) records that mean "none"."""
    return np.full((NUM_FIELDS, num), NULL, dtype=np.int64)


def shown_record(record_f: Ints) -> str:
    """A record as messages show it."""
    position, context = int(record_f[POSITION]), int(record_f[HASH])
    if context == POISON:
        return "poison (never written, or freed)"
    if context == NULL:
        return "nothing (the null row)"
    before = int(record_f[PREVIOUS])
    return f"position {position} of context {_hex(before)} -> {_hex(context)}"


def _hex(context: int) -> str:
    return f"{context % 2**64:016x}"


def mixed(value_n: Ints) -> Ints:
    """A one-to-one scramble of 64-bit integers (the finaliser of SplitMix64)."""
    x = value_n.astype(np.uint64)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x.view(np.int64)


def hash_steps(token_t: Ints, position_t: Ints, is_image_t: npt.NDArray[np.bool_]) -> Ints:
    """By how much each token moves the context hash, modulo 2^64.

    The hash of a context is the sum of its tokens' steps, each a scramble of token and position:
    one prefix sum gives the hashes of a whole chunk.
    """
    # odd factors; sums of products wrap around, which integer arrays do silently
    key = token_t * 0x1E37_79B9_7F4A_7C15 + position_t * 0x5851_F42D_4C95_7F2D
    return mixed(key + is_image_t.astype(np.int64) * 0x2C1B_3C6D_0A5C_9E31)


def ragged(first_s: Ints, count_s: Ints) -> tuple[Ints, Ints]:
    """`first .. first + count - 1` of every s, one behind the other: owners s, and the values."""
    owner = np.repeat(np.arange(len(count_s), dtype=np.int64), count_s)
    before = np.cumsum(count_s) - count_s
    return owner, np.arange(len(owner), dtype=np.int64) + (first_s - before)[owner]
