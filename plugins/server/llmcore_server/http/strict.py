"""HTTP/1.1 requests, read strictly and within bounds: bytes in, a head and a body or a RequestError out.

This file knows nothing of sockets, clocks or a server. It refuses every request that two readers could take for
different requests, and never repairs one. After an error the rest of the connection cannot be understood, so the
connection has to close.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from urllib.parse import unquote_to_bytes

from llmcore.api.counters import TALLIES
from llmcore.api.errors import RequestError

from llmcore_server.http.access import ANYBODY, Entry
from llmcore_server.http.deadlines import NO_KEY

TINY_CHUNKS = 4096
"""This number of chunks may be of any size; after that they must hold TINY_BYTES each on average."""

TINY_BYTES = 64

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?\r\n")
_SIZE_BEGUN = re.compile(rb"[0-9A-Fa-f]{0,16}[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?\r?")
_TRAILER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*")


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The limits on the parts of a request, in bytes unless the name says otherwise."""

    head: int = 32 << 10
    fields: int = 100
    body: int = 32 << 20
    chunk_line: int = 1 << 10
    trailer: int = 8 << 10


class Loan:
    """The part of the pool that one body holds. `yield_up` ends the request of the body and gives the loan back; the
    thread that takes calls it."""

    __slots__ = ("_pool", "client", "size", "yield_up")

    def __init__(self, pool: Pool, client: Hashable, yield_up: Callable[[], None]) -> None:
        self.client = client
        self.size = 0
        self.yield_up: Callable[[], None] | None = yield_up
        self._pool = pool

    def take(self, n: int) -> None:
        """Take `n` bytes more; RequestError (503) where the pool refuses them."""
        self._pool.take(self, n)

    def settle(self) -> None:
        """The body is complete: the pool never ends its request from now on."""
        self.yield_up = None

    def give(self) -> None:
        """Bring everything back. From any thread, and any number of times."""
        self._pool.give(self)


class _Account:
    """The loans of one client, from the oldest to the newest, and their sum."""

    __slots__ = ("loans", "size")

    def __init__(self) -> None:
        self.loans: dict[Loan, None] = {}
        self.size = 0


class Pool:
    """Bytes that all bodies of a process may take together. One thread lends and takes, any thread gives back.

    No client keeps others out. While more than half of the pool is taken, a client that holds SHARE of it gets no
    more, except for its oldest body, so that one body always ends. If nothing is left for a client, the client that
    holds the most loses its newest body, provided that it holds more than the other one would.
    """

    SHARE = 1 / 8

    def __init__(self, size: int) -> None:
        self._size = size
        self._free = size
        self._accounts: dict[Hashable, _Account] = {}
        self._lock = threading.Lock()

    def lend(self, client: Hashable, yield_up: Callable[[], None]) -> Loan:
        """A loan for a body that begins. It counts in the share of `client`."""
        loan = Loan(self, client, yield_up)
        with self._lock:
            account = self._accounts.get(client)
            if account is None:
                account = self._accounts[client] = _Account()
            account.loans[loan] = None
        return loan

    def take(self, loan: Loan, n: int) -> None:
        """See Loan."""
        while True:
            with self._lock:
                account = self._accounts[loan.client]
                if self._exceeds_share(account, loan, n):
                    break
                if n <= self._free:
                    self._free -= n
                    loan.size += n
                    account.size += n
                    return
                richest = self._richest(account.size + n)
            if richest is None or richest.yield_up is None:
                TALLIES.count("refused_bodies", "full")
                raise too_many_bodies()
            TALLIES.count("refused_bodies", "yielded")
            richest.yield_up()
            richest.give()
        TALLIES.count("refused_bodies", "share")
        raise too_many_bodies()

    def give(self, loan: Loan) -> None:
        """See Loan."""
        with self._lock:
            account = self._accounts.get(loan.client)
            if account is None or loan not in account.loans:
                return
            self._free += loan.size
            account.size -= loan.size
            del account.loans[loan]
            if not account.loans:
                del self._accounts[loan.client]

    def _exceeds_share(self, account: _Account, loan: Loan, n: int) -> bool:
        crowded = 2 * (self._size - self._free + n) > self._size
        return crowded and account.size + n > self._size * self.SHARE and next(iter(account.loans)) is not loan

    def _richest(self, least: int) -> Loan | None:
        """The newest unfinished body of the client that holds the most, and more than `least`."""
        for account in sorted(self._accounts.values(), key=lambda account: -account.size):
            if account.size <= least:
                return None
            for loan in reversed(account.loans):
                if loan.yield_up is not None and loan.size:
                    return loan
        return None


