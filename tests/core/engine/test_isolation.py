"""A request's answer is the same alone, in a batch, in chunks, after preemption, with a prefix hit, as a fork."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from llmcore.api.bridge import ChoiceEvent, Finish, Submit
from llmcore.engine.llm import LLM
from llmcore_devtools import fake_answer

MakeLLM = Callable[..., LLM]

PROMPTS = [
    [1, 2, 3],
    list(range(40, 75)),
    [9],
    [200, 100] * 20,
    [5, 5, 5, 5, 5, 5, 5],
    list(range(80, 40, -1)),
    [7, 7],
    list(range(120, 250)),
]
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def expected(prompts: list[list[int]], n: int) -> list[list[int]]:
    return [fake_answer(prompt, n) for prompt in prompts]


def consistent(llm: LLM) -> None:
    for _ in range(3000):
        load = llm.load()
        assert load.kv_live + load.kv_cached + load.kv_free == load.kv_total
        if (load.running, load.waiting, load.kv_live) == (0, 0, 0):
            return
        time.sleep(0.01)
    pytest.fail(f"still busy: {load}")


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(("granule", "chunk"), [(1, 1), (1, 7), (1, 2048), (4, 4), (4, 7), (4, 2048)])
def test_batched_and_chunked(make_llm: MakeLLM, ahead: int, granule: int, chunk: int) -> None:
    llm = make_llm(ahead=ahead, granule=granule, chunked_prefill_size=chunk, batch_max_tokens=max(chunk, 20))
    together = llm.generate(PROMPTS, max_new_tokens=12, **GREEDY)
    assert [answer.token_ids for answer in together] == expected(PROMPTS, 12)
    assert {answer.finish_reason for answer in together} == {"length"}
    alone = [llm.generate([prompt], max_new_tokens=12, **GREEDY)[0].token_ids for prompt in PROMPTS]
    assert alone == expected(PROMPTS, 12)
    consistent(llm)


@pytest.mark.parametrize("ahead", [0, 1])
def test_without_chunks_or_cache(make_llm: MakeLLM, ahead: int) -> None:
    llm = make_llm(
        ahead=ahead,
        disable_chunked_prefill=True,
        disable_dynamic_prompt_cache=True,
        batch_max_tokens=160,
        max_req_input_len=150,
    )
    for _ in range(2):
        answers = llm.generate(PROMPTS, max_new_tokens=9, **GREEDY)
        assert [answer.token_ids for answer in answers] == expected(PROMPTS, 9)
        assert {answer.cached_tokens for answer in answers} == {0}


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("granule", [1, 4])
def test_preempted(make_llm: MakeLLM, ahead: int, granule: int) -> None:
    llm = make_llm(
        ahead=ahead,
        granule=granule,
        max_total_token_num=100,
        length_estimator="capped",
        router_max_new_token_len=1,
    )
    prompts = [[1, 2, 3], [9], [7, 7], [5] * 7, [200, 100, 3, 4]]
    answers = llm.generate(prompts, max_new_tokens=60, temperature=0.0)
    assert [answer.token_ids for answer in answers] == expected(prompts, 60)
    assert llm.load().preemptions > 0
    consistent(llm)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("granule", [1, 4])
def test_prefix_hits(make_llm: MakeLLM, ahead: int, granule: int) -> None:
    llm = make_llm(ahead=ahead, granule=granule)
    shared = list(range(100, 160))
    first = llm.generate([shared], max_new_tokens=10, **GREEDY)[0]
    assert first.cached_tokens == 0
    again = [shared, [*shared, 3, 4], [*shared[:50], 1], [*shared, *first.token_ids[:5], 8]]
    answers = llm.generate(again, max_new_tokens=10, **GREEDY)
    assert [answer.token_ids for answer in answers] == expected(again, 10)
    assert all(answer.cached_tokens >= 48 for answer in answers)
    assert answers[3].cached_tokens >= 64
    consistent(llm)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("granule", [1, 4])
def test_forks(make_llm: MakeLLM, ahead: int, granule: int) -> None:
    llm = make_llm(ahead=ahead, granule=granule, chunked_prefill_size=16)
    prompt = list(range(10, 31))
    greedy = llm.generate([prompt, PROMPTS[0]], n=3, max_new_tokens=12, **GREEDY)
    for result, asked in zip(greedy, (prompt, PROMPTS[0]), strict=True):
        assert [answer.token_ids for answer in result.answers] == [fake_answer(asked, 12)] * 3
    drawn = llm.generate([prompt], n=4, seed=3, max_new_tokens=12, ignore_eos=True)[0]
    assert len({tuple(answer.token_ids) for answer in drawn.answers}) == 4
    consistent(llm)


SAMPLED = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.2, "typical_p": 0.6},
    {"temperature": 0.9, "bad_words": ["5", "ab"]},
    {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.8, "logit_bias": {5: 4.0}, "min_new_tokens": 4, "stop_token_ids": (5,)},
]


@pytest.mark.parametrize("ahead", [0, 1])
def test_seeded_sampling_does_not_see_the_batch(make_llm: MakeLLM, ahead: int) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def ask(llm: LLM, which: int) -> list[list[int]]:
        options = SAMPLED[which % len(SAMPLED)]
        result = llm.generate([PROMPTS[which]], n=2, seed=which, max_new_tokens=15, **options)[0]
        return [answer.token_ids for answer in result.answers]

    llm = make_llm(ahead=ahead)
    alone = [ask(llm, which) for which in range(len(PROMPTS))]
    crowded = make_llm(
        ahead=ahead, max_total_token_num=400, chunked_prefill_size=8, length_estimator="capped",
        router_max_new_token_len=1,
    )  # fmt: skip
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(lambda which: ask(crowded, which), range(len(PROMPTS))))
    assert together == alone


@pytest.mark.parametrize("ahead", [0, 1])
def test_stop_ids_and_stop_texts_end_early(make_llm: MakeLLM, ahead: int) -> None:
    llm = make_llm(ahead=ahead)
    full = fake_answer(PROMPTS[1], 20)
    stopped = llm.generate([PROMPTS[1]], temperature=0.0, max_new_tokens=20, stop_token_ids=(full[6],))[0]
    cut = full.index(full[6]) + 1
    assert (stopped.token_ids, stopped.finish_reason) == (full[:cut], "stop")
    text = llm.generate([PROMPTS[1]], max_new_tokens=20, **GREEDY)[0].text
    stop = text[4:6]
    answer = llm.generate([PROMPTS[1]], max_new_tokens=20, stop=stop, **GREEDY)[0]
    assert (answer.text, answer.finish_reason) == (text[: text.index(stop)], "stop")
    consistent(llm)


def test_a_prefix_is_no_hit_for_another_key(make_llm: MakeLLM) -> None:
    """Whoever brings another API key cannot tell what was asked with this one."""
    llm = make_llm()
    prompt = np.arange(20, 60, dtype="<i4").tobytes()
    cached: list[int] = []
    for number, client in enumerate((0, 0, 1, 1, -1, 0), 1):
        done = threading.Event()
        events: list[ChoiceEvent] = []

        def sink(event: ChoiceEvent, events: list[ChoiceEvent] = events, done: threading.Event = done) -> None:
            events.append(event)
            if event.finish is not Finish.RUNNING:
                done.set()

        llm._bridge.submit(Submit(id=10_000 + number, prompt=prompt, max_new_tokens=2, client=client), sink)
        assert done.wait(60)
        cached.append(events[0].cached)
    assert [hit > 0 for hit in cached] == [False, True, False, True, False, True]
