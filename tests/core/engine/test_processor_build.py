"""Logits processors that are being made: their places are shared among clients, their threads, their ends."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest
from llmcore.api.bridge import LogitsProcessor, Prompt, SamplingParams, Submit
from llmcore.api.errors import RequestError
from llmcore.engine import processor_build
from llmcore.engine.processor_build import (
    LARGE_BYTES,
    MOST_LARGE,
    MOST_OF_A_CLIENT,
    PLACES,
    Making,
    ProcessorBuilder,
    Result,
    Turns,
)
from llmcore.engine.processors import RequestProcessors

SMALL, LARGE = LARGE_BYTES, LARGE_BYTES + 1


def taken(turns: Turns[str], most: int = 99) -> list[str]:
    """What gets a place now, in order."""
    found: list[str] = []
    while len(found) < most and (what := turns.take()) is not None:
        found.append(what)
    return found


def waiting(*what: tuple[str, int, int]) -> Turns[str]:
    turns: Turns[str] = Turns()
    for name, client, size in what:
        turns.wait(name, client, size)
    return turns


def test_one_client_leaves_a_place_to_others() -> None:
    turns = waiting(*((f"a{i}", 1, SMALL) for i in range(9)))
    assert taken(turns) == [f"a{i}" for i in range(MOST_OF_A_CLIENT)]
    turns.wait("b", 2, SMALL)
    assert taken(turns) == ["b"]
    assert turns.leave("b") and not turns.leave("b")
    assert taken(turns) == []
    assert turns.leave("a1") and taken(turns) == [f"a{MOST_OF_A_CLIENT}"]


def test_small_ones_do_not_wait_for_large_ones() -> None:
    turns = waiting(*((f"large{i}", i, LARGE) for i in range(9)))
    assert taken(turns) == [f"large{i}" for i in range(MOST_LARGE)]
    turns.wait("small", 1, SMALL)
    assert taken(turns) == ["small"]
    turns.leave("large0")
    assert taken(turns) == [f"large{MOST_LARGE}"]


def test_small_and_large_ones_of_one_client_alternate() -> None:
    turns = waiting(*((f"large{i}", 1, LARGE) for i in range(9)))
    assert taken(turns) == ["large0", "large1"]
    for i in range(4):
        turns.wait(f"small{i}", 1, SMALL)
    for ended, began in (("large0", "small0"), ("large1", "large2"), ("small0", "small1"), ("small1", "large3")):
        turns.leave(ended)
        assert taken(turns) == [began]


def test_whose_turn_was_longest_ago_comes_first() -> None:
    turns = waiting(*((f"a{i}", 1, SMALL) for i in range(9)), ("b0", 2, SMALL), ("b1", 2, SMALL), ("c0", 3, SMALL))
    assert taken(turns) == ["a0", "b0", "c0"]
    for name in ("a0", "b0", "c0"):
        turns.leave(name)
    assert taken(turns) == ["a1", "b1", "a2"]


def test_a_client_that_comes_late_is_next() -> None:
    """However many others wait, and however often they had a turn."""
    turns = waiting(*((f"{client}.{i}", client, SMALL) for client in (1, 2) for i in range(50)))
    placed = taken(turns)
    for _ in range(20):
        turns.leave(placed.pop(0))
        placed += taken(turns)
    turns.wait("late", 3, SMALL)
    turns.leave(placed.pop(0))
    assert taken(turns) == ["late"]


@pytest.mark.parametrize("seed", range(5))
def test_places_are_never_more_and_nobody_is_forgotten(seed: int) -> None:
    draw, turns = random.Random(seed), Turns[str]()
    sizes: dict[str, tuple[int, int]] = {}
    placed: list[str] = []
    served: list[str] = []
    for n in range(400):
        if draw.random() < 0.6:
            sizes[f"{n}"] = draw.randrange(4), draw.choice((SMALL, LARGE))
            turns.wait(f"{n}", *sizes[f"{n}"])
        elif placed:
            turns.leave(placed.pop(draw.randrange(len(placed))))
        new = taken(turns)
        placed += new
        served += new
        assert len(placed) <= PLACES
        assert sum(sizes[name][1] == LARGE for name in placed) <= MOST_LARGE
        assert all(sum(sizes[name][0] == client for name in placed) <= MOST_OF_A_CLIENT for client in range(4))
    while placed:
        turns.leave(placed.pop())
        new = taken(turns)
        placed += new
        served += new
    assert sorted(served) == sorted(sizes)
    assert not turns._clients


ATTACKER, NEIGHBOUR = 0, 1


class Gates:
    """Processors whose arguments say "wait" are made when the test lets them."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.gate = threading.Event()

    def __call__(self, request: Submit) -> RequestProcessors:
        self.begun.append(request.id)
        if request.sampling.logits_processors[0].args.get("wait"):
            assert self.gate.wait(60)
        return RequestProcessors()


