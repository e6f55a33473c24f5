"""benchmarks/soak.py: which growth a run of samples shows."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("soak")


def test_a_line_has_its_slope_and_nothing_beside_it(soak: Any) -> None:
    points = [(x / 60, 70 + 3 * x / 60) for x in range(60)]
    assert soak.theil_sen(points) == pytest.approx((3, 3, 3))


def test_a_few_samples_far_off_change_no_slope(soak: Any) -> None:
    points = [(x / 60, 70 - x / 60 + (50 if x in (7, 20, 41) else 0)) for x in range(60)]
    slope, low, high = soak.theil_sen(points)
    assert slope == pytest.approx(-1) and low == pytest.approx(-1) and high == pytest.approx(-1)


def test_sens_own_bounds(soak: Any) -> None:
    """Of seven points: Kendall's variance is 7 * 6 * 19 / 18, so 7 slopes beside the median (1.96 * 6.66 / 2)."""
    points = [(1, 9), (2, 15), (3, 19), (4, 20), (10, 45), (12, 55), (18, 78)]
    slopes = sorted((y2 - y1) / (x2 - x1) for i, (x1, y1) in enumerate(points) for x2, y2 in points[i + 1 :])
    assert soak.theil_sen(points) == (slopes[10], slopes[3], slopes[17])


def test_too_few_samples_bound_nothing(soak: Any) -> None:
    assert soak.theil_sen([(0, 70)]) == (0.0, -math.inf, math.inf)
    assert soak.theil_sen([(0, 70), (1, 72)]) == (2, -math.inf, math.inf)


def test_a_short_run_tells_no_small_growth(soak: Any) -> None:
    assert soak.seen(1.0) == soak.GROWTH_MB
    assert soak.seen(0.1) == pytest.approx(10 * soak.RESOLUTION_MB)
