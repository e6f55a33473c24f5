"""Child processes that answer questions within limits, for foreign programs: chat templates, grammars.

Python cannot stop such a program inside its own process; only the end of the process stops it for sure. A `ChildPool`
starts children and asks them. The program of a child calls `serve`, which reads questions from the socket that is its
standard input, and writes answers there. The limits of an answer are the operating system's: the kernel ends a child
that exceeds them, and the pool starts another one.

A child ends when its parent closes the socket or ends. `die_with_parent` would be wrong here: it ends a process with
the thread that started it, and any thread may start a child.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["ChildEnded", "ChildPool", "Limits", "NoChild", "serve"]

logger = logging.getLogger(__name__)

START_SECONDS = 60.0
"""Wall-clock seconds that a child may take to start."""

EXIT_SECONDS = 5.0
"""Wall-clock seconds until a child that closed its socket is killed. Its own exit status says why it ended."""

MOST_IDLE = 2
"""Children that a pool keeps while they have nothing to do."""

SHORT_SECONDS = 0.25
"""Seconds to wait for a child that answers another question. Then a further child starts, which takes longer."""

NICE = 5
"""The niceness of children: streams come before them."""

WORN_BYTES = 32 << 20
"""A child that has grown by more than this since its start ends after its answer, and frees its memory."""

_QUESTION = struct.Struct("<QdQ")
"""The head of a question: its size in bytes, the CPU seconds and the bytes of memory that its answer may take."""

_ANSWER = struct.Struct("<Q?")
"""The head of an answer: its size in bytes, and True if the child ends after it."""


@dataclass(frozen=True)
class Limits:
    """The limits of one answer."""

    cpu_seconds: float
    memory_bytes: int
    """Address space beyond that of a child that has just started."""
    wall_seconds: float
    """The limit for when other processes use the CPU, or the child hangs: seconds without a byte from the child."""


class NoChild(Exception):
    """A child could not be started. The text says why, as "it ..."."""


class ChildEnded(Exception):
    """A child ended instead of answering: the answer exceeded a limit, or crashed the child."""

    def __init__(self, status: int) -> None:
        super().__init__(_ending(status))
        self.status = status
        """As subprocess reports it: the exit code, or the negative number of the signal that ended the child."""

    @property
    def out_of_time(self) -> bool:
        """True if the CPU seconds were over."""
        return self.status == -signal.SIGPROF


# --- the parent's side


class ChildPool:
    """Children that run `python -m MODULE`. Each starts when it is needed. Any thread may use the pool.

    `opening`: the first message to each child (see `serve`).
    """

    def __init__(self, module: str, opening: bytes) -> None:
        self._module = module
        self._opening = opening
        self._idle: list[_Child] = []
        self._busy = 0
        self._freed = threading.Condition()
        weakref.finalize(self, _end_all, self._idle)

    def warm(self) -> None:
        """Start a child, so that the first question does not wait for it. Raises NoChild."""
        self._give(self._take(), kept=True)

    def answer(self, question: bytes, limits: Limits) -> bytearray:
        """A child's answer. Raises ChildEnded, TimeoutError (see `Limits.wall_seconds`), and NoChild."""
        child, kept = self._take(), False
        try:
            answer, worn = child.answer(question, limits)
            kept = not worn
        except TimeoutError:
            raise
        except (EOFError, OSError) as error:
            raise ChildEnded(child.end(EXIT_SECONDS)) from error
        finally:
            self._give(child, kept)
        return answer

    def _take(self) -> _Child:
        with self._freed:
            if self._busy:
                self._freed.wait_for(lambda: self._idle, SHORT_SECONDS)
            self._busy += 1
            while self._idle:
                child = self._idle.pop()
                if child.lives():
                    return child
                child.end()
        try:
            return _Child(self._module, self._opening)
        except BaseException as error:
            with self._freed:
                self._busy -= 1
            if isinstance(error, NoChild):
                logger.error("a process of %s could not be started: %s", self._module, error)
            raise

    def _give(self, child: _Child, kept: bool) -> None:
        with self._freed:
            self._busy -= 1
            if kept and len(self._idle) < MOST_IDLE:
                self._idle.append(child)
                self._freed.notify()
                return
        child.end()


