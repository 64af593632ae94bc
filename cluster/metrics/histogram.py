"""Counts by size: what a histogram of Prometheus needs, cheap enough for every token.

Knows numbers; knows nothing of metric names or formats.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """`counts` has, for each bound, the values up to it and above the one before; at the end, those above all."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float  # the sum of all values

    @property
    def count(self) -> int:
        return sum(self.counts)


class Histogram:
    """Used by one thread. `bounds` ascend."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._total)