def too_many_bodies() -> RequestError:
    """The answer to a body that the pool has no room for."""
    return RequestError("The server is reading too many bodies; try again.", code="server_overloaded", status=503)


class SizedBody:
    """A body of known length. It keeps the bytes if it has a loan for them; else it only looks for the end.

    `size`: the bytes that have come.
    """

    def __init__(self, length: int, loan: Loan | None) -> None:
        self.data: bytes | bytearray = b""
        self.size = 0
        self.done = False
        self._length = length
        self._loan = loan

    def feed(self, data: bytes) -> int:
        """Take the bytes that belong to the body. Returns their number. Raises RequestError if it is malformed."""
        n = min(len(data), self._length - self.size)
        if self._loan is not None:
            self._loan.take(n)
            if n == self._length:
                self.data = data[:n]
            else:
                if not self.data:
                    self.data = bytearray()
                self.data += data[:n]
        self.size += n
        self.done = self.size == self._length
        return n


class ChunkedBody:
    """A body in chunks, otherwise like SizedBody. Extensions and trailers are checked for form and dropped."""

    def __init__(self, bounds: Bounds, loan: Loan | None) -> None:
        self.data: bytes | bytearray = bytearray()
        self.size = 0
        self.done = False
        self._bounds = bounds
        self._loan = loan
        self._held = b""  # the beginning of a line whose end has not come
        self._left = 0  # bytes of the chunk that have not come, and two for its line end
        self._chunks = 0
        self._trailer: int | None = None  # bytes of it so far, once the last chunk has come

    def feed(self, data: bytes) -> int:
        """Take the bytes that belong to the body. Returns their number. Raises RequestError if it is malformed."""
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
        if self._loan is not None and self.size > self._loan.size:
            self._loan.take(self.size - self._loan.size)
        return at - held

    def _chunk(self, data: bytes, at: int) -> int:
        """Data of a chunk, and its line end."""
        n = min(self._left - 2, len(data) - at)
        if n > 0:
            if self._loan is not None:
                self.data += data[at : at + n]
            self.size += n
            self._left -= n
            at += n
        if 0 < self._left <= 2 and at < len(data):
            ending = data[at : at + self._left]
            if not b"\r\n"[2 - self._left :].startswith(ending):
                raise bad("A chunk is longer than its size says.")
            self._left -= len(ending)
            at += len(ending)
        return at

    def _size(self, data: bytes, at: int) -> int:
        """The line before a chunk."""
        match = _SIZE.match(data, at, at + self._bounds.chunk_line + 2)
        if match is None:
            rest = data[at : at + self._bounds.chunk_line + 2]
            if len(data) - at > self._bounds.chunk_line or _SIZE_BEGUN.fullmatch(rest) is None:
                raise bad(
                    f"A chunk does not begin with its size, on a line of at most {self._bounds.chunk_line} bytes."
                )
            self._held = rest
            return len(data)
        size = int(match[1], 16)
        if size == 0:
            self._trailer = 0
            return match.end()
        if self.size + size > self._bounds.body:
            raise too_large(f"The body is larger than {self._bounds.body} bytes.")
        self._chunks += 1
        if self._chunks > TINY_CHUNKS and self._chunks * TINY_BYTES > self.size:
            raise bad(f"The chunks are too small; send at least {TINY_BYTES} bytes in each.")
        self._left = size + 2
        return match.end()

    def _trailer_line(self, data: bytes, at: int) -> int:
        room = self._bounds.trailer - (self._trailer or 0)
        end = data.find(b"\r\n", at, at + room)
        if end < 0:
            if len(data) - at >= room:
                raise bad(f"The trailer is larger than {self._bounds.trailer} bytes.")
            self._held = data[at:]
            return len(data)
        if end == at:
            self.done = True
        elif _TRAILER.fullmatch(data, at, end) is None:
            raise bad("A trailer is not of the form name: value, on one line.")
        self._trailer = (self._trailer or 0) + end + 2 - at
        return end + 2