@pytest.fixture
def gates() -> Iterator[Gates]:
    gates = Gates()
    yield gates
    gates.gate.set()


def submit(number: int, client: int, *, wait: bool = False, size: int = 0) -> Submit:
    call = LogitsProcessor("guided", {"wait": wait, "text": "x" * size}, "guided_grammar")
    return Submit(
        id=number,
        prompt=Prompt.of([]),
        max_new_tokens=1,
        client=client,
        sampling=SamplingParams(logits_processors=(call,)),
    )


def made(builder: ProcessorBuilder, count: int) -> list[tuple[Making, Result]]:
    found: list[tuple[Making, Result]] = []
    end = time.monotonic() + 30
    while len(found) < count:
        assert time.monotonic() < end, "it was not made"
        found += builder.done()
        time.sleep(0.002)
    return found


def until_begun(builder: ProcessorBuilder, gates: Gates, count: int) -> None:
    end = time.monotonic() + 30
    while len(gates.begun) < count:
        assert time.monotonic() < end, "it did not begin"
        list(builder.done())
        time.sleep(0.002)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor_build, "MAKE_SECONDS", 60.0)
    monkeypatch.setattr(processor_build, "LOST_SECONDS", 60.0)


@pytest.mark.parametrize("size", [0, 2 * LARGE_BYTES])
def test_one_client_holds_up_no_other(gates: Gates, size: int) -> None:
    line = ProcessorBuilder(gates)
    for i in range(20):
        line.begin(submit(i, ATTACKER, wait=True, size=size), owner=0)
    most = MOST_OF_A_CLIENT if size == 0 else MOST_LARGE
    until_begun(line, gates, most)
    for i in range(100, 120):
        line.begin(submit(i, NEIGHBOUR), owner=0)
    assert [one.request.id for one, _ in made(line, 20)] == list(range(100, 120))
    assert sorted(gates.begun[:most]) == list(range(most)) and len(gates.begun) == most + 20
    gates.gate.set()
    assert {one.request.id for one, _ in made(line, 20)} == set(range(20))
    assert not line.open


def test_a_request_that_gets_no_place_is_told_so_and_one_that_is_made_too_long_as_well(
    gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ProcessorBuilder(gates)
    for i in range(PLACES):
        line.begin(submit(i, ATTACKER, wait=True), owner=0)
    until_begun(line, gates, MOST_OF_A_CLIENT)
    monkeypatch.setattr(processor_build, "MAKE_SECONDS", 0.0)
    results = {one.request.id: result for one, result in made(line, PLACES)}
    told = [results[i] for i in range(PLACES)]
    assert all(isinstance(error, RequestError) for error in told)
    assert [(error.status, error.code) for error in told if isinstance(error, RequestError)] == [
        *[(400, "invalid_value")] * MOST_OF_A_CLIENT,
        (503, "server_overloaded"),
    ]
    assert str(told[-1]) == "guided_grammar: the requests before it take too long; send it again"


@pytest.mark.parametrize("wanted", [True, False])
def test_a_place_that_is_held_too_long_goes_to_the_next(
    gates: Gates, monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    """Also when the client has left meanwhile."""
    line = ProcessorBuilder(gates)
    for i in range(3 * PLACES):
        line.begin(submit(i, ATTACKER, wait=True), owner=0)
    until_begun(line, gates, MOST_OF_A_CLIENT)
    for i in () if wanted else range(MOST_OF_A_CLIENT):
        line.forget(0, i)
    line.begin(submit(99, ATTACKER), owner=0)
    monkeypatch.setattr(processor_build, "LOST_SECONDS", 0.02)
    assert [one.request.id for one, _ in made(line, 1)] == [99]


def test_arguments_have_a_bound(gates: Gates) -> None:
    line = ProcessorBuilder(gates)
    with pytest.raises(RequestError, match=r"^guided_grammar: it has 2,097,\d+ bytes; at most 2,097,152 are allowed$"):
        line.begin(submit(1, ATTACKER, size=processor_build.MOST_BYTES), owner=0)
    assert not line.open
