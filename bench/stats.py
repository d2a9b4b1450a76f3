"""Medians, percentiles and spreads: pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which that share of the values lies (nearest rank). ValueError when there are none."""
    if not values:
        raise ValueError("a percentile of nothing")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(frozen=True)
class Spread:
    """The median over the rounds, and the least and the most any round gave."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Ratios of the same rounds, so that what slowed the machine in one round slows both sides of its ratio."""
    return Spread.of([top / bottom for top, bottom in zip(numerators, denominators, strict=True)])
