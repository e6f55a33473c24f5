"""Which log-probabilities of a prompt each step is asked for, and that all arrive whatever happens in between."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from llmcore.api.bridge import Finish
from llmcore.builtin.estimators import Capped
from llmcore.sched.plan import StepPlan, Want
from llmcore.sched.request import PromptReport

Make = Any


def probed(plan: StepPlan) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float32]]]:
    """What a runner would read: minus the token that was asked for."""
    parts = [-probe.targets.astype(np.float32) for probe in plan.probes]
    return {"probed": np.concatenate(parts)} if parts else {}


def known(prompt: Iterable[int]) -> tuple[float, ...]:
    return tuple(-float(token) for token in list(prompt)[1:])


def test_chunks_are_asked_for_what_follows_them(bench: Make) -> None:
    b = bench(chunk_tokens=4)
    b.submit(1, range(10, 20), max_new=2, prompt_logprobs=True)
    b.submit(2, [99])
    seen = []
    while not b.scheduler.idle:
        plan = b.plan()
        for probe in plan.probes:
            assert plan.want[probe.row] & Want.LOGPROBS
            seen.append(probe.targets.tolist())
        b.commit(plan, **probed(plan))
    assert seen == [[11, 12, 13, 14], [15, 16, 17, 18], [19]]
    assert b.events[1][0].prompt_logprobs == known(range(10, 20))
    assert b.events[1][1].prompt_logprobs == () == b.events[2][0].prompt_logprobs


def test_a_prompt_of_one_token_has_none(bench: Make) -> None:
    b = bench()
    b.submit(1, [5], prompt_logprobs=True)
    assert b.plan().probes == []


def test_the_first_choice_carries_them(bench: Make) -> None:
    b = bench()
    b.submit(1, range(6), n=3, max_new=1, prompt_logprobs=True)
    plan = b.plan()
    assert len(plan.probes) == 1
    b.commit(plan, **probed(plan))
    assert {event.choice: event.prompt_logprobs for event in b.events[1]} == {0: known(range(6)), 1: (), 2: ()}


def test_nothing_comes_from_the_cache_but_everything_enters_it(bench: Make) -> None:
    b = bench()
    for id in (1, 2):
        b.submit(id, range(30), max_new=2, prompt_logprobs=True)
        while not b.scheduler.idle:
            plan = b.plan()
            b.commit(plan, **probed(plan))
        assert b.events[id][0].cached == 0
        assert b.events[id][0].prompt_logprobs == known(range(30))
    b.submit(3, range(30))
    b.drain()
    assert b.events[3][0].cached == 29


@pytest.mark.parametrize("ahead", [0, 1])
def test_all_are_there_after_preemptions(bench: Make, ahead: int) -> None:
    b = bench(slots=40, estimator=Capped, capped_new_tokens=1, ahead=ahead, chunk_tokens=5)
    for i in range(4):
        b.submit(i, range(100 * i, 100 * i + 8), max_new=30, stop_ids=(9,), prompt_logprobs=True)
    while not b.scheduler.idle:
        for plan in [plan for plan in [b.plan(), *(b.scheduler.plan() for _ in range(ahead))] if plan]:
            b.commit(plan, **probed(plan))
    assert b.scheduler.totals.preemptions > 0
    for i in range(4):
        assert [event.prompt_logprobs for event in b.events[i]].count(()) == 29
        assert b.events[i][0].prompt_logprobs == known(range(100 * i, 100 * i + 8))


@pytest.mark.parametrize("failing", [0, 1, 2, 3])
def test_all_are_there_after_a_failed_step(bench: Make, failing: int) -> None:
    b = bench(chunk_tokens=4)
    b.submit(1, range(10, 20), max_new=3, prompt_logprobs=True)
    b.submit(2, range(30, 40), max_new=3)
    number = 0
    while not b.scheduler.idle:
        plan = b.plan()
        if number == failing:
            b.receive(b.scheduler.fail(plan, ("internal_error", "it broke")))
        else:
            b.commit(plan, **probed(plan))
        number += 1
    assert b.events[1][0].prompt_logprobs == known(range(10, 20))
    assert b.events[1][-1].finish is Finish.LENGTH


def test_the_last_chunk_is_asked_for_them_and_for_a_sample(bench: Make) -> None:
    b = bench(chunk_tokens=4)
    b.submit(1, range(10, 16), prompt_logprobs=True)
    assert b.step(probed=[-1.0] * 4).want.tolist() == [Want.LOGPROBS]
    assert b.plan().want.tolist() == [Want.LOGPROBS | Want.SAMPLE]


def test_those_of_a_request_that_has_gone_are_dropped(bench: Make) -> None:
    b = bench(ahead=1)
    b.submit(1, range(10, 16), prompt_logprobs=True)
    b.submit(2, range(20, 26), prompt_logprobs=True, max_new=1)
    plan = b.plan()
    b.scheduler.abort(0, 1)
    b.commit(plan, **probed(plan))
    assert 1 not in b.events and b.events[2][0].prompt_logprobs == known(range(20, 26))


def test_a_report_is_empty_at_first() -> None:
    report = PromptReport(3, 2)
    columns = report.logprobs, report.ranks, report.top_ids, report.top_logprobs
    assert [column.shape for column in columns] == [(3,), (3,), (3, 2), (3, 2)]
    assert [column.dtype for column in columns] == [np.float32, np.int32, np.int32, np.float32]
    assert np.isnan(report.logprobs).all() and np.isnan(report.top_logprobs).all()
