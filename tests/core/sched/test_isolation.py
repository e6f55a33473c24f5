"""Choices that leave their rows, and failed steps that end only the requests that cause them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from llmcore.api import Finish
from llmcore.builtin.estimators import Capped

Make = Any


def test_an_abort_frees_its_slots_at_once(bench: Make) -> None:
    b = bench(ahead=1)
    b.submit(1, range(30), n=2)
    b.submit(2, range(100, 110), max_new=9)
    first = b.plan()
    b.scheduler.abort(0, 1)
    b.scheduler.abort(0, 99)
    assert b.group.pool.live <= 10 + b.group.pool.run
    second = b.plan()
    b.commit(first)
    b.commit(second)
    assert 1 not in b.events
    b.drain()
    assert len(b.events[2]) == 9
    b.submit(3, [1])
    b.scheduler.abort(0, 3)
    assert b.scheduler.load().aborts == 2


def test_a_text_stop_ends_a_choice_and_caches_up_to_it(bench: Make) -> None:
    b = bench()
    b.submit(1, range(10), max_new=9)
    for _ in range(6):
        b.step()
    b.scheduler.finish(0, 1, 0, 2)
    b.scheduler.finish(0, 1, 0, 2)
    assert b.scheduler.idle
    b.submit(2, [*range(10), 7, 7, 7, 7])
    assert b.step().start.tolist() == [12]


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_newest_is_preempted_and_goes_on_where_it_was(bench: Make, ahead: int) -> None:
    b = bench(slots=40, estimator=Capped, capped_new_tokens=1, ahead=ahead)
    for i in range(3):
        b.submit(i, range(100 * i, 100 * i + 8), max_new=30, stop_ids=(9,))
    order: list[int] = []
    while not b.scheduler.idle:
        plans = [plan for plan in [b.plan(), *(b.scheduler.plan() for _ in range(ahead))] if plan]
        for plan in plans:
            order += [i for i, events in b.events.items() if events[-1].finish and i not in order]
            b.commit(plan)
    assert b.scheduler.totals.preemptions > 0
    assert [len(b.events[i]) for i in range(3)] == [30, 30, 30]
    assert order[0] == 0, "the oldest is never a victim"


BAD_LUCK = ("internal_error", "out of luck")


def test_a_row_that_is_not_finite_ends_alone(bench: Make) -> None:
    b = bench()
    b.submit(1, range(10))
    b.submit(2, range(100, 110))
    b.step(finite=[False, True])
    assert (b.events[1][0].finish, b.events[1][0].tokens) == (Finish.ERROR, ())
    assert b.events[1][0].error is not None and b.events[1][0].error[0] == "internal_error"
    b.drain()
    assert len(b.events[2]) == 4
    b.submit(3, range(10))
    assert b.step().n_query.tolist() == [10], "what it wrote left the cache"


def test_who_took_kv_that_is_not_finite_computes_again(bench: Make) -> None:
    b = bench(batch_tokens=32, chunk_tokens=16, ahead=1)
    b.submit(1, range(32), max_new=9)
    b.commit(b.plan())
    second = b.plan()
    b.submit(2, [*range(32), 90, 91], max_new=3)
    third = b.plan()
    assert third.start.tolist()[-1] == 32
    b.commit(second, finite=[False])
    b.commit(third)
    assert b.events[1][0].finish is Finish.ERROR
    assert 2 not in b.events, "what it computed from that is dropped"
    assert b.plan().start.tolist() == [0]


def test_a_failed_step_is_tried_again_one_at_a_time(bench: Make) -> None:
    b = bench(ahead=1)
    for i in range(3):
        b.submit(i, range(100 * i, 100 * i + 10))
    failing, later = b.plan(), b.plan()
    assert later.request.size == 3
    assert b.scheduler.fail(failing, BAD_LUCK) == {}
    assert b.group.pool.live == 0
    alone = []
    for guilty in (False, True, False):
        plan = b.plan()
        alone.append(plan.request.size)
        if guilty:
            b.receive(b.scheduler.fail(plan, BAD_LUCK))
        else:
            b.commit(plan)
    assert alone == [1, 1, 1]
    b.drain()
    assert b.events[1][0].error == BAD_LUCK
    assert [len(b.events[i]) for i in (0, 2)] == [4, 4]


@pytest.mark.parametrize("ahead", [0, 1])
def test_whoever_fails_alone_has_another_chance_and_no_third(bench: Make, ahead: int) -> None:
    b = bench(ahead=ahead)
    b.submit(1, range(10), max_new=4)
    b.step()
    for _ in range(2):
        assert b.scheduler.fail(b.plan(), BAD_LUCK) == {}
        b.step()
    assert b.scheduler.fail(b.plan(), BAD_LUCK) == {}
    b.receive(b.scheduler.fail(b.plan(), BAD_LUCK))
    assert [event.error for event in b.events[1]] == [None] * 3 + [BAD_LUCK]
    assert (b.scheduler.totals.failed_steps, b.scheduler.totals.failed_requests) == (4, 1)
    assert b.scheduler.idle and b.group.pool.live == 0


def test_a_request_that_failed_is_named_in_the_log_once(bench: Make, caplog: pytest.LogCaptureFixture) -> None:
    b = bench()
    b.submit(1, range(10), request_id="chat-7")
    b.submit(2, range(50, 55), n=2, request_id="chat-8")
    b.commit(b.plan(), finite=[False, False, True])
    why = (
        "ended with an error: the model's output for this request was not finite, or not a token id; if many requests "
        "fail like this, check the weights for NaN and Inf (docs/operators.md, Errors, says how)"
    )
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"request chat-7 {why}", f"request chat-8, choice 0 {why}"]
    assert b.scheduler.totals.failed_requests == 2


def test_a_request_that_cannot_be_done_is_not_a_failure(bench: Make, caplog: pytest.LogCaptureFixture) -> None:
    b = bench()
    b.submit(1, range(10), request_id="chat-7")
    plan = b.plan()
    with caplog.at_level(logging.INFO):
        b.scheduler.expel(plan, {int(plan.request[0]): ("invalid_value", "no token is allowed")})
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (logging.INFO, "request chat-7 asked for what cannot be done")
    assert b.scheduler.totals.failed_requests == 0 and b.scheduler.idle is False


def test_a_request_that_is_never_tried_alone_ends_after_three_failed_steps(bench: Make) -> None:
    b = bench()
    b.submit(1, range(10))
    b.submit(2, range(50, 60))
    for _ in range(3):
        plan = b.plan()
        assert plan.request.size == 2 and b.scheduler.fail(plan, BAD_LUCK) == {}
        b.scheduler._isolation.dismiss()
    b.receive(b.scheduler.fail(b.plan(), BAD_LUCK))
    assert [event.error for i in (1, 2) for event in b.events[i]] == [BAD_LUCK] * 2


def test_rows_that_are_not_finite_are_looked_at_one_by_one(bench: Make) -> None:
    """The first has gone, the second may have taken wrong KV from the cache, and the third is at fault."""
    b = bench(ahead=1)
    b.submit(1, range(20), max_new=1)
    b.drain()
    b.submit(2, range(50, 60))
    b.submit(3, [*range(20), 30])
    b.submit(4, range(70, 80))
    plan = b.plan()
    b.scheduler.abort(0, 2)
    b.commit(plan, finite=[False] * 3)
    assert [event.finish for event in b.events[4]] == [Finish.ERROR]
    assert 3 not in b.events and b.step().start.tolist() == [0]
    b.drain()
    assert len(b.events[3]) == 4
