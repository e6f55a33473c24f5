"""Answers that need no thread: detached replies on waitress.

A responder that calls `detach` returns at once; its worker thread goes back to the pool while the channel keeps the
request, so the connection stays busy. Whoever holds the `Reply` sends from any thread, and no send ever blocks: what
the socket does not take is left to waitress's main loop.

This is the only file that knows the insides of waitress. They are pinned (`WAITRESS`), and
tests/http/test_streaming.py holds every one that is used.

Locks are taken in this order: the reply's, channel.requests_lock, channel.outbuf_lock.
"""

from __future__ import annotations

import contextlib
import resource
import socket
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any

import falcon
from waitress import wasyncore
from waitress.channel import HTTPChannel
from waitress.server import create_server
from waitress.task import ErrorTask, WSGITask

from llmcore.errors import ConfigError
from llmcore.http.errors import http_error, openai_error
from llmcore.http.reply import Detach, Reply
from llmcore.http.request_id import request_id

WAITRESS = "3.0.2"
"""The version whose internals this file was written against."""

MAX_BACKLOG_BYTES = 1 << 20
"""A client for which more than this lies unsent is cut off."""

MAX_BACKLOG_SECONDS = 30.0
"""So is one whose backlog has not been empty for this long."""

SPARE_FILES = 128
"""Open files a worker needs beside its connections."""

LATE_SECONDS = 1.0
"""How long answers cut off by the end of the grace have to leave."""

_TASK = "llmcore.task"
_SSE_HEADERS = (("Cache-Control", "no-cache"), ("X-Accel-Buffering", "no"))


def detach(env: Mapping[str, Any], response: falcon.Response) -> Reply:
    """Make `response` one that is sent later. Headers set on it so far and by middleware are kept.

    If the responder raises afterwards, the error is the answer and the reply closes.
    """
    task: StreamTask = env[_TASK]
    reply = Reply(task)
    task.reply = reply
    task.channel.hold(reply)
    response.stream = reply
    return reply


class StreamTask(WSGITask):  # type: ignore[misc]
    """A waitress task that outlives its worker thread when its response was detached."""

    reply: Reply | None = None
    response_headers: list[tuple[str, str]]

    def get_environment(self) -> dict[str, Any]:
        """WSGI's environment, with the way back to this task."""
        environment: dict[str, Any] = super().get_environment()
        environment[_TASK] = self
        return environment

    def service(self) -> None:
        """Run the application; a reply that was not detached after all is closed."""
        detached = False
        try:
            super().service()
        except Detach:
            detached = True
            raise
        finally:
            if self.reply is not None and not detached:
                self.channel.let_go(self.reply)
                self.reply.abandon()

    def send_part(self, data: bytes) -> None:
        """Frame and send a piece of the body."""
        head = b"" if self.wrote_header else self._stream_header()
        self.channel.push(head + self._frame(data) if data else head)

    def send_end(self) -> None:
        """Send the last chunk and hand the channel back, to be closed."""
        head = b"" if self.wrote_header else self._stream_header()
        self.channel.finish(self, lambda _: head + (b"0\r\n\r\n" if self.chunked_response else b""), close=True)

    def send_whole(self, status: int, body: bytes, content_type: str, headers: Mapping[str, str]) -> None:
        """Send header and body and hand the channel back; it closes if the client asked or sent more meanwhile."""

        def build(close: bool) -> bytes:
            if close:
                self.set_close_on_finish()
            return self._header(falcon.code_to_http_status(status), content_type, headers, len(body)) + body

        self.channel.finish(self, build, close=False)

    def _stream_header(self) -> bytes:
        return self._header("200 OK", "text/event-stream; charset=utf-8", dict(_SSE_HEADERS), None)

    def _header(self, status: str, content_type: str, headers: Mapping[str, str], length: int | None) -> bytes:
        replaced = {"content-type", "content-length", *(name.lower() for name in headers)}
        kept = [(name, value) for name, value in self.response_headers if name.lower() not in replaced]
        self.status = status
        self.response_headers = [*kept, ("Content-Type", content_type), *headers.items()]
        self.content_length = length
        header: bytes = self.build_response_header()
        self.wrote_header = True
        return header

    def build_response_header(self) -> bytes:
        """The header; a server that is about to end keeps no connection."""
        if self.channel.server.draining:
            self.request.headers["CONNECTION"] = "close"
        header: bytes = super().build_response_header()
        return header

    def _frame(self, data: bytes) -> bytes:
        return b"%X\r\n%b\r\n" % (len(data), data) if self.chunked_response else data


