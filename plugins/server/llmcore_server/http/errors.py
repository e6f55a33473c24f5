"""Errors as clients read them: known codes, one encoder, nothing of this machine in a body."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import falcon
import msgspec
import orjson
from llmcore.api.counters import TALLIES
from llmcore.api.errors import RequestError

logger = logging.getLogger(__name__)

EncodeError = Callable[[RequestError], bytes]
"""A dialect's error body (JSON)."""


class ErrorMembers(msgspec.Struct):
    """The members of an error, in OpenAI's shape."""

    message: str
    """The problem, and its fix."""
    type: str
    """The kind of error, such as `invalid_request_error`."""
    param: str | None
    """The field of the request that caused it."""
    code: str | None
    """A name of the error for programs."""


class ErrorAnswer(msgspec.Struct):
    """An answer with a status of 400 or more."""

    error: ErrorMembers
    """The error."""


KNOWN_CODES = frozenset(
    {
        "context_length_exceeded",
        "engine_failed",
        "first_token_timeout",
        "internal_error",
        "invalid_api_key",
        "invalid_json",
        "invalid_type",
        "invalid_value",
        "method_not_allowed",
        "missing_required_parameter",
        "model_not_found",
        "not_found",
        "queue_full",
        "queue_timeout",
        "rate_limit_exceeded",
        "request_timeout",
        "request_too_large",
        "server_overloaded",
        "unsupported",
        "unsupported_media_type",
        "unsupported_parameter",
    }
)
"""Every `code` that a body may carry; another one is sent as null."""

_SHOWN_PATH = 100
"""Characters of a path that an error names."""

_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}

_HTTP: Mapping[int, tuple[str, str | None]] = {
    404: ("There is nothing here.", "not_found"),
    405: ("This route does not take that method; the Allow header lists those it takes.", "method_not_allowed"),
    413: ("The body is too large.", "request_too_large"),
    415: ("The body must be JSON: send Content-Type: application/json.", "unsupported_media_type"),
    501: ("The body's transfer encoding is not supported; send Content-Length, or chunks.", None),
    431: ("The request's header is too large.", "request_too_large"),
}
"""The answers of the HTTP layer itself, by status: (message, code)."""


def refusal(param: str, why: str, code: str = "invalid_value") -> RequestError:
    """The error about the field `param` of a request. Its message begins with the field."""
    return RequestError(f"{param}: {why}", param=param, code=code)


def openai_error(error: RequestError) -> bytes:
    """OpenAI's nested shape; `code` is a known one or null."""
    kind = "server_error" if error.status >= 500 else _OPENAI_TYPES.get(error.status, "invalid_request_error")
    code = error.code if error.code in KNOWN_CODES else None
    body = {"error": {"message": error.message, "type": kind, "param": error.param, "code": code}}
    return orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS)


def retry_headers(error: RequestError) -> dict[str, str]:
    """The headers that say when a refused request is worth another try."""
    return {"Retry-After": str(error.retry_after)} if error.status in (429, 503) else {}


def error_headers(error: RequestError) -> dict[str, str]:
    """The headers that belong to the status of an error."""
    return {"WWW-Authenticate": "Bearer"} if error.status == 401 else retry_headers(error)


def count_error(error: RequestError) -> None:
    """Count an error that an HTTP client is told of; an unknown code counts as none."""
    TALLIES.count("error_answers", str(error.status), error.code if error.code in KNOWN_CODES else "")


def http_error(status: int) -> RequestError:
    """The error for a bare HTTP status."""
    fallback = "internal_error" if status >= 500 else None
    text = "The server failed to handle this request." if status >= 500 else "The request is not valid HTTP."
    message, code = _HTTP.get(status, (text, fallback))
    return RequestError(message, code=code, status=status)


def no_route(method: str, path: str, known: str = "/v1/models, /v1/chat/completions and /generate") -> RequestError:
    """No route has this path. The path is named in ASCII, without control characters, and cut where it is long.
    `known`: some routes that exist."""
    named = ascii(path[:_SHOWN_PATH])[1:-1] + ("..." if len(path) > _SHOWN_PATH else "")
    text = f"There is no route for {method} {named}; there are {known}."
    return RequestError(text, code="not_found", status=404)


def as_request_error(error: Exception, request_id: str = "") -> RequestError:
    """`error` in a form that a client may read. An unexpected error is logged and becomes a bare 500."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, falcon.HTTPError):
        return http_error(error.status_code)
    logger.error("request %s failed", request_id or "without an id", exc_info=error)
    return http_error(500)
