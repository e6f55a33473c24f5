"""Steps in flight: the rows, writes and forks of a plan, and results that come after their request has gone."""

from __future__ import annotations

from typing import Any

import pytest
from llmcore.api import Finish, SamplingParams

Make = Any


def test_n_choices_share_one_prefill(bench: Make) -> None:
    b = bench(granule=4)
    b.submit(1, range(10), max_new=3, n=3, sampling=SamplingParams(seed=5))
    first = b.plan()
    assert first.n_query.tolist() == [10]
    assert first.sample_row.tolist() == [0, 0, 0]
    assert len(set(first.sample_request.tolist())) == 3
    assert [(a.choice, a.fork_of, a.start) for a in first.admitted] == [(0, -1, 0), (1, 0, 10), (2, 0, 10)]
    rows = [first.writes[0].granule[first.writes[0].index == i].tolist() for i in first.sample_request]
    assert rows[0][:3] == rows[1] == rows[2]
    b.commit(first)
    second = b.plan()
    assert len(second.copies[0]) == 2, "all but the last write the shared granule into a copy"
    assert {src for src, _ in second.copies[0]} == {rows[0][2]}
    b.commit(second)
    b.drain()
    assert [(e.choice, e.cached) for e in b.events[1][:3]] == [(0, 0), (1, 0), (2, 0)]
    assert sum(e.finish is Finish.LENGTH for e in b.events[1]) == 3


def test_a_prompt_enters_the_cache_chunk_by_chunk_when_enqueued(bench: Make) -> None:
    b = bench(batch_tokens=32, chunk_tokens=16, ahead=1)
    b.submit(1, range(100))
    first = b.plan()
    b.submit(2, [*range(16), 500, 501])
    second = b.plan()
    assert second.n_query.tolist() == [2, 16]
    assert second.start.tolist() == [16, 16]
    b.commit(first)
    b.commit(second)


def test_with_a_step_in_flight_a_finished_request_runs_one_step_too_many(bench: Make) -> None:
    b = bench(ahead=1)
    b.submit(1, [1, 2], max_new=9, stop_ids=(7,))
    first = b.plan()
    second = b.plan()
    assert second.start.tolist() == [2]
    b.commit(first)
    assert b.events[1][-1].finish is Finish.STOP
    assert b.group.pool.live == 0
    b.submit(2, [5, 6], max_new=2)
    third = b.plan()
    assert third.request.tolist() == second.request.tolist(), "its place is used again before its last step is read"
    b.commit(second)
    assert len(b.events[1]) == 1, "the result of that step is dropped"
    b.commit(third)
    assert len(b.events[2]) == 1


def test_nothing_is_planned_beyond_max_new_tokens(bench: Make) -> None:
    b = bench(ahead=1)
    b.submit(1, [1, 2], max_new=2)
    first, second = b.plan(), b.plan()
    assert b.scheduler.plan() is None
    b.commit(first)
    b.commit(second)
    assert b.scheduler.idle


def test_plans_are_committed_in_order(bench: Make) -> None:
    b = bench(ahead=1)
    b.submit(1, [1, 2])
    b.plan()
    with pytest.raises(ValueError, match="in the order"):
        b.commit(b.plan())
