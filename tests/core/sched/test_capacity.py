"""The future peak against a simulation slot by slot, and what it admits."""

from __future__ import annotations

from typing import Any, ClassVar

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
        ({"produced": {0: (7,) * 4}}, "an answer of 4 tokens has all of its 4"),
        ({"produced": {0: (), 2: (7,)}, "n": 2}, "its choices are 0 to 1"),
        ({"produced": {0: (7,)}, "beams": BeamSearch(2)}, "a beam search, a score and a hidden state do not"),
        ({"produced": {0: (7,)}, "prompt_logprobs": True}, "came with the first token of choice 0"),
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


class Recorded(Capped):
    """Writes down what it is asked, and answers what it is told."""

    asked: ClassVar[list[list[Any]]] = []
    answer: int | None = None

    def totals(self, produced: Any, max_new: Any, ignore_eos: Any, used: float) -> Any:
        self.asked.append([produced.tolist(), max_new.tolist(), ignore_eos.tolist(), used])
        totals = super().totals(produced, max_new, ignore_eos, used)
        return totals if self.answer is None else np.full_like(totals, self.answer)


@pytest.mark.parametrize(
    ("prompt", "limits", "steps"),
    [
        (10, {"chunk_tokens": 4}, 2),  # 6 in chunks of 4
        (10, {"chunk_tokens": 5}, 1),
        (30, {"batch_tokens": 12, "chunk_tokens": 12}, 4),  # 18 beside 7 others: chunks of 5
        (40, {"chunk_tokens": 20, "stall_tokens": 6}, 4),  # 20 in chunks of 6
        (290, {"batch_tokens": 400, "chunk_tokens": 145, "stall_tokens": 200}, 2),  # at least 136, half a tile less
        (290, {"batch_tokens": 400, "chunk_tokens": 145, "stall_tokens": 209}, 1),
        (200, {"batch_tokens": 400, "chunk_tokens": 100, "stall_tokens": 128}, 2),  # at least 64
        (200, {"batch_tokens": 400, "chunk_tokens": 100, "stall_tokens": 127}, 1),
        (30, {"chunk_tokens": 14, "granule": 4}, 2),  # 18 in chunks of 12, of whole granules
        (33, {"batch_tokens": 15, "chunk_tokens": 15, "granule": 8}, 3),  # 17 in chunks of 7 at most, so of a granule
    ],
)
def test_the_steps_of_a_prompt_are_foreseen(bench: Make, prompt: int, limits: dict[str, Any], steps: int) -> None:
    """After its first chunk. It has all slots of its prompt then, and takes one more a step, in granules."""
    b = bench(max_input_len=290, max_total_len=300, **limits)
    b.submit(1, range(prompt), max_new=9)
    b.step()
    granule = limits.get("granule", 1)
    assert b.scheduler.load().peak == sum(-(-part // granule) for part in (prompt - 1, steps + 8)) * granule


@pytest.mark.parametrize(
    ("limits", "slots"),
    [
        ({}, 99),  # the other's 10, and 49; one for the prompt's only step, 19 more, and as many of the other
        ({"chunk_tokens": 25}, 101),  # two steps
        ({"chunked": False, "max_input_len": 60}, 101),  # it may wait a step
        ({"ahead": 3}, 105),
    ],
)
def test_another_is_admitted_if_the_peak_allows_it(bench: Make, limits: dict[str, Any], slots: int) -> None:
    for more, running in ((0, 2), (-1, 1)):
        b = bench(slots=slots + more, **limits)
        b.submit(1, range(100, 110), max_new=31)
        b.step()
        b.submit(2, range(50), max_new=20)
        assert b.step().request.size == running, slots + more


@pytest.mark.parametrize(
    ("prompt", "granules"),
    [
        (10, 3 + 1 + 2 * 6),  # of 4 slots: the prompt's, one for a copy of its end, and 21 slots each
        (9, 2 + 1 + 2 * 6),
        (8, 2 + 0 + 2 * 5),
    ],
)
def test_choices_that_will_fork_count_before_they_do(bench: Make, prompt: int, granules: int) -> None:
    b = bench(granule=4, chunk_tokens=4)
    b.submit(1, range(prompt), max_new=20, n=2)
    b.step()
    assert b.scheduler.load().peak == granules * 4


def test_the_estimator_is_asked_when_another_may_join(bench: Make) -> None:
    """About all that runs, then about the other; with the share of KV that is in use."""
    Recorded.asked.clear()
    b = bench(slots=100, estimator=Recorded, capped_new_tokens=5)
    b.submit(1, range(10), max_new=20, stop_ids=(9,))
    b.step()
    assert Recorded.asked == [[[0], [20], [False], 0.0]]
    used = b.scheduler.load().kv_live / 100
    b.submit(2, range(50, 55), max_new=3)
    b.step()
    assert Recorded.asked[1:] == [[[1], [20], [False], used], [[0], [3], [True], used]]
    more = b.scheduler.load().kv_live / 100
    b.submit(3, range(60, 65), max_new=3)
    b.step()
    assert Recorded.asked[3:] == [[[2, 1], [20, 3], [False, True], more], [[0], [3], [True], more]]
    assert more > used > 0.1


def test_an_answer_that_is_longer_than_foreseen_needs_a_slot_more(bench: Make) -> None:
    """Of 5 foreseen tokens there are 8, and the last one has no slot yet."""
    b = bench(estimator=Capped, capped_new_tokens=5)
    b.submit(1, range(10), max_new=50, stop_ids=(9,))
    for _ in range(8):
        b.step()
    assert b.scheduler.load().peak == 10 + 8


@pytest.mark.parametrize("answer", [-3, 0, 99])
def test_what_an_estimator_says_is_clipped_to_what_can_be(bench: Make, answer: int) -> None:
    """They hold 14 slots, and need five more each; or one more each, if an answer was to end before it is."""
    estimator = type("Estimator", (Recorded,), {"answer": answer})
    for slots, running in ((23, 1), (24, 2)) if answer == 99 else ((15, 1), (16, 2)):
        b = bench(slots=slots, estimator=estimator)
        b.submit(1, range(10), max_new=6)
        b.step()
        b.submit(2, range(50, 55), max_new=6)
        assert b.step().request.size == running, slots


def test_what_is_foreseen_of_one_is_not_of_another(bench: Make) -> None:
    b = bench()
    b.submit(1, range(10), max_new=20)
    b.submit(2, range(50, 60), max_new=5)
    b.step()
    assert b.scheduler.load().peak == 10 + 19, "with both it is 20 + 2 * 4"
