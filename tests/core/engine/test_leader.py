"""A group of ranks gives the tokens of one rank. Its ranks hold the same state when it ends: see `ThreadGroup`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from grouped import ThreadGroup
from llmcore.api.bridge import Prompt, SamplingParams, Submit
from llmcore.api.errors import LlmcoreError
from llmcore.engine.graphs import CAPTURED_AT, Graphs
from llmcore.engine.llm import LLM
from llmcore.engine.model_runner import ModelRunner
from llmcore.engine.rank_messages import Ask, Begin, Drawn, Follow, Limit, Make
from llmcore_devtools import fake_answer
from steered import AHEAD, GREEDY, use

MakeLLM = Callable[..., LLM]

LONG = list(range(100, 170))
REQUESTS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "decode": ([1, 2, 3], GREEDY),
    "chunks": (LONG, GREEDY),
    "prefix hit": ([*LONG[:60], 5], GREEDY),
    "choices": ([9, 8, 7], {"n": 3, "seed": 5, "ignore_eos": True}),
    "penalties": ([4] * 9, {"seed": 2, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "ignore_eos": True}),
    "filtered": ([6, 6], {"seed": 7, "temperature": 0.8, "top_k": 9, "top_p": 0.9, "ignore_eos": True}),
    "masked": ([3, 1], {**GREEDY, **use("lists", lists=[[i] for i in range(9)])}),
    "masked draw": ([3, 2], {"seed": 3, "ignore_eos": True, **use("even")}),
    "biased": ([8, 8], {**GREEDY, **use("push", token=3)}),
    "beams": ([2, 2], {"num_beams": 4, "n": 3}),
    "told": ([5, 1, 2], {"seed": 4, "logprobs": 3, "prompt_logprobs": True, "ignore_eos": True}),
    "logit bias": ([5, 1], {**GREEDY, "logit_bias": {3: 8.0, 90: 2.0}, "logprobs": 2}),
    "on the device": ([2, 4], {**GREEDY, **use("device", ban=[1, 2])}),
}


def answers(llm: LLM) -> dict[str, list[Any]]:
    """All requests at once, after one that leaves a prefix: tokens, their log-probabilities, and the prompt's."""
    llm.generate([LONG], max_new_tokens=2, **GREEDY)

    def ask(name: str) -> list[Any]:
        prompt, options = REQUESTS[name]
        found = llm.generate([prompt], max_new_tokens=14, **options)[0]
        told = [(answer.token_ids, answer.logprobs, answer.top_logprobs) for answer in found.answers]
        return [*told, found.prompt_logprobs]

    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        return dict(zip(REQUESTS, pool.map(ask, REQUESTS), strict=True))


@pytest.mark.parametrize("ranks", [2, 3])
@AHEAD
def test_a_group_gives_the_tokens_of_one_rank(
    steered: MakeLLM, request: pytest.FixtureRequest, ahead: int, ranks: int
) -> None:
    settings = {"granule": 4, "chunked_prefill_size": 16, "batch_max_tokens": 64}
    alone = answers(steered(ahead, **settings))
    groups = request.getfixturevalue("groups")
    groups.ranks = ranks
    llm = steered(ahead, **settings)
    assert answers(llm) == alone
    sent = groups[0].link.sent
    assert any(isinstance(message, Drawn) for message in sent), "rank 0 has drawn for the others"
    assert alone["decode"][0][0] == fake_answer([1, 2, 3], 14)
    assert len(alone["told"][-1]) == 2, "log-probabilities of the prompt"


def test_when_the_start_is_over_no_rank_waits_longer_than_the_limit(
    make_llm: MakeLLM, groups: list[ThreadGroup]
) -> None:
    llm = make_llm(rank_timeout=3.0)
    llm.generate([[1]], max_new_tokens=2, **GREEDY)
    assert [peers.limit for peers in groups[0].peers] == [3.0, 3.0]
    begin, ask, make, limit, *steps = groups[0].link.sent
    assert [type(one) for one in (begin, ask, make)] == [Begin, Ask, Make] and limit == Limit(3.0)
    assert steps and all(isinstance(step, Follow) for step in steps)


