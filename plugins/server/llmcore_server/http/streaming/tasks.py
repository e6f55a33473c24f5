"""Requests as waitress holds them, the answers to them, and the refusals that the application never sees."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import lru_cache
from itertools import chain
from typing import Any

import falcon
from llmcore.api.errors import RequestError, reraise_if_stopping
from waitress.task import ErrorTask, WSGITask

from llmcore_server.http.access import ANYBODY, ENTRY, Entry
from llmcore_server.http.errors import EncodeError, count_error, error_headers, http_error, openai_error
from llmcore_server.http.reply import Detach, Reply
from llmcore_server.http.streaming.limits import Limits
from llmcore_server.http.strict import Judge, Line, Pool, RequestReader, request_id

logger = logging.getLogger(__name__)


@dataclass
class Unread:
    """A connection that was refused before a request was read."""

    error: RequestError | None
    command: str = ""
    version: str = "1.1"
    headers: Mapping[str, str] = field(default_factory=dict)
    entry: Entry = ANYBODY
    encode_error: EncodeError = openai_error


def refusal(request: StreamRequest | Unread, *, close: bool) -> tuple[bytes, bool]:
    """A whole answer in our error shape, and whether the connection closes after it: it does if `close` says so, or
    the client does."""
    error = request.error
    if not isinstance(error, RequestError):
        error = http_error(500)  # waitress's own: the application raised
    count_error(error)
    body = _encoded(request, error)
    wish = request.headers.get("CONNECTION", "").lower()
    close = close or (wish != "keep-alive" if request.version == "1.0" else wish == "close")
    more = (*error_headers(error).items(), *request.entry.headers)
    start = _start(request.version, error.status, close, len(body), *more)
    name = request_id(request.headers.get("X_REQUEST_ID")).encode()
    head = b"%b%b\r\nX-Request-Id: %b\r\n\r\n" % (start, _date(int(time.time())), name)
    return head if request.command == "HEAD" else head + body, close


def _encoded(request: StreamRequest | Unread, error: RequestError) -> bytes:
    """The dialect's body, or else ours: the main loop calls this too, and must outlive a dialect that fails."""
    try:
        return request.encode_error(error)
    except BaseException as failure:
        reraise_if_stopping(failure)
        logger.exception("a dialect could not write an error")
        return openai_error(error)


@lru_cache(maxsize=256)
def _start(version: str, status: int, close: bool, length: int, *more: tuple[str, str]) -> bytes:
    lines = [f"HTTP/{version} {falcon.code_to_http_status(status)}", "Content-Type: application/json"]
    if close or version == "1.0":
        lines.append("Connection: close" if close else "Connection: Keep-Alive")
    lines += [f"Content-Length: {length}", *(f"{name}: {value}" for name, value in more), ""]
    return "\r\n".join(lines).encode("latin-1")


@lru_cache(maxsize=1)
def _date(second: int) -> bytes:
    return f"Date: {formatdate(second, usegmt=True)}".encode()


_TASK = "llmcore.task"
_EVENT_STREAM = "text/event-stream"
_EVENTS = f"{_EVENT_STREAM}; charset=utf-8"
_SSE_HEADERS = (("Cache-Control", "no-cache"), ("X-Accel-Buffering", "no"))
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


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


