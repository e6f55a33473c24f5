"""What a choice's masks are checked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from llmcore.api.bridge import Finish
from llmcore.api.errors import RequestError
from llmcore.api.processors import OVERLOADED, words_of
from llmcore.api.protocols import Int32
from llmcore.sched import processors
from llmcore.sched.processors import ChoiceProcessors


class Says:
    """A processor that says one mask."""

    def __init__(self, words: Int32) -> None:
        self.words = words

    def mask(self) -> Int32:
        return self.words


def now(work: Callable[[], None]) -> None:
    work()


@pytest.mark.parametrize("size", [31, 32, 33, 100, 150_000])
@pytest.mark.parametrize("behind", [False, True])
def test_a_mask_is_cut_at_the_vocabulary_and_its_owner_keeps_its_own(size: int, behind: bool) -> None:
    bits = np.random.default_rng(size).random(words_of(size) * 32) < 0.5
    bits[size:], bits[size - 1] = behind, True
    words = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
    before = words.copy()
    bound = ChoiceProcessors([("says", "mask", Says(words))], [], size, now)
    assert bound.error is None and bound.mask is not None
    found = np.unpackbits(bound.mask.view(np.uint8), bitorder="little").astype(bool)
    assert (found[:size] == bits[:size]).all() and not found[size:].any()
    assert (words == before).all()


@pytest.mark.parametrize("size", [31, 32, 33, 150_000])
def test_a_mask_that_allows_only_what_is_behind_the_vocabulary_allows_nothing(size: int) -> None:
    bits = np.arange(words_of(size) * 32) >= size
    words = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
    bound = ChoiceProcessors([("says", "mask", Says(words))], [], size, now)
    assert bound.error is not None and "allows no token" in bound.error[1]


CODES = [(7, "invalid_value"), ("its_own", "invalid_value"), (OVERLOADED, OVERLOADED)]


@pytest.mark.parametrize(("code", "told"), CODES)
def test_a_refusal_in_the_middle_of_an_answer_can_be_sent(code: object, told: str) -> None:
    """Whatever a plugin puts into it: what no message can carry would end the engine."""

    class Refuses:
        def mask(self) -> Int32:
            raise RequestError("half \ud83d of a pair", code=code)  # type: ignore[arg-type]

    bound = ChoiceProcessors([("refuses", "mask", Refuses())], [], 32, now, fields={"refuses": "guided_x"})
    assert bound.error == (told, "guided_x: half ? of a pair")


class Counts:
    """Allows any token, ends after `end` of them, and raises at token `wrong`."""

    def __init__(self, end: int = 99, wrong: int = -1) -> None:
        self.told: list[int] = []
        self.end, self.wrong = end, wrong

    def mask(self) -> None:
        return None

    def accept(self, token: int) -> None:
        if token == self.wrong:
            raise RuntimeError("told to raise")
        self.told.append(token)

    def finished(self) -> bool:
        return len(self.told) >= self.end


def counting(run: Callable[[Callable[[], None]], None] = now, **how: int) -> ChoiceProcessors:
    return ChoiceProcessors([("counts", "mask", Counts(**how))], [], 100, run)


def test_late_samples_are_named_and_can_be_postponed(bench: Any) -> None:
    b = bench(ahead=1)
    mine = counting()
    b.submit(1, range(5), max_new=3, processors=[mine])
    b.submit(2, range(50, 55), max_new=3)
    first = b.plan()
    assert b.scheduler.steering(first) == [(0, mine)] and first.admitted[0].masked and not first.admitted[1].masked
    b.scheduler.postpone(first, [int(first.request[0])])
    second = b.plan()
    assert second.start.tolist() == [5, 4] or second.start.tolist() == [4, 5]
    assert b.scheduler.totals.late_masks == 1
    with pytest.raises(ValueError, match="only the newest plan"):
        b.scheduler.postpone(first, [])
    b.commit(first)
    assert 1 not in b.events and len(b.events[2]) == 1
    b.commit(second)
    b.drain()
    assert [len(b.events[i]) for i in (1, 2)] == [3, 3]


@pytest.mark.parametrize("drafts", [0, 4])
def test_a_processor_ends_its_choice(bench: Any, drafts: int) -> None:
    b = bench(drafts=drafts)
    b.submit(1, range(5), max_new=9, processors=[counting(end=2)])
    b.submit(2, range(50, 55), max_new=9, processors=[counting(wrong=7)])
    counts = {"counts": np.ones(2, np.int32)} if drafts else {}
    b.step(**counts)
    assert (b.events[2][0].finish, b.events[2][0].error) == (
        Finish.ERROR,
        ("internal_error", "logits processor 'counts' failed: RuntimeError: told to raise"),
    )
    plan = b.step(**({"counts": np.ones(1, np.int32)} if drafts else {}))
    assert plan.n_query.tolist() == [1], "a row with logits processors verifies no drafts"
    assert [event.finish for event in b.events[1]] == [Finish.RUNNING, Finish.STOP]
    assert b.scheduler.idle and b.group.pool.live == 0


def test_the_draw_may_end_a_choice(bench: Any) -> None:
    b = bench()
    b.submit(1, range(5), processors=[counting()])
    plan = b.plan()
    error = ("invalid_value", "it cannot be")
    b.receive(b.scheduler.expel(plan, {int(plan.request[0]): error}))
    b.receive(b.scheduler.expel(plan, {int(plan.request[0]): error}))
    assert [event.error for event in b.events[1]] == [error]
    b.commit(plan)
    assert b.scheduler.idle


def test_choices_that_are_late_too_often_wait_and_are_given_up(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    b, work = bench(), list[Callable[[], None]]()
    mine = counting(run=work.append)
    b.submit(1, range(5), max_new=9, processors=[mine])
    b.submit(2, range(50, 55), max_new=3)
    assert b.step().request.size == 1, "it does not join before its processors are ready"
    work.pop()()
    assert b.step().request.size == 2
    mine.late = processors.PATIENT
    assert b.step().request.size == 1, "it waits for its mask"
    assert b.scheduler.give_up() == {}
    monkeypatch.setattr(processors, "MOST_SECONDS", 0.0)
    b.receive(b.scheduler.give_up())
    assert b.events[1][-1].error == ("internal_error", "logits processor 'counts' gave no answer within 0 s")
    assert b.scheduler.idle
