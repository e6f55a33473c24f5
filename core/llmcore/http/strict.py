"""HTTP/1.1 requests, read strictly and within bounds: bytes in, a head and a body or a RequestError out.

Nothing here knows of sockets, clocks or a server. Where two readers could take the same bytes for different requests
they are refused, never repaired. After an error nothing more of the connection can be understood: it has to close.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol
from urllib.parse import unquote_to_bytes

from llmcore.errors import RequestError

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"})

SINGLE = frozenset(
    {"HOST", "CONTENT_LENGTH", "TRANSFER_ENCODING", "AUTHORIZATION", "CONTENT_TYPE", "CONTENT_ENCODING", "EXPECT"}
)
"""Headers that may come once only: joined or picked from, two of them mean different things to different readers."""

TINY_CHUNKS = 4096
"""So many chunks may be of any size; after that they must hold TINY_BYTES each on average."""

TINY_BYTES = 64

_BROKEN = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\r[^\n]|(?<!\r)\n")
_START = re.compile(rb"[A-Z]{1,7}(?: |\Z)")
_LINE = re.compile(r"([A-Z]{1,7}) (/[!\"$-~]*) HTTP/1\.([01])")
_NAME = re.compile(r"[!#$%&'*+.^`|~0-9A-Za-z-]+")
_HOST = re.compile(r"(?:[A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?\r\n")
_SIZE_BEGUN = re.compile(rb"[0-9A-Fa-f]{0,16}[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?\r?")
_TRAILER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*")


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Most of everything that a request may hold, in bytes unless it says otherwise."""

    head: int = 32 << 10
    fields: int = 100
    body: int = 32 << 20
    chunk_line: int = 1 << 10
    trailer: int = 8 << 10


class Pool:
    """Bytes that all bodies of a process may take together. Safe from any thread."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._lock = threading.Lock()

    def take(self, n: int) -> None:
        """Take `n` bytes; RequestError (503) where so many are not free."""
        with self._lock:
            if n <= self._free:
                self._free -= n
                return
        raise RequestError("The server is reading too many bodies; try again.", code="server_overloaded", status=503)

    def give(self, n: int) -> None:
        """Bring `n` bytes back."""
        with self._lock:
            self._free += n


@dataclass(slots=True)
class Head:
    """A request without its body. `headers` are under CGI's names: "X_REQUEST_ID"; `path` is decoded once."""

    method: str
    target: str
    path: str
    query: str
    version: str
    headers: dict[str, str]
    length: int | None = 0
    """Bytes of the body; None where it comes in chunks."""
    expects: bool = False
    """The client waits for 100 Continue before it sends the body."""


def parse_head(data: bytes | bytearray, bounds: Bounds) -> Head:
    """The head in `data`, which ends before the empty line. RequestError says what is wrong with it."""
    line, *fields = data.decode("latin-1").split("\r\n")
    match = _LINE.fullmatch(line)
    if match is None or match[1] not in METHODS:
        raise _bad_line()
    if len(fields) > bounds.fields:
        raise _too_large(f"The request has more than {bounds.fields} headers.", 431)
    method, target, minor = match.groups()
    path, _, query = target.partition("?")
    headers = _headers(fields)
    if "%" in path:
        path = unquote_to_bytes(path).decode("latin-1")
    head = Head(method, target, path, query, f"1.{minor}", headers)
    host = headers.get("HOST")
    if host is None and minor == "1":
        raise _bad("The Host header is missing.")
    if host is not None and _HOST.fullmatch(host) is None:
        raise _bad("The Host header is no host name or address, with or without a port.")
    _frame(head, bounds)
    expect = headers.get("EXPECT")
    if expect is not None and minor == "1":
        if expect.lower() != "100-continue":
            raise _bad("The only Expect that is understood is 100-continue.", 417)
        head.expects = head.length != 0
    return head


