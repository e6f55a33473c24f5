"""Lower priority numbers first, on a view that a test writes down."""

from __future__ import annotations

from itertools import pairwise

import pytest
from llmcore.builtin.fcfs import FCFS
from llmcore.builtin.priority import TURN, Priority
from llmcore.sched.policy import PATIENCE
from written_view import LIMITS, View, shares


def test_prompts_are_computed_by_priority_and_then_by_arrival() -> None:
    decision = Priority(LIMITS).plan(View([9, 1, 7, 9], ranks=[2, 9, 2, -1]))
    assert shares(decision) == {10: 7, 11: 1, 13: 8}


def test_the_queue_is_read_by_priority() -> None:
    view = View([1], [(4, 0, True), (4, 0, True), (4, 0, True), (8, 0, True)], queue_ranks=[0, -5, 7, 0])
    decision = Priority(LIMITS).plan(view)
    assert (shares(decision), decision.admit) == ({10: 1}, [(1, 4), (0, 4), (3, 7)])


def test_a_candidate_goes_before_running_prompts_of_higher_numbers_only() -> None:
    view = View([9, 9], [(3, 0, True), (2, 0, True)], ranks=[1, 3], queue_ranks=[2, 3])
    decision = Priority(LIMITS).plan(view)
    assert (shares(decision), decision.admit) == ({10: 8, 11: 5}, [(0, 3)])


def test_the_first_that_does_not_fit_blocks_the_queue_and_not_what_runs() -> None:
    view = View([9], [(3, 0, True), (3, 0, False)], ranks=[9], queue_ranks=[1, 0])
    decision = Priority(LIMITS).plan(view)
    assert (shares(decision), decision.admit) == ({10: 8}, [])


def test_equal_priorities_are_first_come_first_served() -> None:
    for view in (
        View([20, 1, 1, 9, 4]),
        View([1, 1], [(5, 0, True), (30, 26, True), (30, 0, True)]),
        View([1], [(3, 0, True), (3, 0, False), (3, 0, True)]),
        View([1], [(3, 0, True)], admit=False),
        View([1, 16, 30], [(2, 0, True)], whole=True),
        View([1, 1], [(15, 0, True)], whole=True),
    ):
        ours, theirs = Priority(LIMITS).plan(view), FCFS(LIMITS).plan(view)
        assert (shares(ours), ours.admit) == (shares(theirs), theirs.admit)


@pytest.mark.parametrize("whole", [False, True])
def test_the_oldest_prompt_is_not_passed_over_for_long(whole: bool) -> None:
    policy = Priority(LIMITS)
    ran = [10 in shares(policy.plan(View([9, 16, 16], ranks=[1, 0, 0], whole=whole))) for _ in range(8 * TURN)]
    at = [i for i, did in enumerate(ran) if did]
    assert len(at) >= 4 and max(after - before for before, after in pairwise(at)) < PATIENCE
