"""Answers to requests that the application never sees. Under load there are many, so each costs little."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import lru_cache
from typing import Protocol

import falcon
from llmcore.api.errors import RequestError, reraise_if_stopping

from llmcore_server.http.entry import ANYBODY, Entry
from llmcore_server.http.errors import EncodeError, count_error, error_headers, http_error, openai_error
from llmcore_server.http.request_id import request_id

logger = logging.getLogger(__name__)


class Refused(Protocol):
    """What is read of a request."""

    command: str
    version: str
    headers: Mapping[str, str]
    entry: Entry
    error: RequestError | None

    @property
    def encode_error(self) -> EncodeError:
        """How the dialect that was asked writes errors."""


@dataclass
class Unread:
    """What was refused before a request was read."""

    error: RequestError | None
    command: str = ""
    version: str = "1.1"
    headers: Mapping[str, str] = field(default_factory=dict)
    entry: Entry = ANYBODY
    encode_error: EncodeError = openai_error


def refusal(request: Refused, *, close: bool) -> tuple[bytes, bool]:
    """A whole answer in our error shape, and whether the connection closes after it: it does if `close` says so, or
    the client does."""
    error = request.error
    if not isinstance(error, RequestError):
        error = http_error(500)  # waitress's own: the application raised
    count_error(error)
    body = _encoded(request, error)
    wish = request.headers.get("CONNECTION", "").lower()
    close = close or (wish != "keep-alive" if request.version == "1.0" else wish == "close")
    more = (*error_headers(error).items(), *request.entry.headers)
    start = _start(request.version, error.status, close, len(body), *more)
    name = request_id(request.headers.get("X_REQUEST_ID")).encode()
    head = b"%b%b\r\nX-Request-Id: %b\r\n\r\n" % (start, _date(int(time.time())), name)
    return head if request.command == "HEAD" else head + body, close


def _encoded(request: Refused, error: RequestError) -> bytes:
    """As the dialect writes it, or else as we do: the main loop asks too, and must outlive a dialect that fails."""
    try:
        return request.encode_error(error)
    except BaseException as failure:
        reraise_if_stopping(failure)
        logger.exception("a dialect could not write an error")
        return openai_error(error)


@lru_cache(maxsize=256)
def _start(version: str, status: int, close: bool, length: int, *more: tuple[str, str]) -> bytes:
    lines = [f"HTTP/{version} {falcon.code_to_http_status(status)}", "Content-Type: application/json"]
    if close or version == "1.0":
        lines.append("Connection: close" if close else "Connection: Keep-Alive")
    lines += [f"Content-Length: {length}", *(f"{name}: {value}" for name, value in more), ""]
    return "\r\n".join(lines).encode("latin-1")


@lru_cache(maxsize=1)
def _date(second: int) -> bytes:
    return f"Date: {formatdate(second, usegmt=True)}".encode()
