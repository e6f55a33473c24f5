"""What the router reads of bodies."""

from __future__ import annotations

import json

import pytest
from llmcore_route.prompts import NO_BODY, Wish, wish_of


def wish(**fields: object) -> Wish:
    return wish_of(json.dumps(fields).encode())


def test_the_model_and_the_length() -> None:
    assert wish(model="m", prompt="x" * 400) == wish(model="m", inputs="x" * 400)
    assert wish(model="m", prompt="x" * 401).arrival.tokens == 101
    assert wish(prompt=[1, 2, 3]).arrival.tokens == 3 and wish(prompt="x").model is None
    assert wish(model=7).model is None
    assert wish_of(b"") is NO_BODY
    assert wish_of(b"[1, 2, 3]").arrival.tokens == 3


def test_requests_that_begin_alike_share_chunks_and_the_key() -> None:
    begun = {"role": "user", "content": "a" * 4000}
    first = wish(model="m", messages=[begun])
    second = wish(model="m", messages=[begun, {"role": "assistant", "content": "b" * 400}])
    assert first.arrival.key == second.arrival.key
    whole = len(first.chunks) - 1
    assert whole >= 14 and first.chunks[:whole] == second.chunks[:whole]
    other = wish(model="other", messages=[begun])
    assert not set(other.chunks) & set(first.chunks) and other.arrival.key != first.arrival.key


@pytest.mark.parametrize("body", [b"{", b"\xff", b'{"prompt": [1e999]}', b'{"prompt": "\\ud800"}', b"[" * 100_000])
def test_whatever_it_cannot_read_goes_on(body: bytes) -> None:
    assert wish_of(body).model is None


def test_odd_values_go_on() -> None:
    assert wish(prompt=[2**40, -1, True], model="m").arrival.tokens == 3
    assert wish(prompt=None, messages={}, tools=[]).model is None
