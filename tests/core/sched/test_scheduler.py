"""The scheduler step by step: chunks, choices, the prefix cache, limits, owners."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from llmcore.api import ConfigError, Finish, Prompt, RequestError, SamplingParams, Submit
from llmcore.builtin.estimators import Conservative
from llmcore.builtin.radix import NoCache
from llmcore.sched.plan import StepResult

Make = Any


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


def test_a_whole_prompt_that_may_not_pause_answers_waits(bench: Make, caplog: pytest.LogCaptureFixture) -> None:
    b = bench(batch_tokens=32, chunked=False, max_input_len=32, max_running=4)
    b.submit(1, range(8), max_new=9)
    b.step()
    for number in (2, 3):
        b.submit(number, range(100 * number, 100 * number + 32))
    assert [b.step().n_query.tolist() for _ in range(3)] == [[32], [1, 1], [32]]
    assert not caplog.records, "the policy was not overruled"


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


def test_the_same_prompt_waits_instead_of_being_computed_twice(bench: Make) -> None:
    b = bench()
    for i in range(4):
        b.submit(i, range(50))
    assert b.step().n_query.tolist() == [50]
    assert b.step().n_query.tolist() == [1, 1, 1, 1]
    assert b.scheduler.load().cached_tokens == 3 * 49


@pytest.mark.parametrize(
    ("common", "size", "waits"), [(5, 10, True), (4, 10, False), (64, 190, True), (63, 190, False)]
)
def test_half_a_prompt_or_64_tokens_of_another_are_worth_waiting_for(
    bench: Make, common: int, size: int, waits: bool
) -> None:
    b = bench(batch_tokens=512, chunk_tokens=256, slots=2000)
    b.submit(1, range(1000, 1000 + size + 1))
    b.submit(2, [*range(1000, 1000 + common), *range(5000, 5000 + size + 1 - common)])
    assert b.step().request.size == 1 + (not waits)


@pytest.mark.parametrize(("common", "waits"), [(4, True), (3, False)])
def test_behind_a_prefix_hit_only_the_rest_counts(bench: Make, common: int, waits: bool) -> None:
    """Eight tokens remain behind the hit, of which one is always computed."""
    b = bench()
    b.submit(1, range(20), max_new=1)
    b.drain()
    b.submit(2, [*range(20), *range(100, 109)])
    b.submit(3, [*range(20), *range(100, 100 + common), *range(200, 209 - common)])
    plan = b.step()
    assert plan.start.tolist() == [20] * (1 + (not waits))


def test_an_accidental_common_token_makes_nobody_wait(bench: Make) -> None:
    b = bench()
    b.submit(1, [0, *range(100, 120)])
    b.submit(2, [0, *range(200, 220)])
    assert b.step().request.size == 2


def test_stop_ids_count_only_after_min_new_tokens(bench: Make) -> None:
    b = bench()
    b.submit(1, [1, 2], max_new=9, min_new_tokens=2, stop_ids=(7, 8))
    b.submit(2, [3, 4], max_new=9, stop_ids=tuple(range(30, 6, -1)))
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


def test_an_answer_goes_on_after_the_tokens_of_another_engine(bench: Make) -> None:
    b = bench()
    b.submit(1, [1, 2, 3], max_new=6, n=3, produced={2: (7, 8)}, stop_ids=(9,), min_new_tokens=4)
    plan = b.step(9)
    (new,) = plan.admitted
    assert (new.tokens.tolist(), new.prompt_len, new.choice) == ([1, 2, 3, 7, 8], 3, 2)
    assert b.step(9).start.tolist() == [5], "stop ids do not count yet"
    b.step(9)
    assert [(event.tokens, event.finish) for event in b.events[1]] == [
        ((9,), Finish.RUNNING),
        ((9,), Finish.RUNNING),
        ((9,), Finish.STOP),
    ]
    assert [event.cached for event in b.events[1]] == [-1] * 3, "it was reported with the first token"
    b.submit(2, [1, 2, 3], max_new=4, produced={0: (7, 8)})
    assert b.step().start.tolist() == [4], "a hit may end in the answer"
    assert b.scheduler.load().cached_tokens == 3, "only the prompt's tokens count"


@pytest.mark.parametrize(
    ("prompt", "more", "message", "code"),
    [
        ([], {}, "is empty", "invalid_value"),
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


def test_a_lost_engine_ends_everything(bench: Make) -> None:
    b = bench(max_running=2)
    b.submit(1, [1], n=2)
    b.submit(2, [2])
    b.plan()
    before = time.monotonic()
    events = b.scheduler.abandon(("engine_failed", "the device is gone"))
    assert before <= events[0].stamp <= time.monotonic()
    b.receive(events)
    assert [(e.choice, e.finish) for e in b.events[1]] == [(0, Finish.ERROR), (1, Finish.ERROR)]
    assert b.events[2][0].finish is Finish.ERROR
    assert b.scheduler.idle
    assert b.group.pool.live == 0
    assert b.scheduler.totals.failed_requests == 0, "neither the model nor a plugin failed on them"


def test_events_go_to_their_owners(bench: Make) -> None:
    b = bench()
    b.submit(1, [1])
    b.scheduler.submit(Submit(id=1, prompt=Prompt.of([2]), max_new_tokens=3), owner=5)
    result = StepResult(np.array([7, 8], np.int32), np.ones(2, np.bool_))
    before = time.monotonic()
    events = b.scheduler.commit(b.plan(), result)
    assert all(before <= columns.stamp <= time.monotonic() for columns in events.values())
    assert b.scheduler.load().steps == 1
    assert {owner: (e.request, e.tokens, e.cached) for owner, e in events.items()} == {
        0: ([1], [7], {0: 0}),
        5: ([1], [8], {0: 0}),
    }


def test_the_estimator_hears_how_long_answers_were(bench: Make) -> None:
    heard: list[int] = []

    class Listens(Conservative):
        def observe(self, produced: int) -> None:
            heard.append(produced)

    b = bench(estimator=Listens)
    b.submit(1, range(10), max_new=3)
    b.submit(2, range(50, 55), max_new=5)
    b.drain()
    assert heard == [3, 5] and b.scheduler.load().steps == 5


def test_counts_that_contradict_each_other_are_found(bench: Make) -> None:
    b = bench()
    b.submit(1, range(10))
    b.step()
    b.scheduler.check()
    b.scheduler._state.table.known[0] += 1
    with pytest.raises(AssertionError, match="more tokens are known than there can be"):
        b.scheduler.check()
