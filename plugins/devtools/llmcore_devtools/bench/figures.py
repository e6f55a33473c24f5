"""Figures and their context: medians, percentiles and goodput; the machine and the versions. No torch."""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from llmcore import __version__
from llmcore.registry.registry import Registry

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


_PACKAGES = ("torch", "triton", "numpy", "msgspec")


def machine() -> dict[str, str | int]:
    """This machine's processor, the cores this process may use, memory and system."""
    return {
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30,
        "system": f"{platform.system()} {platform.release()}",
    }


def versions(registry: Registry | None = None) -> dict[str, str]:
    """Versions of llmcore, Python, the libraries that compute, and the plugins of `registry`."""
    found = {"llmcore": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    for plugin in registry.plugins if registry is not None else ():
        if plugin.dist != "llmcore-engine":
            found[f"plugin {plugin.name}"] = plugin.version
    return found


def process_age() -> float:
    """Seconds since this process was started, by the kernel's clock (ticks of 10 ms)."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # field 22: starttime, in ticks since boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
