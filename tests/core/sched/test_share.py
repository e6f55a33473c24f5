"""Share divides the tokens of a step among answers and prompts, on a view that a test writes down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llmcore.api.sched import RequestInfo, Share, WaitingRequest


class View:
    """Running requests by the tokens that remain of each. Every candidate fits."""

    def __init__(self, remaining: Sequence[int], *, whole: bool = False, budget: int = 16, prompts: int = 16) -> None:
        self.remaining = np.array(remaining, np.int32)
        self.running = np.arange(10, 10 + len(remaining), dtype=np.int32)
        self.whole, self.budget, self.prompt_budget = whole, budget, prompts
        self.chunk = budget if whole else 8

    def fits(self, candidate: WaitingRequest) -> bool:
        return True


def share(view: Any, **more: bool) -> Share:
    return Share(view, **more)


def prompt(index: int, tokens: int, cached: int = 0) -> WaitingRequest:
    return WaitingRequest(
        index=index, tokens=tokens, cached=cached, max_new=5, choices=1, waited=0, info=RequestInfo()
    )


def shares(of: Share) -> dict[int, int]:
    """Tokens by the index of a running request."""
    decision = of.decision()
    return dict(zip(decision.rows.tolist(), decision.n_query.tolist(), strict=True))


def test_answers_come_first_and_the_oldest_of_too_many() -> None:
    assert shares(share(View([1, 5, 1, 1], budget=2))) == {10: 1, 12: 1}
    exact = share(View([1, 1, 1], budget=3))
    assert shares(exact) == {10: 1, 11: 1, 12: 1} and exact.left == 0 and not exact.open
    assert share(View([1, 1, 1], budget=2)).left == 0


def test_prompts_get_the_rest_in_chunks() -> None:
    one = share(View([1, 20, 20, 20]))
    assert one.prompts().tolist() == [1, 2, 3] and (one.left, one.paused) == (15, False)
    for row in one.prompts().tolist():
        one.compute(row)
    assert shares(one) == {10: 1, 11: 8, 12: 7}
    assert not one.open and not one.admit(prompt(0, 3))


def test_prompts_get_no_more_than_their_budget() -> None:
    one = share(View([1, 20], prompts=5))
    assert one.admit(prompt(0, 9, cached=6)) and one.left == 2
    one.compute(1)
    assert (shares(one), one.decision().admit) == ({10: 1, 11: 2}, [(0, 3)])


def test_a_whole_prompt_gets_all_or_none_and_none_overtakes_it() -> None:
    exact = share(View([1, 15], whole=True))
    exact.compute(1)
    assert shares(exact) == {10: 1, 11: 15}
    none = share(View([1, 16, 3], whole=True))
    none.compute(1)
    none.compute(2)
    assert shares(none) == {10: 1} and (none.left, none.open, none.paused) == (0, False, False)
    assert share(View([1], whole=True)).admit(prompt(0, 15)) is False, "it takes all that is left"
    waits = share(View([1], whole=True))
    assert not waits.admit(prompt(0, 16)) and not waits.admit(prompt(1, 3)) and waits.decision().admit == []


def test_one_whole_prompt_may_take_the_tokens_of_answers() -> None:
    one = share(View([1, 1], whole=True), may_pause=True)
    assert one.open
    assert not one.admit(prompt(0, 16)) and one.paused
    assert (shares(one), one.decision().admit) == ({}, [(0, 16)])
    beside = share(View([1, 1], whole=True), may_pause=True)
    assert beside.admit(prompt(0, 10)) and not beside.paused
    assert not beside.admit(prompt(1, 16)), "the first prompt decides"
    assert (shares(beside), beside.decision().admit) == ({10: 1, 11: 1}, [(0, 10)])


def test_chunks_never_pause_answers() -> None:
    one = share(View([1, 20], prompts=0), may_pause=True)
    assert not one.open and one.left == 0
    one.compute(1)
    assert shares(one) == {10: 1}
