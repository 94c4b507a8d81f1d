"""`Prefixes`: beginnings that sequences share are computed once.

`PrefixCache` knows what blocks and snapshots hold; here is what the engine does with it. A sequence
that is admitted goes on behind the longest beginning with a snapshot: it shares the blocks, and the
snapshot is copied into its slot. Snapshots are taken where a chunk of a prompt ends, so chunks are
cut at the places where one is wanted (*checkpoints*): the last block end of the prompt, and the end
of a beginning that another sequence has, too.

While a running prompt is on its way to a checkpoint that a waiting one could go on from, the
waiting one is passed over: the beginning is computed once, also for requests that come together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from deepinfer.cache.block_pool import BlockPool
from deepinfer.cache.layout import BLOCK_TOKENS
from deepinfer.cache.prefix_cache import Digest, Hit, PrefixCache, block_digests
from deepinfer.engine.scheduler import NEVER, Waiting
from deepinfer.engine.sequence import Sequence
from deepinfer.engine.table import SequenceTable

__all__ = ["Prefixes", "SlotCopies"]

_Ints = npt.NDArray[np.int64]

_MAX_PASSED_OVER = 64
"""Waiting sequences that a step passes over at most, so that it does not read a long queue."""


@dataclass(slots=True)
class SlotCopies:
    """Slots to copy from and to."""

    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)

    def add(self, source: int, target: int) -> None:
        self.sources.append(source)
        self.targets.append(target)


class Prefixes:
    """Shared beginnings of one engine.

    Args:
        table: the sequences that run.
        num_blocks: blocks of the cache.
        snapshot_slots: slots for snapshots; none: nothing is shared.
        replay_keep: last tokens of a prompt whose windows the decoder layers see (bounded replay);
            a hit must not reach into them, because the windows there depend on the prompt's length.
    """

    def __init__(
        self,
        table: SequenceTable,
        num_blocks: int,
        snapshot_slots: range,
        *,
        replay_keep: int | None = None,
    ) -> None:
        self._table, self._replay_keep = table, replay_keep
        self._is_on = len(snapshot_slots) > 0 and num_blocks > 0
        self._cache, self._num_snapshot_slots = PrefixCache(snapshot_slots), len(snapshot_slots)
        self.blocks = BlockPool(
            num_blocks, is_useful=self._cache.is_known, on_reuse=self._cache.forget_block
        )
        # digests of all full blocks of running sequences, and of the checkpoints before them
        self._live: Counter[Digest] = Counter()
        self._building: Counter[Digest] = Counter()
        self._num_registered: _Ints = np.zeros(len(table.owner), dtype=np.int64)

    # ---- before a sequence runs ----

    def candidates(self, queue: Iterable[Sequence], chosen: list[Sequence]) -> Iterator[Waiting]:
        """What the scheduler is told of the waiting sequences, in their order.

        Args:
            queue: the sequences.
            chosen: receives each one that is told of, just before.
        """
        num_passed = 0
        live: Counter[Digest] = Counter()  # of those told of here, on top of what runs
        building: Counter[Digest] = Counter()
        for seq in queue:
            awaited = seq.awaited_digest
            hit = None
            if awaited is None or not (self._building[awaited] or building[awaited]):
                hit = self._lookup(seq)
                rest = seq.digests[len(hit.blocks) :]
                found = (d for d in rest if self._building[d] or building[d])
                seq.awaited_digest = next(found, None)
            if hit is None or seq.awaited_digest is not None:
                num_passed += 1
                if num_passed == _MAX_PASSED_OVER:
                    return
                continue
            points = self._checkpoints(seq, hit, live)
            chosen.append(seq)
            yield Waiting(
                num_tokens=len(seq.token_ids),
                was_preempted=seq.num_preemptions > 0,
                is_alone=seq.is_alone,
                num_cached=hit.num_tokens,
                num_shared=sum(self.blocks.references(block) > 0 for block in hit.blocks),
                stop=points[0] if points else NEVER,
            )
            # asked for the next one: this one is admitted
            live.update(seq.digests)
            building.update(_digest_at(seq, point) for point in points)

    def begin(self, seq: Sequence, copies: SlotCopies) -> int:
        """Let a sequence that has just got its slot go on behind what is known; returns the hit of
        its prompt in tokens: 0 where it was preempted and goes on from what it had computed itself.
        """
        slot, hit = seq.slot, self._lookup(seq)
        self.blocks.share(hit.blocks)
        self._table.add_blocks(slot, [*hit.blocks])
        self._table.num_computed[slot] = hit.num_tokens
        if hit.snapshot:
            copies.add(hit.snapshot, slot)
            self._cache.use(_digest_at(seq, hit.num_tokens))
        seq.checkpoints = self._checkpoints(seq, hit, Counter())
        self._table.stop[slot] = seq.checkpoints[0] if seq.checkpoints else NEVER
        self._num_registered[slot] = len(hit.blocks)
        if not seq.num_preemptions:
            seq.num_cached_tokens = hit.num_tokens
        if self._is_on:
            seq.live_digests = tuple(seq.digests)
            self._live.update(seq.live_digests)
            self._building.update(_digest_at(seq, point) for point in seq.checkpoints)
        return 0 if seq.num_preemptions else hit.num_tokens

    def _lookup(self, seq: Sequence) -> Hit:
        """What is known of a waiting sequence's beginning."""
        if not self._is_on:
            return Hit((), 0, 0)
        seq.digests = block_digests(seq.token_ids, seq.digests)
        longest = len(seq.token_ids) - 1  # at least one token has to be computed
        if self._replay_keep is not None:
            longest = min(longest, max(0, seq.num_prompt_tokens - self._replay_keep))
        return self._cache.lookup(seq.digests, longest)

    def _checkpoints(self, seq: Sequence, hit: Hit, live: Counter[Digest]) -> list[int]:
        """Block ends behind a hit at which a snapshot is wanted, ascending.

        Args:
            live: digests of sequences that are about to run.
        """
        if not self._is_on:
            return []
        num_shared = 0
        for digest in seq.digests:
            if not (self._cache.knows(digest) or self._live[digest] or live[digest]):
                break
            num_shared += 1
        last = (len(seq.token_ids) - 1) // BLOCK_TOKENS
        wanted = {min(num_shared, last), last}
        return [
            number * BLOCK_TOKENS
            for number in sorted(wanted)
            if number > len(hit.blocks) and not self._cache.has_snapshot(seq.digests[number - 1])
        ]

    # ---- while it runs ----

    def launched(self, slots: _Ints, ends: _Ints) -> SlotCopies:
        """Note what a launched step computes.

        Args:
            slots: the sequences.
            ends: where their rows end.

        Returns:
            Snapshots to take behind the step.
        """
        copies, table = SlotCopies(), self._table
        if not self._is_on:
            return copies
        self._cache.begin_step()
        # tokens that are not read yet have no digest yet
        full = np.minimum(ends, table.num_tokens[slots]) // BLOCK_TOKENS
        is_new = (full > self._num_registered[slots]) | (ends == table.stop[slots])
        for at in np.flatnonzero(is_new).tolist():
            slot, end = int(slots[at]), int(ends[at])
            seq = table.owner[slot]
            assert seq is not None, f"slot {slot} has no sequence"
            self._register(seq, int(full[at]))
            if end == table.stop[slot]:
                self._reach_checkpoint(seq, end, copies)
        return copies

    def _register(self, seq: Sequence, num_full: int) -> None:
        """Make the first blocks of a sequence known."""
        slot, table = seq.slot, self._table
        if len(seq.digests) < num_full:
            tokens = table.tokens[slot, : num_full * BLOCK_TOKENS]
            seq.digests = block_digests(tokens, seq.digests)
        for number in range(int(self._num_registered[slot]), num_full):
            self._cache.add_block(seq.digests[number], int(table.blocks[slot, number]))
        self._num_registered[slot] = max(num_full, int(self._num_registered[slot]))

    def _reach_checkpoint(self, seq: Sequence, end: int, copies: SlotCopies) -> None:
        digest = _digest_at(seq, end)
        target = self._cache.add_snapshot(digest)
        if target:
            copies.add(seq.slot, target)
        _drop(self._building, [digest])
        seq.checkpoints = seq.checkpoints[1:]
        self._table.stop[seq.slot] = seq.checkpoints[0] if seq.checkpoints else NEVER

    # ---- when it leaves ----

    def end(self, seq: Sequence, held: list[int]) -> None:
        """Take the blocks of a sequence back; what they hold stays known until they are given out
        again, the last ones first.
        """
        _drop(self._live, seq.live_digests)
        _drop(self._building, [_digest_at(seq, point) for point in seq.checkpoints])
        seq.live_digests, seq.checkpoints = (), []
        self.blocks.release(reversed(held))

    def forget(self) -> None:
        """A step has failed: what launched steps were to compute is not there."""
        self._cache.clear()

    @property
    def num_snapshots(self) -> int:
        """Snapshots that are kept."""
        return self._cache.num_snapshots

    @property
    def is_balanced(self) -> bool:
        """Whether nothing is left of sequences that have gone, and every snapshot slot is free or
        in use; for tests.
        """
        slots = self._cache.num_snapshots + self._cache.num_free_snapshots
        return not self._live and not self._building and slots == self._num_snapshot_slots


def _drop(counter: Counter[Digest], digests: Iterable[Digest]) -> None:
    """One less of each; those without any leave the counter."""
    for digest in digests:
        counter[digest] -= 1
        if not counter[digest]:
            del counter[digest]


def _digest_at(seq: Sequence, position: int) -> Digest:
    return seq.digests[position // BLOCK_TOKENS - 1]
