"""Steps of the real runner that fail: whoever was in them is answered as if nothing had been, or ends alone."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llmcore.api.bridge import BeamSearch, ChoiceEvent, SamplingParams, Submit
from llmcore.api.errors import RequestError, text_of
from llmcore.engine.llm import LLM
from llmcore_devtools import fake_answer

MakeLLM = Callable[..., LLM]

AHEAD = pytest.mark.parametrize("ahead", [0, 1])
AHEAD_DEVICE = str(Path(__file__).with_name("ahead_device.py"))
STEERING = str(Path(__file__).with_name("steering.py"))
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
LONG = list(range(20, 90))
IDS = itertools.count(1 << 40)


def engine_of(llm: LLM) -> Any:
    return llm._bridge._engine


def failing(llm: LLM, fails: Callable[[str, Any], Exception | None]) -> None:
    """`fails(where, plan)` says what a call raises: before or after it has launched anything, at a draw, at a read."""
    runner = engine_of(llm)._runner
    launch, draw, read = runner.launch, runner.draw, runner.read

    def maybe(where: str, plan: Any) -> None:
        if (error := fails(where, plan)) is not None:
            raise error

    def flaky_launch(plan: Any) -> Any:
        maybe("before", plan)
        step = launch(plan)
        maybe("after", plan)
        return step

    def flaky_draw(step: Any, steered: Any) -> Any:
        maybe("draw", step.plan)
        return draw(step, steered)

    def flaky_read(step: Any) -> Any:
        result = read(step)
        maybe("read", step.plan)
        return result

    runner.launch, runner.draw, runner.read = flaky_launch, flaky_draw, flaky_read


def ask_raw(llm: LLM, prompt: list[int], fields: dict[str, Any]) -> Any:
    """Each choice's tokens and hidden state, of a request as the bridge takes it."""
    events: dict[int, list[ChoiceEvent]] = {}
    done, submit = threading.Event(), Submit(id=next(IDS), prompt=np.array(prompt, "<i4").tobytes(), **fields)

    def take(event: ChoiceEvent) -> None:
        events.setdefault(event.choice, []).append(event)
        if len(events) == submit.n and all(mine[-1].finish for mine in events.values()):
            done.set()

    llm._bridge.submit(submit, take)
    assert done.wait(60)
    return [
        ([token for event in mine for token in event.tokens], mine[-1].finish, mine[-1].pooled)
        for _, mine in sorted(events.items())
    ]


def ask_all(llm: LLM, requests: list[tuple[list[int], dict[str, Any]]]) -> list[Any]:
    """What each gets, all at once: the answers' tokens and what else they asked for, or the error's code."""

    def ask(request: tuple[list[int], dict[str, Any]]) -> Any:
        if "sampling" in request[1]:
            return ask_raw(llm, *request)
        try:
            (found,) = llm.generate([request[0]], **request[1])
        except RequestError as error:
            return error.code
        numbers = [[pytest.approx(value, rel=1e-4) for value in answer.logprobs] for answer in found.answers]
        prompt = [pytest.approx(value, rel=1e-4) for value in found.prompt_logprobs]
        return [answer.token_ids for answer in found.answers], numbers, prompt

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(ask, requests))


def settled(llm: LLM) -> None:
    load = llm.load()
    assert (load.running, load.waiting, load.kv_live) == (0, 0, 0)
    assert load.kv_cached + load.kv_free == load.kv_total


