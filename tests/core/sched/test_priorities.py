"""What requests tell the scheduler: their priority, their client, and what a dialect adds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llmcore.api import RequestError
from llmcore.api.sched import Decision, RequestInfo, SchedulerView
from llmcore.builtin.estimators import Capped
from llmcore.builtin.fcfs import FCFS
from llmcore.builtin.priority import Priority
from llmcore_devtools.simulator import Scenario, simulate

from tests.examples import examples

MakeBench = Callable[..., Any]


def test_a_policy_that_does_not_heed_priorities_gets_none(bench: MakeBench) -> None:
    engine = bench()
    with pytest.raises(RequestError, match="--scheduler priority") as error:
        engine.submit(1, [1, 2], priority=1)
    assert (error.value.param, error.value.code) == ("priority", "unsupported_parameter")
    engine.submit(2, [1, 2], priority=0)


def test_those_that_wait_run_by_priority(bench: MakeBench) -> None:
    engine = bench(policy=Priority, priorities=True, max_running=1)
    ended: list[int] = []
    for number, priority in enumerate((0, 5, 0, -1, 5)):
        engine.submit(number, range(20 * number, 20 * number + 9), max_new=2, priority=priority)
    while not engine.scheduler.idle:
        engine.step()
        ended += [number for number in engine.events if number not in ended]
    assert ended == [3, 0, 2, 1, 4]


def test_a_late_request_goes_before_a_prompt_that_is_being_computed(bench: MakeBench) -> None:
    engine = bench(policy=Priority, priorities=True, batch_tokens=16, chunk_tokens=16)
    engine.submit(1, range(60), max_new=1, priority=3)
    engine.step()
    engine.submit(2, range(100, 120), max_new=1, priority=2)
    engine.submit(3, range(200, 203), max_new=1, priority=4)
    for _ in range(2):
        engine.step()
    assert list(engine.events) == [2]
    engine.drain()
    assert list(engine.events) == [2, 1, 3]


def test_a_policy_sees_what_requests_tell(bench: MakeBench) -> None:
    seen: dict[str, list[RequestInfo]] = {"waiting": [], "running": []}

    class Looks(FCFS):
        def plan(self, view: SchedulerView) -> Decision:
            seen["running"] += [view.info(int(row)) for row in view.running]
            seen["waiting"] += [candidate.info for candidate in view.waiting()]
            return super().plan(view)

    engine = bench(policy=Looks, priorities=True)
    hints = {"tenant": "a", "deadline": 2.5, "tries": 3, "batch": True}
    engine.submit(1, [1, 2, 3], max_new=3, n=2, priority=-4, client=7, hints=hints)
    engine.step()
    engine.step()
    told = RequestInfo(-4, 7, hints)
    assert seen == {"waiting": [told], "running": [told, told]}, "forks tell what their request tells"


def test_the_newest_of_the_lowest_priority_is_preempted(bench: MakeBench) -> None:
    engine = bench(policy=Priority, priorities=True, estimator=Capped, slots=40, capped_new_tokens=1, max_total_len=40)
    for number, priority in enumerate((9, 4, 0, 4)):
        engine.submit(number, np.arange(6) + 10 * number, max_new=20, priority=priority, stop_ids=(999,))
        engine.step()
    together: list[set[int]] = []
    while engine.scheduler.totals.preemptions < 3:
        ran = {engine.scheduler.who(row)[1] for row in engine.step().request.tolist()}
        together += [ran] if ran not in together else []
    assert together == [{0, 1, 2, 3}, {0, 1, 2}, {0, 2}, {0}], "the oldest stays, whatever its priority"
    engine.drain()
    assert sorted(engine.events) == list(range(4))


def test_it_is_never_overruled(bench: MakeBench, caplog: pytest.LogCaptureFixture) -> None:
    """A prompt of a high number is passed over as long as others come, but not for ever."""
    engine = bench(policy=Priority, priorities=True, granule=16, slots=960, max_running=4, stall_tokens=16)
    with caplog.at_level(logging.ERROR):
        engine.submit(0, [1] * 5, max_new=80, priority=0)
        engine.submit(1, range(200), max_new=1, priority=9)
        for number in range(2, 200):
            engine.submit(number, np.arange(20) + 30 * number, max_new=1, priority=0)
            engine.step()
        engine.drain()
    assert not caplog.records and len(engine.events) == 200


@examples(25)
@given(
    seed=st.integers(0, 10_000),
    slots=st.sampled_from([96, 192]),
    chunked=st.booleans(),
    stall=st.sampled_from([0, 6]),
    ahead=st.sampled_from([0, 1]),
    failures=st.sampled_from([0.0, 0.05]),
    searches=st.sampled_from([0.0, 0.2]),
)
def test_by_priority_every_request_is_answered_as_if_alone(
    seed: int, slots: int, chunked: bool, stall: int, ahead: int, failures: float, searches: float
) -> None:
    scenario = Scenario(
        seed=seed,
        requests=12,
        slots=slots,
        chunked=chunked,
        batch_tokens=48,
        stall_tokens=stall if chunked else 0,
        ahead=ahead,
        failures=failures,
        searches=searches,
        longest_answer=8,
        arrivals=0.95,
        aborts=0.01,
        priorities=(-1, 0, 0, 3),
    )
    simulate(Priority, scenario, estimator=Capped)
