"""Bad input as data: wrong values of every field of a request struct, odd ones of some, bodies that are no JSON.

The fault suite sends them to a running server, and the dialects' tests to a dialect alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"prompt": "hi"}
NATIVE: dict[str, Any] = {"inputs": "hi", "parameters": {}}

_WRONG: dict[type, list[Any]] = {
    msgspec.inspect.StrType: [3, True, {}, 1.5],
    msgspec.inspect.IntType: ["3", True, 1.5, [], 2**80, -(2**80)],
    msgspec.inspect.FloatType: ["0.5", True, [], {}],
    msgspec.inspect.BoolType: ["true", 1, 0, []],
    msgspec.inspect.ListType: [3, {}, True],
    msgspec.inspect.TupleType: [3, {}, True, [], [1], [1, 2, 3]],
    msgspec.inspect.DictType: [3, [], "x"],
    msgspec.inspect.StructType: [3, [], "x"],
    msgspec.inspect.LiteralType: ["x", 3, []],
    msgspec.inspect.AnyType: [],
}


def wrong_values(kind: Any) -> Iterator[Any]:
    """Values that no alternative of a field's type admits."""
    kinds = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    kinds = [k for k in kinds if not isinstance(k, msgspec.inspect.NoneType)]
    accepted = set(map(type, kinds))
    for one in kinds:
        yield from (value for value in _WRONG[type(one)] if not any(_admits(k, value) for k in accepted))
        if isinstance(one, msgspec.inspect.IntType | msgspec.inspect.FloatType):
            yield from (one.ge - 1,) if one.ge is not None else ()
            yield from (one.gt,) if one.gt is not None else ()
            yield from (one.le + 1,) if one.le is not None else ()
        if isinstance(one, msgspec.inspect.StrType) and one.max_length:
            yield "x" * (one.max_length + 1)
            yield from ("",) if one.min_length else ()
        if isinstance(one, msgspec.inspect.ListType | msgspec.inspect.DictType) and one.min_length:
            yield []


def _admits(kind: type, value: Any) -> bool:
    return {
        msgspec.inspect.StrType: isinstance(value, str),
        msgspec.inspect.IntType: type(value) is int and abs(value) < 2**63,
        msgspec.inspect.ListType: isinstance(value, list),
        msgspec.inspect.DictType: isinstance(value, dict),
        msgspec.inspect.StructType: isinstance(value, dict),
        msgspec.inspect.BoolType: isinstance(value, bool),
    }.get(kind, False)


def cases(kind: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path of the field, value) of every wrong value of every field of a struct."""
    for field in msgspec.inspect.type_info(kind).fields:  # type: ignore[attr-defined]
        for value in wrong_values(field.type):
            yield prefix + field.name, value


def refused(table: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path of the field, value) of fields that are refused whatever is in them."""
    for name in table:
        yield prefix + name, "something else"
        yield prefix + name, {"a": 1}


def put(body: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """`body` with `value` at a path like "parameters.n"."""
    first, _, rest = path.partition(".")
    return {**body, first: put(body.get(first) or {}, rest, value) if rest else value}


NOT_JSON: Mapping[str, bytes] = {
    "empty": b"",
    "null": b"null",
    "a list": b"[]",
    "a text": b'"x"',
    "a number": b"1",
    "cut": b'{"prompt": "x"',
    "a byte-order mark": b'\xef\xbb\xbf{"prompt": "x"}',
    "no utf-8": b'{"prompt": "\xff"}',
    "deep": b'{"prompt": %b%b, "inputs": 1}' % (b"[" * 100_000, b"]" * 100_000),
    "deep and open": b'{"a": ' * 100_000,
    "NaN": b'{"prompt": "x", "inputs": "x", "messages": [], "temperature": NaN}',
    "1e999": b'{"prompt": "x", "inputs": "x", "messages": [], "temperature": 1e999}',
    "5,000 digits": b'{"prompt": "x", "inputs": "x", "seed": %b}' % (b"9" * 5000),
    "half a pair": b'{"prompt": "\\ud800", "inputs": "\\ud800", "messages": "\\udfff"}',
    "half a pair in stop": b'{"prompt": "x", "inputs": "x", "stop": "\\ud800"}',
    "half a pair in model": b'{"prompt": "x", "inputs": "x", "model": "\\ud800"}',
    "half a pair in a tool": b'{"messages": [], "tools": [{"function": {"name": "\\udc00"}}]}',
}
"""Bodies that no endpoint reads."""

STRANGE: tuple[Any, ...] = (
    *([], {}, [None], [[]], {"a": [1]}, "", "x" * 1500, True, -1, 0, 1.5, 2**31, 2**64, 1e308),
    *(["", 1], ["a"] * 40, {"-1": 1}, {"1": 1e9}),
)
"""Values that some fields take and others do not; none is worth a 5xx."""
