"""`x-request-id`: one per answer, the client's own where it is harmless."""

from __future__ import annotations

import os
import re

_HARMLESS = re.compile(r"[A-Za-z0-9._-]{1,64}")


def request_id(given: str | None) -> str:
    """`given` where it has at most 64 letters, digits, dots, dashes and underscores; else a new random one.

    It only ever appears in answers and logs: requests are told apart by numbers of our own.
    """
    if given is not None and _HARMLESS.fullmatch(given):
        return given
    return os.urandom(16).hex()