@AHEAD
def test_preempted_requests_and_those_that_leave(make_llm: MakeLLM, groups: list[ThreadGroup], ahead: int) -> None:
    llm = make_llm(
        ahead=ahead, max_total_token_num=100, length_estimator="capped", router_max_new_token_len=1, granule=4
    )
    prompts = [[1, 2, 3], [9], [7, 7], [5] * 7, [200, 100, 3, 4]]
    begun = threading.Event()
    leaving = Submit(id=10_000, prompt=Prompt.of([6]), max_new_tokens=90, sampling=SamplingParams(temperature=0.0))
    llm._bridge.submit(leaving, lambda event: begun.set())
    assert begun.wait(60)
    llm._bridge.abort(10_000)
    found = llm.generate(prompts, max_new_tokens=60, temperature=0.0)
    assert [answer.token_ids for answer in found] == [fake_answer(prompt, 60) for prompt in prompts]
    assert llm.load().preemptions > 0


def test_every_rank_captures_what_rank_0_captures(make_llm: MakeLLM, groups: list[ThreadGroup]) -> None:
    llm = make_llm(ahead=1)
    for _ in range(CAPTURED_AT + 1):
        assert llm.generate([[1, 2]], max_new_tokens=9, **GREEDY)[0].token_ids == fake_answer([1, 2], 9)
    (group,) = groups
    mine, its = group.engine._runner._runner, group.followers[0]._runner  # type: ignore[union-attr]
    assert mine.graphs == its.graphs > 0  # type: ignore[union-attr]
    assert mine._graphs._captured.keys() == its._graphs._captured.keys()  # type: ignore[union-attr]
    assert {0, 1} == {rank for rank, _, doing in group.did if doing == "capturing"}


def test_a_capture_that_one_rank_cannot_make_is_dropped_by_all(
    make_llm: MakeLLM, groups: list[ThreadGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_one_rank(graphs: Graphs[Any], *args: Any) -> object:
        return None if threading.current_thread() in groups[0].threads else "captured"

    monkeypatch.setattr(Graphs, "_capture", on_one_rank)
    llm = make_llm(ahead=1)
    assert llm.generate([[1, 2]], max_new_tokens=12, **GREEDY)[0].token_ids == fake_answer([1, 2], 12)
    assert llm.load().graphs == 0 and groups[0].followers[0]._runner.graphs == 0  # type: ignore[union-attr]


def test_kv_is_the_least_that_any_rank_has_room_for(
    make_llm: MakeLLM, groups: list[ThreadGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmcore.engine.follower.kv_room", lambda *args: 700)
    llm = make_llm(ahead=1, max_total_token_num=None)
    assert llm.load().kv_total == 700
    assert groups[0].followers[0]._runner.groups[0].padding == 700  # type: ignore[union-attr]


def test_a_step_that_cannot_be_packed_is_nobodys_loss(
    make_llm: MakeLLM, groups: list[ThreadGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()
    prepare, failures = ModelRunner.prepare, [RuntimeError("told to fail")]

    def once(runner: ModelRunner, plan: Any) -> Any:
        if failures and threading.current_thread() not in groups[0].threads:
            raise failures.pop()
        return prepare(runner, plan)

    monkeypatch.setattr(ModelRunner, "prepare", once)
    prompts = [[1, 2, 3], [9], [7, 7]]
    found = llm.generate(prompts, max_new_tokens=12, **GREEDY)
    assert [answer.token_ids for answer in found] == [fake_answer(prompt, 12) for prompt in prompts]
    assert not failures and llm.load().failed_steps == 1


@pytest.mark.parametrize("method", ["enqueue", "read", "draw"])
def test_a_step_that_fails_after_it_was_sent_ends_the_group(
    steered: MakeLLM, groups: list[ThreadGroup], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    llm = steered()
    engine = groups[0].engine
    assert engine is not None

    def fail(*args: Any) -> Any:
        raise RuntimeError("told to fail")

    monkeypatch.setattr(engine._runner._runner, method, fail)  # type: ignore[attr-defined]
    masked = use("lists", lists=[[1]])
    with pytest.raises(LlmcoreError, match="a group of ranks cannot repeat it: RuntimeError: told to fail"):
        llm.generate([[1, 2]], max_new_tokens=3, **GREEDY, **masked)
    groups[0].engine = None  # its state is not to be compared


def test_one_rank_has_no_leader(make_llm: MakeLLM) -> None:
    assert isinstance(make_llm()._bridge._engine._runner, ModelRunner)  # type: ignore[attr-defined]
