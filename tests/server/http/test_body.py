from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Annotated

import pytest
from llmcore.api.errors import RequestError
from llmcore_server.http import body
from msgspec import Meta, Struct


class Inner(Struct):
    name: str


class Outer(Struct):
    count: Annotated[int, Meta(ge=1, le=8)] | None = None
    inner: list[Inner] | None = None
    weights: dict[str, float] | None = None


def test_a_good_body() -> None:
    value = body.decode(b'{"count": 3, "inner": [{"name": "a", "more": 1}], "weights": null, "x": 1}', Outer)
    assert value == Outer(3, [Inner("a")])


@pytest.mark.parametrize(
    ("data", "param", "code", "message"),
    [
        (b'{"count": "3"}', "count", "invalid_type", "count: expected int, got str"),
        (b'{"count": true}', "count", "invalid_type", "count: expected int, got bool"),
        (b'{"count": 9}', "count", "invalid_value", "count: expected int <= 8"),
        (b'{"inner": [{}]}', "inner[0].name", "missing_required_parameter", "inner[0].name: this field is required"),
        (b'{"inner": [{"name": 1}]}', "inner[0].name", "invalid_type", "inner[0].name: expected str, got int"),
        (b'{"weights": {"a": "b"}}', "weights", "invalid_type", "weights: expected float, got str"),
        (b"[]", None, "invalid_type", "the body must be a JSON object: expected object, got array"),
        (b" ", None, "invalid_json", "the body is empty; send a JSON object"),
    ],
)
def test_errors_name_the_field(data: bytes, param: str | None, code: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        body.decode(data, Outer)
    error = caught.value
    assert (error.param, error.code, error.message, error.status) == (param, code, message, 400)


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (b'{"a": {"b": [1, NaN]}}', "a.b[1]"),
        (b'{"a": [' + b"9" * 400 + b"]}", "a[0]"),
        (b'{"a": [-' + b"9" * 5000 + b"]}", "a[0]"),
        (b'{"a": ["\\ud83d"]}', "a[0]"),
        (b'{"a": {"\\ud83d": 1}}', "a"),
        (b'{"a": "\\"[[", "k": ' + b"[" * 2000, "k"),
        (b'{"a": ' + b'{"a":' * 2000, "a"),
        (b'{"a": ' + b"[" * 500 + b"NaN" + b"]" * 500 + b"}", "a" + "[0]" * 500),
    ],
)
def test_what_json_cannot_hold(data: bytes, param: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        body.decode(data, Outer)
    assert (caught.value.param, caught.value.status) == (param, 400)


MOST = body.MAX_CONTAINERS


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (b'{"count": 3, "inner": [' + b"[]," * MOST + b"1]}", "inner"),
        (b'{"weights": {"x": [{}]}, "inner": [' + b'{"name": "]"},' * MOST + b"1]}", "inner"),
        (b'{"a": [' + b"[]," * 1000 + b'1], "b": {"c\\\\": [' + b'"\\"[", {},' * MOST + b"1]}}", "b"),
        (b'{"\\u0061": [' + b"[1]," * MOST + b"1]}", "a"),
        (b'{"inner": [' + b"[]," * MOST + b'1], "inner": null}', "inner"),
        (b"[" + b"[]," * MOST + b"1]", None),
        (b'{"inner": [' + b"[]," * MOST, None),
        (b'{"a": "\\\\", "inner": [' + b"[]," * (1 << 18) + b"1]}", "inner"),
    ],
)
def test_many_arrays_and_objects_are_refused_before_they_are_made(data: bytes, param: str | None) -> None:
    with pytest.raises(RequestError, match="at most 65,536 arrays and objects; send several") as caught:
        body.decode(data, Outer)
    assert (caught.value.param, caught.value.code, caught.value.status) == (param, "invalid_value", 400)


