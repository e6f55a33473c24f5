"""Messages between the engine and the process that tries grammars, on a socket."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, field

import msgspec

_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Words:
    """The first message: what grammars may name of a vocabulary. `special`: its special tokens by id."""

    size: int
    eos_ids: tuple[int, ...]
    special: dict[int, str]


@dataclass(frozen=True)
class Question:
    """Is this a grammar? `args`: the processor's arguments as JSON. `tags`: what each tag in them is
    (`grammars.TagRule`). `closed`: whether objects of schemas are closed. `seconds`: of a processor that the answer
    may take."""

    args: str
    tags: dict[str, str | None]
    closed: bool
    seconds: float


@dataclass(frozen=True)
class Answer:
    """`text`: the grammar for llguidance, or with `wrong` what is wrong. `unenforced`: keywords of its schemas that it
    does not enforce."""

    text: str = ""
    wrong: bool = False
    unenforced: tuple[str, ...] = field(default=())


def send(to: socket.socket, message: Words | Question | Answer) -> None:
    """Write a message."""
    data = msgspec.msgpack.encode(message)
    to.sendall(len(data).to_bytes(_LENGTH_BYTES, "big") + data)


def receive(source: socket.socket, until: float | None = None) -> bytes:
    """The next message, by `until` (time.monotonic()). Raises EOFError where none will come, and TimeoutError."""
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