LISTED = {"name": "lists", "args": {"lists": [[i] for i in range(9)]}}
KINDS: Mapping[str, tuple[list[int], dict[str, Any]]] = {
    "plain": ([1, 2, 3], {"max_new_tokens": 12, **GREEDY}),
    "chunks": (LONG, {"max_new_tokens": 6, **GREEDY}),
    "same prefix": ([*LONG[:60], 5], {"max_new_tokens": 9, **GREEDY}),
    "choices": ([9, 8, 7], {"n": 3, "seed": 5, "max_new_tokens": 8, "ignore_eos": True}),
    "penalties": ([4] * 9, {"seed": 2, "repetition_penalty": 1.3, "max_new_tokens": 10, "ignore_eos": True}),
    "logprobs": ([6, 6], {"logprobs": 2, "max_new_tokens": 7, **GREEDY}),
    "prompt": (LONG[:40], {"prompt_logprobs": True, "max_new_tokens": 3, **GREEDY}),
    "search": ([2, 7, 1], {"n": 2, "beams": BeamSearch(3), "max_new_tokens": 6, "sampling": SamplingParams()}),
    "last": (LONG[:33], {"pool": "last", "max_new_tokens": 1, "sampling": SamplingParams()}),
    "mean": (LONG[:35], {"pool": "mean", "max_new_tokens": 1, "sampling": SamplingParams()}),
    "host": ([3, 1], {"max_new_tokens": 9, **GREEDY, "logits_processors": [LISTED]}),
}


def failing_now_and_then(llm: LLM, requests: list[Any], expected: list[Any], chance: random.Random) -> None:
    isolation = engine_of(llm)._scheduler._isolation

    def now_and_then(where: str, plan: Any) -> Exception | None:
        # Whoever fails a second time, alone, would end.
        fails = isolation.suspect() is None and chance.random() < 0.15
        return RuntimeError(f"told to fail {where}") if fails else None

    failing(llm, now_and_then)
    assert ask_all(llm, requests) == expected
    assert llm.load().failed_steps > 0 and llm.load().failed_requests == 0
    settled(llm)


@AHEAD
def test_steps_that_fail_now_and_then_change_nothing(make_llm: MakeLLM, ahead: int) -> None:
    sizes = {"chunked_prefill_size": 16, "batch_max_tokens": 64, "running_max_req_size": 20}
    options = {**sizes, "plugins": [AHEAD_DEVICE, STEERING], "device": "cpu-ahead" if ahead else "cpu"}
    requests = list(KINDS.values())
    whole = make_llm(**options)
    expected = [ask_all(whole, [request])[0] for request in requests]
    assert not any(isinstance(answer, str) for answer in expected)

    for seed in range(4):
        failing_now_and_then(make_llm(**options), requests, expected, random.Random(seed))


@AHEAD
def test_where_memory_is_short_for_many_rows_they_run_alone(make_llm: MakeLLM, ahead: int) -> None:
    llm = make_llm(ahead=ahead)

    def short(where: str, plan: Any) -> Exception | None:
        many = where == "before" and plan.request.size > 2
        return torch.OutOfMemoryError("no memory for so many") if many else None

    failing(llm, short)
    prompts = [[i, 50 + i] for i in range(6)]
    answers = ask_all(llm, [(prompt, {"max_new_tokens": 5, **GREEDY}) for prompt in prompts])
    assert [tokens for tokens, *_ in answers] == [[fake_answer(prompt, 5)] for prompt in prompts]
    assert llm.load().failed_requests == 0
    settled(llm)


@AHEAD
def test_whom_there_is_never_memory_for_is_told_so_and_nobody_else(make_llm: MakeLLM, ahead: int) -> None:
    llm = make_llm(ahead=ahead)

    def short(where: str, plan: Any) -> Exception | None:
        large = where == "after" and (plan.n_query > 40).any()
        return torch.OutOfMemoryError("no memory for so much") if large else None

    failing(llm, short)
    requests = [([1, 2], {"max_new_tokens": 20, **GREEDY}), (LONG, {"max_new_tokens": 5, **GREEDY})]
    (alone, *_), refused = ask_all(llm, requests)
    assert (alone, refused) == ([fake_answer([1, 2], 20)], "server_overloaded")
    assert llm.load().failed_requests == 1
    settled(llm)


