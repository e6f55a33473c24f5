"""Policies that decide nonsense: nothing breaks, it is said once, and every request is served."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from llmcore.api.counters import TALLIES
from llmcore.api.errors import Stopped
from llmcore.api.sched import Decision, SchedulerLimits, SchedulerView
from llmcore.builtin.fcfs import FCFS
from llmcore.builtin.radix import RadixCache
from llmcore.kv.space import KVGroup
from llmcore.sched.policy import GuardedEstimator, GuardedManager, oldest_first

Make = Any
Plan = Callable[[SchedulerView], Decision]


def column(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def everyone(view: SchedulerView, n: int = 1) -> Decision:
    return Decision(view.running, np.full(view.running.size, n, np.int32))


def without_asking(view: SchedulerView) -> Decision:
    admit = [(candidate.index, 1) for candidate in view.waiting()]
    return Decision(column(), column(), admit)


def too_much_at_once(view: SchedulerView) -> Decision:
    admit = [(c.index, c.tokens) for c in view.waiting() if view.fits(c)]
    return Decision(column(), column(), admit)


def twice(view: SchedulerView) -> Decision:
    admit = [(c.index, 1) for c in view.waiting() if view.fits(c)]
    return Decision(column(), column(), admit * 2)


def nothing_at_first(view: SchedulerView) -> Decision:
    return Decision(column(), column(), [(c.index, 0) for c in view.waiting() if view.fits(c)])


def raising(view: SchedulerView) -> Decision:
    raise RuntimeError("no idea")


BAD: dict[str, tuple[Plan, str]] = {
    "a row that does not exist": (lambda view: Decision(column(99), column(1)), "does not exist"),
    "a row that does not run": (lambda view: Decision(column(7), column(1)), "cannot run"),
    "nothing of a row": (lambda view: Decision(column(0), column(0)), "nothing of it"),
    "more than remains": (lambda view: Decision(column(0), column(50)), "more of a request"),
    "twice": (lambda view: Decision(column(0, 0), column(1, 1)), "cannot run|names a request twice"),
    "no columns": (lambda view: Decision(column(0), np.array([0.5])), "integers"),  # type: ignore[arg-type]
    "not offered": (lambda view: Decision(column(), column(), [(3, 1)]), "not offered"),
    "without asking": (without_asking, "without asking"),
    "over budget": (too_much_at_once, "budget"),
    "admitted twice": (twice, "admits a request twice"),
    "a chunk that is too long": (lambda view: everyone(view, 25), "a row has more than 24 tokens|more of a request"),
    "an empty first chunk": (nothing_at_first, "first chunk of an admitted request is empty"),
    "raising": (raising, "RuntimeError.*no idea"),
    "lazy": (lambda view: Decision(column(), column()), ""),
    "lists": (lambda view: Decision([], []), ""),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_policy_is_overruled(bench: Make, name: str, caplog: pytest.LogCaptureFixture) -> None:
    plan, message = BAD[name]

    class Bad:
        def __init__(self, limits: SchedulerLimits) -> None:
            pass

        def plan(self, view: SchedulerView) -> Decision:
            return plan(view)

    with caplog.at_level(logging.ERROR):
        b = bench(policy=Bad, batch_tokens=24, chunk_tokens=24)
        for i in range(3):
            b.submit(i, range(100 * i, 100 * i + 20), max_new=5)
        b.drain()
    assert [len(b.events[i]) for i in range(3)] == [5, 5, 5]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (message != ""), said
    if message:
        assert "policy Bad is overruled" in said[0]
        assert re.search(message, said[0])


@pytest.mark.parametrize(("first", "says"), [(5, "in pieces"), (20, "")])
def test_a_whole_prompt_is_not_cut(bench: Make, first: int, says: str, caplog: pytest.LogCaptureFixture) -> None:
    class Cuts(FCFS):
        def plan(self, view: SchedulerView) -> Decision:
            if view.running.size:
                return super().plan(view)
            return Decision(column(), column(), [(c.index, first) for c in view.waiting() if view.fits(c)][:1])

    b = bench(policy=Cuts, chunked=False, batch_tokens=40, max_input_len=40)
    b.submit(1, range(20))
    with caplog.at_level(logging.ERROR):
        assert b.step().n_query.tolist() == [20]
    assert [says in record.getMessage() for record in caplog.records] == [True] * bool(says)
    b.drain()


def test_nobody_joins_between_the_steps_in_which_requests_may(bench: Make, caplog: pytest.LogCaptureFixture) -> None:
    class Eager(FCFS):
        def plan(self, view: SchedulerView) -> Decision:
            view.admit = True  # type: ignore[misc]
            decision = super().plan(view)
            view.admit = False  # type: ignore[misc]
            return decision

    b = bench(policy=Eager, wait_steps=4)
    b.submit(1, range(5), max_new=9)
    b.step()
    b.submit(2, range(50, 55))
    with caplog.at_level(logging.ERROR):
        assert b.step().request.size == 1
    assert ["in which none may join" in record.getMessage() for record in caplog.records] == [True, True][:1]
    b.drain()
    assert [len(b.events[i]) for i in (1, 2)] == [9, 4]


# --- guards ----------------------------------------------------------------------------------------------------


class Failing(RadixCache):
    """Raises `error` in `method` from now on, or says `lie` there."""

    method = ""
    lie: Any = None
    error: BaseException = RuntimeError("told to raise")

    def __getattribute__(self, name: str) -> Any:
        if name == "method" or name != self.method:
            return super().__getattribute__(name)
        if self.lie is None:
            raise self.error
        return lambda *_: self.lie


def guarded() -> tuple[KVGroup, Failing]:
    """A group of 16 granules of 2 tokens; the cache holds four, of which row 1 has two in use."""
    cache = Failing(2)
    group = KVGroup(total=16, rows=4, max_len=16, granule=2, manager=cache)
    group.manager = GuardedManager(group, "failing")
    group.grow(column(0), column(8), column(8))
    group.insert(b"", np.arange(8), 0)
    group.release(0)
    group.take(1, group.match(b"", np.arange(4)))
    return group, cache


@pytest.mark.parametrize("lie", [None, np.array([9, 9], np.int32)])
@pytest.mark.parametrize("method", ["match", "insert", "remove", "evict"])
def test_without_its_prefix_cache_a_group_goes_on(method: str, lie: Any, caplog: pytest.LogCaptureFixture) -> None:
    group, cache = guarded()
    assert group.manager.caching and group.manager.stats()["granules"] == 4
    cache.method, cache.lie = method, lie
    with caplog.at_level(logging.ERROR):
        if method == "match":
            assert not group.match(b"", np.arange(4)).size
        elif method == "insert":
            group.grow(column(2), column(4), column(4))
            assert not group.insert(b"", np.arange(50, 54), 2).size
            group.release(2)
        elif method == "remove":
            assert group.remove(b"", np.arange(8), 6).size == 4, "nobody knows what is in the others"
        else:
            assert group.make_free(14), "what nobody uses can be had"
    assert [record.getMessage() for record in caplog.records] == [
        "prefix cache 'failing' has failed; from now on nothing is cached"
    ]
    assert not group.manager.caching and not group.match(b"", np.arange(4)).size
    assert group.make_free(14) and group.pool.live == 2
    group.release(1)
    assert group.make_free(16) and not group.pool.kept.any()
    assert group.manager.stats() == {"granules": 0, "nodes": 0}
    group.pool.check()


def test_a_prefix_cache_that_works_is_asked_as_it_would_be_without_a_guard(caplog: pytest.LogCaptureFixture) -> None:
    group, _ = guarded()
    assert group.match(b"", np.arange(8)).size == 4 and not group.match(b"other", np.arange(8)).size
    assert group.make_free(13) and group.pool.cached == 1, "one of two that nobody uses has to go"
    assert group.manager.stats()["granules"] == 3
    assert group.remove(b"other", np.arange(8), 2).size == 0
    assert group.remove(b"", np.arange(8), 2).size == 2
    assert group.manager.caching and group.manager.stats() == {"granules": 1, "nodes": 1} and not caplog.records


def test_figures_of_a_prefix_cache_that_fails() -> None:
    group, cache = guarded()
    cache.method = "stats"
    assert group.manager.stats() == {"granules": 4, "nodes": 0}


def test_a_plugin_that_fails_is_counted_and_its_error_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    (group, cache), estimator = guarded(), GuardedEstimator(Guess(None), "guess")
    names = [("plugin_failures", ("failing", "kv_manager")), ("plugin_failures", ("guess", "length_estimator"))]
    before = [TALLIES.figures().counts.get(name, 0) for name in names]
    cache.method = "match"
    group.match(b"", np.arange(4))
    estimator.totals(column(1), column(9), np.zeros(1, np.bool_), 0.5)
    assert [TALLIES.figures().counts.get(name, 0) for name in names] == [count + 1 for count in before]
    errors = [record.exc_info and record.exc_info[1] for record in caplog.records]
    assert [str(error) for error in errors] == ["told to raise"] * 2
    assert group.manager.caching is False


def test_a_process_that_stops_is_not_a_failure_of_a_plugin() -> None:
    group, cache = guarded()
    cache.method, cache.error = "match", Stopped()
    with pytest.raises(Stopped):
        group.match(b"", np.arange(4))
    assert group.manager.caching


class Guess:
    """Says `totals`, or raises."""

    guaranteed = False
    asked: tuple[Any, ...] = ()

    def __init__(self, totals: Any) -> None:
        self.answer = totals
        self.seen: list[int] = []

    def totals(self, *asked: Any) -> Any:
        self.asked = asked
        if self.answer is None:
            raise RuntimeError("told to raise")
        return self.answer

    def observe(self, produced: int) -> None:
        self.seen.append(produced)


@pytest.mark.parametrize("totals", [None, column(3), np.array([3.0, np.nan])])
def test_without_its_estimator_full_lengths_are_foreseen(totals: Any, caplog: pytest.LogCaptureFixture) -> None:
    guess = Guess(column(3, 4))
    estimator = GuardedEstimator(guess, "guess")
    asked = column(1, 2), column(9, 8), np.zeros(2, np.bool_), 0.5
    assert estimator.totals(*asked).tolist() == [3, 4] and estimator.guaranteed is False
    assert all(given is wanted for given, wanted in zip(guess.asked, asked, strict=True))
    estimator.observe(5)
    guess.answer = totals
    with caplog.at_level(logging.ERROR):
        assert estimator.totals(*asked).tolist() == [9, 8]
    guess.answer = column(3, 4)
    estimator.observe(6)
    assert estimator.totals(*asked).tolist() == [9, 8] and guess.seen == [5], "it is asked no more"
    assert [record.getMessage() for record in caplog.records] == [
        "length estimator 'guess' has failed; from now on full lengths are foreseen"
    ]


def test_the_oldest_is_not_passed_over_for_ever(bench: Make, caplog: pytest.LogCaptureFixture) -> None:
    class Youngest(FCFS):
        def plan(self, view: SchedulerView) -> Decision:
            decision = super().plan(view)
            keep = decision.rows != view.running[:1] if view.running.size > 1 else slice(None)
            return Decision(decision.rows[keep], decision.n_query[keep], decision.admit)

    b = bench(policy=Youngest)
    b.submit(1, [1], max_new=3)
    b.submit(2, [2], max_new=200)
    with caplog.at_level(logging.ERROR):
        for _ in range(150):
            b.step()
    assert len(b.events[1]) == 3
    assert "passed over" in caplog.text


def test_a_candidate_that_fits_is_asked_for_again_and_places_run_out(bench: Make) -> None:
    answers: list[list[bool]] = []

    class Asks:
        def __init__(self, limits: SchedulerLimits) -> None:
            pass

        def plan(self, view: SchedulerView) -> Decision:
            offered = list(view.waiting())
            fits = [view.fits(c) for c in offered]
            answers.append(fits + [view.fits(c) for c in offered[:1]])
            admit = [(c.index, c.tokens) for c, fit in zip(offered, fits, strict=True) if fit]
            return Decision(view.running, np.ones(view.running.size, np.int32), admit)

    b = bench(policy=Asks, max_running=2)
    for i in range(3):
        b.submit(i, [10 * i, 10 * i + 1], max_new=2)
    assert b.step().request.size == 2
    b.drain()
    assert answers[0] == [True, True, False, True]
    assert [len(b.events[i]) for i in range(3)] == [2, 2, 2]


def test_more_decode_rows_than_a_step_has_tokens_wait_for_their_turn(bench: Make) -> None:
    class Tight(FCFS):
        def plan(self, view: SchedulerView) -> Decision:
            view.budget = min(view.budget, max(view.running.size - 1, 4))  # type: ignore[misc]
            return super().plan(view)

    b = bench(policy=Tight)
    for i in range(6):
        b.submit(i, [i], max_new=6)
    b.drain()
    assert [len(b.events[i]) for i in range(6)] == [6] * 6


def test_what_a_policy_sees_of_candidates(bench: Make) -> None:
    seen: list[list[tuple[int, ...]]] = []

    class Patient(FCFS):
        def plan(self, view: SchedulerView) -> Decision:
            seen.append([(c.tokens, c.cached, c.max_new, c.choices, c.waited) for c in view.waiting()])
            return super().plan(view) if len(seen) in (1, 5) else everyone(view)

    b = bench(policy=Patient)
    b.submit(1, range(10), max_new=9)
    b.step()
    b.submit(2, range(20), max_new=5, n=3)
    b.submit(3, range(50, 54), max_new=6, produced={0: (7, 8)})
    for _ in range(4):
        b.step()
    assert seen[0] == [(10, 0, 9, 1, 0)]
    assert seen[1:] == [[(20, 10, 5, 3, waited), (6, 0, 4, 1, waited)] for waited in range(4)]
    assert b.scheduler.load().running == 5


def test_a_candidate_that_waits_for_another_lets_others_pass(bench: Make) -> None:
    b = bench(chunk_tokens=8)
    b.submit(1, range(40))
    b.submit(2, range(40))
    b.submit(3, range(50, 60))
    assert b.step().request.size == 2
    assert [choice.request.submit.id for choice in b.scheduler._state.queue] == [2]
    b.drain()
    assert b.scheduler.load().cached_tokens == 39


@pytest.mark.parametrize(
    ("whole", "n_query"),
    [
        (False, [1, 8, 3]),  # chunks of 8 in a step of 12
        (True, [1, 8]),  # the third does not fit whole
    ],
)
def test_the_fallback_computes_what_runs_in_order(whole: bool, n_query: list[int]) -> None:
    remaining = column(1, 8, 9, 1)
    view = SimpleNamespace(running=column(5, 3, 4, 6), remaining=remaining, chunk=8, budget=12, whole=whole)
    decision = oldest_first(view)  # type: ignore[arg-type]
    assert (decision.rows.tolist(), decision.n_query.tolist()) == ([5, 3, 4][: len(n_query)], n_query)
    assert decision.n_query.dtype == np.int32 and not decision.admit


@pytest.mark.parametrize(("chunk", "budget", "first"), [(8, 12, 8), (64, 12, 12), (64, 64, 25), (64, 5, 5)])
@pytest.mark.parametrize("fits", [True, False])
def test_the_fallback_admits_the_head_of_the_queue_if_nothing_runs(
    chunk: int, budget: int, first: int, fits: bool
) -> None:
    waiting = [SimpleNamespace(index=i, tokens=30 + i, cached=5) for i in range(2)]
    view = SimpleNamespace(
        running=column(),
        remaining=column(),
        chunk=chunk,
        budget=budget,
        whole=False,
        waiting=lambda: iter(waiting),
        fits=lambda candidate: fits,
    )
    decision = oldest_first(view)  # type: ignore[arg-type]
    assert (decision.rows.size, decision.admit) == (0, [(0, first)] * fits)
