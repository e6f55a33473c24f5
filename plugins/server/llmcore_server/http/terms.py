"""Whose a request is, and how long it may take."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field

import falcon
from llmcore.api.errors import RequestError

TIMEOUT_HEADER = "x-request-timeout"
"""Seconds after which the client wants no answer any more."""

_NUMBER = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,15})?")

NO_KEY = -1
"""The client of a server without keys."""


@dataclass(frozen=True)
class Terms:
    """Whose request this is (the number of its API key), when it came (time.monotonic()), and the client's own limit
    in seconds, 0 for none."""

    client: int = NO_KEY
    received: float = field(default_factory=time.monotonic)
    seconds: float = 0.0


def read_terms(req: falcon.Request) -> Terms:
    """What a request says of itself. Raises RequestError for a limit that is none."""
    given = req.get_header(TIMEOUT_HEADER)
    return Terms(getattr(req.context, "client", NO_KEY), seconds=0.0 if given is None else _seconds(given))


def number(given: str) -> float | None:
    """The number that a header or a query gives in digits, None if it is none. float() takes more: +1, 1_0, 1e9, inf,
    and digits of any script."""
    return float(given) if _NUMBER.fullmatch(given) else None


def _seconds(given: str) -> float:
    seconds = number(given)
    if not seconds:
        raise RequestError(
            f"{TIMEOUT_HEADER}: it is a number of seconds above 0, such as 30 or 0.5",
            param=TIMEOUT_HEADER,
            code="invalid_value",
        )
    return seconds