def _headers(lines: list[str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        key = _key(name)
        if not key or not colon:
            raise _bad("A header is not of the form name: value, on one line.")
        if "_" in name:
            continue  # under CGI's names it could pass for another header, one with dashes
        value = value.strip(" \t")
        if key not in headers:
            headers[key] = value
        elif key in SINGLE:
            raise _bad(f"The header {name} may come only once.")
        else:
            headers[key] += ", " + value
    return headers


@lru_cache(maxsize=512)
def _key(name: str) -> str:
    """CGI's name of a header, or "" where `name` is no name."""
    return name.upper().replace("-", "_") if _NAME.fullmatch(name.replace("_", "-")) else ""


def _frame(head: Head, bounds: Bounds) -> None:
    """How long the body is."""
    coding = head.headers.pop("TRANSFER_ENCODING", None)
    length = head.headers.get("CONTENT_LENGTH")
    if coding is not None:
        if length is not None:
            raise _bad("Content-Length and Transfer-Encoding exclude each other.")
        if head.version == "1.0":
            raise _bad("HTTP/1.0 has no Transfer-Encoding; send Content-Length.")
        if coding.lower() != "chunked":
            raise _bad("The only Transfer-Encoding that is understood is chunked.", 501)
        head.length = None
    elif length is not None:
        if not (length.isascii() and length.isdigit() and len(length) <= 18):
            raise _bad("Content-Length is no number of bytes.")
        head.length = int(length)
        if head.length > bounds.body:
            raise _too_large(f"The body is larger than {bounds.body} bytes.")


class Body(Protocol):
    """Collects a body."""

    data: bytes | bytearray
    taken: int
    """What the pool has lent for it."""
    done: bool

    def feed(self, data: bytes) -> int:
        """Take what belongs to the body; how many bytes of `data` that is. RequestError where it is malformed."""


class SizedBody:
    """A body of known length."""

    def __init__(self, length: int, pool: Pool) -> None:
        self.data: bytes | bytearray = b""
        self.taken = 0
        self.done = False
        self._length = length
        self._pool = pool

    def feed(self, data: bytes) -> int:
        """See Body."""
        n = min(len(data), self._length - len(self.data))
        self._pool.take(n)
        self.taken += n
        if not self.data and n == self._length:
            self.data = data[:n]
        else:
            if not self.data:
                self.data = bytearray()
            self.data += data[:n]
        self.done = len(self.data) == self._length
        return n


class ChunkedBody:
    """A body in chunks. Extensions and trailers are checked for form and dropped, as HTTP allows."""

    def __init__(self, bounds: Bounds, pool: Pool) -> None:
        self.data: bytes | bytearray = bytearray()
        self.taken = 0
        self.done = False
        self._bounds = bounds
        self._pool = pool
        self._held = b""  # the beginning of a line whose end has not come
        self._left = 0  # bytes of the chunk that have not come, and two for its line end
        self._chunks = 0
        self._trailer: int | None = None  # bytes of it so far, once the last chunk has come

    def feed(self, data: bytes) -> int:
        """See Body."""
        held = len(self._held)
        if held:
            data, self._held = self._held + data, b""
        at, end = 0, len(data)
        while at < end and not self.done:
            if self._left:
                at = self._chunk(data, at)
            elif self._trailer is None:
                at = self._size(data, at)
            else:
                at = self._trailer_line(data, at)
        grown = len(self.data) - self.taken
        if grown:
            self._pool.take(grown)
            self.taken += grown
        return at - held

    def _chunk(self, data: bytes, at: int) -> int:
        """Data of a chunk, and its line end."""
        n = min(self._left - 2, len(data) - at)
        if n > 0:
            self.data += data[at : at + n]
            self._left -= n
            at += n
        if 0 < self._left <= 2 and at < len(data):
            ending = data[at : at + self._left]
            if not b"\r\n"[2 - self._left :].startswith(ending):
                raise _bad("A chunk is longer than its size says.")
            self._left -= len(ending)
            at += len(ending)
        return at

    def _size(self, data: bytes, at: int) -> int:
        """The line before a chunk."""
        match = _SIZE.match(data, at, at + self._bounds.chunk_line + 2)
        if match is None:
            rest = data[at : at + self._bounds.chunk_line + 2]
            if len(data) - at > self._bounds.chunk_line or _SIZE_BEGUN.fullmatch(rest) is None:
                raise _bad(
                    f"A chunk does not begin with its size, on a line of at most {self._bounds.chunk_line} bytes."
                )
            self._held = rest
            return len(data)
        size = int(match[1], 16)
        if size == 0:
            self._trailer = 0
            return match.end()
        if len(self.data) + size > self._bounds.body:
            raise _too_large(f"The body is larger than {self._bounds.body} bytes.")
        self._chunks += 1
        if self._chunks > TINY_CHUNKS and self._chunks * TINY_BYTES > len(self.data):
            raise _bad(f"The chunks are too small; send at least {TINY_BYTES} bytes in each.")
        self._left = size + 2
        return match.end()

    def _trailer_line(self, data: bytes, at: int) -> int:
        room = self._bounds.trailer - (self._trailer or 0)
        end = data.find(b"\r\n", at, at + room)
        if end < 0:
            if len(data) - at >= room:
                raise _bad(f"The trailer is larger than {self._bounds.trailer} bytes.")
            self._held = data[at:]
            return len(data)
        if end == at:
            self.done = True
        elif _TRAILER.fullmatch(data, at, end) is None:
            raise _bad("A trailer is not of the form name: value, on one line.")
        self._trailer = (self._trailer or 0) + end + 2 - at
        return end + 2


class RequestReader:
    """One request, from the bytes of its connection as they come."""

    def __init__(self, bounds: Bounds, pool: Pool) -> None:
        self.head: Head | None = None
        self.error: RequestError | None = None
        self.done = False
        self._bounds = bounds
        self._pool = pool
        self._begun = bytearray()
        self._line_read = False
        self._body: Body | None = None

    @property
    def body(self) -> bytes | bytearray:
        """What of the body has come."""
        return self._body.data if self._body is not None else b""

    def feed(self, data: bytes) -> int:
        """Take what belongs to this request; how many bytes of `data` that is. With an error, all of it."""
        taken = 0
        try:
            if self.head is None:
                taken = self._feed_head(data)
            if self.head is not None and not self.done:
                taken += self._feed_body(self.head, data[taken:] if taken else data)
        except RequestError as error:
            self.error = error
            self.done = True
            self.release()
            return len(data)
        return taken

    def release(self) -> None:
        """Let go of the body."""
        body, self._body = self._body, None
        if body is not None:
            self._pool.give(body.taken)

    def _feed_head(self, data: bytes) -> int:
        before = len(self._begun)
        if before:
            self._begun += data
        text = self._begun if before else data
        start = 2 if text[:2] == b"\r\n" else 0  # one empty line before a request is forgiven, as HTTP asks
        end = text.find(b"\r\n\r\n", max(start, before - 3))
        if _BROKEN.search(text, max(0, before - 1), end + 4 if end >= 0 else len(text)):
            raise _bad("The header holds a control character, or a line that does not end with CR LF.")
        if (len(text) if end < 0 else end) > self._bounds.head:
            raise _too_large(f"The header is larger than {self._bounds.head} bytes.", 431)
        if end < 0:
            self._check_begun(text, start)
            if not before:
                self._begun += data
            return len(data)
        self.head = parse_head(text[start:end], self._bounds)
        self._begun = bytearray()
        return end + 4 - before

    def _check_begun(self, text: bytes | bytearray, start: int) -> None:
        """Refuse at once what will never be a request, whatever follows."""
        if text == b"\r":
            return
        if len(text) > start and _START.match(text, start) is None:
            raise _bad_line()
        line = -1 if self._line_read else text.find(b"\r\n", start)
        if line > 0:
            self._line_read = True
            if _LINE.fullmatch(text[start:line].decode("latin-1")) is None:
                raise _bad_line()

    def _feed_body(self, head: Head, data: bytes) -> int:
        if self._body is None:
            chunked = head.length is None
            self._body = ChunkedBody(self._bounds, self._pool) if chunked else SizedBody(head.length or 0, self._pool)
        taken = self._body.feed(data)
        self.done = self._body.done
        return taken


def _bad(message: str, status: int = 400) -> RequestError:
    return RequestError(message, status=status)


def _bad_line() -> RequestError:
    return _bad(
        "The request does not begin with a line such as POST /v1/completions HTTP/1.1; speak plain HTTP/1.1 here."
    )


def _too_large(message: str, status: int = 413) -> RequestError:
    return RequestError(message, code="request_too_large", status=status)
