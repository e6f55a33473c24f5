"""What is read of a step: several tokens of a row, log-probabilities, hidden states, scores, answers of searches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from llmcore.api.bridge import BeamSearch, Finish, SamplingParams
from llmcore.sched.plan import StepPlan, StepResult

Make = Any


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
    assert (b.events[1][0].tokens, b.events[1][0].finish) == ((), Finish.STOP)
    assert [len(event.tokens) for event in b.events[2]] == [1, 1, 1]
    assert b.scheduler.totals.output_tokens == 3


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


def test_the_answers_of_a_search_come_at_its_end(bench: Make) -> None:
    """Beside a plain request, with log-probabilities, and with those of the prompt."""
    b = bench()
    fields = {"sampling": SamplingParams(logprobs=1), "prompt_logprobs": True}
    b.submit(1, [5, 6], max_new=2, n=2, beams=BeamSearch(2), **fields)
    b.submit(2, [9], max_new=2)
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
