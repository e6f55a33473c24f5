"""Policies that decide nonsense: nothing breaks, it is said once, and every request is served."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from llmcore.api.sched import Decision, SchedulerLimits, SchedulerView
from llmcore.builtin.fcfs import FCFS

Make = Any
Plan = Callable[[SchedulerView], Decision]


def column(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def everyone(view: SchedulerView, n: int = 1) -> Decision:
    return Decision(view.running, np.full(view.running.size, n, np.int32))


def without_asking(view: SchedulerView) -> Decision:
    admit = [(candidate.index, 1) for candidate in view.waiting()]
    return Decision(column(), column(), admit)


def too_much_at_once(view: SchedulerView) -> Decision:
    admit = [(c.index, c.tokens) for c in view.waiting() if view.fits(c)]
    return Decision(column(), column(), admit)


def twice(view: SchedulerView) -> Decision:
    admit = [(c.index, 1) for c in view.waiting() if view.fits(c)]
    return Decision(column(), column(), admit * 2)


def raising(view: SchedulerView) -> Decision:
    raise RuntimeError("no idea")


BAD: dict[str, tuple[Plan, str]] = {
    "a row that does not exist": (lambda view: Decision(column(99), column(1)), "does not exist"),
    "a row that does not run": (lambda view: Decision(column(7), column(1)), "cannot run"),
    "nothing of a row": (lambda view: Decision(column(0), column(0)), "nothing of it"),
    "more than remains": (lambda view: Decision(column(0), column(50)), "more of a request"),
    "twice": (lambda view: Decision(column(0, 0), column(1, 1)), "cannot run|names a request twice"),
    "no columns": (lambda view: Decision(column(0), np.array([0.5])), "integers"),  # type: ignore[arg-type]
    "not offered": (lambda view: Decision(column(), column(), [(3, 1)]), "not offered"),
    "without asking": (without_asking, "without asking"),
    "over budget": (too_much_at_once, "budget"),
    "admitted twice": (twice, "admits a request twice"),
    "raising": (raising, "RuntimeError.*no idea"),
    "lazy": (lambda view: Decision(column(), column()), ""),
    "lists": (lambda view: Decision([], []), ""),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_policy_is_overruled(bench: Make, name: str, caplog: pytest.LogCaptureFixture) -> None:
    plan, message = BAD[name]

    class Bad:
        def __init__(self, limits: SchedulerLimits) -> None:
            pass

        def plan(self, view: SchedulerView) -> Decision:
            return plan(view)

    with caplog.at_level(logging.ERROR):
        b = bench(policy=Bad, batch_tokens=24, chunk_tokens=24)
        for i in range(3):
            b.submit(i, range(100 * i, 100 * i + 20), max_new=5)
        b.drain()
    assert [len(b.events[i]) for i in range(3)] == [5, 5, 5]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (message != ""), said
    if message:
        assert "policy Bad is overruled" in said[0]
        assert re.search(message, said[0])


def test_the_oldest_is_not_passed_over_for_ever(bench: Make, caplog: pytest.LogCaptureFixture) -> None:
    class Youngest(FCFS):
        def plan(self, view: SchedulerView) -> Decision:
            decision = super().plan(view)
            keep = decision.rows != view.running[:1] if view.running.size > 1 else slice(None)
            return Decision(decision.rows[keep], decision.n_query[keep], decision.admit)

    b = bench(policy=Youngest)
    b.submit(1, [1], max_new=3)
    b.submit(2, [2], max_new=200)
    with caplog.at_level(logging.ERROR):
        for _ in range(150):
            b.step()
    assert len(b.events[1]) == 3
    assert "passed over" in caplog.text
