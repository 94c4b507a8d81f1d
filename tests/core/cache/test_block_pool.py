"""Pools of blocks and slots, against simple models of them."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deepinfer.cache.block_pool import BlockPool, SlotPool


class BlockPoolMachine(RuleBasedStateMachine):
    """Random allocations, shares and releases beside a dict of reference counts."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.counts: dict[int, int] = {}

    @rule(count=st.integers(0, 12))
    def allocate(self, count: int) -> None:
        if count > 12 - len(self.counts):
            with pytest.raises(AssertionError, match="asked for"):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert not set(blocks) & set(self.counts)
        assert all(1 <= block <= 12 for block in blocks)
        self.counts.update(dict.fromkeys(blocks, 1))

    @precondition(lambda self: self.counts)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.counts)))
        self.pool.share([block])
        self.counts[block] += 1

    @precondition(lambda self: self.counts)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.counts)))
        self.pool.release([block])
        self.counts[block] -= 1
        if not self.counts[block]:
            del self.counts[block]

    @rule(block=st.integers(1, 12))
    def revive(self, block: int) -> None:
        """A free block that holds something of use gets an owner again."""
        if block not in self.counts:
            self.pool.share([block])
            self.counts[block] = 1

    @rule(block=st.integers(1, 12))
    def a_free_block_cannot_be_released(self, block: int) -> None:
        if block not in self.counts:
            with pytest.raises(AssertionError, match="nobody owns"):
                self.pool.release([block])

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.num_free == 12 - len(self.counts)
        for block in range(1, 13):
            assert self.pool.references(block) == self.counts.get(block, 0)


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def test_useless_blocks_are_given_out_first_then_those_freed_longest_ago() -> None:
    useful, told = {1, 2, 4}, []
    pool = BlockPool(4, is_useful=useful.__contains__, on_reuse=told.append)
    assert pool.allocate(4) == [1, 2, 3, 4]
    pool.release([2, 1, 3, 4])
    told.clear()
    assert pool.allocate(3) == [3, 2, 1]
    assert told == [3, 2, 1]


def test_a_slot_has_one_owner_and_slot_0_none() -> None:
    pool = SlotPool(3)
    taken = [pool.allocate() for _ in range(3)]
    assert sorted(taken) == [1, 2, 3]
    assert pool.num_free == 0
    pool.release(2)
    with pytest.raises(AssertionError, match="nobody owns"):
        pool.release(2)
    assert pool.allocate() == 2
