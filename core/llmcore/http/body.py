"""Request bodies: JSON in, a validated struct out, or an error that names the field.

orjson reads first, because it refuses what JSON does not have (NaN, lone surrogates, numbers without a value); msgspec
then checks every field's type and range. Unknown fields are ignored; null means absent where a field is optional.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import falcon
import msgspec
import numpy as np
import orjson

from llmcore.conversion import convert
from llmcore.errors import RequestError

T = TypeVar("T")

MAX_DEPTH = 1024
"""Deepest nesting of a body: orjson's own limit."""

MAX_CONTAINERS = 1 << 16
"""Most arrays and objects in a body. Three bytes of JSON ask for one, and each takes a hundred bytes and the garbage
collector's time; none is of use to a model without a few tokens of a prompt, a message or a tool around it."""

_SLICE = 1 << 18
_BEGINNING = 64 << 10
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_AT = re.compile(r" - at `(?:key in )?`?\$\.?(.*?)`?$")
_MISSING = re.compile(r"missing required field `([^`]+)`")
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]')


def read(req: falcon.Request, kind: type[T]) -> T:
    """The JSON body of `req` as `kind`, a msgspec.Struct. Raises RequestError (400, or 415 for another media type)."""
    media = (req.content_type or "application/json").partition(";")[0].strip().lower()
    if not media.endswith("json") or req.get_header("content-encoding", default="identity") != "identity":
        raise RequestError(
            "the body must be plain JSON: send Content-Type: application/json and no Content-Encoding",
            code="unsupported_media_type",
            status=415,
        )
    return decode(req.bounded_stream.read(), kind)


def decode(data: bytes, kind: type[T]) -> T:
    """`data` as `kind`. Raises RequestError whose `param` is the path of the field at fault."""
    return check(loads(data), kind)


def loads(data: bytes) -> Any:
    """The JSON value in `data`. Raises RequestError."""
    if _containers(data) > MAX_CONTAINERS:
        raise _crowded(data)
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise _explain(data, error) from error
    return value


def check(value: Any, kind: type[T]) -> T:
    """A decoded JSON value as `kind`. Raises RequestError."""
    try:
        return convert(value, kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error


def _containers(data: bytes) -> int:
    """How many arrays and objects JSON has, without making them: more than MAX_CONTAINERS if they are, else at most
    that."""
    n = data.count(b"[") + data.count(b"{")
    if n <= MAX_CONTAINERS:
        return n
    if b"\\" in data:  # then every quote that is left begins or ends a text, and brackets in texts do not count
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    n = inside = 0
    for at in range(0, len(data), _SLICE):
        piece = np.frombuffer(data[at : at + _SLICE], np.uint8)
        texts = np.bitwise_xor.accumulate((piece == ord('"')).view(np.uint8)) ^ inside  # 1 in a text, else 0
        opens = (piece | 0x20) == ord("{")  # or [
        n += int(np.count_nonzero(opens > texts))
        if n > MAX_CONTAINERS:
            break
        inside = texts[-1]
    return n


def _crowded(data: bytes) -> RequestError:
    """What is said of more than MAX_CONTAINERS; it names the field that has most of them."""
    try:
        fields = _FIELDS.decode(data)
    except (msgspec.MsgspecError, RecursionError):
        deep = _too_deep(data[:_BEGINNING])
        if deep is not None:
            return _nested(deep)
        fields = {}
    field = max(fields, key=lambda name: _containers(bytes(fields[name])), default="")[:100]
    message = f"{field or 'the body'}: a body holds at most {MAX_CONTAINERS:,} arrays and objects; send several"
    return RequestError(message, param=field or None, code="invalid_value")


def _invalid(text: str) -> RequestError:
    """msgspec's message, with its path as the name of the field."""
    at = _AT.search(text)
    path = at[1].replace("[...]", "") if at else ""
    reason = text[: at.start()] if at else text
    missing = _MISSING.search(reason)
    if missing:
        param = f"{path}.{missing[1]}" if path else missing[1]
        return RequestError(f"{param}: this field is required", param=param, code="missing_required_parameter")
    reason = reason.replace("`", "").replace(" | null", "").replace("Expected", "expected")
    if not path:
        return RequestError(f"the body must be a JSON object: {reason}", code="invalid_type")
    code = "invalid_type" if ", got" in reason else "invalid_value"
    return RequestError(f"{path}: {reason}", param=path, code=code)


# --- what is wrong with JSON that orjson refused: slower, but only then ---------------------------------------------


def _explain(data: bytes, error: orjson.JSONDecodeError) -> RequestError:
    if not data.strip():
        return RequestError("the body is empty; send a JSON object", code="invalid_json")
    deep = _too_deep(data)
    if deep is not None:
        return _nested(deep)
    try:
        path, reason = next(_offences(json.loads(data), ""), ("", ""))
    except (ValueError, RecursionError):
        path = reason = ""
    if not reason:
        return RequestError(f"the body is not valid JSON: {error}", code="invalid_json")
    return RequestError(f"{path or 'the body'}: {reason}", param=path or None, code="invalid_value")


def _nested(field: str) -> RequestError:
    message = f"{field or 'the body'}: JSON is nested deeper than {MAX_DEPTH} levels"
    return RequestError(message, param=field or None, code="invalid_json")


def _too_deep(data: bytes) -> str | None:
    """The field of the body in which nesting passes MAX_DEPTH ("" if there is none to name), or None."""
    depth, field = 0, b""
    for match in _TOKEN.finditer(data):
        token = match[0]
        if token in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                return field.decode("utf-8", "replace")
        elif token in b"]}":
            depth -= 1
        elif depth == 1:
            # The last string at this level before a bracket opens is the bracket's key.
            field = token[1:-1]
    return None


def _offences(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """(path, reason) of every number and string that JSON cannot hold."""
    if isinstance(value, float) and not math.isfinite(value):
        yield path, "NaN and Infinity are no numbers of JSON"
    elif isinstance(value, str) and not _encodable(value):
        yield path, "the text holds half a surrogate pair, which is no character"
    elif isinstance(value, dict):
        for key, item in value.items():
            inner = f"{path}.{key}" if path else key
            yield from [] if _encodable(key) else [(path, "a key holds half a surrogate pair")]
            yield from _offences(item, inner)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _offences(item, f"{path}[{i}]")


def _encodable(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)
