"""The future peak against a simulation slot by slot, and what it admits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmcore.api import ConfigError, RequestError
from llmcore.api.bridge import BeamSearch
from llmcore.builtin.estimators import Capped, Conservative
from llmcore.sched.capacity import FuturePeak

Make = Any

requests = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30)), max_size=12)


def brute_force(held: list[tuple[int, int]], shared: int) -> int:
    """Most slots over all steps: each of `held` (own, growth) grows by one a step, then gives all back."""
    last = max((growth for _, growth in held), default=0)
    return max(shared + sum(own + step for own, growth in held if growth >= step) for step in range(last + 1))


def peak_of(held: list[tuple[int, int]], shared: int = 0) -> FuturePeak:
    rows = np.arange(len(held), dtype=np.int32)
    own, growth = (np.array([pair[i] for pair in held], np.int32) for i in (0, 1))
    return FuturePeak.of(rows, own, growth, shared)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(requests, st.integers(0, 20))
def test_the_peak_is_what_a_simulation_finds(held: list[tuple[int, int]], shared: int) -> None:
    assert peak_of(held, shared).peak == brute_force(held, shared)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(requests, requests)
def test_adding_one_by_one_is_the_same(held: list[tuple[int, int]], more: list[tuple[int, int]]) -> None:
    peak = peak_of(held)
    for i, (own, growth) in enumerate(more):
        peak = peak.add(np.array([100 + i], np.int32), np.array([own], np.int32), growth)
    assert peak.peak == brute_force(held + more, 0)
    assert (np.diff(peak.growth) <= 0).all()


def test_what_becomes_shared_outlives_its_owner() -> None:
    peak = peak_of([(10, 1), (10, 9)])
    assert peak.peak == brute_force([(10, 1), (10, 9)], 0) == 22
    assert peak.share(np.array([0, 0, 0], np.int32)).peak == brute_force([(7, 1), (10, 9)], 3) == 22
    assert peak_of([(10, 1), (10, 19)]).share(np.array([0, 0, 0], np.int32)).peak == 3 + 29


def test_a_request_waits_until_the_peak_allows_it(bench: Make) -> None:
    b = bench(slots=50)
    b.submit(1, range(10), max_new=20)
    b.submit(2, range(100, 110), max_new=20)
    plan = b.step()
    assert plan.request.size == 1, "10 + 10 + 2 * 19 > 50"
    while plan.request.size == 1:
        plan = b.step()
    # They peak when the first ends, in step 20 with 29 slots; the second, joining in step 9, then holds 21.
    assert len(b.events[1]) == 9
    b.drain()
    assert b.scheduler.totals.preemptions == 0


def test_a_shared_prefix_is_counted_once(bench: Make) -> None:
    b = bench(slots=60)
    b.submit(1, range(40), max_new=9)
    b.step()
    b.submit(2, range(40), max_new=9)
    assert b.step().request.size == 2
    assert b.scheduler.load().peak <= 60


def test_an_optimist_admits_what_a_pessimist_does_not(bench: Make) -> None:
    sizes = {}
    for estimator in (Capped, Conservative):
        b = bench(slots=100, estimator=estimator, capped_new_tokens=5)
        for i in range(6):
            b.submit(i, range(100 * i, 100 * i + 10), max_new=50, stop_ids=(9,))
        sizes[estimator] = b.step().request.size
    assert sizes == {Capped: 6, Conservative: 1}


def test_several_choices_of_a_guaranteed_request_must_fit_together(bench: Make) -> None:
    b = bench(slots=50)
    b.submit(1, range(10), max_new=21, n=2)
    bench(slots=48, granule=16).submit(1, range(20), max_new=12, n=2)
    with pytest.raises(RequestError, match="lower max_new_tokens or n"):
        b.submit(2, range(10), max_new=22, n=2)
    b.drain()
    assert b.scheduler.totals.preemptions == 0


def test_running_requests_leave_room_for_a_chunk(bench: Make) -> None:
    b = bench(max_running=64, batch_tokens=4, chunk_tokens=4)
    for i in range(6):
        b.submit(i, [i], max_new=30)
    for _ in range(4):
        b.step()
    assert b.scheduler.load().running == 4


def test_a_step_has_to_fill_a_granule(bench: Make) -> None:
    with pytest.raises(ConfigError, match="a step of 64 tokens in chunks of 8 cannot fill a KV granule of 16"):
        bench(granule=16, chunk_tokens=8)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"produced": (7,) * 4}, "an answer of 4 tokens has all of its 4"),
        ({"produced": (7,), "n": 2}, "only a single choice continues"),
        ({"produced": (7,), "beams": BeamSearch(2)}, "only a single choice continues"),
        ({"produced": (7,), "prompt_logprobs": True}, "reports nothing of its prompt"),
    ],
)
def test_what_cannot_continue_is_refused(bench: Make, more: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says) as refused:
        bench().submit(1, [1, 2], **more)
    assert (refused.value.param, refused.value.code) == ("produced", "invalid_value")


def test_drafts_may_take_the_last_slot(bench: Make) -> None:
    """Three tokens hold four slots with the one that was drawn, and two drafts fill the pool."""
    for slots, drafts in ((8, [3]), (7, [1])):
        b = bench(slots=slots, drafts=2, estimator=Conservative)
        b.submit(1, [1, 2, 3], max_new=4)
        b.commit(b.plan(), counts=np.ones(1, np.int32))
        assert b.plan().n_query.tolist() == drafts, slots