def bad(message: str, status: int = 400) -> RequestError:
    """The error for a malformed request."""
    return RequestError(message, status=status)


def too_large(message: str, status: int = 413) -> RequestError:
    """The error for a request beyond a bound."""
    return RequestError(message, code="request_too_large", status=status)


METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"})

SINGLE = frozenset(
    {
        *("HOST", "ORIGIN", "AUTHORIZATION", "X_API_KEY", "EXPECT"),
        *("CONTENT_LENGTH", "TRANSFER_ENCODING", "CONTENT_TYPE", "CONTENT_ENCODING"),
    }
)
"""Headers that may come once only: joined or picked from, two of them mean different things to different readers."""

_PLAIN = bytes(byte for byte in range(256) if byte == 0x09 or 0x20 <= byte != 0x7F)
_BROKEN = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\r[^\n]|(?<!\r)\n")
_BEGUN = frozenset(name[:n] for name in METHODS for n in range(len(name) + 1))
_LINE = re.compile(r"([A-Z]{1,7}) ([!\"$-~]+) HTTP/1\.([01])")
_ABSOLUTE = re.compile(r"(?i:https?)://([^/?]+)")
_NAME = re.compile(r"[!#$%&'*+.^`|~0-9A-Za-z-]+")
_HOST = re.compile(r"(?:[A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(?::([0-9]{1,5}))?")
_MOST_PORT = 65535
_GUESSED = 8 << 10
_SHORT = 128


@dataclass(slots=True)
class Line:
    """The first line of a request. `path` is decoded once.

    `target` is a path with its query, or * where the whole server is asked; of one that was a whole URL the rest is
    in `authority`, "" otherwise.
    """

    method: str
    target: str
    path: str
    query: str
    version: str
    authority: str


@dataclass(slots=True)
class Head(Line):
    """A request without its body. `headers` are under CGI's names: "X_REQUEST_ID"."""

    headers: dict[str, str]
    length: int | None = 0
    """Bytes of the body; None where it comes in chunks."""
    expects: bool = False
    """The client waits for 100 Continue before it sends the body."""


def parse_line(text: str) -> Line:
    """The first line, without its end. Raises RequestError. Callers share the result and do not change it."""
    return _known_line(text) if len(text) < _SHORT else _parse_line(text)


def _parse_line(text: str) -> Line:
    match = _LINE.fullmatch(text)
    if match is None or match[1] not in METHODS:
        raise _bad_line()
    line = _line(*match.groups())
    if line.authority and not _is_host(line.authority):
        raise bad("The URL that is asked for names no host, with or without a port, and nothing else before its path.")
    if not line.target.startswith("/") and (line.method, line.target) != ("OPTIONS", "*"):
        raise _bad_line()
    return line


_known_line = lru_cache(maxsize=256)(_parse_line)


def guess_line(data: bytes | bytearray) -> Line:
    """The best guess of the first line of `data`, which does not begin with a valid one: the refusal needs it."""
    text, ended, _ = bytes(data[:_GUESSED]).lstrip(b"\r\n").partition(b"\r\n")
    method, _, rest = text.decode("latin-1").partition(" ")
    target, _, version = rest.partition(" ")
    known = ended or version or "?" in target  # else the path may go on
    line = _line(method if method in METHODS else "", target if known else "", "0" if version == "HTTP/1.0" else "1")
    return line if line.target.startswith("/") else replace(line, target="", path="", query="")