class JsonErrorTask(ErrorTask):  # type: ignore[misc]
    """What waitress itself refuses (a body or header too large, broken HTTP), in our error shape."""

    def execute(self) -> None:
        """Send the error and close."""
        error = http_error(self.request.error.code)
        body = openai_error(error)
        self.status = falcon.code_to_http_status(error.status)
        self.response_headers.append(("Content-Type", "application/json"))
        self.response_headers.append(("X-Request-Id", request_id(self.request.headers.get("X_REQUEST_ID"))))
        self.set_close_on_finish()
        self.content_length = len(body)
        self.write(body)


class StreamChannel(HTTPChannel):  # type: ignore[misc]
    """A connection whose current request may be answered by a `Reply`.

    Stricter parsing of requests (header deadline, chunk-size lines, Host) belongs in a `parser_class` of this class.
    """

    task_class = StreamTask
    error_task_class = JsonErrorTask
    requests: list[Any]
    _reply: Reply | None = None
    _behind_since: float | None = None
    _extra = False

    # --- worker threads

    def service(self) -> None:
        """Serve one request; a detached one leaves the channel busy."""
        try:
            super().service()
        except Detach as detached:
            if self.connected:
                detached.reply.attach()
            else:
                detached.reply.abandon()

    def hold(self, reply: Reply) -> None:
        """`reply` answers the current request."""
        with self.requests_lock:
            self._reply = reply
            if len(self.requests) > 1:
                self.server.pull_trigger()  # the main loop has stopped reading; it must see the client leave
        if not self.connected:
            reply.abandon()

    def let_go(self, reply: Reply) -> None:
        """The current request is answered in the usual way after all."""
        with self.requests_lock:
            if self._reply is reply:
                self._reply = None

    # --- the main loop

    def readable(self) -> bool:
        """Also while a reply is open, so that a client that leaves is noticed at once."""
        if self._reply is not None:
            return not (self.will_close or self.close_when_flushed)
        return bool(super().readable())

    def received(self, data: bytes) -> bool:
        """Parse `data`; but nothing is accepted while a reply is open, and the connection closes after it."""
        with self.requests_lock:
            if self._reply is not None:
                self._extra = True
                return False
        return bool(super().received(data))

    def handle_close(self) -> None:
        """Tell the open reply that its client has left."""
        reply, self._reply = self._reply, None
        super().handle_close()
        if reply is not None:
            reply.abandon()

    @property
    def busy(self) -> bool:
        """Whether a request is being answered or an answer is still being sent."""
        return bool(self.requests or self.total_outbufs_len)

    # --- whoever holds the reply

    def push(self, data: bytes) -> None:
        """Send what the socket takes now and leave the rest to the main loop; cuts off a client that is too slow."""
        with self.outbuf_lock:
            if not self.connected or self.will_close or not data:
                return
            sent = 0 if self.total_outbufs_len else self._send_now(data)
            if sent < len(data):
                self.outbufs[-1].append(data[sent:])
                self.total_outbufs_len += len(data) - sent
            self._watch_backlog()
            if self.total_outbufs_len or self.will_close:
                self.server.pull_trigger()

    def finish(self, task: StreamTask, build: Callable[[bool], bytes], *, close: bool) -> None:
        """Send the last bytes, `build(closes)`, and take the next request, or close."""
        with self.requests_lock:
            self._reply = None
            close = close or self._extra or len(self.requests) > 1 or self.request is not None
            self.push(build(close))
            for request in self.requests:
                request.close()
            self.requests = []
            if close or task.close_on_finish:
                self.close_when_flushed = True
        self.last_activity = time.time()
        if self.connected:
            self.server.pull_trigger()

    def _send_now(self, data: bytes) -> int:
        try:
            sent: int = self.socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self.will_close = True
            return len(data)
        self.last_activity = time.time()
        return sent

    def _watch_backlog(self) -> None:
        if not self.total_outbufs_len:
            self._behind_since = None
            return
        now = time.monotonic()
        if self._behind_since is None:
            self._behind_since = now
        if self.total_outbufs_len > MAX_BACKLOG_BYTES or now - self._behind_since > MAX_BACKLOG_SECONDS:
            self._cut_off()

    def _cut_off(self) -> None:
        """Close without waiting: the main loop would never find this socket writable, so end it for both sides."""
        self.will_close = True
        with contextlib.suppress(OSError):  # the client may have closed it at this moment
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.socket.shutdown(socket.SHUT_RDWR)


