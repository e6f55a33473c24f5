"""A connection: its requests, its answers, which any thread may send, and its time limits."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from llmcore.api.errors import RequestError, reraise_if_stopping
from waitress.channel import HTTPChannel

from llmcore_server.http.access import Entry, network
from llmcore_server.http.errors import EncodeError
from llmcore_server.http.reply import Detach, Reply
from llmcore_server.http.streaming.limits import FRESH_SECONDS, BodyPace, Limits
from llmcore_server.http.streaming.loop import GONE, READ, WRITE, Loop, SendBatch
from llmcore_server.http.streaming.tasks import JsonErrorTask, StreamRequest, StreamTask, refusal
from llmcore_server.http.strict import Head, Pool, too_many_bodies

logger = logging.getLogger(__name__)


class Feed:
    """An answer that is made while it is sent. `sent`: bytes of its pieces so far."""

    __slots__ = ("began", "pieces", "sent", "task")

    def __init__(self, task: StreamTask, pieces: Iterator[bytes]) -> None:
        self.task, self.pieces = task, pieces
        self.began, self.sent = time.monotonic(), 0


class Owner(Protocol):
    """The server, as a connection needs it."""

    limits: Limits
    pool: Pool
    loop: Loop
    send_batch: SendBatch
    encoder: Callable[[str], EncodeError]
    """The error encoder of the dialect of a path."""

    def judge(self, head: Head) -> Entry:
        """Admit or refuse a request by its head."""

    def forget(self, channel: StreamChannel) -> None:
        """`channel` is closing."""


class StreamChannel(HTTPChannel):  # type: ignore[misc]
    """A connection whose current request may be answered by a `Reply`.

    The main loop watches it for `_watched`. After a change of what it waits for, the main loop's thread calls
    `settle`, and any other thread `_ask`.
    """

    task_class = StreamTask
    error_task_class = JsonErrorTask
    requests: list[Any]
    request: StreamRequest | None
    will_close: bool
    close_when_flushed: bool

    # Slots, and in __init__ also the attributes that waitress sets late. So all connections have the same few keys.
    # Without that Python looks up every attribute and method in a hash table of the connection.
    __slots__ = (
        *("_allowance", "_asked", "_behind_since", "_drained", "_ended", "_extra", "_feed", "_limits"),
        *("_lingers_since", "_lingers_until", "_outbuf", "_owner", "_pace", "_reply", "_served", "_shut"),
        *("_since", "_watched"),
        "refused",
    )

    def __init__(self, owner: Owner, *args: Any, **named: Any) -> None:
        self._owner, self._limits, self._since = owner, owner.limits, time.monotonic()
        self._reply: Reply | None = None
        self._feed: Feed | None = None
        self._extra = self._served = self._ended = self._shut = self._asked = False
        self._behind_since: float | None = None
        self._allowance = 0.0
        self._lingers_until: float | None = None
        self._lingers_since = 0.0
        self._drained = 0
        self._pace: BodyPace | None = None
        self.refused = False  # by a worker thread, whose answer is to be read before the connection closes
        self._watched: int | None = None
        self.request, self.will_close, self.close_when_flushed = None, False, False
        self.total_outbufs_len = self.current_outbuf_count = 0
        super().__init__(*args, **named)
        self._outbuf = threading.RLock()  # a Condition's own `with` is two calls more, for every piece of a stream
        self.outbuf_lock = threading.Condition(self._outbuf)

    def parser_class(self, adj: object) -> StreamRequest:
        """waitress asks for one to be refused in place of the request that the application failed on."""
        request = self._new_request()
        request.show(self.requests[0].line)
        request.entry = self.requests[0].entry
        return request

    def _new_request(self) -> StreamRequest:
        owner = self._owner
        sender = network(self.addr[0])
        return StreamRequest(
            self._limits, owner.pool, owner.encoder, owner.judge, sender=sender, yield_up=self._yield_up
        )

    # --- worker threads

    def service(self) -> None:
        """Serve one request; a detached one leaves the channel busy."""
        try:
            super().service()
        except Detach as detached:
            for request in self.requests[:1]:
                request.close()  # the body has been read; a stream may be long
            if self.connected:
                detached.reply.attach()
            else:
                detached.reply.abandon()
        else:
            self._ask()

    def write_soon(self, data: bytes) -> int:
        """Send a piece of an answer in the usual way; the main loop sends what the socket does not take."""
        taken: int = super().write_soon(data)
        if self.total_outbufs_len or self.will_close:
            self._ask()
        return taken

    def _ask(self) -> None:
        if not self._asked:
            self._asked = True
            self._owner.loop.call(self._answer)

    def _answer(self) -> None:
        self._asked = False  # first, so that a change from now on asks again
        self.ready(0)

    def touch(self) -> None:
        """A request was answered: the wait for the next begins."""
        self._since = time.monotonic()
        self._served = True

    def hold(self, reply: Reply) -> None:
        """`reply` answers the current request."""
        with self.requests_lock:
            self._reply = reply
            ended = self._ended
            if len(self.requests) > 1:
                self._ask()  # the main loop has stopped reading; it must see the client leave
        if not self.connected:
            reply.abandon()
        elif ended:
            reply.probe()

    def let_go(self, reply: Reply) -> None:
        """The current request is answered in the usual way after all."""
        with self.requests_lock:
            if self._reply is reply:
                self._reply = None

    # --- the main loop

    def ready(self, events: int) -> None:
        """The socket can be read, written to, or neither ever again."""
        try:
            if events & READ and self.readable():
                self.handle_read()
            if events & WRITE and self.socket is not None:
                self.handle_write()
            if events & GONE:
                self.handle_close()
            self.settle()
        except BaseException as error:
            reraise_if_stopping(error)
            logger.exception("a connection failed")
            self.handle_close()

    def settle(self) -> None:
        """Do the work that can be done now, and watch for the rest."""
        if self.socket is None:
            return
        if self.writable() and not (self._watched or 0) & WRITE:
            self.handle_write()
            if self.socket is None:
                return
        wanted = (READ if self.readable() else 0) | (WRITE if self.writable() else 0)
        if wanted != self._watched:
            if self._watched is None:
                self._owner.loop.add(self._fileno, wanted, self.ready)
            else:
                self._owner.loop.change(self._fileno, wanted)
            self._watched = wanted

    def readable(self) -> bool:
        """Also while a reply is open, so that a client disconnect is noticed at once."""
        if self._ended or self.will_close or self.close_when_flushed:
            return False
        if self._reply is not None or self._lingers_until is not None:
            return True
        return not self.total_outbufs_len and len(self.requests) < 2

    def writable(self) -> bool:
        """True if data is to be sent or the connection to be closed."""
        if self.total_outbufs_len or self.will_close or self.close_when_flushed or self._feed is not None:
            return True
        if self._ended and not self.requests:
            self.close_when_flushed = True
            return True
        return False

    def handle_read(self) -> None:
        """Read the bytes that have come. A client that stopped sending may still read its answer."""
        try:
            data = self.socket.recv(self.adj.recv_bytes)
        except BlockingIOError:
            return
        except OSError:
            self.handle_close()
            return
        if data:
            self.received(data)
            if self._lingers_until is not None:
                self._drain(len(data))
        elif self.requests and self._lingers_until is None:
            self._end()
        else:
            self.handle_close()

    def handle_write(self) -> None:
        """Send what is left, and the next piece of an answer; after a refusal, say that nothing more follows."""
        if self.refused and self.close_when_flushed and not self._ended:
            self.refused = self.close_when_flushed = False
            self._linger()
        super().handle_write()
        if self._feed is not None and not self.total_outbufs_len:
            self._send_next(self._feed)
        if self._lingers_until is not None and not self.total_outbufs_len:
            self._shut_down()

    def received(self, data: bytes) -> bool:
        """Parse `data`; but nothing is accepted while a reply is open, and the connection closes after it."""
        with self.requests_lock:
            if self._reply is not None:
                self._extra = True
                return False
            while data and not (self.will_close or self.close_when_flushed or self._lingers_until is not None):
                if self.request is None:
                    self.request, self._pace = self._new_request(), None
                    self._since = time.monotonic()
                data = self._take(self.request, data)
        return True

    def handle_close(self) -> None:
        """Free what the connection holds. The open reply hears of the client disconnect."""
        if self.socket is None:
            return
        with self.requests_lock:
            self.connected = False  # from here on `hold` sees that the client has gone
            reply, self._reply = self._reply, None
            self._feed = None
            unserved = [*self.requests[1:], *([self.request] if self.request is not None else [])]
            self.request = None
        self._owner.forget(self)
        super().handle_close()
        for request in unserved:
            request.close()
        if reply is not None:
            reply.abandon()

    def send(self, data: bytes, do_close: bool = True) -> int:
        """Send what the socket takes. It never closes, as locks may be held: `handle_write` does, after this."""
        try:
            sent: int = self.socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self.will_close = True
            return len(data)
        return sent

    def sweep(self, now: float) -> None:
        """Enforce the limits of time."""
        limits, request, waited = self._limits, self.request, now - self._since
        if self._lingers_until is not None:
            if now > self._lingers_until:
                self.handle_close()
        elif self._feed is not None or self.total_outbufs_len:
            with self.outbuf_lock:
                if self._feed is None:
                    self._watch_backlog(now)
                elif now - self._feed.began > limits.backlog_seconds + self._feed.sent / limits.rate:
                    self._cut_off()
            if self.will_close:
                self.handle_close()
        elif self.will_close or self.close_when_flushed:
            return
        elif request is not None and request.head is not None:
            self._watch_pace(now, request)
        elif self.requests:
            return
        elif request is None:
            ended = self._served and self.server.draining  # it was answered just when the end began
            if ended or waited > (limits.idle_seconds if self._served else limits.head_seconds):
                self.handle_close()
        elif waited > limits.head_seconds:
            self._break_off(RequestError("The header took too long.", code="request_timeout", status=408))

    def _watch_pace(self, now: float, request: StreamRequest) -> None:
        if self._pace is None:
            self._pace = BodyPace(self._limits, now)
        elif self._pace.is_late(now, request.body_size):
            text = (
                f"The body took too long: after {self._limits.body_seconds:g} s it has to arrive at "
                f"{self._limits.rate} bytes a second."
            )
            self._break_off(RequestError(text, code="request_timeout", status=408))

    def _yield_up(self) -> None:
        """The pool needs the room of the body that is being read."""
        self._break_off(too_many_bodies())

    def _break_off(self, error: RequestError) -> None:
        """Refuse the request that is being read, after the answers before it."""
        with self.requests_lock:
            request = self.request
            if request is None:
                return
            if not self.requests:
                self.refuse(error, request)
            else:
                request.error = error
                request.close()
                self._enqueue(request)
        self._owner.loop.later(self.settle)

    def refuse(self, error: RequestError, request: StreamRequest | None = None, *, close: bool = True) -> None:
        """Answer with `error` from the main loop; nothing that the client sends after it is looked at."""
        request = request or self._new_request()
        request.error = error
        request.close()
        self.request = None
        answer, closes = refusal(request, close=close or self.server.draining)
        self.post(answer)
        self.touch()
        if closes:
            self._owner.send_batch.flush()
            self._linger()

    def _linger(self) -> None:
        """Throw away further bytes until the client has read its answer."""
        self._lingers_since = time.monotonic()
        self._lingers_until = self._lingers_since + self._limits.linger_seconds
        if not self.total_outbufs_len:
            self._shut_down()

    def _drain(self, n: int) -> None:
        """Count `n` more bytes that were thrown away."""
        limits = self._limits
        self._drained += n
        last = self._lingers_since + limits.longest_linger_seconds
        self._lingers_until = min(time.monotonic() + limits.linger_seconds, last)
        if self._drained > limits.linger_bytes:
            self.handle_close()

    @property
    def busy(self) -> bool:
        """True while a request is being answered, an answer is being sent, or a first request is on its way."""
        if self.requests or self.total_outbufs_len:
            return True
        return not (self._served or self._ended) and time.monotonic() - self._since < FRESH_SECONDS

    def _take(self, request: StreamRequest, data: bytes) -> bytes:
        """Give `data` to the request that is being read. Returns the bytes that are left."""
        rest = data[request.received(data) :]
        understood = request.completed and request.error is None
        request.error = request.entry.error or request.error  # a client without a key hears of nothing else
        if request.error is not None and not self.requests:
            self.refuse(request.error, request, close=not understood)
            return rest
        if request.expect_continue and not self.requests:
            self.send_continue()
        if request.completed or request.error is not None:
            self._enqueue(request)
        return rest

    def _enqueue(self, request: StreamRequest) -> None:
        """Let a worker thread answer `request`, which is complete or has an error, in its turn."""
        self.request = None
        self.requests.append(request)
        if len(self.requests) == 1:
            self._owner.send_batch.flush()  # a refusal of the request before it comes first
            self.server.add_task(self)

    def send_continue(self) -> None:
        """Ask for the body."""
        if self.request is not None:
            self.request.expect_continue = False
            self.post(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _end(self) -> None:
        """The client sends nothing more. Only sending shows if it still reads: see Reply.probe."""
        with self.requests_lock:
            self._ended = True
            reply = self._reply
            old = reply is not None and self.requests[0].version == "1.0"
        if old:
            self.handle_close()  # HTTP/1.0 has nothing to probe with
            return
        if reply is not None:
            reply.probe()

    def _shut_down(self) -> None:
        if not self._shut:
            self._shut = True
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_WR)

    # --- the threads that answer

    def post(self, data: bytes) -> None:
        """Send `data`, which may wait for what goes to other clients: see SendBatch."""
        self._owner.send_batch.post(self._deliver, data)

    def _deliver(self, data: bytes) -> None:
        try:
            self.push(data)
        except BaseException as error:
            reraise_if_stopping(error)
            logger.exception("an answer is lost, and its connection closes")
            if self._reply is not None:
                self._reply.why_closed = "failure"
            self.will_close = True
            self._ask()

    def push(self, data: bytes, allowance: float = 0.0) -> None:
        """Send what the socket takes now and leave the rest to the main loop; cuts off a client that is too slow.

        `allowance`: seconds granted beyond the limit, and the limit of size waived.
        """
        with self._outbuf:
            if not self.connected or self.will_close or not data:
                return
            sent = 0
            if not self.total_outbufs_len:
                sent = self.send(data)
                if sent == len(data) and not self.will_close:
                    return  # as nearly always
                self._behind_since = None
            self._allowance = allowance
            if sent < len(data):
                self.outbufs[-1].append(data[sent:])
                self.total_outbufs_len += len(data) - sent
            self._watch_backlog(time.monotonic())
            if self.total_outbufs_len > self._limits.backlog and not allowance:
                self._cut_off()
            if self.total_outbufs_len or self.will_close:
                self._ask()

    def finish(self, task: StreamTask, build: Callable[[bool], bytes], *, close: bool) -> None:
        """Send the last bytes, `build(closes)`, and take the next request, or close."""
        self._owner.send_batch.flush()
        with self.requests_lock:
            self._reply = None
            whole = not close
            close = close or self._extra or self._ended or len(self.requests) > 1 or self.request is not None
            data = build(close)
            self.push(data, len(data) / self._limits.rate if whole else 0.0)
            for request in self.requests:
                request.close()
            self.touch()
            self.requests = []
            if close or task.close_on_finish:
                self.close_when_flushed = True
                self._ask()

    def feed(self, task: StreamTask, pieces: Iterator[bytes]) -> None:
        """Have the main loop send `pieces`, each when the client has taken the one before it, and close after them."""
        self._owner.send_batch.flush()
        with self.requests_lock:
            if self.connected:
                self._feed = Feed(task, pieces)
        self._ask()

    def _send_next(self, feed: Feed) -> None:
        """Main loop: make the next piece and send what the socket takes of it."""
        try:
            piece = next(feed.pieces, None)
        except BaseException as error:
            reraise_if_stopping(error)
            logger.exception("an answer breaks off, and its connection is reset")
            self.reset_when_closed()
            self.handle_close()
            return
        if piece is None:
            self._feed = None
            self.finish(feed.task, lambda _: b"", close=True)
            return
        feed.sent += len(piece)
        self.push(piece)

    def _watch_backlog(self, now: float) -> None:
        if self._behind_since is None or not self.total_outbufs_len:
            self._behind_since = now
        if now - self._behind_since > self._limits.backlog_seconds + self._allowance:
            self._cut_off()

    def _cut_off(self) -> None:
        """Close without waiting: the main loop would never find this socket writable, so end it for both sides."""
        if self._reply is not None:
            self._reply.why_closed = "slow_client"
        self.will_close = True
        self.reset_when_closed()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def reset_when_closed(self) -> None:
        """The client must not take a part of an answer for the whole."""
        with contextlib.suppress(OSError):  # the client may have closed it at this moment
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
