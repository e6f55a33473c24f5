"""The scheduler step by step: chunks, forks, the cache, endings, steps in flight, failures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from llmcore.api import ConfigError, Finish, RequestError, SamplingParams, Submit
from llmcore.builtin.estimators import Capped
from llmcore.builtin.radix import NoCache
from llmcore.sched.plan import StepResult

Make = Any
BAD_LUCK = ("internal_error", "out of luck")


def test_chunks_run_beside_decode_rows_under_one_budget(bench: Make) -> None:
    b = bench(batch_tokens=16, chunk_tokens=10)
    b.submit(1, range(5), max_new=9)
    assert b.step().n_query.tolist() == [5]
    b.submit(2, range(100, 124))
    b.submit(3, range(200, 203))
    first = b.step()
    assert (first.n_decode, first.n_query.tolist(), first.sample_row.tolist()) == (1, [1, 3, 10], [0, 1])
    second = b.step()
    assert (second.n_decode, second.n_query.tolist()) == (2, [1, 1, 10])
    assert second.start[2] == 10
    assert b.step().n_query.tolist() == [1, 1, 4]
    b.drain()
    assert [len(b.events[i]) for i in (1, 2, 3)] == [9, 4, 4]
    assert {b.events[i][-1].finish for i in (1, 2, 3)} == {Finish.LENGTH}


def test_chunk_borders_are_multiples_of_the_granule(bench: Make) -> None:
    b = bench(granule=16, batch_tokens=40, chunk_tokens=40)
    b.submit(1, range(70))
    assert [b.step().n_query.tolist() for _ in range(2)] == [[32], [38]]


def test_a_whole_prompt_is_computed_in_one_step(bench: Make) -> None:
    b = bench(batch_tokens=32, chunked=False, max_input_len=32, max_running=2)
    b.submit(1, range(8), max_new=9)
    b.step()
    b.submit(2, range(100, 132))
    assert b.step().n_query.tolist() == [32], "it does not fit beside the decode row, so it gets a step"
    assert b.step().n_query.tolist() == [1, 1]
    with pytest.raises(ConfigError, match="--disable_chunked_prefill"):
        bench(batch_tokens=32, chunked=False, max_input_len=33)


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


def test_choices_need_as_many_places(bench: Make) -> None:
    b = bench(max_running=3)
    b.submit(1, [1, 2], n=2)
    b.submit(2, [3, 4], n=2)
    assert b.step().request.size == 1
    assert b.scheduler.load().waiting == 1
    b.drain()
    assert len(b.events[2]) == 8
    with pytest.raises(RequestError, match="n must be between 1 and 3"):
        b.submit(3, [1], n=4)


def test_a_prefix_hit_computes_at_least_the_last_token(bench: Make) -> None:
    b = bench()
    b.submit(1, range(20))
    b.drain()
    b.submit(2, range(20))
    plan = b.step()
    assert (plan.n_query.tolist(), plan.start.tolist(), plan.admitted[0].start) == ([1], [19], 19)
    assert b.events[2][0].cached == 19
    b.submit(3, [*range(20), 7, 7, 7, 99])
    assert b.step().start.tolist()[-1] == 23, "generated tokens are found too"


def test_salts_separate_and_no_cache_keeps_nothing(bench: Make) -> None:
    b = bench()
    b.submit(1, range(20), salt=b"a")
    b.drain()
    b.submit(2, range(20), salt=b"b")
    assert b.step().n_query.tolist() == [20]
    b = bench(manager=NoCache)
    for i in (1, 2):
        b.submit(i, range(20))
    assert b.step().n_query.tolist() == [20, 20], "and nobody waits for anybody"


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


def test_the_same_prompt_waits_instead_of_being_computed_twice(bench: Make) -> None:
    b = bench()
    for i in range(4):
        b.submit(i, range(50))
    assert b.step().n_query.tolist() == [50]
    assert b.step().n_query.tolist() == [1, 1, 1, 1]
    assert b.scheduler.load().cached_tokens == 3 * 49


def test_an_accidental_common_token_makes_nobody_wait(bench: Make) -> None:
    b = bench()
    b.submit(1, [0, *range(100, 120)])
    b.submit(2, [0, *range(200, 220)])
    assert b.step().request.size == 2


def test_stop_ids_count_only_after_min_new_tokens(bench: Make) -> None:
    b = bench()
    b.submit(1, [1, 2], max_new=9, min_new_tokens=2, stop_ids=(7, 8))
    b.submit(2, [3, 4], max_new=9, stop_ids=tuple(range(7, 30)))
    for _ in range(3):
        b.step()
    assert [e.finish for e in b.events[1]] == [Finish.RUNNING, Finish.RUNNING, Finish.STOP]
    assert [e.tokens for e in b.events[2]] == [(7,)]
    assert b.scheduler.idle
    assert b.group.pool.live == 0


def test_logprobs_come_to_those_who_asked(bench: Make) -> None:
    b = bench()
    b.submit(1, [1], sampling=SamplingParams(logprobs=2))
    b.submit(2, [2])
    b.step(
        logprobs=np.array([-0.5, -0.25], np.float32),
        top_ids=np.array([[7, 8, 9], [7, 8, 9]], np.int32),
        top_logprobs=np.array([[-0.5, -1, -2], [-0.25, -1, -2]], np.float32),
    )
    assert b.events[1][0].logprobs == (-0.5,)
    assert b.events[1][0].top == (((7, -0.5), (8, -1.0)),)
    assert (b.events[2][0].logprobs, b.events[2][0].top) == ((0.0,), ())


def test_new_requests_join_every_nth_step(bench: Make) -> None:
    b = bench(wait_steps=3)
    b.submit(1, [1], max_new=20)
    b.step()
    b.submit(2, [2])
    assert [b.step().request.size for _ in range(3)] == [1, 1, 2]


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


@pytest.mark.parametrize("ahead", [0, 1])
def test_capacity_is_exact(bench: Make, ahead: int) -> None:
    b = bench(slots=40, ahead=ahead)
    b.submit(1, range(21), max_new=20)
    b.drain()
    assert len(b.events[1]) == 20
    assert b.scheduler.totals.preemptions == 0
    with pytest.raises(RequestError, match="may need 41 KV slots; this server has 40") as error:
        b.submit(2, range(22), max_new=20)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "max_new_tokens")


@pytest.mark.parametrize(
    ("prompt", "more", "message", "code"),
    [
        ([], {}, "holds no token", "invalid_value"),
        ([1], {"max_new": 0}, "at least 1", "invalid_value"),
        (range(201), {}, "201 tokens; at most 200", "context_length_exceeded"),
        (range(200), {"max_new": 101}, "make 301; at most 300", "context_length_exceeded"),
        ([1], {"n": 0}, "n must be", "invalid_value"),
    ],
)
def test_what_can_never_be_served_is_refused(bench: Make, prompt: Any, more: Any, message: str, code: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        bench().submit(1, prompt, **more)
    assert error.value.code == code


def test_ids_are_unique_per_owner(bench: Make) -> None:
    b = bench()
    b.submit(1, [1])
    with pytest.raises(RequestError, match="exists already"):
        b.submit(1, [1])


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


def test_a_lost_engine_ends_everything(bench: Make) -> None:
    b = bench(max_running=2)
    b.submit(1, [1], n=2)
    b.submit(2, [2])
    b.plan()
    b.receive(b.scheduler.abandon(("engine_failed", "the device is gone")))
    assert [(e.choice, e.finish) for e in b.events[1]] == [(0, Finish.ERROR), (1, Finish.ERROR)]
    assert b.events[2][0].finish is Finish.ERROR
    assert b.scheduler.idle
    assert b.group.pool.live == 0


def test_events_go_to_their_owners(bench: Make) -> None:
    b = bench()
    b.submit(1, [1])
    b.scheduler.submit(Submit(id=1, prompt=np.array([2], "<i4").tobytes(), max_new_tokens=3), owner=5)
    result = StepResult(np.array([7, 8], np.int32), np.ones(2, np.bool_))
    events = b.scheduler.commit(b.plan(), result)
    assert {owner: (e.request, e.tokens, e.cached) for owner, e in events.items()} == {
        0: ([1], [7], {0: 0}),
        5: ([1], [8], {0: 0}),
    }
