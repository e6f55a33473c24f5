"""What a choice's masks are checked for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from llmcore.api.bridge import Finish
from llmcore.api.counters import TALLIES
from llmcore.api.errors import RequestError, Stopped
from llmcore.api.processors import OVERLOADED, words_of
from llmcore.api.protocols import Int32
from llmcore.sched import processors
from llmcore.sched.processors import ChoiceProcessors, mask_of


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

    hosts = [("refuses", "mask", Refuses())]
    bound = ChoiceProcessors(hosts, [], 32, now, fields={"refuses": "guided_x"})
    assert bound.error == (told, "guided_x: half ? of a pair")
    assert ChoiceProcessors(hosts, [], 32, now).error == (told, "refuses: half ? of a pair")


class Raises:
    """A processor that raises `error` in each of its methods."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def mask(self) -> Int32:
        raise self.error

    def accept(self, token: int) -> None:
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError, RequestError])
def test_a_message_of_a_processor_is_cut(error: Callable[[str], Exception]) -> None:
    bound = ChoiceProcessors([("raises", "mask", Raises(error("x" * 2000)))], [], 32, now)
    assert bound.error is not None and len(bound.error[1]) == 500


def test_a_processor_that_fails_is_counted() -> None:
    name = ("plugin_failures", ("raises", "logits_processor"))
    before = TALLIES.figures().counts.get(name, 0)
    ChoiceProcessors([("raises", "mask", Raises(RuntimeError()))], [], 32, now)
    ChoiceProcessors([("raises", "mask", Raises(RequestError("the client's fault")))], [], 32, now)
    assert TALLIES.figures().counts[name] == before + 1


def test_a_process_that_stops_is_not_a_failure_of_a_processor() -> None:
    hosts = [("raises", "mask", Raises(Stopped()))]
    with pytest.raises(Stopped):
        ChoiceProcessors(hosts, [], 32, now)
    bound = ChoiceProcessors(hosts, [], 32, lambda work: None)
    with pytest.raises(Stopped):
        bound.accept(5)
    assert bound.error is None


def test_what_is_bound_has_said_nothing_at_first() -> None:
    bound = ChoiceProcessors([("adds", "bias", Adds({}))], [], 32, lambda work: None)
    assert (bound.mask, bound.bias, bound.error, bound.cause, bound.late) == (None, {}, None, None, 0)
    assert (bound.dropped, bound.free, bound.must_end, bound.ready) == (False, False, False, False)
    assert ChoiceProcessors([], [("device", object())], 32, now).bias == {}


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
    b.scheduler.postpone(second, [int(first.request[0])])
    assert b.scheduler.totals.late_masks == 2
    b.commit(first)
    assert 1 not in b.events and len(b.events[2]) == 1
    b.commit(second)
    b.drain()
    assert [len(b.events[i]) for i in (1, 2)] == [3, 3]


def test_a_postponed_row_that_another_had_before_gets_nothing(bench: Any) -> None:
    b = bench(ahead=1)
    b.submit(1, range(5), max_new=1)
    b.drain()
    b.submit(2, range(50, 55), max_new=3, processors=[counting()])
    plan = b.plan()
    b.scheduler.postpone(plan, [int(plan.request[0])])
    b.commit(plan)
    assert 2 not in b.events
    b.drain()
    assert len(b.events[2]) == 3


def test_an_answer_may_end_by_a_processor_and_another_by_a_stop_id(bench: Any) -> None:
    b = bench()
    mine = counting(end=1)
    b.submit(1, range(5), max_new=9, processors=[mine])
    b.submit(2, range(50, 55), max_new=9, stop_ids=(7,))
    b.step()
    assert [b.events[number][0].finish for number in (1, 2)] == [Finish.STOP] * 2
    assert mine.dropped is True


