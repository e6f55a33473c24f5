"""Medians, percentiles and goodput. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

QUANTILES = (50, 90, 95, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie, between two of them by linear interpolation."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def distribution(values: Sequence[float]) -> dict[str, float] | None:
    """`mean`, `p50`, `p90`, `p95`, `p99`; None of no values."""
    if not values:
        return None
    quantiles = {f"p{percent}": percentile(values, percent) for percent in QUANTILES}
    return {"mean": statistics.fmean(values), **quantiles}


@dataclass(frozen=True)
class Spread:
    """Repeats of one measurement: the median, and how far they lie apart."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    def scaled(self, factor: float) -> Spread:
        """In another unit."""
        return Spread(self.median * factor, self.low * factor, self.high * factor)

    def __str__(self) -> str:
        digits = max(0, 3 - math.floor(math.log10(self.median))) if self.median > 0 else 3  # four that count
        if self.low == self.high:
            return f"{self.median:,.{digits}f}"
        return f"{self.median:,.{digits}f} ({self.low:,.{digits}f}-{self.high:,.{digits}f})"


def meets(figures: Mapping[str, float | None], objectives: Mapping[str, float]) -> bool:
    """Whether one request keeps every objective; what it has no value of (TPOT of one token) cannot be late."""
    values = ((figures[name], most) for name, most in objectives.items())
    return all(value is None or value <= most for value, most in values)
