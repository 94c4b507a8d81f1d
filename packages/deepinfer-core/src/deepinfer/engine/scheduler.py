"""The scheduler: which sequences run how many rows in the next step. A pure function.

No torch, no clock, no state of its own: `plan` maps what runs, what waits and what is free to a
`StepPlan`, so that millions of steps can be run in a test.

The rules, in the order in which they apply:

1. A sequence that failed together with others runs alone until it has got past that place.
2. Every sequence that decodes gets its row: the row budget is at least the sequence budget.
3. Prompts that run get chunks of what is left of the row budget, the most important first.
4. Where blocks are short, less important sequences are preempted (see `_make_room`). So the most
   important one always gets on and finishes, and then the next one is the most important.
5. Waiting sequences are admitted in the order of their queue while slots, rows and blocks last. A
   prompt gets its blocks chunk by chunk, but is admitted only if those for all of it are free and
   no prompt that runs already counts on them. One that was preempted before needs a block more for
   each sequence that runs, so that it gets on before blocks are short again; others leave
   `watermark_blocks`.

Importance is a rank: smaller is more important. Shape letters: R = running sequences.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from deepinfer.cache.layout import BLOCK_TOKENS

__all__ = ["NEVER", "PRIORITY_SHIFT", "Running", "SchedulerLimits", "StepPlan", "Waiting", "plan"]

_Ints = npt.NDArray[np.int64]

PRIORITY_SHIFT = 44
"""A rank is a priority number shifted by this many bits, and an arrival."""

NEVER = 2**62
"""Position of a stop that there is not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerLimits:
    """What a step may hold."""

    max_num_batched_tokens: int
    """Rows of a step; at least `max_num_seqs`."""
    max_num_seqs: int
    """Sequences that run at a time."""
    watermark_blocks: int = 0
    """Blocks that stay free when a new prompt is admitted beside others."""
    uses_blocks: bool = True
    """False for a model without compressed entries, whose sequences need no blocks."""

    def blocks_for(self, num_tokens: _Ints) -> _Ints:
        """Blocks for that many tokens."""
        return -(-num_tokens // BLOCK_TOKENS) * self.uses_blocks


@dataclass(frozen=True, slots=True)
class Running:
    """The sequences that run, one item each."""

    num_computed_r: _Ints
    """Positions computed, those of launched steps included."""
    num_tokens_r: _Ints
    """Tokens there are to compute, those that launched steps will yield included."""
    num_blocks_r: _Ints
    """Blocks held."""
    rank_r: _Ints
    """Importance; no two are equal."""
    stop_r: _Ints
    """Position that a chunk must not pass in one step, `NEVER` for none."""
    is_alone_r: npt.NDArray[np.bool_]
    """It may be the cause of a failed step."""

    @property
    def left_r(self) -> _Ints:
        """Rows that can run in the next step."""
        return np.minimum(self.num_tokens_r, self.stop_r) - self.num_computed_r


@dataclass(frozen=True, slots=True)
class Waiting:
    """A sequence that waits."""

    num_tokens: int
    """Tokens to compute: its prompt, and what it generated before it was preempted."""
    was_preempted: bool = False
    is_alone: bool = False
    num_cached: int = 0
    """Tokens of its beginning that are there already."""
    num_shared: int = 0
    """Blocks of that beginning that others hold, too: they cost no free ones."""
    stop: int = NEVER
    """Position that its first chunk must not pass."""

    @property
    def num_rows(self) -> int:
        """Rows that its first chunk can have."""
        return min(self.num_tokens, self.stop) - self.num_cached


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a step runs."""

    counts_r: _Ints
    """Rows of each running sequence; 0: none in this step."""
    preempted: tuple[int, ...]
    """Running sequences (indices) that give up their slot and blocks before the step."""
    admitted: tuple[int, ...]
    """Rows of the first sequences of the queue, which start to run."""

    @property
    def num_rows(self) -> int:
        return int(self.counts_r.sum()) + sum(self.admitted)


def plan(
    running: Running,
    waiting: Iterable[Waiting],
    *,
    num_free_blocks: int,
    limits: SchedulerLimits,
) -> StepPlan:
    """Choose the rows of the next step.

    Args:
        running: sequences that hold a slot.
        waiting: the queue, its head first; read only as far as sequences can be admitted.
        num_free_blocks: blocks nobody holds.
        limits: what a step may hold.
    """
    if running.is_alone_r.any():
        return _alone(running, num_free_blocks, limits)
    counts_r = _rows(running, limits.max_num_batched_tokens)
    counts_r, preempted, num_free_blocks = _make_room(running, counts_r, num_free_blocks, limits)
    if preempted:
        return StepPlan(counts_r, preempted, ())
    admitted, runs_alone = _admit(running, counts_r, waiting, num_free_blocks, limits)
    return StepPlan(np.zeros_like(counts_r) if runs_alone else counts_r, (), admitted)


def _alone(running: Running, num_free_blocks: int, limits: SchedulerLimits) -> StepPlan:
    """A step of one suspect; nothing else is computed or admitted beside it."""
    only = int(np.flatnonzero(running.is_alone_r)[0])
    counts_r = np.zeros_like(running.num_tokens_r)
    counts_r[only] = min(int(running.left_r[only]), limits.max_num_batched_tokens)
    first = running.rank_r.copy()
    first[only] = first.min() - 1  # while it runs alone, it is the most important
    first_running = replace(running, rank_r=first)
    counts_r, preempted, _ = _make_room(first_running, counts_r, num_free_blocks, limits)
    return StepPlan(counts_r, preempted, ())


def _rows(running: Running, budget: int) -> _Ints:
    """Rows of the running sequences: one for each that decodes, the rest for prompts by rank."""
    left_r = running.left_r
    counts_r: _Ints = np.minimum(left_r, 1)
    prompts = np.flatnonzero(left_r > 1)
    if len(prompts):
        counts_r[prompts] = 0
        budget -= int(counts_r.sum())
        for r in prompts[np.argsort(running.rank_r[prompts])].tolist():
            counts_r[r] = min(int(left_r[r]), budget)
            budget -= int(counts_r[r])
    return counts_r


def _make_room(
    running: Running, counts_r: _Ints, num_free: int, limits: SchedulerLimits
) -> tuple[_Ints, tuple[int, ...], int]:
    """See to the blocks that `counts_r` needs; returns the rows that can run, the sequences to
    preempt for them, and the blocks left free.

    The most important sequence in need is served first. Where blocks are short, the victim is one
    of the less important ones: of those with the largest priority number the one that loses the
    least work (the fewest positions to compute again), and the later arrival on ties. Without a
    victim, only the rows run for which there are blocks.
    """
    need_r = limits.blocks_for(running.num_computed_r + counts_r) - running.num_blocks_r
    need_r = np.where(counts_r > 0, np.maximum(need_r, 0), 0)
    left = num_free - int(need_r.sum())
    if left >= 0:
        return counts_r, (), left
    counts_r, holds_r, victims = counts_r.copy(), running.num_blocks_r > 0, []
    in_need = np.flatnonzero(need_r)
    for r in in_need[np.argsort(running.rank_r[in_need])].tolist():
        while counts_r[r] and need_r[r] > num_free:
            less = np.flatnonzero(holds_r & (running.rank_r > running.rank_r[r]))
            if not len(less):
                room = (int(running.num_blocks_r[r]) + num_free) * BLOCK_TOKENS
                counts_r[r] = max(0, room - int(running.num_computed_r[r]))
                need_r[r] = num_free if counts_r[r] else 0
                break
            rank = running.rank_r[less]
            cost = np.lexsort((-rank, running.num_computed_r[less], -(rank >> PRIORITY_SHIFT)))
            victim = int(less[cost[0]])
            victims.append(victim)
            num_free += int(running.num_blocks_r[victim])
            counts_r[victim], holds_r[victim] = 0, False
        if counts_r[r]:
            num_free -= int(need_r[r])
    return counts_r, tuple(victims), num_free


def _admit(
    running: Running,
    counts_r: _Ints,
    waiting: Iterable[Waiting],
    num_free: int,
    limits: SchedulerLimits,
) -> tuple[tuple[int, ...], bool]:
    """Rows of the waiting sequences that start, and whether nothing else may run beside them."""
    num_running, budget = len(counts_r), limits.max_num_batched_tokens - int(counts_r.sum())
    if num_running >= limits.max_num_seqs:
        return (), False
    after_r = np.maximum(limits.blocks_for(running.num_computed_r + counts_r), running.num_blocks_r)
    # blocks that the prompts which run will still ask for
    num_free -= int(np.maximum(limits.blocks_for(running.num_tokens_r) - after_r, 0).sum())
    admitted: list[int] = []
    for item in waiting:
        if num_running >= limits.max_num_seqs or (item.is_alone and admitted):
            break
        if budget <= 0 and not item.is_alone:
            break
        need = -(-item.num_tokens // BLOCK_TOKENS) * limits.uses_blocks - item.num_shared
        spare = num_running if item.was_preempted else limits.watermark_blocks
        if need + (spare if num_running else 0) > num_free:
            break
        if item.is_alone:
            return (min(item.num_rows, limits.max_num_batched_tokens),), True
        admitted.append(min(item.num_rows, budget))
        budget, num_running, num_free = budget - admitted[-1], num_running + 1, num_free - need
    return tuple(admitted), False
