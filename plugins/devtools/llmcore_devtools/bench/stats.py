"""Medians, percentiles and goodput. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

QUANTILES = (50, 90, 95, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie, with linear interpolation between two of them."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def distribution(values: Sequence[float]) -> dict[str, float] | None:
    """`mean`, `p50`, `p90`, `p95` and `p99`, or None without values."""
    if not values:
        return None
    quantiles = {f"p{percent}": percentile(values, percent) for percent in QUANTILES}
    return {"mean": statistics.fmean(values), **quantiles}


@dataclass(frozen=True)
class Spread:
    """Repeats of one measurement: the median, the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    def scaled(self, factor: float) -> Spread:
        """The same spread in another unit."""
        return Spread(self.median * factor, self.low * factor, self.high * factor)

    def __str__(self) -> str:
        digits = max(0, 3 - math.floor(math.log10(self.median))) if self.median > 0 else 3  # four significant digits
        if self.low == self.high:
            return f"{self.median:,.{digits}f}"
        return f"{self.median:,.{digits}f} ({self.low:,.{digits}f}-{self.high:,.{digits}f})"


def meets(figures: Mapping[str, float | None], objectives: Mapping[str, float]) -> bool:
    """True if one request meets every objective. A missing value (TPOT of one token) meets its objective."""
    values = ((figures[name], most) for name, most in objectives.items())
    return all(value is None or value <= most for value, most in values)
