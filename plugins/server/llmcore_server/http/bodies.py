"""Bodies of requests, of known length or in chunks, within bounds."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

from llmcore.api.counters import TALLIES
from llmcore.api.errors import RequestError

TINY_CHUNKS = 4096
"""So many chunks may be of any size; after that they must hold TINY_BYTES each on average."""

TINY_BYTES = 64

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


class Body(Protocol):
    """Reads a body. It keeps the bytes if it has a loan for them; else it only looks for the end."""

    data: bytes | bytearray
    size: int
    """Bytes that have come."""
    done: bool

    def feed(self, data: bytes) -> int:
        """Take what belongs to the body; how many bytes of `data` that is. RequestError where it is malformed."""


class SizedBody:
    """A body of known length."""

    def __init__(self, length: int, loan: Loan | None) -> None:
        self.data: bytes | bytearray = b""
        self.size = 0
        self.done = False
        self._length = length
        self._loan = loan

    def feed(self, data: bytes) -> int:
        """See Body."""
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
    """A body in chunks. Extensions and trailers are checked for form and dropped, as HTTP allows."""

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
    """What is malformed."""
    return RequestError(message, status=status)


def too_large(message: str, status: int = 413) -> RequestError:
    """What passes a bound."""
    return RequestError(message, code="request_too_large", status=status)
