"""Messages between the engine and the process that tries grammars, on a socket."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, field

import msgspec

_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Words:
    """The first message: the part of a vocabulary that grammars may name. `special`: its special tokens by id."""

    size: int
    eos_ids: tuple[int, ...]
    special: dict[int, str]


@dataclass(frozen=True)
class Question:
    """Asks whether this is a grammar."""

    args: str
    """The processor's arguments as JSON."""
    tags: dict[str, str | None]
    """A tag's text -> its special token (`grammars.TagRule`)."""
    closed: bool
    """Objects of schemas are closed."""
    seconds: float
    """CPU seconds that the answer may take."""


@dataclass(frozen=True)
class Answer:
    """`text`: the grammar for llguidance, or with `wrong` the mistake. `unenforced`: keywords of its schemas that the
    grammar does not enforce."""

    text: str = ""
    wrong: bool = False
    unenforced: tuple[str, ...] = field(default=())


def send(to: socket.socket, message: Words | Question | Answer) -> None:
    """Write a message."""
    data = msgspec.msgpack.encode(message)
    to.sendall(len(data).to_bytes(_LENGTH_BYTES, "big") + data)


def receive(source: socket.socket, until: float | None = None) -> bytes:
    """Returns the next message, at the latest at `until` (time.monotonic()). Raises EOFError at the end of the stream,
    and TimeoutError."""
    size = int.from_bytes(_read(source, _LENGTH_BYTES, until), "big")
    return _read(source, size, until)


def _read(source: socket.socket, size: int, until: float | None) -> bytes:
    data = bytearray()
    while len(data) < size:
        if until is not None:
            source.settimeout(max(1e-3, until - time.monotonic()))
        part = source.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