class HttpServer:
    """waitress on an inherited listening socket, with every default that hurts replaced."""

    def __init__(self, app: Callable[..., Any], listener: socket.socket, *, connections: int) -> None:
        raise_open_files(connections + SPARE_FILES)
        self._server = create_server(
            app,
            sockets=[listener],
            threads=16,
            connection_limit=connections,
            backlog=2048,
            asyncore_use_poll=True,
            asyncore_loop_timeout=1,
            channel_request_lookahead=1,
            channel_timeout=30,
            cleanup_interval=5,
            max_request_header_size=32 << 10,
            max_request_body_size=32 << 20,
            outbuf_high_watermark=2 << 20,
            clear_untrusted_proxy_headers=True,
            expose_tracebacks=False,
            ident=None,
        )
        self._server.channel_class = StreamChannel
        self._server.draining = False
        self._deadline: float | None = None
        self.turned = time.monotonic()

    def run(self, draining: Callable[[], None] | None = None, late: Callable[[], None] | None = None) -> None:
        """Serve until `stop`, then call `draining` and go on until no request is open.

        Connections are still taken meanwhile, so that whoever comes hears at once that the server is ending; none is
        kept. When the grace is over, `late` is called to end what is left, and has a second to be heard.
        """
        while self._deadline is None:
            self._turn(1.0)
        self._server.draining = True
        if draining is not None:
            draining()
        if time.monotonic() >= self._deadline:
            self._stop_accepting()
        for channel in self._channels():
            if not channel.busy:
                channel.close_when_flushed = True
        self._wait_for_idle(self._deadline)
        self._stop_accepting()
        if late is not None and self._busy():
            late()
            self._wait_for_idle(time.monotonic() + LATE_SECONDS)
        self._server.task_dispatcher.shutdown(timeout=0.5)
        for channel in self._channels():
            channel.handle_close()
        self._server.trigger.close()

    def stop(self, grace: float) -> None:
        """End once open requests are answered, or after `grace` seconds; with none, nothing more is accepted.

        From any thread; the first call counts.
        """
        if self._deadline is None:
            self._deadline = time.monotonic() + grace
            self._server.pull_trigger()

    def _stop_accepting(self) -> None:
        if self._server.accepting:
            self._server.accepting = False
            self._server.del_channel()
            self._server.socket.close()

    def _busy(self) -> bool:
        return any(channel.busy for channel in self._channels())

    def _wait_for_idle(self, deadline: float) -> None:
        while time.monotonic() < deadline and self._busy():
            self._turn(0.05)

    def _channels(self) -> list[StreamChannel]:
        return list(self._server.active_channels.values())

    def _turn(self, seconds: float) -> None:
        self.turned = time.monotonic()
        wasyncore.loop(timeout=seconds, use_poll=True, map=self._server._map, count=1)


def raise_open_files(need: int) -> None:
    """Raise this process's limit of open files to `need`; ConfigError where the system forbids it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= need:
        return
    if hard != resource.RLIM_INFINITY and hard < need:
        raise ConfigError(
            f"{need} open files are needed and the hard limit is {hard}; raise it with `ulimit -Hn {need}` "
            "(or LimitNOFILE= in a systemd unit, --ulimit nofile= in docker)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
