"""The decision about a request that its head allows, before a byte of its body is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llmcore.api.errors import RequestError

from llmcore_server.http.terms import NO_KEY

Headers = tuple[tuple[str, str], ...]
"""Names and values of an answer's headers."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The decision. `error`: the refusal; None for a request that is admitted.

    `client`: the number of its API key, NO_KEY without one. `keyless`: the request needs no key even if the server has
    keys, so the server keeps nothing of its body. `preflight`: a browser asks whether a page may send a request, and
    `headers` are the whole answer. `headers`: headers of every answer to the request.
    """

    error: RequestError | None = None
    client: int = NO_KEY
    keyless: bool = False
    preflight: bool = False
    headers: Headers = ()

    @property
    def keeps_body(self) -> bool:
        """False if no responder will ever read the body."""
        return self.error is None and not self.keyless


ENTRY = "llmcore.entry"
"""The key of WSGI's environment under which the Entry of a request is."""

ANYBODY = Entry()
"""The entry of every request to a server that asks for nothing."""

Admit = Callable[[str, str, Mapping[str, str]], Entry]
"""Decides about a request by its method, path and headers (under CGI's names: "X_REQUEST_ID"). The main loop calls it,
before the body is read and before a thread is taken, so it must not block."""


def admit_anybody(method: str, path: str, headers: Mapping[str, str]) -> Entry:
    """An Admit that refuses nothing."""
    return ANYBODY
