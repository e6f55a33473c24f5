"""JSON that is made while it is sent, because the values that it is made from take a tenth of its memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import orjson

PIECE = 1 << 16
"""Bytes of a piece. It takes one to three milliseconds to make, and an empty socket takes it whole."""

_NUMBERS = 4096
"""Numbers that are written at a time."""


class Listed:
    """A JSON array in an answer. Its elements, each as JSON, are made when they are sent, and only once."""

    __slots__ = ("elements",)

    def __init__(self, elements: Iterable[bytes]) -> None:
        self.elements = elements


def listed(values: Iterable[Any]) -> Listed:
    """A JSON array of `values`."""
    return Listed(map(orjson.dumps, values))


def pieces(answer: Any) -> Iterator[bytes]:
    """`answer` as JSON, in pieces of `PIECE` bytes and a shorter last one. Its objects and lists may hold a `Listed`
    or an `array` of numbers at any depth; everything else is what orjson takes."""
    # Bytes that orjson makes take 4 KB however short they are, so none of them are kept.
    buffer = bytearray()
    for part in _parts(answer):
        buffer += part
        while len(buffer) >= PIECE:
            yield bytes(buffer[:PIECE])
            del buffer[:PIECE]
    if buffer:
        yield bytes(buffer)


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, Listed):
        yield from _between(b"[", ((element,) for element in value.elements), b"]")
    elif isinstance(value, array):
        some = (value[at : at + _NUMBERS].tolist() for at in range(0, len(value), _NUMBERS))
        yield from _between(b"[", ((orjson.dumps(numbers)[1:-1],) for numbers in some), b"]")
    elif not _is_made_late(value):
        yield orjson.dumps(value)
    elif isinstance(value, Mapping):
        yield from _between(b"{", (_member(name, inner) for name, inner in value.items()), b"}")
    else:
        yield from _between(b"[", map(_parts, value), b"]")


def _member(name: str, value: Any) -> Iterator[bytes]:
    yield orjson.dumps(name) + b":"
    yield from _parts(value)


def _between(begin: bytes, items: Iterable[Iterable[bytes]], end: bytes) -> Iterator[bytes]:
    yield begin
    comma = b""
    for item in items:
        if comma:
            yield comma
        yield from item
        comma = b","
    yield end


def _is_made_late(value: Any) -> bool:
    """True if something in `value` is encoded bit by bit."""
    if isinstance(value, Mapping):
        return any(map(_is_made_late, value.values()))
    return isinstance(value, Listed | array) or (isinstance(value, list) and any(map(_is_made_late, value)))
