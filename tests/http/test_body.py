from __future__ import annotations

from typing import Annotated

import pytest
from llmcore.errors import RequestError
from llmcore.http import body
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
        (b'{"a": ["\\ud83d"]}', "a[0]"),
        (b'{"a": {"\\ud83d": 1}}', "a"),
        (b'{"a": "\\"[[", "k": ' + b"[" * 2000, "k"),
        (b'{"a": ' + b'{"a":' * 2000, "a"),
        (b'{"a": ' + b"[" * 900 + b"NaN" + b"]" * 900 + b"}", None),
    ],
)
def test_what_json_cannot_hold(data: bytes, param: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        body.decode(data, Outer)
    assert caught.value.param == param or (param is None and caught.value.status == 400)
