"""Bodies of requests, of known length or in chunks, within bounds."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from typing import Protocol

from llmcore.errors import RequestError

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
        if len(self.data) + size > self._bounds.body:
            raise too_large(f"The body is larger than {self._bounds.body} bytes.")
        self._chunks += 1
        if self._chunks > TINY_CHUNKS and self._chunks * TINY_BYTES > len(self.data):
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
