"""benchmarks/steps.py without a GPU: kinds of steps, and the lines of the table."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llmcore.engine.graphs import Action
from llmcore.sched.plan import StepPlan

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("steps")


def plan(rows: tuple[int, ...], n_decode: int) -> StepPlan:
    """A step whose rows have so many new tokens."""
    count = np.array(rows, np.int32)
    numbers = np.arange(len(rows), dtype=np.int32)
    return StepPlan(
        number=0,
        request=numbers,
        n_query=count,
        start=np.zeros_like(count),
        reserve=count,
        want=np.ones(len(rows), np.uint8),
        n_decode=n_decode,
        sample_row=numbers,
        sample_request=numbers,
    )


def test_a_line_for_each_kind(steps: Any) -> None:
    decodes, launch, replay = plan((1, 1), 2), Action.LAUNCH, Action.REPLAY
    found = [(plan((8, 8), 0), launch, 1.0), (plan((1, 7), 1), launch, 1.5), (decodes, replay, 1.6)]
    prompts, both, decode = steps.table(0.5, [*found, (decodes, replay, 1.8)])
    assert prompts.split()[:2] == ["prompts,", "launched"] and "1 steps    500.00 ms" in prompts
    assert both.startswith("  prompts and decode, launched") and "8 tokens each" in both
    assert decode.startswith("  decode, CUDA graph") and "2 steps    300.00 ms" in decode
    assert "longest  200.000" in decode and "75000.0 us a token" in decode and "late" not in decode


def test_late_steps_are_listed(steps: Any) -> None:
    """With their places among the steps of their kind, and the time beyond the median."""
    step = plan((1, 1), 2)
    (line,) = steps.table(0.0, [(step, Action.REPLAY, at) for at in (0.1, 0.2, 0.5, 0.6, 0.7)])
    assert line.endswith("late: 2, 200.00 ms")
