"""Who waits, counted as it is bounded, and who has waited too long."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from llmcore.api.bridge import Finish
from llmcore.sched.scheduler import QueueStats

Make = Any
LATE = ("queue_timeout", "too late")


def test_choices_and_tokens_of_those_that_wait(bench: Make) -> None:
    made = bench(max_running=4, slots=100)
    assert made.scheduler.queue_stats() == QueueStats(0, 0, 4, 100)
    made.submit(1, [1, 2, 3], n=3)
    made.submit(2, [8, 9])
    made.submit(3, [5])
    assert made.scheduler.queue_stats() == QueueStats(5, 6, 4, 100)
    made.step()
    assert (made.scheduler.queue_stats().choices, made.scheduler.queue_stats().places) == (1, 0)
    made.scheduler.abort(0, 3)
    assert (made.scheduler.queue_stats().choices, made.scheduler.queue_stats().tokens) == (0, 0)
    made.drain()
    assert made.scheduler.queue_stats() == QueueStats(0, 0, 4, 100)


def test_only_who_never_ran_can_be_too_late(bench: Make, caplog: pytest.LogCaptureFixture) -> None:
    made = bench(max_running=1)
    made.submit(1, [1, 2], received=10.0)
    made.step()
    made.submit(2, [3], received=10.0)
    made.submit(3, [4], received=20.0)
    made.submit(4, [5])  # nobody says when it came
    made.receive(made.scheduler.expire(10.0, LATE))
    assert 2 not in made.events
    made.receive(made.scheduler.expire(15.0, LATE))
    assert [(event.finish, event.error) for event in made.events[2]] == [(Finish.ERROR, LATE)]
    assert made.scheduler.queue_stats().choices == 2
    made.drain()
    assert all(made.events[number][-1].finish is Finish.LENGTH for number in (1, 3, 4))
    assert made.scheduler.totals.failed_requests == 0 and not caplog.records, "nothing failed"


def test_all_answers_of_a_late_request_end(bench: Make) -> None:
    made = bench(max_running=2)
    made.submit(1, [1], n=2)
    made.step()
    made.submit(2, [3], n=2, received=1.0)
    made.receive(made.scheduler.expire(2.0, LATE))
    assert sorted(event.choice for event in made.events[2]) == [0, 1]


def test_slots_are_tokens(bench: Make) -> None:
    made = bench(granule=4, slots=100)
    made.submit(1, range(10))
    made.step()
    assert made.scheduler.queue_stats().slots == 100 - 4 * made.group.pool.live


def test_a_snapshot_has_every_total_and_what_waits(bench: Make) -> None:
    made = bench(max_running=1, slots=100, granule=2)
    made.submit(1, range(10))
    made.submit(2, [1, 2, 3])
    made.step()
    totals = [field.name for field in fields(made.scheduler.totals) if field.name != "late_masks"]
    for figure, name in enumerate(totals, start=50):
        setattr(made.scheduler.totals, name, figure)
    load = made.scheduler.load()
    assert [getattr(load, name) for name in totals] == [*range(50, 50 + len(totals))]
    assert (load.running, load.waiting, load.waiting_tokens, load.kv_total) == (1, 1, 3, 100)
    assert load.cache == {"granules": 5, "nodes": 1} == made.group.manager.stats()
    assert load.kv_live + load.kv_cached + load.kv_free == 100