@AHEAD
@pytest.mark.parametrize("where", ["before", "read", "synchronize"])
def test_where_the_device_is_lost_everyone_hears_of_it(make_llm: MakeLLM, ahead: int, where: str) -> None:
    llm = make_llm(ahead=ahead, fake={"step_delay": 0.002})
    engine = engine_of(llm)
    engine._device.sticky = lambda error: str(error) == "lost"

    def lose(at: str, plan: Any) -> Exception | None:
        if engine._scheduler.totals.output_tokens < 20:
            return None
        error = RuntimeError("lost" if where != "synchronize" else "not yet")
        return error if at == (where if where != "synchronize" else "read") else None

    if where == "synchronize":
        engine._device.synchronize = lambda: (_ for _ in ()).throw(RuntimeError("lost"))
    failing(llm, lose)
    requests = [([i, 7], {"max_new_tokens": 500, **GREEDY}) for i in range(4)]
    assert ask_all(llm, requests) == ["engine_failed"] * 4
    with pytest.raises(RequestError):
        llm.generate([[1]], max_new_tokens=1)


def test_what_goes_wrong_while_a_request_is_queued_ends_that_request(make_llm: MakeLLM) -> None:
    llm = make_llm()
    scheduler = engine_of(llm)._scheduler
    submit = scheduler.submit

    def fragile(request: Any, *args: Any) -> None:
        if request.max_new_tokens == 13:
            raise KeyError("a bug")
        submit(request, *args)

    scheduler.submit = fragile
    options: list[dict[str, Any]] = [{"max_new_tokens": count, **GREEDY} for count in (12, 13, 14)]
    first, wrong, last = ask_all(llm, [([1, 2], option) for option in options])
    assert (first[0], wrong, last[0]) == ([fake_answer([1, 2], 12)], "internal_error", [fake_answer([1, 2], 14)])
    settled(llm)


def test_any_exception_can_be_told_of() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert text_of(Silent()) == "Silent"
    assert text_of(ValueError("half a \ud83d pair")) == "ValueError: half a ? pair"


ILLEGAL = """
from dataclasses import replace
from llmcore.api import KernelSpec, Requires, hookimpl
from llmcore.builtin.cpu.sample import make as make_sampler

@hookimpl
def register_kernels():
    yield KernelSpec(op="sample", name="bad", make=f"{__name__}:make", when=Requires(device="cpu"), priority=99)

def make(context):
    sample = make_sampler(context)

    def bad(logits, rows):
        out = sample(logits, rows)
        return replace(out, **wrong(out, rows.temperature == 0.125, logits.shape[1]))

    return bad

def wrong(out, rows, vocabulary):
    DAMAGE
"""

DAMAGES = {
    "above": "return {'tokens': out.tokens.masked_fill(rows, vocabulary)}",
    "far above": "return {'tokens': out.tokens.masked_fill(rows, (1 << 31) - 1)}",
    "below": "return {'tokens': out.tokens.masked_fill(rows, -1)}",
    "far below": "return {'tokens': out.tokens.masked_fill(rows, -5)}",
    "of a row that is not finite": "return {'tokens': out.tokens.masked_fill(rows, -1), 'finite': out.finite & ~rows}",
    "among the best": "best = out.top_ids\n    "
    "return {'top_ids': None if best is None else best.masked_fill(rows[:, None], vocabulary)}",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_drawn_token_that_is_none_ends_its_row_and_the_step_in_flight_never_reads_it(
    make_llm: MakeLLM, tmp_path: Path, damage: str
) -> None:
    file = tmp_path / "bad.py"
    file.write_text(ILLEGAL.replace("DAMAGE", DAMAGES[damage]))
    llm = make_llm(plugins=[str(file), AHEAD_DEVICE], device="cpu-ahead")
    top = {"logprobs": 2} if damage == "among the best" else {}
    good: dict[str, Any] = {"max_new_tokens": 20, **GREEDY, **top}
    bad = {**good, "temperature": 0.125, "repetition_penalty": 1.2}  # which looks tokens up among the scores
    first, wrong, second, too = ask_all(llm, [([1, 2], good), ([3, 4], bad), ([5], good), ([6] * 40, bad)])
    assert (first[0], second[0]) == ([fake_answer([1, 2], 20)], [fake_answer([5], 20)])
    assert (wrong, too) == ("internal_error", "internal_error")
    assert llm.load().failed_steps == 0, "no step looked up what is not there"
    settled(llm)
