"""Steps in flight: plans that fork and enter prompts into the cache, and the results that are read of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from llmcore.api.bridge import BeamSearch, Finish, SamplingParams
from llmcore.sched.plan import Pool, StepPlan, StepResult, Want

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


def read(b: Any, plan: StepPlan, tokens: list[list[int]], **more: Any) -> None:
    """Commit `plan`, each of whose samples gives a list of tokens."""
    flat, counts = [token for some in tokens for token in some], [len(some) for some in tokens]
    result = StepResult(np.array(flat, np.int32), np.ones(len(counts), np.bool_), np.array(counts, np.int32), **more)
    b.receive(b.scheduler.commit(plan, result))
    b.scheduler.check()


def test_a_row_gives_as_many_tokens_as_the_device_accepted(bench: Make) -> None:
    b = bench(drafts=3)
    b.submit(1, range(10), max_new=20)
    b.submit(2, range(50, 60), max_new=20, owner=1)
    first = b.plan()
    assert (first.n_query.tolist(), first.reserve.tolist()) == ([10, 10], [10, 10])
    read(b, first, [[1], [2]])
    for given, length in (([[3, 4, 5, 6], []], (15, 11)), ([[], [7]], (15, 12)), ([[8, 9], [1, 1]], (17, 14))):
        plan = b.plan()
        assert plan.n_query.tolist() == [4, 4] and plan.n_decode == 2
        read(b, plan, given)
        table = b.scheduler._state.table
        rows = plan.request
        assert tuple(table.length[rows]) == tuple(table.known[rows]) == length
        assert tuple(table.computed[rows]) == tuple(table.length[rows] - 1) == tuple(table.settled[rows])
    assert [event.tokens for event in b.events[1]] == [(1,), (3, 4, 5, 6), (8, 9)], "a row without tokens has no event"
    assert [event.tokens for event in b.events[2]] == [(2,), (7,), (1, 1)]
    assert b.scheduler.totals.output_tokens == 11


def test_until_it_is_read_a_length_is_an_upper_bound(bench: Make) -> None:
    b = bench(drafts=4, ahead=1)
    b.submit(1, range(10), max_new=100)
    read(b, b.plan(), [[1]])
    first, second = b.plan(), b.plan()
    assert (first.start.tolist(), first.reserve.tolist()) == ([10], [5])
    assert (second.start.tolist(), second.reserve.tolist()) == ([15], [10]), "it may begin five tokens earlier"
    assert b.group.held[0] >= 20
    read(b, first, [[2]])
    assert b.scheduler._state.table.length[0] == 17, "eleven are known, one has no KV, five may come"
    read(b, second, [[3, 4]])
    assert b.plan().start.tolist() == [13]


def test_what_a_bound_had_reserved_is_given_back(bench: Make) -> None:
    b = bench(drafts=40, ahead=1, batch_tokens=128)
    b.submit(1, range(10), max_new=200)
    read(b, b.plan(), [[1]])
    first, second = b.plan(), b.plan()
    assert b.group.held[0] >= 10 + 2 * 41
    read(b, first, [[2]])
    read(b, second, [[3]])
    assert b.group.held[0] <= 12 + b.group.pool.run
    assert b.group.pool.live == b.group.held[0]


def test_nothing_is_drafted_beyond_the_longest_answer_or_the_budget(bench: Make) -> None:
    b = bench(drafts=4, batch_tokens=7)
    b.submit(1, [1, 2], max_new=4)
    b.submit(2, [3, 4], max_new=50)
    read(b, b.plan(), [[9], [9]])
    assert sorted(b.plan().n_query.tolist()) == [3, 4], "two more tokens are possible, and seven in all"


@pytest.mark.parametrize(
    ("fields", "kept", "finish"),
    [
        ({"stop_ids": (5,)}, (4, 5), Finish.STOP),
        ({"stop_ids": (4, 6), "min_new_tokens": 3}, (4, 5, 6), Finish.STOP),
        ({"stop_ids": tuple(range(6, 30))}, (4, 5, 6), Finish.STOP),
        ({"max_new": 6}, (4, 5, 6, 7, 8), Finish.LENGTH),
    ],
)
def test_tokens_behind_the_end_do_not_count(bench: Make, fields: dict[str, Any], kept: Any, finish: Finish) -> None:
    b = bench(drafts=4)
    b.submit(1, range(10), **{"max_new": 20, **fields})
    read(b, b.plan(), [[1]])
    read(b, b.plan(), [[4, 5, 6, 7, 8]])
    assert (b.events[1][-1].tokens, b.events[1][-1].finish) == (kept, finish)
    assert b.scheduler.idle and b.group.pool.live == 0


def test_log_probabilities_of_several_tokens(bench: Make) -> None:
    b = bench(drafts=2)
    b.submit(1, [1], max_new=9, sampling=SamplingParams(logprobs=1))
    b.submit(2, [2], max_new=9, owner=3)
    more = {
        "logprobs": np.float32([-1, -2]),
        "top_ids": np.int32([[1], [2]]),
        "top_logprobs": np.float32([[-1], [-2]]),
    }
    read(b, b.plan(), [[1], [2]], **more)
    columns = {"top_ids": np.int32([[7], [8], [9]]), "top_logprobs": np.float32([[-0.5], [-0.25], [-4]])}
    read(b, b.plan(), [[7, 8], [9]], logprobs=np.float32([-0.5, -0.25, -4]), **columns)
    event = b.events[1][-1]
    assert (event.tokens, event.logprobs, event.top) == ((7, 8), (-0.5, -0.25), (((7, -0.5),), ((8, -0.25),)))
    assert (b.events[2][-1].tokens, b.events[2][-1].logprobs) == ((9,), ())


def test_the_best_tokens_go_to_those_who_asked_for_them(bench: Make) -> None:
    b = bench()
    for number, logprobs in enumerate([1, 0, None]):
        b.submit(number, [number], max_new=9, sampling=SamplingParams(logprobs=logprobs))
    best = np.float32([-0.5, -0.25, -4])
    b.step(logprobs=best, top_ids=np.int32([[7], [8], [9]]), top_logprobs=best[:, None])
    assert [(b.events[i][0].logprobs, b.events[i][0].top) for i in range(3)] == [
        ((-0.5,), (((7, -0.5),),)),
        ((-0.25,), ()),
        ((0.0,), ()),
    ]


@pytest.mark.parametrize(("pool", "state"), [("last", [3.0, 3.0]), ("mean", [0.6, 0.6])])
def test_hidden_states_of_chunks_come_together(bench: Make, pool: str, state: list[float]) -> None:
    b = bench(chunk_tokens=4)
    b.submit(1, range(10), max_new=1, pool=pool)
    b.submit(2, [99], max_new=3)
    step = 0
    while not b.scheduler.idle:
        step += 1
        plan = b.plan()
        pooled = np.full((len(plan.pools), 2), step, np.float32)
        b.commit(plan, **({"pooled": pooled} if plan.pools else {}))
    assert np.frombuffer(b.events[1][0].pooled, "<f4").tolist() == pytest.approx(state)
    (event,) = b.events[1]
    assert (event.tokens, event.finish, event.choice, event.cached) == ((), Finish.STOP, 0, 0)
    assert [len(event.tokens) for event in b.events[2]] == [1, 1, 1]
    assert b.scheduler.totals.output_tokens == 3


def test_chunks_are_asked_for_the_hidden_states_of_their_tokens(bench: Make) -> None:
    b = bench(chunk_tokens=4)
    b.submit(1, range(6), max_new=1, pool="mean")
    plan = b.step(pooled=np.zeros((1, 2), np.float32))
    assert (plan.pools, plan.want.tolist()) == ([Pool(0, 0)], [Want.HIDDEN])
    plan = b.step(pooled=np.zeros((1, 2), np.float32))
    assert (plan.pools, plan.want.tolist()) == ([Pool(0, 0)], [Want.HIDDEN | Want.SAMPLE])
    b.submit(2, range(20, 27), max_new=1, pool="last")
    plan = b.step()
    assert (plan.pools, plan.want.tolist()) == ([], [Want.NOTHING])
    plan = b.step(pooled=np.zeros((1, 2), np.float32))
    assert (plan.pools, plan.want.tolist()) == ([Pool(0, 2)], [Want.HIDDEN | Want.SAMPLE])


def test_a_mean_begins_again_with_its_request(bench: Make) -> None:
    b = bench(chunk_tokens=4)
    b.submit(1, range(6), max_new=1, pool="mean")
    b.step(pooled=np.ones((1, 2), np.float32))
    b.scheduler.fail(b.plan(), ("internal_error", "out of luck"))
    for _ in range(2):
        assert 1 not in b.events
        b.step(pooled=np.full((1, 2), 3, np.float32))
    assert np.frombuffer(b.events[1][0].pooled, "<f4").tolist() == [1.0, 1.0]


def test_a_last_hidden_state_that_is_computed_again_is_the_newer_one(bench: Make) -> None:
    b = bench(chunk_tokens=4)
    b.submit(1, range(8), max_new=1)
    b.drain()
    b.submit(2, range(12), max_new=1, pool="last")
    assert b.step(finite=[False], pooled=np.ones((1, 2), np.float32)).start.tolist() == [8]
    assert [b.step().start.tolist() for _ in range(2)] == [[0], [4]]
    b.step(pooled=np.full((1, 2), 3, np.float32))
    (event,) = b.events[2]
    assert (np.frombuffer(event.pooled, "<f4").tolist(), event.cached) == ([3.0, 3.0], 8)


def test_a_score_ends_its_request_without_a_token(bench: Make) -> None:
    b = bench()
    b.submit(1, range(5), max_new=1, score=True)
    b.submit(2, range(50, 57), max_new=1, score=True)
    b.step(scores=np.float32([[0.5, 1.5], [2.5, 3.5]]))
    assert [(e.scores, e.tokens, e.finish) for i in (1, 2) for e in b.events[i]] == [
        ((0.5, 1.5), (), Finish.STOP),
        ((2.5, 3.5), (), Finish.STOP),
    ]
    assert b.scheduler.totals.output_tokens == 0


def test_ranks_and_the_best_tokens_of_a_prompt(bench: Make) -> None:
    b = bench(chunk_tokens=2)
    b.submit(1, [5, 6, 7, 8], max_new=1, prompt_logprobs=True, prompt_top=1)
    while not b.scheduler.idle:
        plan = b.plan()
        targets = np.concatenate([probe.targets for probe in plan.probes] or [np.empty(0, np.int32)])
        column = -targets[:, None].astype(np.float32)
        b.commit(
            plan,
            probed=column[:, 0],
            probed_ranks=targets,
            probed_top_ids=targets[:, None] + 1,
            probed_top_logprobs=column,
        )
    (event,) = b.events[1]
    assert (event.prompt_logprobs, event.prompt_ranks) == ((-6.0, -7.0, -8.0), (6, 7, 8))
    assert event.prompt_top == (((7, -6.0),), ((8, -7.0),), ((9, -8.0),))


@pytest.mark.parametrize("beside", [None, 0])
def test_the_answers_of_a_search_come_at_its_end(bench: Make, beside: int | None) -> None:
    """Beside a request without log-probabilities, or with them, and with those of the prompt."""
    b = bench()
    fields = {"sampling": SamplingParams(logprobs=1), "prompt_logprobs": True}
    b.submit(1, [5, 6], max_new=2, n=2, beams=BeamSearch(2), **fields)
    b.submit(2, [9], max_new=2, sampling=SamplingParams(logprobs=beside))
    b.submit(3, [8], max_new=2, beams=BeamSearch(2))
    while not b.scheduler.idle:
        plan = b.plan()
        size = plan.sample_row.size
        ids = np.tile(np.arange(4, dtype=np.int32), (size, 1))
        best = np.tile(np.float32([-0.1, -0.2, -3, -4]), (size, 1))
        probed = {"probed": np.float32([-6] * sum(probe.targets.size for probe in plan.probes))} if plan.probes else {}
        b.commit(plan, logprobs=best[:, 0], top_ids=ids, top_logprobs=best, **probed)
    first, second = b.events[1]
    assert (first.tokens, second.tokens) == ((0, 0), (0, 1))
    assert first.logprobs == pytest.approx((-0.1, -0.1)) and first.top[0][0] == (0, pytest.approx(-0.1))
    assert (first.prompt_logprobs, second.prompt_logprobs) == ((-6.0,), ())
    assert [event.tokens for event in b.events[2]] == [(7,), (7,)]
    if beside is not None:
        assert [event.logprobs for event in b.events[2]] == [(pytest.approx(-0.1),)] * 2
    (plain,) = b.events[3]
    assert (plain.tokens, plain.top) == ((0, 0), ()), "it did not ask for log-probabilities"
