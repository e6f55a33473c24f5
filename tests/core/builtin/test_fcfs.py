"""First come, first served, on a view that a test writes down."""

from __future__ import annotations

from llmcore.builtin.fcfs import FCFS
from written_view import LIMITS, View, shares


def test_decode_first_then_chunks_in_order_of_arrival() -> None:
    decision = FCFS(LIMITS).plan(View([20, 1, 1, 9, 4], []))
    assert shares(decision) == {10: 8, 11: 1, 12: 1, 13: 6}


def test_the_rest_of_the_budget_goes_to_the_queue() -> None:
    view = View([1, 1], [(5, 0, True), (30, 26, True), (30, 0, True), (9, 0, True)])
    assert FCFS(LIMITS).plan(view).admit == [(0, 5), (1, 4), (2, 5)]
    assert view.read == 3, "nobody is looked at whom the budget cannot admit"


def test_the_first_that_does_not_fit_blocks() -> None:
    assert FCFS(LIMITS).plan(View([1], [(3, 0, True), (3, 0, False), (3, 0, True)])).admit == [(0, 3)]


def test_nobody_joins_a_step_that_is_closed() -> None:
    assert FCFS(LIMITS).plan(View([1], [(3, 0, True)], admit=False)).admit == []


def test_more_decode_rows_than_budget_run_oldest_first() -> None:
    assert list(shares(FCFS(LIMITS).plan(View([1] * 20, [])))) == list(range(10, 26))


def test_whole_prompts_share_a_step_or_get_one_every_other_time() -> None:
    policy = FCFS(LIMITS)
    assert policy.plan(View([1], [(15, 0, True)], whole=True)).admit == [(0, 15)]
    alone = policy.plan(View([1, 1], [(15, 0, True)], whole=True))
    assert (shares(alone), alone.admit) == ({}, [(0, 15)])
    after = policy.plan(View([1, 1, 1], [(15, 0, True)], whole=True))
    assert (shares(after), after.admit) == ({10: 1, 11: 1, 12: 1}, [])


def test_a_running_prompt_that_is_recomputed_goes_before_the_queue() -> None:
    decision = FCFS(LIMITS).plan(View([1, 16, 30], [(2, 0, True)], whole=True))
    assert (shares(decision), decision.admit) == ({11: 16}, [])


def test_prompts_take_no_more_of_a_step_than_they_should() -> None:
    view = View([1, 6, 1, 9], [(5, 0, True)], prompt_budget=7)
    decision = FCFS(LIMITS).plan(view)
    assert (shares(decision), decision.admit) == ({10: 1, 11: 6, 12: 1, 13: 1}, [])
    assert view.read == 0
    assert FCFS(LIMITS).plan(View([1, 1], [(4, 0, True), (9, 0, True)], prompt_budget=7)).admit == [(0, 4), (1, 3)]