def parse_head(line: Line, data: bytes | bytearray, bounds: Bounds) -> Head:
    """The head that begins with `line` and goes on with `data`, without the empty line at the end. RequestError says
    what is wrong with it."""
    fields = data.decode("latin-1").split("\r\n") if data else []
    if len(fields) > bounds.fields:
        raise too_large(f"The request has more than {bounds.fields} headers.", 431)
    headers = _headers(fields)
    head = Head(line.method, line.target, line.path, line.query, line.version, line.authority, headers)
    minor = line.version[2:]
    host = headers.get("HOST")
    if host is None and minor == "1":
        raise bad("The Host header is missing.")
    if host is not None and not _is_host(host):
        raise bad("The Host header is no host name or address, with or without a port.")
    if line.authority:
        headers["HOST"] = line.authority  # as HTTP asks: the URL counts, so that no two readers see two hosts
    _frame(head)
    if "," in headers.get("CONNECTION", ""):  # "TE, close" closes too; later code compares the whole value
        options = {option.strip() for option in headers["CONNECTION"].lower().split(",")}
        headers["CONNECTION"] = next((option for option in ("close", "keep-alive") if option in options), "")
    expect = headers.get("EXPECT")
    if expect is not None and minor == "1":
        if expect.lower() != "100-continue":
            raise bad("The only Expect that is understood is 100-continue.", 417)
        head.expects = head.length != 0
    return head


def _line(method: str, target: str, minor: str) -> Line:
    absolute, authority = _ABSOLUTE.match(target), ""
    if absolute is not None:
        authority, target = absolute[1], target[absolute.end() :]
        if not target.startswith("/"):
            target = "*" if method == "OPTIONS" and not target else "/" + target  # a URL's path may be left out
    path, _, query = target.partition("?")
    if "%" in path:
        path = unquote_to_bytes(path).decode("latin-1")
    return Line(method, target, path, query, f"1.{minor}", authority)


@lru_cache(maxsize=64)
def _is_host(text: str) -> bool:
    match = _HOST.fullmatch(text)
    return match is not None and int(match[1] or 0) <= _MOST_PORT


