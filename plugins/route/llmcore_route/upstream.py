"""Requests to nodes, with the standard library's HTTP: no redirect is followed, and no variable names a proxy."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from llmcore.api import RequestError

from llmcore_route.addresses import Place, dial

CONNECT_SECONDS = 5.0
"""The time for a connection to each address of a node, TLS included."""

SEND_SECONDS = 30.0
"""The time in which a node has to read a request."""

HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"),
        *("te", "trailer", "transfer-encoding", "upgrade"),
    }
)
"""Headers that hold for one connection alone."""

OURS = frozenset({"host", "content-length", "expect", "authorization", "x-api-key", "x-request-id"})
"""Further headers of a request that the router writes itself. A client's key is for the router, so no node gets it."""

THEIRS = frozenset({"content-length", "content-type", "date", "set-cookie"})
"""Further headers of an answer that the router writes itself. A cookie would bind a client to one node, which does not
get the client's next request."""


class Unanswered(Exception):
    """A node did not answer, or broke off. The text says why."""


class Unreachable(Unanswered):
    """A node takes no connection."""


@dataclass(frozen=True)
class Call:
    """A client's request. `target`: its path and query as they came. `headers`: those to send, without the key."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


class _Connection(http.client.HTTPConnection):
    """A connection that is made as `dial` does it."""

    def __init__(self, place: Place) -> None:
        super().__init__(place.host, place.port)
        self.default_port = 443 if place.secure else 80  # beside any other port, Host names it
        self.place = place

    def connect(self) -> None:
        """See HTTPConnection."""
        self.sock = dial(self.place, CONNECT_SECONDS)


class Exchange:
    """One request to one node, by one thread. Another thread may `cancel` it."""

    def __init__(self, place: Place, key: str | None) -> None:
        self._connection = _Connection(place)
        self._key = key
        self._socket: socket.socket | None = None
        self._cancelled = False

    def open(self, call: Call, wait: float | None = None) -> http.client.HTTPResponse:
        """Send a request and read the header of the answer. Raises Unanswered, or RequestError (400) for a request
        that HTTP cannot carry.

        `wait`: seconds that each part of the answer may take; None for any time, as a long queue may need.
        """
        connection = self._connection
        self._write_head(call)
        try:
            connection.connect()
        except OSError as error:
            raise Unreachable(f"no connection: {error}") from error
        self._socket = connection.sock
        if self._cancelled:
            raise Unanswered("the request was cancelled")
        try:
            connection.sock.settimeout(SEND_SECONDS)
            connection.endheaders(call.body or None)
            connection.sock.settimeout(wait)
            return connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise Unanswered(f"{type(error).__name__}: {error}") from error

    def _write_head(self, call: Call) -> None:
        """Keep the head, which is sent with the body. A client's mistake shows here, so it is not a node's fault."""
        connection = self._connection
        try:
            connection.putrequest(call.method, connection.place.base + call.target, skip_accept_encoding=True)
            for name, value in call.headers:
                connection.putheader(name, value.encode("latin-1", "replace"))
        except (http.client.HTTPException, ValueError) as error:
            text = "the request's path or a header of it cannot be sent on; write it in ASCII"
            raise RequestError(text) from error
        if self._key is not None:
            connection.putheader("Authorization", f"Bearer {self._key}")
        if call.body or call.method in ("POST", "PUT", "PATCH"):
            connection.putheader("Content-Length", str(len(call.body)))
        connection.putheader("Connection", "close")

    def cancel(self) -> None:
        """Let the thread that reads find the end of the answer now."""
        self._cancelled = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                # Not the method of a TLS socket: it frees what the thread that reads is using.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """End the request. The node notices that its answer has no reader."""
        self.cancel()
        self._connection.close()


def piece(response: http.client.HTTPResponse, most: int) -> bytes:
    """The next bytes of an answer, as they come; b"" at its end. Raises Unanswered if it breaks off."""
    try:
        return response.read1(most)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unanswered(f"the answer broke off: {type(error).__name__}") from error


def whole(response: http.client.HTTPResponse, most: int) -> bytes:
    """The rest of an answer. Raises Unanswered if it breaks off, or is longer than `most` bytes."""
    try:
        body = response.read(most + 1)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unanswered(f"the answer broke off: {type(error).__name__}") from error
    if len(body) > most:
        raise Unanswered(f"the answer is longer than {most:,} bytes")
    missing = response.length or 0
    if missing:
        raise Unanswered(f"the answer broke off {missing:,} bytes before its end")
    return body


def request_headers(given: Mapping[str, str], request_id: str) -> tuple[tuple[str, str], ...]:
    """The headers of a client's request (by their names) that a node gets."""
    dropped = HOP_BY_HOP | OURS | _named(given.get("CONNECTION", ""))
    kept = [(name.title(), value) for name, value in given.items() if name.lower() not in dropped]
    return (*kept, ("X-Request-Id", request_id))


def answer_headers(response: http.client.HTTPResponse) -> dict[str, str]:
    """The headers of a node's answer that a client gets. Values of one name are joined."""
    dropped = HOP_BY_HOP | THEIRS | _named(response.headers.get("connection", ""))
    found: dict[str, list[str]] = {}
    for name, value in response.headers.items():
        if name.lower() not in dropped:
            found.setdefault(name.title(), []).append(value)
    return {name: ", ".join(values) for name, values in found.items()}


def _named(connection: str) -> frozenset[str]:
    return frozenset(name.strip().lower() for name in connection.split(","))
