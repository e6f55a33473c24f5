"""The answer to one request, sent later and from any thread, and the comments that keep a silent stream open."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Protocol

from llmcore_server.http.deadlines import Deadline, Deadlines, Terms

_STATUSES = range(200, 600)


class Transport(Protocol):
    """Carries a reply. Its calls are made one at a time, in order, and never block.

    `stream_type`: the content type of a stream, set before its first part.
    """

    stream_type: str

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """Headers for the answer, whichever it is, in place of others of their names. Too late once it has begun."""

    def send_part(self, data: bytes) -> None:
        """A piece of a stream, with the header before the first."""

    def send_end(self) -> None:
        """The end of the stream."""

    def send_break(self) -> None:
        """Close the connection in the middle of the stream, so that the client sees that it has no end."""

    def send_whole(self, status: int, body: bytes, content_type: str, headers: Mapping[str, str]) -> None:
        """A whole answer."""

    def send_pieces(self, pieces: Iterator[bytes], content_type: str, headers: Mapping[str, str]) -> None:
        """A long answer with status 200. `pieces` is asked for the next one when the client has taken the last."""

    def send_probe(self) -> None:
        """Send bytes that are not a part of the answer."""


class Detach(BaseException):
    """Unwinds a worker thread out of a response that others will write. It is not an `Exception`, so no handler
    catches it."""

    def __init__(self, reply: Reply) -> None:
        super().__init__()
        self.reply = reply


class Reply:
    """Either `stream` any number of times and `end` or `break_off`, or `respond` or `respond_in_pieces` once.

    `sent`: when the last piece of a stream was (time.monotonic()), 0.0 before the first. `terms`: whose request it
    answers, and for how long. `why_closed`: a key of `counters.CAUSES`, for when it closes.

    Anything else is a TypeError, after which the right thing can still be sent.

    If the client leaves before that, the `on_close` callbacks run, and later data is dropped. To the HTTP server it is
    a response body that detaches itself when iterated.
    """

    __slots__ = (
        *("_abandoned", "_callbacks", "_early", "_lock", "_phase", "_transport"),
        *("sent", "terms", "why_closed"),
    )

    def __init__(self, transport: Transport) -> None:
        self.terms = Terms()
        self.why_closed = "client"
        self._transport = transport
        self._lock = threading.Lock()
        self._early: list[Callable[[], None]] | None = []
        self._phase = "new"
        self._abandoned = False
        self._callbacks: list[Callable[[], None]] = []
        self.sent = 0.0

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        raise Detach(self)

    @property
    def closed(self) -> bool:
        """True if the client has left, or the request was answered in another way."""
        return self._abandoned

    @property
    def streaming(self) -> bool:
        """True while a stream goes on; an error is then a part of the stream."""
        return self._phase == "streaming"

    def stream_as(self, content_type: str) -> None:
        """Call this first if `stream` does not send server-sent events, but e.g. "application/x-ndjson"."""
        self._transport.stream_type = content_type

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """Have the answer carry `headers` as well. Call it before anything is sent."""
        with self._lock:
            self._send(partial(self._transport.add_headers, headers))

    def stream(self, data: bytes) -> None:
        """Send a piece of a stream of server-sent events; the first call sends status 200 and the header."""
        if not isinstance(data, bytes):
            raise TypeError(f"a piece of a stream is bytes, not {type(data).__name__}")
        with self._lock:
            if self._abandoned:
                return
            if self._phase != "streaming":
                self._enter("streaming", ("new",))
            self.sent = time.monotonic()
            if self._early is None:
                self._transport.send_part(data)
            else:
                self._early.append(partial(self._transport.send_part, data))

    def end(self) -> None:
        """End the stream; the connection closes when all is sent."""
        self._do("done", ("new", "streaming"), self._transport.send_end)

    def break_off(self) -> None:
        """Close the connection of a stream whose end is lost. The client must not take a part for the whole."""
        self._do("done", ("streaming",), self._transport.send_break)

    def respond(
        self,
        status: int,
        body: bytes,
        content_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send a whole answer; the connection is kept for the next request."""
        if not (isinstance(body, bytes) and isinstance(content_type, str) and status in _STATUSES):
            raise TypeError(f"an answer is a status, bytes and a media type, not {status}, {type(body).__name__}")
        send = partial(self._transport.send_whole, status, body, content_type, dict(headers or {}))
        self._do("done", ("new",), send)

    def respond_in_pieces(
        self, pieces: Iterator[bytes], content_type: str = "application/json", headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a whole answer, with status 200, that would take much memory as one object.

        Another thread asks `pieces` for the next piece when the client has taken the one before it. A piece may take
        some milliseconds to make. An answer of one piece is sent as `respond` sends it. A longer one has no
        Content-Length, because its length is not known before its last piece is made. It is chunked, or, for a client
        of HTTP/1.0, ends with its connection. The connection closes after it. If `pieces` raises, the connection is
        reset.
        """
        first, second = next(pieces, b""), next(pieces, None)
        if second is None:
            self.respond(200, first, content_type, headers)
            return
        rest = chain((first, second), pieces)
        self._do("done", ("new",), partial(self._transport.send_pieces, rest, content_type, dict(headers or {})))

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call `callback` once if the client leaves first; at once if it has left. It must not block."""
        with self._lock:
            if self._phase == "done":
                return
            if not self._abandoned:
                self._callbacks.append(callback)
                return
        callback()

    def probe(self) -> None:
        """The client sends nothing more: find out if it still reads. Called by the transport's side."""
        with self._lock:
            if self._abandoned or self._phase == "done":
                return
            self._send(self._transport.send_probe)

    def attach(self) -> None:
        """The worker thread has let go: send the data that was kept back. Called by the transport's side."""
        with self._lock:
            early, self._early = self._early or [], None
            for send in early:
                send()

    def abandon(self) -> None:
        """The client has left, or the responder failed after all. Called by the transport's side."""
        with self._lock:
            if self._abandoned or self._phase == "done":
                return
            self._abandoned = True
            self._early = None
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def _do(self, phase: str, allowed: tuple[str, ...], send: Callable[[], None]) -> None:
        with self._lock:
            if self._abandoned:
                return
            self._enter(phase, allowed)
            self._callbacks = []
            self._send(send)

    def _send(self, send: Callable[[], None]) -> None:
        """Now, or when the worker thread has let go."""
        if self._early is None:
            send()
        else:
            self._early.append(send)

    def _enter(self, phase: str, allowed: tuple[str, ...]) -> None:
        if self._phase not in allowed:
            raise RuntimeError(f"this reply is {self._phase} already")
        self._phase = phase


COMMENT = b": keep-alive\n\n"
"""A comment, as server-sent events have them: no client sees it."""


class KeepAlive:
    """Sends a comment on `reply` whenever nothing was sent for `seconds`, until `end`. The bridge's thread sends it.

    The first comment brings status 200, so a later error is an event of the stream.
    """

    def __init__(self, reply: Reply, deadlines: Deadlines, seconds: float) -> None:
        self._reply = reply
        self._deadlines = deadlines
        self._seconds = seconds
        self._ended = False
        self._began = time.monotonic()
        self._next: Deadline | None = None
        self._wait()

    def end(self) -> None:
        """The stream is over. From any thread."""
        self._ended = True
        if self._next is not None:
            self._next.cancel()

    def _wait(self) -> None:
        self._next = self._deadlines.add(max(self._began, self._reply.sent) + self._seconds, self._look)
        if self._ended:
            self._next.cancel()

    def _look(self) -> None:
        if self._ended:
            return
        if time.monotonic() - max(self._began, self._reply.sent) >= self._seconds:
            self._reply.stream(COMMENT)
        self._wait()