@pytest.mark.parametrize("drafts", [0, 4])
def test_a_processor_ends_its_choice(bench: Any, drafts: int, caplog: pytest.LogCaptureFixture) -> None:
    b = bench(drafts=drafts)
    b.submit(1, range(5), max_new=9, processors=[counting(end=2)])
    b.submit(2, range(50, 55), max_new=9, processors=[counting(wrong=7)])
    counts = {"counts": np.ones(2, np.int32)} if drafts else {}
    with caplog.at_level(logging.ERROR):
        b.step(**counts)
    assert [record.exc_info and str(record.exc_info[1]) for record in caplog.records] == ["told to raise"]
    assert (b.events[2][0].finish, b.events[2][0].error) == (
        Finish.ERROR,
        ("internal_error", "logits processor 'counts' failed: RuntimeError: told to raise"),
    )
    plan = b.step(**({"counts": np.ones(1, np.int32)} if drafts else {}))
    assert plan.n_query.tolist() == [1], "a row with logits processors verifies no drafts"
    assert [event.finish for event in b.events[1]] == [Finish.RUNNING, Finish.STOP]
    assert b.scheduler.idle and b.group.pool.live == 0


def test_nobody_is_given_up_who_has_answered(bench: Any) -> None:
    b = bench()
    wrong = adding({99: 1.0})
    b.submit(1, range(5), processors=[wrong])
    assert wrong.error is not None and b.scheduler.give_up() == {}
    assert not b.scheduler.idle, "the engine sees the error at its next draw"


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


class Adds:
    """Adds `values` to the next token's scores."""

    def __init__(self, values: dict[int, float]) -> None:
        self.values = values

    def bias(self) -> dict[int, float]:
        return self.values


def adding(*values: dict[int, float]) -> ChoiceProcessors:
    return ChoiceProcessors([("adds", "bias", Adds(one)) for one in values], [], 32, now)


def test_biases_of_several_processors_add_up() -> None:
    bound = adding({3: 1.0, 5: float("-inf")}, {3: 0.5, 0: 2.0})
    assert (bound.bias, bound.mask, bound.error) == ({0: 2.0, 3: 1.5, 5: float("-inf")}, None, None)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({32: 1.0}, "its bias names token 32, outside 0 to 31"),
        ({-1: 1.0}, "its bias names token -1, outside 0 to 31"),
        ({3: float("inf")}, "its bias of token 3 is inf"),
        ({3: float("nan")}, "its bias of token 3 is nan"),
    ],
)
def test_a_bias_that_no_score_can_take_ends_the_choice(values: dict[int, float], says: str) -> None:
    bound = adding(values)
    assert bound.ready and bound.error == ("internal_error", f"logits processor 'adds' failed: ValueError: {says}")
    assert isinstance(bound.cause, ValueError)


@pytest.mark.parametrize(
    ("words", "says"),
    [(np.zeros(2, np.int32), "its mask is int32 [2]"), (np.zeros(1, np.float32), "its mask is float32 [1]")],
)
def test_a_mask_of_another_form_ends_the_choice(words: Any, says: str) -> None:
    bound = ChoiceProcessors([("says", "mask", Says(words))], [], 32, now)
    assert bound.error is not None and f"{says}, needs int32 [1]" in bound.error[1]


def test_a_token_needs_all_masks_and_an_answer_that_may_only_end_does_end() -> None:
    first, second = (mask_of(ids, 40) for ids in ([1, 2, 39], [2, 3, 39, 40, 99]))
    hosts = [("one", "mask", Says(first)), ("two", "mask", Says(second))]
    bound = ChoiceProcessors(hosts, [], 40, now, banned=(2,))
    assert bound.mask is not None and (bound.mask == mask_of([2, 39], 40)).all()
    assert not bound.must_end
    assert ChoiceProcessors(hosts, [], 40, now, banned=(2, 39)).must_end


def test_a_processor_without_a_mask_allows_everything() -> None:
    hosts = [("one", "mask", Says(mask_of([1, 2], 40))), ("free", "mask", Counts())]
    bound = ChoiceProcessors(hosts, [], 40, now)
    assert bound.mask is not None and (bound.mask == mask_of([1, 2], 40)).all()


