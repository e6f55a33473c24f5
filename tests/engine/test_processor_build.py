"""Requests whose logits processors are being made: whose turn it is, and what becomes of those that get none."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from llmcore.bridge import LogitsProcessor, SamplingParams, Submit
from llmcore.engine import making
from llmcore.engine.making import Made, Making
from llmcore.engine.processors import Prepared
from llmcore.engine.turns import LARGE_BYTES, MOST_LARGE, MOST_OF_A_CLIENT, PLACES
from llmcore.errors import RequestError

ATTACKER, NEIGHBOUR = 0, 1


class Gates:
    """Processors whose arguments say "wait" are made when the test lets them."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.gate = threading.Event()

    def __call__(self, request: Submit) -> Prepared:
        self.begun.append(request.id)
        if request.sampling.logits_processors[0].args.get("wait"):
            assert self.gate.wait(60)
        return Prepared()


@pytest.fixture
def gates() -> Iterator[Gates]:
    gates = Gates()
    yield gates
    gates.gate.set()


def submit(number: int, client: int, *, wait: bool = False, size: int = 0) -> Submit:
    call = LogitsProcessor("guided", {"wait": wait, "text": "x" * size}, "guided_grammar")
    return Submit(
        id=number, prompt=b"", max_new_tokens=1, client=client, sampling=SamplingParams(logits_processors=(call,))
    )


def made(making: Making, count: int) -> list[Made]:
    found: list[Made] = []
    end = time.monotonic() + 30
    while len(found) < count:
        assert time.monotonic() < end, "it was not made"
        found += making.done()
        time.sleep(0.002)
    return found


def until_begun(making: Making, gates: Gates, count: int) -> None:
    end = time.monotonic() + 30
    while len(gates.begun) < count:
        assert time.monotonic() < end, "it did not begin"
        list(making.done())
        time.sleep(0.002)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "MAKE_SECONDS", 60.0)
    monkeypatch.setattr(making, "LOST_SECONDS", 60.0)


@pytest.mark.parametrize("size", [0, 2 * LARGE_BYTES])
def test_one_client_holds_up_no_other(gates: Gates, size: int) -> None:
    line = Making(gates)
    for i in range(20):
        line.begin(submit(i, ATTACKER, wait=True, size=size), owner=0)
    most = MOST_OF_A_CLIENT if size == 0 else MOST_LARGE
    until_begun(line, gates, most)
    for i in range(100, 120):
        line.begin(submit(i, NEIGHBOUR), owner=0)
    assert [one.request.id for one in made(line, 20)] == list(range(100, 120))
    assert sorted(gates.begun[:most]) == list(range(most)) and len(gates.begun) == most + 20
    gates.gate.set()
    assert {one.request.id for one in made(line, 20)} == set(range(20))
    assert not len(line)


def test_a_request_that_gets_no_place_is_told_so_and_one_that_is_made_too_long_as_well(
    gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = Making(gates)
    for i in range(PLACES):
        line.begin(submit(i, ATTACKER, wait=True), owner=0)
    until_begun(line, gates, MOST_OF_A_CLIENT)
    monkeypatch.setattr(making, "MAKE_SECONDS", 0.0)
    results = {one.request.id: one.result for one in made(line, PLACES)}
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
    line = Making(gates)
    for i in range(3 * PLACES):
        line.begin(submit(i, ATTACKER, wait=True), owner=0)
    until_begun(line, gates, MOST_OF_A_CLIENT)
    for i in () if wanted else range(MOST_OF_A_CLIENT):
        line.forget(0, i)
    line.begin(submit(99, ATTACKER), owner=0)
    monkeypatch.setattr(making, "LOST_SECONDS", 0.02)
    assert [one.request.id for one in made(line, 1)] == [99]


def test_arguments_have_a_bound(gates: Gates) -> None:
    line = Making(gates)
    with pytest.raises(RequestError, match=r"^guided_grammar: it has 2,097,\d+ bytes; at most 2,097,152 are allowed$"):
        line.begin(submit(1, ATTACKER, size=making.MOST_BYTES), owner=0)
    assert not len(line)
