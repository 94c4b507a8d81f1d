"""`BlockPool` and `SlotPool`: who owns which block and which state slot. Plain Python, no torch.

Numbers start at 1: block 0 and slot 0 mean "none" and are never given out.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

__all__ = ["BlockPool", "SlotPool"]


def _never(block: int) -> bool:
    """Nothing is worth keeping."""
    return False


def _forget(block: int) -> None:
    """Nobody has to be told."""


class BlockPool:
    """Blocks with reference counts.

    A block without owners is free; its content may still be of use. Free blocks without use are
    given out first, then those that were freed longest ago.

    Args:
        num_blocks: blocks 1..num_blocks.
        is_useful: whether the content of a block that becomes free is worth keeping.
        on_reuse: told of every block that is given out, before it is.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        is_useful: Callable[[int], bool] = _never,
        on_reuse: Callable[[int], None] = _forget,
    ) -> None:
        self.num_blocks = num_blocks
        self._is_useful, self._on_reuse = is_useful, on_reuse
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self._references = [0] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one reference. The caller has checked `num_free`."""
        assert count <= len(self._free), f"{count} blocks asked for, {len(self._free)} are free"
        blocks = []
        for _ in range(count):
            block, _none = self._free.popitem(last=False)
            self._on_reuse(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for blocks, whose content stays; a free one is free no more."""
        for block in blocks:
            if not self._references[block]:
                del self._free[block]
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One owner less; blocks without any become free, and are given out in this order."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is released, but nobody owns it"
            self._references[block] -= 1
            if not self._references[block]:
                self._free[block] = None
                if not self._is_useful(block):
                    self._free.move_to_end(block, last=False)

    def references(self, block: int) -> int:
        """How many owners a block has."""
        return self._references[block]


class SlotPool:
    """State slots; one owner each.

    Args:
        num_slots: slots 1..num_slots.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = deque(range(1, num_slots + 1))
        self._is_taken = [False] * (num_slots + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """Take a slot. The caller has checked `num_free`."""
        slot = self._free.popleft()
        self._is_taken[slot] = True
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back."""
        assert self._is_taken[slot], f"slot {slot} is released, but nobody owns it"
        self._is_taken[slot] = False
        self._free.append(slot)
