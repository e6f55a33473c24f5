"""Release: choices that end early, or are preempted, and what of their KV stays in the prefix cache."""

from __future__ import annotations

from typing import Any

import pytest
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
    assert b.scheduler.load().aborts == 1


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
