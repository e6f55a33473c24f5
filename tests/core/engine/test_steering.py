"""Logits processors: what they ask for happens, to their own request alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from llmcore.api.bridge import LogitsProcessor
from llmcore.api.errors import RequestError
from llmcore.engine.graphs import CAPTURED_AT
from llmcore.engine.llm import LLM
from llmcore.engine.processors import _refused
from llmcore_devtools import check_plugin, fake_answer, registry_of
from steered import AHEAD, ANSWERS, GREEDY, PLUGINS, together, use

MakeLLM = Callable[..., LLM]


def told(tag: str) -> list[list[int]]:
    found: list[list[int]] = sys.modules["llmcore_file_steering"].TOLD[tag]
    return found


def forbidding(tokens: list[int], **more: Any) -> dict[str, Any]:
    return use("lists", lists=[tokens], forbid=True, **more)


def by_hand(llm: LLM, prompt: list[int], n: int, allowed: Callable[[int, int], bool]) -> list[int]:
    """Token by token, the best of those that are allowed at its place, from a list of the best."""
    tokens: list[int] = []
    for place in range(n):
        best = llm.generate([[*prompt, *tokens]], max_new_tokens=1, logprobs=20, **GREEDY)[0].answers[0].top_logprobs
        tokens.append(next(token for token, _ in best[0] if allowed(place, token)))
    return tokens


def test_the_plugin_keeps_the_contract() -> None:
    assert check_plugin(registry_of(PLUGINS[1]), "steering") == {"register_logits_processors": 4}


@AHEAD
def test_a_mask_leaves_the_best_of_what_it_allows(steered: MakeLLM, ahead: int) -> None:
    llm = steered(ahead)
    prompt = [1, 2, 3]
    banned = sorted(set(fake_answer(prompt, 20)))[:12]
    expected = by_hand(llm, prompt, 20, lambda place, token: token not in banned)
    assert expected != fake_answer(prompt, 20)
    for _ in range(CAPTURED_AT + 1):  # the last time but one is captured, the last replayed
        answer = llm.generate([prompt], max_new_tokens=20, **GREEDY, **forbidding(banned))[0]
        assert answer.token_ids == expected
        assert answer.finish_reason == "length"
    graphs = llm._bridge._engine._runner._graphs
    assert bool(ahead) == (graphs is not None)
    if graphs is not None:
        parts = [key[0] for key in graphs._captured if isinstance(key, tuple) and isinstance(key[0], str)]
        assert {"forward", "draw"} <= set(parts), "both halves of a step are captured"


@AHEAD
@pytest.mark.parametrize("granule", [1, 4])
def test_only_the_request_that_asked_is_changed(steered: MakeLLM, ahead: int, granule: int) -> None:
    """In one batch: rows with processors, different ones, and rows without, in chunks."""
    llm = steered(ahead, granule=granule, chunked_prefill_size=8, batch_max_tokens=40)
    prompts = [[i + 1, 2, *range(60, 60 + 3 * i)] for i in range(9)]
    lists = [[[5, 7], [9], list(range(20, 30))], [[i] for i in range(15)], [[i for i in range(0, 275, 2)]]]
    options = [{}, use("lists", lists=lists[0]), use("lists", lists=lists[1]), use("even")]
    alone = [
        llm.generate([p], max_new_tokens=15, **GREEDY, **options[i % 4])[0].token_ids for i, p in enumerate(prompts)
    ]
    assert together(llm, prompts, options, 15) == alone
    for i, (prompt, tokens) in enumerate(zip(prompts, alone, strict=True)):
        if i % 4 == 0:
            assert tokens == fake_answer(prompt, 15)
        if i % 4 == 2:
            assert tokens == list(range(15))
        if i % 4 == 3:
            assert not any(token % 2 for token in tokens)


@AHEAD
def test_a_finished_processor_ends_the_answer_and_was_told_every_token_once(steered: MakeLLM, ahead: int) -> None:
    llm = steered(ahead)
    options = use("lists", lists=[[7], [8], [9], [10]], finish_at=3, tag=f"finish {ahead}")
    answer = llm.generate([[4, 4]], max_new_tokens=10, **GREEDY, **options)[0]
    assert (answer.token_ids, answer.finish_reason) == ([7, 8, 9], "stop")
    assert told(f"finish {ahead}") == [[7, 8, 9]]


@AHEAD
def test_choices_have_processors_of_their_own(steered: MakeLLM, ahead: int) -> None:
    llm = steered(ahead)
    options = use("lists", lists=[list(range(10)), list(range(10, 20)), list(range(40))], tag=f"choices {ahead}")
    for _ in range(2):  # the second time with a prefix hit
        drawn = llm.generate([[1, 2, 3, 4]], n=4, seed=3, max_new_tokens=8, ignore_eos=True, **options)[0]
        answers = [answer.token_ids for answer in drawn.answers]
        assert len({tuple(answer) for answer in answers}) > 1
        assert all(a[0] < 10 <= a[1] < 20 and max(a) < 40 for a in answers)
    assert sorted(told(f"choices {ahead}")[4:]) == sorted(answers)


@AHEAD
def test_biases_add_up_with_the_requests_own(steered: MakeLLM, ahead: int) -> None:
    llm = steered(ahead)
    plain = fake_answer([1, 2, 3], 1)[0]
    answer = llm.generate([[1, 2, 3]], max_new_tokens=6, **GREEDY, **use("push", token=33, ban=33))[0].token_ids
    assert answer[::2] == [33] * 3 and 33 not in answer[1::2]
    options = {**use("push", token=33, ban=33), "logit_bias": {33: -2000.0}}
    assert llm.generate([[1, 2, 3]], max_new_tokens=6, **GREEDY, **options)[0].token_ids[0] == plain
    both = {"logits_processors": [{"name": "push", "args": {"token": 33}}, {"name": "even"}]}
    assert llm.generate([[1, 2, 3]], max_new_tokens=1, **GREEDY, **both)[0].token_ids[0] % 2 == 0


@AHEAD
def test_on_the_device(steered: MakeLLM, ahead: int) -> None:
    llm = steered(ahead)
    prompt = [9, 9, 9]
    banned = sorted(set(fake_answer(prompt, 12)))[:5]
    known = [prompt[-1]]

    def allowed(place: int, token: int) -> bool:
        if token in banned or token == known[-1]:
            return False
        known.append(token)
        return True

    expected = by_hand(llm, prompt, 12, allowed)
    options = [use("device", ban=banned), {}, use("lists", lists=[[3]])]
    assert together(llm, [prompt] * 3, options, 12) == [expected, fake_answer(prompt, 12), [3] * 12]
    first = fake_answer(prompt, 1)[0]
    answer = llm.generate([prompt], max_new_tokens=1, logprobs=1, **GREEDY, **use("device", ban=[first]))[0].answers[0]
    assert answer.token_ids != [first] and answer.top_logprobs[0][0][0] == first, "those of the raw logits"


FAULTS: list[tuple[dict[str, Any], str]] = [
    (use("lists", lists=[[1]], raise_mask_at=0), "'lists' failed: RuntimeError: told to raise in mask"),
    (use("lists", lists=[[1]], raise_mask_at=3), "'lists' failed: RuntimeError: told to raise in mask"),
    (use("lists", lists=[[1]], raise_at=2), "'lists' failed: RuntimeError: told to raise in accept"),
    (use("lists", lists=[[1], []]), "its mask allows no token"),
    (use("push", token=999), "outside 0 to"),
    (use("push", token=1, value=float("nan")), "is nan"),
    (use("device", ban=[1], fault="raise"), "'device' failed: RuntimeError: told to raise on the device"),
    (use("device", ban=[1], fault="short"), "it returned"),
    (use("device", ban=[1], fault="nan"), "not finite"),
    (use("lists", lists="x", nothing=1), "'lists' refuses its arguments: there is no argument nothing"),
    (use("even", start_fails=True), "'even' failed: RuntimeError: told to raise in start"),
    (use("evne"), "there is no 'evne'; known: bad_words, device, even, lists, push. Did you mean even"),
]


@pytest.mark.parametrize(
    ("code", "told"), [("server_overloaded", "server_overloaded"), ("of_its_own", "invalid_value")]
)
def test_a_refusal_is_the_clients_to_mend_unless_there_was_no_time(steered: MakeLLM, code: str, told: str) -> None:
    """Whoever sends the request again is served then; a code that front ends do not know would be a 500."""
    with pytest.raises(RequestError, match="not now") as caught:
        steered(1).generate([[1, 5]], max_new_tokens=2, **GREEDY, **use("lists", lists=[[1]], refusal=code))
    assert caught.value.code == told


class Silent(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "said"),
    [(ValueError("half \ud83d of a pair"), "half ? of a pair"), (Silent(), ""), (ValueError("x" * 999), "x" * 9)],
)
def test_a_refusal_can_be_sent_whatever_text_it_has(error: ValueError, said: str) -> None:
    """What no message can carry would end the engine."""
    told = _refused(LogitsProcessor("p"), error)
    start = f"logits_processors: 'p' refuses its arguments: {said}"
    assert (told.status, told.message[: len(start)]) == (400, start)
    assert len(told.message.encode()) <= 500


@AHEAD
def test_a_fault_ends_its_own_request(steered: MakeLLM, ahead: int) -> None:
    llm = steered(ahead)
    prompts = [[i + 1, 5] for i in range(4)]
    expected = [fake_answer(prompt, 12) for prompt in prompts[:3]]
    steady = use("lists", lists=[[8]])
    for fault, words in FAULTS:
        with pytest.raises(RequestError) as caught:
            llm.generate([prompts[3]], max_new_tokens=12, **GREEDY, **fault)
        assert words in caught.value.message

    def ask(i: int, fault: dict[str, Any]) -> list[int] | None:
        try:
            return llm.generate([prompts[i]], max_new_tokens=12, **GREEDY, **fault)[0].token_ids
        except RequestError:
            return None

    with ThreadPoolExecutor(6) as pool:
        for fault, _ in FAULTS:
            running = [pool.submit(ask, i, options) for i, options in enumerate(({}, {}, {}, fault))]
            beside = pool.submit(ask, 0, steady)
            assert [future.result() for future in running] == [*expected, None]
            assert beside.result() == [8] * 12
    load = llm.load()
    assert (load.running, load.waiting, load.kv_live) == (0, 0, 0)


@AHEAD
@pytest.mark.parametrize("granule", [1, 4])
def test_preempted(steered: MakeLLM, ahead: int, granule: int) -> None:
    """A processor keeps its state through preemption: it is told each token once."""
    llm = steered(
        ahead,
        granule=granule,
        max_total_token_num=100,
        length_estimator="capped",
        router_max_new_token_len=1,
    )
    prompts = [[1, 2, 3], [9], [7, 7], [5] * 7, [200, 100, 3, 4]]
    tag = f"preempted {ahead} {granule}"
    lists = [[i % ANSWERS, (i + 1) % ANSWERS] for i in range(60)]
    steered_by = use("lists", lists=lists, tag=tag)
    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(llm.generate, prompts[1::2], max_new_tokens=60, temperature=0.0)
        crowded = [a.token_ids for a in llm.generate(prompts[::2], max_new_tokens=60, temperature=0.0, **steered_by)]
        assert [answer.token_ids for answer in others.result()] == [fake_answer(p, 60) for p in prompts[1::2]]
    assert llm.load().preemptions > 0
    assert sorted(told(tag)) == sorted(crowded)
    alone = [llm.generate([p], max_new_tokens=60, temperature=0.0, **steered_by)[0].token_ids for p in prompts[::2]]
    assert crowded == alone


@AHEAD
def test_an_end_that_the_mask_demands_wins_over_the_least_length(steered: MakeLLM, ahead: int) -> None:
    """A mask of stop ids alone, while the request forbids them; logit_bias stays."""
    llm = steered(ahead)
    options = {**GREEDY, "stop_token_ids": (9, 11), "min_new_tokens": 5, "logit_bias": {9: -50.0}}
    answer = llm.generate([[1, 2]], max_new_tokens=8, **options, **use("lists", lists=[[4, 9], [9, 11]], finish_at=2))
    assert answer[0].answers[0].token_ids == [4, 11]


@AHEAD
def test_a_failing_step_and_broken_rows_leave_processors_where_they_were(steered: MakeLLM, ahead: int) -> None:
    for kind in ("forward", "nan"):
        llm = steered(ahead, fake={"faults": {kind: 250}})
        tag = f"{kind} {ahead}"
        options = [use("lists", lists=[[i] for i in range(30)], tag=tag), {}]
        prompts = [[1, 2], [3, 4], [5, 6], [7, 250]]
        results: dict[int, list[int] | str] = {}

        def ask(
            i: int,
            llm: LLM = llm,
            options: list[dict[str, Any]] = options,
            results: Any = results,
            prompts: Any = prompts,
        ) -> None:
            try:
                results[i] = llm.generate([prompts[i]], max_new_tokens=30, **GREEDY, **options[i % 2])[0].token_ids
            except RequestError as error:
                results[i] = error.code or ""

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(ask, range(4)))
        assert results[0] == results[2] == list(range(30))
        assert results[1] == fake_answer(prompts[1], 30) and results[3] == "internal_error"
        assert told(tag) == [list(range(30))] * 2


@AHEAD
def test_leaving_in_the_middle(steered: MakeLLM, ahead: int) -> None:
    llm = steered(ahead)
    pieces = llm.stream_chat([{"role": "user", "content": "x"}], max_new_tokens=500, **use("even"))
    next(pieces)
    pieces.close()
    assert llm.generate([[1, 2, 3]], max_new_tokens=9, **GREEDY)[0].token_ids == fake_answer([1, 2, 3], 9)