class StreamRequest(RequestReader):
    """A request with the attributes that waitress's channel and tasks read. `encoder`: how the dialect of a path
    writes errors. `sender`, `yield_up`: see RequestReader."""

    __slots__ = (
        *("_encoder", "_file", "command", "expect_continue", "headers", "path", "query", "request_uri"),
        "version",
    )
    empty = False
    url_scheme = "http"

    def __init__(
        self,
        limits: Limits,
        pool: Pool,
        encoder: Callable[[str], EncodeError],
        judge: Judge,
        *,
        sender: str = "",
        yield_up: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(limits.bounds, pool, judge, sender=sender, yield_up=yield_up)
        self.expect_continue = False
        self.command = self.path = self.query = self.request_uri = ""
        self.version = "1.1"
        self.headers: Mapping[str, str] = {}
        self._encoder = encoder
        self._file: io.BytesIO | None = None

    @property
    def encode_error(self) -> EncodeError:
        """The error encoder of the dialect that was asked."""
        return self._encoder(self.path)

    @property
    def completed(self) -> bool:
        """True if it is read to its end, or has an error."""
        return self.done

    @property
    def headers_finished(self) -> bool:
        """True if the header is read."""
        return self.head is not None

    def received(self, data: bytes) -> int:
        """Read the next bytes of this request. Returns how many of them belong to it."""
        before = self.line
        taken = self.feed(data)
        if self.line is not None and self.line is not before:
            self.show(self.line)
        if self.head is not None:
            if self.head is not before:
                self.headers, self.expect_continue = self.head.headers, self.head.expects
            # a client that sends its body unasked needs no answer to its question
            self.expect_continue = self.expect_continue and not (self.done or self.body_size)
            if self.done and (self.head.length is None or not self.entry.keeps_body):
                self.head.headers["CONTENT_LENGTH"] = str(len(self.body))
        return taken

    def get_body_stream(self) -> io.BytesIO:
        """The body as WSGI's input."""
        self._file = io.BytesIO(self.body)
        return self._file

    def close(self) -> None:
        """Free the body."""
        self.release()
        if self._file is not None:
            self._file.close()

    def show(self, line: Line) -> None:
        """Become the request that begins with `line`."""
        self.line = line
        self.command, self.path, self.query = line.method, line.path, line.query
        self.request_uri, self.version = line.target, line.version


class StreamTask(WSGITask):  # type: ignore[misc]
    """A waitress task that outlives its worker thread when its response was detached."""

    response_headers: list[tuple[str, str]]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.reply: Reply | None = None
        self.stream_type = _EVENTS
        # what waitress sets with the first byte of the answer: see StreamChannel
        self.wrote_header = self.chunked_response = self.close_on_finish = False
        self.content_length: int | None = None

    def get_environment(self) -> dict[str, Any]:
        """WSGI's environment, with the way back to this task."""
        environment: dict[str, Any] = super().get_environment()
        environment[_TASK] = self
        environment[ENTRY] = self.request.entry
        environment["PATH_INFO"] = self.request.path  # waitress takes //health for /health
        return environment

    def service(self) -> None:
        """Run the application; a reply that was not detached after all is closed.

        References that lead back to this task are let go, so that it is freed with its last user.
        """
        detached = False
        try:
            super().service()
        except Detach:
            detached = True
            raise
        finally:
            self.channel.touch()
            reply, self.reply, self.environ = self.reply, None, None
            if reply is not None and not detached:
                self.channel.let_go(reply)
                reply.abandon()

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """Keep them for the header, in place of others of their names."""
        self.response_headers = [*_without(self.response_headers, headers), *headers.items()]

    def send_part(self, data: bytes) -> None:
        """Frame and send a piece of the body."""
        head = b"" if self.wrote_header else self._stream_header()
        self.channel.post(head + self._frame(data) if data else head)

    def send_end(self) -> None:
        """Send the last chunk and hand the channel back, to be closed."""
        head = b"" if self.wrote_header else self._stream_header()
        self.channel.finish(self, lambda _: head + (b"0\r\n\r\n" if self.chunked_response else b""), close=True)

    def send_break(self) -> None:
        """Hand the channel back, to be closed without the last chunk. HTTP/1.0 has no chunks: its client gets a
        reset."""
        if not self.chunked_response:
            self.channel.reset_when_closed()
        self.channel.finish(self, lambda _: b"", close=True)

    def send_whole(self, status: int, body: bytes, content_type: str, headers: Mapping[str, str]) -> None:
        """Send header and body and hand the channel back; it closes if the client asked or sent more meanwhile."""

        def build(close: bool) -> bytes:
            if close:
                self.set_close_on_finish()
            head = self._header(falcon.code_to_http_status(status), content_type, headers, len(body))
            return head if self._is_head else head + body

        self.channel.finish(self, build, close=False)

    def send_pieces(self, pieces: Iterator[bytes], content_type: str, headers: Mapping[str, str]) -> None:
        """Have the main loop send header and body; the connection closes after it."""
        head = self._header("200 OK", content_type, headers, None)
        framed = map(self._frame, pieces)
        last = (b"0\r\n\r\n",) if self.chunked_response else ()
        self.channel.feed(self, chain((head,), framed, last))

    def send_probe(self) -> None:
        """Send bytes that a client ignores if it has only stopped sending. One that has left answers with a reset.

        In a stream of events that is a comment, in one of JSON a space.
        """
        ignored = b":\n\n" if self.stream_type.startswith(_EVENT_STREAM) else b" "
        self.channel.post(self._frame(ignored) if self.wrote_header else _CONTINUE)

    def build_response_header(self) -> bytes:
        """The header; a server that is about to end keeps no connection."""
        if self.channel.server.draining:
            self.request.headers["CONNECTION"] = "close"
        header: bytes = super().build_response_header()
        if self._is_head:
            self.chunked_response = False  # the header describes the answer to GET; no chunk follows it here
        return header

    def finish(self) -> None:
        """Send the bytes that waitress has not sent. Falcon does not iterate the body of an answer to HEAD, so a
        detached reply detaches here."""
        if self._is_head and self.reply is not None and self.content_length is None:
            raise Detach(self.reply)
        super().finish()

    @property
    def _is_head(self) -> bool:
        """True if the answer is a header alone."""
        return bool(self.request.command == "HEAD")

    def _stream_header(self) -> bytes:
        return self._header("200 OK", self.stream_type, dict(_SSE_HEADERS), None)

    def _header(self, status: str, content_type: str, headers: Mapping[str, str], length: int | None) -> bytes:
        kept = _without(self.response_headers, ("content-type", "content-length", *headers))
        self.status = status
        self.response_headers = [*kept, ("Content-Type", content_type), *headers.items()]
        self.content_length = length
        header: bytes = self.build_response_header()
        self.wrote_header = True
        return header

    def _frame(self, data: bytes) -> bytes:
        if self._is_head:
            return b""
        return b"%X\r\n%b\r\n" % (len(data), data) if self.chunked_response else data


def _without(headers: Iterable[tuple[str, str]], names: Iterable[str]) -> list[tuple[str, str]]:
    """Those of other names."""
    left_out = {name.lower() for name in names}
    return [(name, value) for name, value in headers if name.lower() not in left_out]


class JsonErrorTask(ErrorTask):  # type: ignore[misc]
    """A refusal that comes after answers to earlier requests, or in place of the application's own."""

    def execute(self) -> None:
        """Send it and close, once the client has read it. Called by a worker thread."""
        self.channel.refused = True
        answer, self.close_on_finish = refusal(self.request, close=True)
        self.channel.write_soon(answer)
        self.wrote_header = True
