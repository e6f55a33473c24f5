"""Logits processors that are late, or never answer: others go on, and they are given up in time."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from llmcore.api.errors import RequestError
from llmcore.engine import engine, processor_build, token_masks
from llmcore.engine.llm import LLM
from llmcore.sched import processors
from llmcore.sched.request import Totals
from llmcore_devtools import fake_answer
from steered import AHEAD, ANSWERS, GREEDY, together, use

MakeLLM = Callable[..., LLM]


def let_call(name: str, function: Callable[[], object]) -> None:
    """Processors that ask for `name` call it; after the engine is made."""
    sys.modules["llmcore_file_steering"].CALLS[name] = function


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Processors may wait for it (`wait_for`); it opens when the test is over."""
    gate = threading.Event()
    yield gate
    gate.set()


def wait_for(gate: threading.Event) -> list[threading.Thread]:
    """What processors that ask for "gate" do from now on; the threads that have begun to."""
    waiting: list[threading.Thread] = []
    let_call("gate", lambda: (waiting.append(threading.current_thread()), gate.wait(60)))
    return waiting


def totals(llm: LLM) -> Totals:
    found: Totals = llm._bridge._engine._scheduler.totals
    return found


@AHEAD
@pytest.mark.parametrize("granule", [1, 4])
def test_late_masks_change_nothing_but_the_pace(
    steered: MakeLLM, ahead: int, granule: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_masks, "_PATIENCE", 0.0)
    llm = steered(ahead, granule=granule)
    prompts = [[1, 2, 3], [9], [7, 7], [5] * 7]
    lists = [[(3 * i + k) % ANSWERS for k in range(5)] for i in range(10)]
    options = [use("lists", lists=lists, calls="lag"), {}, use("lists", lists=lists), {"seed": 5}]
    quick = [use("lists", lists=lists), *options[1:]]
    expected = together(llm, prompts, quick, 40, temperature=0.9, seed=1)
    steps, late = totals(llm).steps, totals(llm).late_masks

    def lag() -> None:
        """Some steps, as long as others make any."""
        began, end = totals(llm).steps, time.monotonic() + 20
        while totals(llm).steps < began + 3 and llm.load().running > 1:
            assert time.monotonic() < end
            time.sleep(0.0002)

    let_call("lag", lag)
    assert together(llm, prompts, options, 40, temperature=0.9, seed=1) == expected
    assert totals(llm).late_masks > late + 20
    assert totals(llm).steps > steps + 40


def test_nobody_waits_for_a_processor_that_never_answers(
    steered: MakeLLM, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows without processors go on; the one that hangs is left out after some steps."""
    monkeypatch.setattr(processors, "MOST_SECONDS", 60.0)
    llm = steered(1)
    wait_for(gate)
    pieces = llm.stream_chat(
        [{"role": "user", "content": "x"}], max_new_tokens=50, **use("lists", lists=[[1]], calls="gate")
    )
    hung = threading.Thread(target=lambda: next(pieces, None), daemon=True)
    hung.start()
    answers = llm.generate([[1, 2, 3]] * 3, max_new_tokens=200, **GREEDY)
    assert [answer.token_ids for answer in answers] == [fake_answer([1, 2, 3], 200)] * 3
    assert totals(llm).late_masks <= 3
    gate.set()
    hung.join()
    pieces.close()


@AHEAD
def test_who_never_answers_is_given_up(
    steered: MakeLLM, ahead: int, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processors, "MOST_SECONDS", 0.1)
    monkeypatch.setattr(engine, "_LOOK_SECONDS", 0.02)  # how often it looks whose time is over
    llm = steered(ahead)
    wait_for(gate)
    for n in (1, 3):
        with pytest.raises(RequestError, match=r"'lists' gave no answer within 0\.1 s"):
            llm.generate([[1, 2]], n=n, max_new_tokens=9, **GREEDY, **use("lists", lists=[[1]], calls="gate"))
    assert llm.generate([[1, 2, 3]], max_new_tokens=9, **GREEDY)[0].token_ids == fake_answer([1, 2, 3], 9)
    load = llm.load()
    assert (load.running, load.waiting, load.kv_live) == (0, 0, 0)


@AHEAD
def test_others_go_on_while_a_processor_is_made(
    steered: MakeLLM, ahead: int, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor_build, "MAKE_SECONDS", 60.0)
    llm = steered(ahead)
    wait_for(gate)
    with ThreadPoolExecutor(4) as pool:
        slow = [
            pool.submit(
                llm.generate, [[1]], max_new_tokens=3, **GREEDY, **use("lists", lists=[[5]], make_calls="gate")
            )
            for _ in range(2)
        ]
        until(lambda: llm.load().waiting == 2)
        assert llm.generate([[1, 2, 3]], max_new_tokens=100, **GREEDY)[0].token_ids == fake_answer([1, 2, 3], 100)
        assert llm.load().waiting == 2
        gate.set()
        assert [future.result()[0].token_ids for future in slow] == [[5, 5, 5]] * 2
    assert (llm.load().waiting, llm.load().running) == (0, 0)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.005)


def test_what_is_never_made_is_given_up_and_others_are_made(
    steered: MakeLLM, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor_build, "MAKE_SECONDS", 60.0)
    monkeypatch.setattr(processor_build, "LOST_SECONDS", 0.1)
    llm = steered(1)
    wait_for(gate)
    with ThreadPoolExecutor(8) as pool:
        hung = [
            pool.submit(llm.generate, [[1]], max_new_tokens=3, **use("lists", lists=[[5]], make_calls="gate"))
            for _ in range(5)
        ]
        until(lambda: llm.load().waiting == 5)
        answer = llm.generate([[1, 2]], max_new_tokens=3, **GREEDY, **use("lists", lists=[[7]]))[0]
        assert answer.token_ids == [7, 7, 7]
        assert not any(future.done() for future in hung)
        monkeypatch.setattr(processor_build, "MAKE_SECONDS", 0.5)
        for future in hung:
            with pytest.raises(RequestError, match=r"logits_processors: it was not made ready within 0\.5 s"):
                future.result()
    assert llm.load().waiting == 0


def test_masks_that_hang_leave_threads_for_others(
    steered: MakeLLM, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processors, "MOST_SECONDS", 60.0)
    monkeypatch.setattr("llmcore.engine.processors.HUNG_SECONDS", 0.1)
    monkeypatch.setattr(engine, "_LOOK_SECONDS", 0.02)  # how often it looks whether a thread hangs
    llm = steered(1)
    waiting = wait_for(gate)
    with ThreadPoolExecutor(8) as pool:
        hung = [
            pool.submit(llm.generate, [[1]], max_new_tokens=3, **GREEDY, **use("lists", lists=[[5]], calls="gate"))
            for _ in range(6)
        ]
        until(lambda: len(waiting) == 6)
        answer = llm.generate([[1, 2]], max_new_tokens=30, **GREEDY, **use("lists", lists=[[7]]))[0]
        assert answer.token_ids == [7] * 30 and not any(future.done() for future in hung)
        gate.set()
        assert [future.result()[0].token_ids for future in hung] == [[5, 5, 5]] * 6