class _Child:
    def __init__(self, module: str, opening: bytes) -> None:
        try:
            self._socket, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
        except OSError as error:
            raise NoChild(f"it cannot be started ({error.strerror})") from error
        try:
            self.answer(opening, Limits(0.0, 0, START_SECONDS))
        except TimeoutError as error:
            self.end()
            raise NoChild(f"it did not start within {START_SECONDS:g} s") from error
        except (EOFError, OSError) as error:
            raise NoChild(_ending(self.end(EXIT_SECONDS))) from error
        except BaseException:
            self.end()
            raise

    def lives(self) -> bool:
        return self._process.poll() is None

    def answer(self, question: bytes, limits: Limits) -> tuple[bytearray, bool]:
        """The answer, and True if the child ends now."""
        self._socket.settimeout(limits.wall_seconds)
        self._socket.sendall(_QUESTION.pack(len(question), limits.cpu_seconds, limits.memory_bytes) + question)
        size, worn = _ANSWER.unpack(_read(self._socket, _ANSWER.size))
        return _read(self._socket, size), worn

    def end(self, seconds: float = 0.05) -> int:
        """The exit status. Kills the process if it still runs after `seconds`."""
        self._socket.close()
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def _ending(status: int) -> str:
    if status < 0:
        return f"it was ended by {signal.Signals(-status).name}"
    return f"it ended with exit code {status}"


def _end_all(idle: list[_Child]) -> None:
    """End the idle children. The others end with this process, which has the other end of their sockets."""
    for child in idle:
        child.end()


# --- the child's side


def serve(begin: Callable[[bytearray], Callable[[bytearray], bytes]], *, stack_bytes: int = 0) -> None:
    """The program of a child: answer questions until the parent closes the socket.

    `begin` gets the pool's opening, and returns the function that answers questions. Both run on a thread whose stack
    has `stack_bytes`; 0: as many as the platform's threads have.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGPROF,))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(stack_bytes)
    thread = threading.Thread(target=_answer_all, args=(socket.socket(fileno=os.dup(0)), begin))
    thread.start()
    thread.join()


def _answer_all(parent: socket.socket, begin: Callable[[bytearray], Callable[[bytearray], bytes]]) -> None:
    try:
        size, _, _ = _QUESTION.unpack(_read(parent, _QUESTION.size))
        answer_to = begin(_read(parent, size))
        most, _ = resource.getrlimit(resource.RLIMIT_AS)
        fresh = _address_space()
        os.nice(NICE)
        parent.sendall(_ANSWER.pack(0, False))
        worn = False
        while not worn:
            size, cpu_seconds, memory_bytes = _QUESTION.unpack(_read(parent, _QUESTION.size))
            _limit_memory(fresh + WORN_BYTES + memory_bytes, most)
            question = _read(parent, size)
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
            answer = answer_to(question)
            signal.setitimer(signal.ITIMER_PROF, 0)
            worn = _address_space() > fresh + WORN_BYTES
            parent.sendall(_ANSWER.pack(len(answer), worn) + answer)
    finally:
        os._exit(1)  # Without memory, Python's own way to its end may never end.


def _limit_memory(size: int, most: int) -> None:
    """Limit the address space to `size` bytes. `most`: the limit that this process was started with."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size if most == resource.RLIM_INFINITY else min(size, most), hard))


def _address_space() -> int:
    """Bytes of this process's address space."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read(32).split()[0]) * resource.getpagesize()


# --- both


def _read(source: socket.socket, size: int) -> bytearray:
    """The next `size` bytes. Raises EOFError at the end of the stream."""
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        count = source.recv_into(rest)
        if not count:
            raise EOFError
        rest = rest[count:]
    return data