def _headers(lines: list[str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        key = _key(name)
        if not key or not colon:
            raise bad("A header is not of the form name: value, on one line.")
        if "_" in name:
            continue  # under CGI's names it could pass for another header, one with dashes
        value = value.strip(" \t")
        if key not in headers:
            headers[key] = value
        elif key in SINGLE:
            raise bad(f"The header {name} may come only once.")
        else:
            headers[key] += ", " + value
    return headers


@lru_cache(maxsize=512)
def _key(name: str) -> str:
    """CGI's name of a header, or "" if `name` is not a header name."""
    return name.upper().replace("-", "_") if _NAME.fullmatch(name.replace("_", "-")) else ""


def _frame(head: Head) -> None:
    """Set the length of the body."""
    coding = head.headers.pop("TRANSFER_ENCODING", None)
    length = head.headers.get("CONTENT_LENGTH")
    if coding is not None:
        if length is not None:
            raise bad("Content-Length and Transfer-Encoding exclude each other.")
        if head.version == "1.0":
            raise bad("HTTP/1.0 has no Transfer-Encoding; send Content-Length.")
        if coding.lower() != "chunked":
            raise bad("The only Transfer-Encoding that is understood is chunked.", 501)
        head.length = None
    elif length is not None:
        if not (length.isascii() and length.isdigit() and len(length) <= 18):
            raise bad("Content-Length is no number of bytes.")
        head.length = int(length)


Judge = Callable[[Head], Entry]
"""Admits or refuses a request by its head."""


def _nothing() -> None:
    """The `yield_up` of a request that is read without a connection."""


class RequestReader:
    """One request, from the bytes of its connection as they come. `judge` is asked as soon as its head is there.

    `sender`: the client in whose share of the pool the body counts, unless a key names the client. `yield_up` ends the
    request while it is read, because the pool needs room for others.
    """

    __slots__ = (
        *("_begun", "_body", "_bounds", "_judge", "_loan", "_pool", "_sender", "_yield_up"),
        *("done", "entry", "error", "head", "line"),
    )

    def __init__(
        self,
        bounds: Bounds,
        pool: Pool,
        judge: Judge = lambda head: ANYBODY,
        *,
        sender: str = "",
        yield_up: Callable[[], None] = _nothing,
    ) -> None:
        self.line: Line | None = None
        """The first line, once it is there; with an error, what it was meant to be."""
        self.head: Head | None = None
        self.error: RequestError | None = None
        self.entry: Entry = ANYBODY
        """The decision of `judge`, once the head is there. After a refusal the reader keeps nothing of the body, and
        nothing more is to be fed."""
        self.done = False
        self._bounds = bounds
        self._pool = pool
        self._judge = judge
        self._begun = bytearray()
        self._body: SizedBody | ChunkedBody | None = None
        self._loan: Loan | None = None
        self._sender = sender
        self._yield_up = yield_up

    @property
    def body_size(self) -> int:
        """Bytes of the body that have come, kept or not."""
        return self._body.size if self._body is not None else 0

    @property
    def body(self) -> bytes | bytearray:
        """The part of the body that has come."""
        return self._body.data if self._body is not None else b""

    def feed(self, data: bytes) -> int:
        """Take the bytes that belong to this request. Returns their number; with an error, all of `data`."""
        taken = 0
        try:
            if self.head is None:
                taken = self._feed_head(data)
            if self.head is not None and not self.done:
                taken += self._feed_body(self.head, data[taken:] if taken else data)
        except RequestError as error:
            self.line = self.line or guess_line(self._begun or data)
            self.error = error
            self.done = True
            self.release()
            return len(data)
        return taken

    def release(self) -> None:
        """Let go of the body."""
        loan, self._loan, self._body = self._loan, None, None
        if loan is not None:
            loan.give()

    def _feed_head(self, data: bytes) -> int:
        before = len(self._begun)
        if before:
            self._begun += data
        text = self._begun if before else data
        start = 2 if text[:2] == b"\r\n" else 0  # one empty line before a request is forgiven, as HTTP asks
        line = self.line = self.line or self._read_line(text, start)
        end = text.find(b"\r\n\r\n", max(start, before - 3))
        if _is_broken(text[: end + 4]) if end >= 0 else _BROKEN.search(text, max(0, before - 1)):
            raise bad("The header holds a control character, or a line that does not end with CR LF.")
        if (len(text) if end < 0 else end) > self._bounds.head:
            raise too_large(f"The header is larger than {self._bounds.head} bytes.", 431)
        if end < 0 or line is None:
            if not before:
                self._begun += data
            return len(data)
        self.line = self.head = head = parse_head(line, text[text.index(b"\r\n", start) + 2 : end], self._bounds)
        self.entry = self._judge(head)
        self._begun = bytearray()
        if (head.length or 0) > self._bounds.body:
            raise too_large(f"The body is larger than {self._bounds.body} bytes.")
        return end + 4 - before

    def _read_line(self, text: bytes | bytearray, start: int) -> Line | None:
        """The first line, or None while it is incomplete. Data that cannot become one is refused at once.

        A line longer than a header may be never counts as complete, in however few pieces it came.
        """
        end = text.find(b"\r\n", start, self._bounds.head)
        if end >= 0:
            return parse_line(text[start:end].decode("latin-1"))
        word, space, _ = bytes(text[start : start + 8]).partition(b" ")
        if text != b"\r" and word.decode("latin-1") not in (METHODS if space else _BEGUN):
            raise _bad_line()
        return None

    def _feed_body(self, head: Head, data: bytes) -> int:
        if self._body is None:
            if head.length == 0:
                self.done = True
                return 0
            if self.entry.keeps_body:
                client = self._sender if self.entry.client == NO_KEY else self.entry.client
                self._loan = self._pool.lend(client, self._yield_up)
            chunked = head.length is None
            self._body = ChunkedBody(self._bounds, self._loan) if chunked else SizedBody(head.length or 0, self._loan)
        taken = self._body.feed(data)
        self.done = self._body.done
        if self.done and self._loan is not None:
            self._loan.settle()
        return taken


def _is_broken(head: bytes | bytearray) -> bool:
    """The same as _BROKEN says of a whole header, in a tenth of the time."""
    return bool(head.replace(b"\r\n", b"").translate(None, _PLAIN))


def _bad_line() -> RequestError:
    return bad(
        "The request does not begin with a line such as POST /v1/completions HTTP/1.1; speak plain HTTP/1.1 here."
    )


_HARMLESS = re.compile(r"[A-Za-z0-9._-]{1,64}")


def request_id(given: str | None) -> str:
    """`given` where it has at most 64 letters, digits, dots, dashes and underscores; else a new random one.

    It only ever appears in answers and logs: requests are told apart by numbers of our own.
    """
    if given is not None and _HARMLESS.fullmatch(given):
        return given
    return os.urandom(16).hex()
