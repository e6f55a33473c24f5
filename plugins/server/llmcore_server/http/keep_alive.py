"""What a stream says while it has nothing to say: proxies and clients cut connections that are silent for long."""

from __future__ import annotations

import time

from llmcore_server.http.deadlines import Deadline, Deadlines
from llmcore_server.http.reply import Reply

COMMENT = b": keep-alive\n\n"
"""A comment, as server-sent events have them: no client sees it."""


class KeepAlive:
    """Sends a comment on `reply` whenever nothing was sent for `seconds`, until `end`. The bridge's thread sends it,
    and nothing is done for a stream that is not silent.

    The first comment brings status 200: what goes wrong later is an event of the stream.
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