def test_a_mask_of_tokens() -> None:
    words = mask_of([0, 33, 39, 40, 99], 40)
    assert (words.dtype, words.tolist()) == (np.int32, [1, 1 << 1 | 1 << 7])


@pytest.mark.parametrize("bit", [40, 41, 62])
def test_a_single_bit_behind_the_vocabulary_is_cut(bit: int) -> None:
    words = np.zeros(2, np.int32)
    words[0], words[1] = 1, 1 << bit - 32
    bound = ChoiceProcessors([("says", "mask", Says(words))], [], 40, now)
    assert bound.mask is not None and bound.mask.tolist() == [1, 0]


def test_an_answer_has_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    bound = counting(run=lambda work: None)
    assert not bound.overdue(109.75) and bound.error is None
    assert bound.overdue(110.0)
    assert bound.error == ("internal_error", "logits processor 'counts' gave no answer within 10 s")


def test_an_answer_that_is_waited_for() -> None:
    work = list[Callable[[], None]]()
    bound = counting(run=work.append)
    assert not bound.ready and not bound.wait(0.0) and not bound.held and not bound.overdue(time.monotonic())
    work.pop()()
    assert bound.ready and bound.wait(0.0) and not bound.overdue(time.monotonic() + 99.0)
    bound.late = processors.PATIENT
    assert not bound.accept(4) and not bound.ready and bound.late == 0, "a token that came is not late"
    bound.late = processors.PATIENT
    assert bound.held
    assert bound.overdue(time.monotonic() + processors.MOST_SECONDS)
    assert bound.error == ("internal_error", "logits processor 'counts' gave no answer within 10 s")


def test_a_choice_that_has_ended_asks_nothing() -> None:
    work = list[Callable[[], None]]()
    bound = ChoiceProcessors([("says", "mask", Says(mask_of([1], 32)))], [], 32, work.append)
    bound.dropped = True
    work.pop()()
    assert bound.ready and bound.mask is None


class Frees(Counts):
    """Allows everything after `end` tokens."""

    def finished(self) -> bool:
        return False

    def mask(self) -> Any:
        return mask_of([5], 32)

    def free(self) -> bool:
        return len(self.told) >= self.end


def test_a_processor_that_allows_everything_is_asked_no_more() -> None:
    frees = Frees(end=2)
    bound = ChoiceProcessors([("frees", "mask", frees)], [], 32, now)
    assert not bound.accept(5) and not bound.free and bound.mask is not None
    assert not bound.accept(5) and bound.free and bound.mask is None and bound.ready
    assert not bound.accept(6) and frees.told == [5, 5]
    beside = ChoiceProcessors([("frees", "mask", Frees(end=0))], [("device", object())], 32, now)
    assert not beside.accept(5) and not beside.free, "the other one still has a say"


def test_what_another_engine_produced_is_told_first() -> None:
    frees = Frees(end=2)
    bound = ChoiceProcessors([("frees", "mask", frees)], [], 32, now, produced=(5,))
    assert frees.told == [5] and not bound.free and bound.mask is not None
    done = ChoiceProcessors([("frees", "mask", Frees(end=2))], [], 32, now, produced=(5, 5))
    assert done.free and done.ready and done.mask is None
    wrong = ChoiceProcessors([("counts", "mask", Counts(wrong=7))], [], 32, now, produced=(6, 7, 8))
    assert wrong.ready and wrong.error is not None and "told to raise" in wrong.error[1]
    assert not wrong.accept(9), "nothing more is told after an error"
    assert counting(wrong=5).accept(5) is False, "an error does not finish an answer"


def test_a_processor_on_the_device_is_ready_and_may_fail() -> None:
    bound = ChoiceProcessors([], [("device", object())], 32, now)
    assert bound.ready and not bound.accept(3) and bound.ready and not bound.free
    assert bound.fail("device", RuntimeError("no")) == bound.error
    assert bound.error == ("internal_error", "logits processor 'device' failed: RuntimeError: no")