@pytest.mark.parametrize(
    "text",
    [
        "[" * (MOST + 1),
        "{[" * MOST,
        'a["b"] = {\n' * MOST,
        "\\" + '"[' * MOST + "\\",
        "\\\\[" * MOST,
        "\u00e9[" * (1 << 20),
        '["\\' * (1 << 20),
    ],
    ids=range(7),
)
def test_brackets_in_texts_are_no_arrays(text: str) -> None:
    """Whatever is written around them, and wherever a slice of the body ends."""
    value = {"inner": [{"name": text}, {"name": "[]"}], "[" * 10: '"', "x": [[]] * 1000}
    assert body.decode(json.dumps(value).encode(), Outer).inner == [Inner(text), Inner("[]")]


def test_the_most_arrays_and_objects_are_taken() -> None:
    inner = b"[" + b",".join([b'{"name": "["}'] * (MOST - 2)) + b"]"
    assert len(body.decode(b'{"inner": ' + inner + b"}", Outer).inner or ()) == MOST - 2
    with pytest.raises(RequestError):
        body.decode(b'{"count": null, "inner": ' + inner.replace(b'"["', b'"[", "x": []', 1) + b"}", Outer)


def seconds(work: Callable[[], object]) -> float:
    """Of processor time, on this thread."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def test_a_body_of_brackets_takes_little_time() -> None:
    """Beside what this machine takes to read two million numbers."""
    numbers = b"[" + b"1," * 2_000_000 + b"1]"
    little = 10 * min(seconds(lambda: json.loads(numbers)) for _ in range(3))
    for data in (b'{"x": [' + b'"[",' * 4_000_000 + b"1]}", b'{"x": "' + b'x[\\"y\\"]\\n' * 2_000_000 + b'"}'):
        assert body._count(data, b"[{", MOST) <= 2
        assert seconds(lambda data=data: body._count(data, b"[{", MOST)) < little  # type: ignore[misc]
    many = b'{"x": [' + b"[]," * 10_000_000 + b"1]}"

    def refused() -> None:
        with pytest.raises(RequestError):
            body.loads(many)

    assert seconds(refused) < little


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 500 + b'{"a": "' + b'\\"' * 4_000_000,
        b"[" * 513 + b'"' + b'\\"' * 4_000_000,
        b'{"a": "' + b"[" * 8_000_000,
        b'{"a": [' + b'"",' * 8_000_000 + b"NaN]}",
        b'{"a": [' + b"1," * 8_000_000 + b"NaN]}",
        b'{"a": "' + b"a" * 8_000_000 + b'\\ud800"}',
    ],
    ids=range(6),
)
def test_to_say_what_is_no_json_takes_little_time(data: bytes) -> None:
    """Beside what this machine takes to read two million numbers."""
    numbers = b"[" + b"1," * 2_000_000 + b"1]"
    little = 10 * min(seconds(lambda: json.loads(numbers)) for _ in range(3))

    def refused() -> None:
        with pytest.raises(RequestError) as caught:
            body.loads(data)
        assert caught.value.code == "invalid_json"

    assert seconds(refused) < little


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (b'{"a": [[]], "b" : {"c": "[[", "d": ' + b"[" * 2000, "b"),
        (b'{"a": "' + b"[x" * (1 << 18) + b'", "b": ' + b"[" * 2000, "b"),
        (b'{"a": ' + b"[" * 500 + b"]" * 500 + b', "b": ' + b"[1" * 2000, "b"),
        (b'{"a": "b", "c": 1}' + b"[" * 2000, None),
        (b'["a", ' + b"[" * 2000, None),
    ],
)
def test_the_field_that_is_nested_too_deep_is_named(data: bytes, param: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        body.loads(data)
    assert caught.value.param == param


def test_many_members_are_refused_before_they_are_made() -> None:
    most = body.MAX_MEMBERS
    members = b",".join(b'"%d:":1' % i for i in range(most))
    assert body.decode(b'{"weights": {' + members.replace(b'"1:":1,', b"", 1) + b"}}", Outer).weights
    with pytest.raises(RequestError, match="weights: a body holds at most 262,144 members of objects") as caught:
        body.decode(b'{"weights": {' + members + b"}}", Outer)
    assert (caught.value.param, caught.value.code) == ("weights", "invalid_value")
    assert body.decode(b'{"inner": [{"name": "' + b":" * (2 * most) + b'"}]}', Outer).inner
