"""The server: its listening socket, its main loop and its connections."""

from __future__ import annotations

import logging
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from waitress.server import create_server

from llmcore_server.http.access import Admit, Entry, admit_anybody, announced
from llmcore_server.http.errors import EncodeError, openai_error
from llmcore_server.http.streaming.channel import StreamChannel
from llmcore_server.http.streaming.limits import (
    REFUSALS,
    SPARE_FILES,
    Limits,
    raise_open_files,
    too_many,
    too_many_of_address,
)
from llmcore_server.http.streaming.loop import READ, Loop, SendBatch
from llmcore_server.http.strict import Head, Pool

logger = logging.getLogger(__name__)

ACCEPTS = 16
"""Connections taken in one turn of the loop: more would leave the other workers on the socket with too few."""

TURN_SECONDS = 5.0
"""A main loop that has not turned for this time is stuck; it turns every second at least."""

SWEEP_SECONDS = 0.5
"""Seconds between two checks of every connection's time limits."""

LATE_SECONDS = 1.0
"""The seconds that answers cut off at the end of the grace have to leave."""


class HttpServer:
    """waitress on an inherited listening socket, with every default that hurts replaced.

    `connections`: the most at a time; further clients get a 503. `admit` decides about every request when its header
    was read, before its body. `encoder`: the error encoder of a path. `send_batch` sends pieces of streams and
    refusals.
    """

    def __init__(
        self,
        app: Callable[..., Any],
        listener: socket.socket,
        *,
        connections: int,
        admit: Admit = admit_anybody,
        encoder: Callable[[str], EncodeError] = lambda path: openai_error,
        limits: Limits | None = None,
        send_batch: SendBatch | None = None,
        threads: int = 16,
    ) -> None:
        raise_open_files(connections + REFUSALS + SPARE_FILES)
        self.limits = limits or Limits()
        self.pool = Pool(self.limits.bodies)
        self.send_batch = send_batch or SendBatch()
        self._turned = time.monotonic()
        self._connections = connections
        self._admit = admit
        self.encoder = encoder
        self._server = create_server(
            app,
            sockets=[listener],
            threads=threads,
            connection_limit=1 << 30,  # the limit is ours: see _open
            backlog=2048,
            channel_request_lookahead=1,
            recv_bytes=64 << 10,
            outbuf_overflow=1 << 30,  # nothing of an answer goes to a file,
            outbuf_high_watermark=1 << 30,  # and no thread waits for a client
            clear_untrusted_proxy_headers=True,
            expose_tracebacks=False,
            ident=None,
        )
        self._server.draining = False
        self._server.trigger.close()
        self._server.pull_trigger = lambda: None  # the loop is ours, and connections say themselves what they need
        self.loop = Loop(self.send_batch)
        self.loop.add(self._server.socket.fileno(), READ, self._knock)
        self._by_address: Counter[str] = Counter()
        self._swept = 0.0
        self._deadline: float | None = None
        self.deaf = False
        """True if the hub has failed, so that another process has to take this one's place."""

    def run(self, draining: Callable[[], None] | None = None, late: Callable[[], None] | None = None) -> None:
        """Serve until `stop`, then call `draining` and go on until no request is open.

        Meanwhile it still takes connections, so that a new client hears at once that the server is ending, but keeps
        none. When the grace is over, `late` ends the open requests, and a second is left to send their errors.
        """
        while self._deadline is None:
            self._turn(SWEEP_SECONDS)
        self._server.draining = True
        if draining is not None:
            draining()
        if time.monotonic() >= self._deadline:
            self._stop_accepting()
        for channel in self._channels():
            if not channel.busy:
                channel.close_when_flushed = True
                channel.settle()
        self._wait_for_idle(self._deadline)
        self._stop_accepting()
        if late is not None and self._busy():
            late()
            self._wait_for_idle(time.monotonic() + LATE_SECONDS)
        self._end_threads(time.monotonic() + 0.5)
        for channel in self._channels():
            channel.handle_close()
        self.loop.close()

    def turns(self) -> bool:
        """False if the main loop is stuck."""
        return time.monotonic() - self._turned < TURN_SECONDS

    def stop(self, grace: float) -> None:
        """End once open requests are answered, or after `grace` seconds; with none, nothing more is accepted.

        From any thread; the first call counts.
        """
        if self._deadline is None:
            self._deadline = time.monotonic() + grace
            self.loop.call(lambda: None)

    def run_hub(self, run: Callable[[], None], what: str) -> None:
        """Run the hub of the process, on a thread of its own; if it fails, end the server.

        Without its hub a process hears nothing, or answers from old news. `what`: the process, for the log.
        """
        try:
            run()
        except BaseException:  # an exit would end this thread without a word
            logger.exception("the hub of %s failed", what)
            self.deaf = True
            self.stop(0.0)

    # --- for channels

    def judge(self, head: Head) -> Entry:
        """See Owner."""
        return self._admit(head.method, head.path, head.headers)

    def forget(self, channel: StreamChannel) -> None:
        """See Owner."""
        self.loop.remove(channel._fileno)
        address = channel.addr[0]
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]

    # --- the main loop

    def _knock(self, events: int) -> None:
        """Accept, but last: a connection could get the number of one that was closed just now, and its events."""
        self.loop.later(self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS if self._server.accepting else 0):
            try:
                sock, address = self._server.socket.accept()
                self._server.set_socket_options(sock)
            except OSError:  # none is waiting, or the one that was has left
                return
            inner = sock.family == socket.AF_UNIX
            self._open(sock, (announced(address), None) if inner else self._server.fix_addr(address))

    def _open(self, sock: socket.socket, address: Any) -> None:
        """Take a connection, if only to say that there are too many."""
        server = self._server
        open_now = len(server.active_channels)
        if open_now >= self._connections + REFUSALS:
            sock.close()
            return
        channel = StreamChannel(self, server, sock, address, server.adj, map=server._map)
        most = self.limits.per_address
        self._by_address[channel.addr[0]] += 1
        if open_now >= self._connections:
            channel.refuse(too_many())
        elif 0 < most < self._by_address[channel.addr[0]] and sock.family != socket.AF_UNIX:
            channel.refuse(too_many_of_address(most))
        channel.settle()

    def _turn(self, seconds: float) -> None:
        now = self._turned = time.monotonic()
        self.loop.turn(seconds)  # reads what came before `now`, also while this process stood still
        if now >= self._swept + SWEEP_SECONDS:
            self._swept = now
            for channel in self._channels():
                channel.sweep(now)

    def _stop_accepting(self) -> None:
        if self._server.accepting:
            self._server.accepting = False
            self.loop.remove(self._server.socket.fileno())
            self._server.socket.close()

    def _busy(self) -> bool:
        return any(channel.busy for channel in self._channels())

    def _wait_for_idle(self, deadline: float) -> None:
        while time.monotonic() < deadline and self._busy():
            self._turn(0.05)

    def _end_threads(self, deadline: float) -> None:
        dispatcher = self._server.task_dispatcher
        dispatcher.set_thread_count(0)
        while dispatcher.threads and time.monotonic() < deadline:
            time.sleep(0.005)

    def _channels(self) -> list[StreamChannel]:
        return list(self._server.active_channels.values())
