"""`WaitingQueue`: sequences that wait, by priority, then by arrival, with bounded overtaking."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer.engine.sequence import Sequence

__all__ = ["MAX_OVERTAKES", "WaitingQueue"]

MAX_OVERTAKES = 64
"""How often later sequences may be admitted before the oldest waiting one."""

_rank, _arrival = attrgetter("rank"), attrgetter("arrival")


class WaitingQueue:
    """Sequences in the order in which they are admitted: by rank, smallest first.

    A smaller priority number goes first, then the earlier arrival (`Sequence.rank`). Nobody
    starves: admissions before the sequence that arrived first of all that wait are counted, for
    good, and after `MAX_OVERTAKES` of them (and the rest of what one step admits) that sequence is
    promoted: it gets the smallest rank of all. So a sequence with k older ones before it is
    admitted after at most k of these and k + 1 times that many later ones. The engine promotes a
    sequence that is preempted a second time before it got any further, too.
    """

    def __init__(self) -> None:
        self._by_rank: list[Sequence] = []
        self._by_arrival: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._by_rank)

    def __iter__(self) -> Iterator[Sequence]:
        """From the head on."""
        return iter(self._by_rank)

    def push(self, sequence: Sequence) -> None:
        """Queue a sequence, or queue it again after it was preempted."""
        insort(self._by_rank, sequence, key=_rank)
        insort(self._by_arrival, sequence, key=_arrival)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands."""
        for order, key in ((self._by_rank, _rank), (self._by_arrival, _arrival)):
            at = bisect_left(order, key(sequence), key=key)
            found = order[at] if at < len(order) else None
            assert found is sequence, f"sequence {sequence.arrival} does not wait"
            del order[at]

    def take(self, sequences: Iterable[Sequence]) -> None:
        """Take out sequences that are admitted."""
        for seq in sequences:
            oldest = self._by_arrival[0]
            self.remove(seq)
            if seq is not oldest:
                oldest.num_overtaken += 1
        # only now, so that what the caller has planned for is what it gets
        if self._by_arrival and self._by_arrival[0].num_overtaken >= MAX_OVERTAKES:
            self.promote(self._by_arrival[0])

    def promote(self, sequence: Sequence) -> None:
        """Make a sequence that waits more important than all that were not promoted before."""
        self.remove(sequence)
        sequence.promote()
        self.push(sequence)
