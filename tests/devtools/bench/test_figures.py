"""From the times of known answers to percentiles and goodput."""

from __future__ import annotations

import random

import numpy as np
import pytest
from llmcore.api.errors import ConfigError
from llmcore_devtools.bench.client import Answer
from llmcore_devtools.bench.figures import Spread, distribution, meets, percentile
from llmcore_devtools.bench.load import Window, departures, figures, gaps, latencies, parse_objectives


def test_percentiles_are_numpys() -> None:
    values = [random.Random(3).expovariate(1) for _ in range(37)]
    for percent in (0, 50, 90, 99, 100):
        assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))
    assert distribution([]) is None
    assert distribution([5.0]) == {"mean": 5.0, "p50": 5.0, "p90": 5.0, "p95": 5.0, "p99": 5.0}


def test_a_spread_shows_four_digits() -> None:
    assert str(Spread.of([0.0049701, 0.0048, 0.0051]).scaled(1e3)) == "4.970 (4.800-5.100)"
    assert str(Spread.of([38123.4, 38000.2])) == "38,062 (38,000-38,123)"
    assert str(Spread.of([2.0])) == "2.000"


def test_objectives() -> None:
    assert parse_objectives(["ttft=500", "tpot=50ms"]) == {"ttft": 500.0, "tpot": 50.0}
    assert meets({"ttft": 500.0, "tpot": None}, {"ttft": 500.0, "tpot": 50.0})
    assert not meets({"ttft": 500.1, "tpot": 1.0}, {"ttft": 500.0})
    for wrong in ("ttft", "ttft=x", "itl=3", "ttft=-1", "ttft=nan"):
        with pytest.raises(ConfigError):
            parse_objectives([wrong])


def answer(sent: float, *arrivals: tuple[float, int], ended: float, error: str | None = None) -> Answer:
    """An answer of 10 prompt tokens."""
    return Answer(10, 5, sent=sent, ended=ended, arrivals=list(arrivals), error=error)


def test_figures_of_known_answers() -> None:
    quick = answer(0.0, (0.1, 1), (0.2, 2), (0.5, 5), ended=0.5)
    slow = answer(1.0, (1.9, 1), (2.0, 5), ended=2.0)
    broken = answer(1.0, ended=1.5, error="500: no")
    given_up = answer(1.0, (1.2, 1), ended=0.0)
    assert latencies(quick) == pytest.approx({"ttft": 100, "tpot": 100, "gap": 300, "e2e": 500})
    assert latencies(answer(0.0, (0.1, 5), ended=0.5))["gap"] is None, "all tokens came at once"
    assert gaps(quick) == pytest.approx([100, 300])
    window = Window(2.0, 2.0, (quick, slow, broken, given_up), busy=0.1, late=0.0)
    found = figures(window, {"ttft": 500, "tpot": 100.1})
    assert (found["answered"], found["failed"], found["unfinished"]) == (2, 1, 1)
    assert found["errors"] == {"500: no": 1}
    assert found["output_tokens_per_s"] == 5.0 and found["requests_per_s"] == 1.0
    assert found["ttft_ms"]["p50"] == pytest.approx(500)
    assert found["tpot_ms"]["mean"] == pytest.approx((100 + 25) / 2)
    assert found["gap_ms"]["mean"] == pytest.approx((300 + 100) / 2)
    assert found["itl_ms"]["mean"] == pytest.approx(500 / 3)
    assert found["goodput"]["requests_per_s"] == pytest.approx(0.5) and found["goodput"]["share"] == 0.25


def test_requests_leave_as_a_poisson_process() -> None:
    times = departures(20_000, 50.0, seed=1)
    waits = np.diff(times)
    assert times[0] == 0.0 and waits.min() >= 0
    assert waits.mean() == pytest.approx(1 / 50, rel=0.03) and waits.std() == pytest.approx(1 / 50, rel=0.05)
    assert departures(3, float("inf"), seed=1) == [0.0, 0.0, 0.0]
