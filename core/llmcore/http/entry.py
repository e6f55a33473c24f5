"""What the head of a request decides before a byte of its body is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llmcore.errors import RequestError
from llmcore.http.terms import NO_KEY

Headers = tuple[tuple[str, str], ...]
"""Names and values of an answer's headers."""


@dataclass(frozen=True, slots=True)
class Entry:
    """How a request comes in. `error`: why it does not; None where it does.

    `client`: the number of its API key, NO_KEY where it has none. `keyless`: it needs no key even where there are
    some, so nothing of its body is kept. `preflight`: a browser asks whether a page may send a request, and `headers`
    are the whole answer. `headers`: what every answer to the request carries.
    """

    error: RequestError | None = None
    client: int = NO_KEY
    keyless: bool = False
    preflight: bool = False
    headers: Headers = ()

    @property
    def keeps_body(self) -> bool:
        """Whether the body of the request is of use to anybody."""
        return self.error is None and not self.keyless


ENTRY = "llmcore.entry"
"""Where WSGI's environment has the Entry of a request whose head was judged."""

ANYBODY = Entry()
"""How everybody comes in where nothing is asked."""

Admit = Callable[[str, str, Mapping[str, str]], Entry]
"""How a request with this method, path and headers (under CGI's names: "X_REQUEST_ID") comes in. It is asked in the
main loop, before the body and before a thread is taken, and must not block."""


def admit_anybody(method: str, path: str, headers: Mapping[str, str]) -> Entry:
    """An Admit that refuses nothing."""
    return ANYBODY
