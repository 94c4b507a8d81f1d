"""`PrefixCache`: which blocks and snapshots hold what beginning of a sequence. Plain Python.

A block's content is known by a digest over all tokens up to its end (a hash chain), so equal
digests mean equal beginnings. Going on behind a block needs more than the blocks: the window rings
of every layer and the compressor state, as they were at that very place. A window cannot be rebuilt
exactly from its own tokens, so a *snapshot* of a state slot is kept at some block ends; only there
a sequence can go on. Snapshots lie in slots of their own, in the pools of the running sequences.

Blocks stay known after their last owner has gone, until they are given out again; snapshots until
their slot is needed for another one. In both, what was used longest ago goes first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deepinfer.cache.layout import BLOCK_TOKENS

__all__ = ["Digest", "Hit", "PrefixCache", "block_digests"]

Digest = bytes

_DIGEST_BYTES = 16


def block_digests(token_ids: npt.NDArray[np.int32], known: Sequence[Digest] = ()) -> list[Digest]:
    """One digest per full block of a sequence, each over everything up to the block's end.

    Args:
        token_ids: the sequence, (tokens,).
        known: digests of its first blocks, computed before.
    """
    digests = [*known]
    for begin in range(
        len(digests) * BLOCK_TOKENS, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS
    ):
        before = digests[-1] if digests else b""
        tokens = token_ids[begin : begin + BLOCK_TOKENS].tobytes()
        digests.append(hashlib.blake2b(before + tokens, digest_size=_DIGEST_BYTES).digest())
    return digests


@dataclass(frozen=True, slots=True)
class Hit:
    """What is known of a sequence's beginning."""

    blocks: tuple[int, ...]
    """Blocks up to the snapshot: the sequence goes on behind them."""
    snapshot: int
    """Slot of the snapshot; 0: none, the sequence begins at its start."""
    num_known: int
    """Leading blocks that are known, whether or not there is a snapshot at their end."""

    @property
    def num_tokens(self) -> int:
        """Tokens that need not be computed."""
        return len(self.blocks) * BLOCK_TOKENS


class PrefixCache:
    """Finds blocks and snapshots by digest.

    Args:
        snapshot_slots: slots that snapshots may take.
    """

    def __init__(self, snapshot_slots: Sequence[int]) -> None:
        self._free_slots = [*snapshot_slots]
        self._block_of: dict[Digest, int] = {}
        self._digest_of: dict[int, Digest] = {}
        self._snapshots: OrderedDict[Digest, int] = OrderedDict()
        self._fresh: set[Digest] = set()

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    @property
    def num_free_snapshots(self) -> int:
        """Slots without a snapshot."""
        return len(self._free_slots)

    @property
    def num_blocks(self) -> int:
        """Blocks whose content is known."""
        return len(self._digest_of)

    def lookup(self, digests: Sequence[Digest], max_tokens: int) -> Hit:
        """The longest beginning behind which a sequence can go on.

        Args:
            digests: of its full blocks.
            max_tokens: the hit may be no longer: at least one token has to be computed.
        """
        num_known, usable = 0, 0
        for digest in digests:
            if digest not in self._block_of:
                break
            num_known += 1
            if digest in self._snapshots and num_known * BLOCK_TOKENS <= max_tokens:
                usable = num_known
        blocks = tuple(self._block_of[digest] for digest in digests[:usable])
        snapshot = self._snapshots[digests[usable - 1]] if usable else 0
        return Hit(blocks, snapshot, num_known)

    def use(self, digest: Digest) -> None:
        """Note that the snapshot behind a block was used."""
        self._snapshots.move_to_end(digest)

    def knows(self, digest: Digest) -> bool:
        """Whether the block with this digest is known."""
        return digest in self._block_of

    def has_snapshot(self, digest: Digest) -> bool:
        """Whether a sequence can go on behind the block with this digest, its blocks permitting."""
        return digest in self._snapshots

    def add_block(self, digest: Digest, block: int) -> None:
        """Note what a block holds, unless another one is known to hold the same."""
        assert block not in self._digest_of or self._digest_of[block] == digest, (
            f"block {block} is known for something else"
        )
        if digest not in self._block_of:
            self._block_of[digest], self._digest_of[block] = block, digest

    def forget_block(self, block: int) -> None:
        """A block gets other content."""
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]

    def is_known(self, block: int) -> bool:
        """Whether a block's content is known."""
        return block in self._digest_of

    def begin_step(self) -> None:
        """Snapshots added from here on are all taken behind one step: none of them may make room
        for another.
        """
        self._fresh.clear()

    def add_snapshot(self, digest: Digest) -> int:
        """A slot for a snapshot behind a block; 0: there is one already, or there is no room."""
        if digest in self._snapshots:
            self.use(digest)
            return 0
        if not self._free_slots:
            oldest = next((known for known in self._snapshots if known not in self._fresh), None)
            if oldest is None:
                return 0
            self._free_slots.append(self._snapshots.pop(oldest))
        slot = self._free_slots.pop()
        self._snapshots[digest] = slot
        self._fresh.add(digest)
        return slot

    def clear(self) -> None:
        """Forget everything: what blocks and snapshots hold is no longer certain."""
        self._block_of.clear()
        self._digest_of.clear()
        self._free_slots.extend(self._snapshots.values())
        self._snapshots.clear()
        self._fresh.clear()
