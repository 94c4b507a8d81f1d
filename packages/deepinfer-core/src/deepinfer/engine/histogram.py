"""Counts of values on a fixed grid: quantiles within 5 % from a few kilobytes, however many values.

The grid of times has 70 edges per decade, spaced by 2 to 5 %, from a microsecond to a day. They are
round numbers, so that coarser round edges (those a monitoring system wants) give exact counts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["SIZE_EDGES", "TIME_EDGES", "Histogram", "Quantiles"]

_HUNDREDTHS = (*range(100, 200, 5), *range(200, 500, 10), *range(500, 1000, 25))
TIME_EDGES: tuple[float, ...] = tuple(
    float(f"{step}e{exponent - 2}") for exponent in range(-6, 5) for step in _HUNDREDTHS
)
"""Edges of times in seconds."""
SIZE_EDGES: tuple[float, ...] = tuple(float(2**power) for power in range(21))
"""Edges of counts of tokens: powers of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """How some values are spread; all but `count` are None where there are none."""

    count: int
    mean: float | None
    """Exact."""
    p50: float | None
    p90: float | None
    p99: float | None


class Histogram:
    """Counts of values between fixed edges; bucket i has the values above edge i - 1, up to edge i.

    Args:
        edges: increasing; values above the last one share a bucket.

    Attributes:
        count: values added.
        sum: their sum.
    """

    def __init__(self, edges: Sequence[float] = TIME_EDGES) -> None:
        self._edges = list(edges)
        self._edges_e = np.asarray(edges, dtype=np.float64)
        self.clear()

    def clear(self) -> None:
        """Forget all values."""
        self.count, self.sum = 0, 0.0
        self._min, self._max = float("inf"), 0.0
        self._counts: npt.NDArray[np.int64] = np.zeros(len(self._edges) + 1, dtype=np.int64)

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, `times` times. Below 0 (a clock set back) is 0."""
        if times < 1:
            return
        value = max(value, 0.0)
        self._counts[bisect_left(self._edges, value)] += times
        self.count += times
        self.sum += value * times
        self._min, self._max = min(self._min, value), max(self._max, value)

    def add_many(self, values: Iterable[float]) -> None:
        """Count each of some values."""
        found = np.maximum(np.fromiter(values, dtype=np.float64), 0.0)
        if found.size:
            buckets = np.searchsorted(self._edges_e, found, side="left")
            self._counts += np.bincount(buckets, minlength=len(self._counts))
            self.count += int(found.size)
            self.sum += float(found.sum())
            self._min = min(self._min, float(found.min()))
            self._max = max(self._max, float(found.max()))

    def quantile(self, fraction: float) -> float | None:
        """The value that `fraction` of all are at or below, within a bucket's width (5 % for
        times); None where there are none.
        """
        if not self.count:
            return None
        target = fraction * self.count
        totals = np.cumsum(self._counts)
        bucket = int(np.searchsorted(totals, target, side="left"))
        low = self._edges[bucket - 1] if bucket else 0.0
        high = self._edges[bucket] if bucket < len(self._edges) else self._max
        inside = int(self._counts[bucket])
        part = (target - (int(totals[bucket]) - inside)) / inside if inside else 0.0
        return min(max(low + (high - low) * part, self._min), self._max)

    def quantiles(self) -> Quantiles:
        """Mean and the usual quantiles."""
        return Quantiles(
            count=self.count,
            mean=self.sum / self.count if self.count else None,
            p50=self.quantile(0.50),
            p90=self.quantile(0.90),
            p99=self.quantile(0.99),
        )

    def counts_up_to(self, edges: Iterable[float]) -> list[int]:
        """How many values are at or below each of some edges of the grid."""
        totals = np.cumsum(self._counts)
        found = []
        for edge in edges:
            bucket = bisect_left(self._edges, edge)
            assert self._edges[bucket : bucket + 1] == [edge], f"{edge} is no edge of the grid"
            found.append(int(totals[bucket]))
        return found
