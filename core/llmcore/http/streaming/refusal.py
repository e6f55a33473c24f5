"""Answers to requests that the application never sees. Under load there are many, so each costs little."""

from __future__ import annotations

import time
from collections.abc import Mapping
from email.utils import formatdate
from functools import lru_cache
from typing import Protocol

import falcon

from llmcore.errors import RequestError
from llmcore.http.errors import EncodeError, count_error, http_error, retry_headers
from llmcore.http.request_id import request_id


class Refused(Protocol):
    """What is read of a request."""

    command: str
    version: str
    headers: Mapping[str, str]
    error: RequestError | None
    encode_error: EncodeError


def refusal(request: Refused, *, close: bool) -> tuple[bytes, bool]:
    """A whole answer in our error shape, and whether the connection closes after it: it does if `close` says so, or
    the client does."""
    error = request.error
    if not isinstance(error, RequestError):
        error = http_error(500)  # waitress's own: the application raised
    count_error(error)
    body: bytes = request.encode_error(error)
    wish = request.headers.get("CONNECTION", "").lower()
    close = close or (wish != "keep-alive" if request.version == "1.0" else wish == "close")
    head = [_start(request.version, error.status, close), f"Content-Length: {len(body)}", _date(int(time.time()))]
    head += [f"{name}: {value}" for name, value in retry_headers(error).items()]
    head.append(f"X-Request-Id: {request_id(request.headers.get('X_REQUEST_ID'))}\r\n\r\n")
    written = "\r\n".join(head).encode("latin-1")
    return written if request.command == "HEAD" else written + body, close


@lru_cache(maxsize=64)
def _start(version: str, status: int, close: bool) -> str:
    lines = [f"HTTP/{version} {falcon.code_to_http_status(status)}", "Content-Type: application/json"]
    if close or version == "1.0":
        lines.append("Connection: close" if close else "Connection: Keep-Alive")
    return "\r\n".join(lines)


@lru_cache(maxsize=1)
def _date(second: int) -> str:
    return f"Date: {formatdate(second, usegmt=True)}"
