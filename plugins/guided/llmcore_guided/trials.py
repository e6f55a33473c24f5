"""The engine's side of the processes that try grammars (`trial`)."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref

import msgspec
from llmcore.api import RequestError

from llmcore_guided import limits
from llmcore_guided.talk import Answer, Question, Words, receive, send

logger = logging.getLogger(__name__)

START_SECONDS = 10.0
"""Wall-clock seconds that a trial process may take to start."""


MOST_IDLE = 2
"""Processes that are kept while no grammar is tried. Each has about 40 MB."""


class Trials:
    """The trial processes, one for each grammar that is tried at the same time. Each starts when it is needed. Any
    thread may use them."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._idle: list[_Process] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _end_all, self._idle)

    def warm(self) -> None:
        """Start one process."""
        self._give(self._take())

    def answer(self, question: Question) -> Answer:
        """A process's answer, or that it took too long. Raises RequestError (503) if the server is too busy."""
        process = self._take()
        try:
            answer = process.answer(question, time.monotonic() + limits.PATIENCE_SECONDS)
        except TimeoutError as error:
            process.end()
            raise _busy("the server is too busy to compile it") from error
        except (EOFError, OSError):
            return _last_words(process.end(), question.seconds)
        except BaseException:
            process.end()
            raise
        self._give(process)
        return answer

    def _take(self) -> _Process:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.lives():
                    return process
                process.end()
        try:
            return _Process(self._words)
        except (OSError, EOFError) as error:
            logger.error("a process that tries grammars could not be started", exc_info=error)
            raise _busy("the process that compiles grammars does not start") from error

    def _give(self, process: _Process) -> None:
        with self._lock:
            if len(self._idle) < MOST_IDLE:
                self._idle.append(process)
                return
        process.end()


class _Process:
    def __init__(self, words: Words) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "llmcore_guided.trial"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        try:
            self._socket.settimeout(START_SECONDS)
            send(self._socket, words)
            receive(self._socket, time.monotonic() + START_SECONDS)
        except BaseException:
            self.end()
            raise

    def lives(self) -> bool:
        return self._process.poll() is None

    def answer(self, question: Question, until: float) -> Answer:
        self._socket.settimeout(max(1e-3, until - time.monotonic()))
        send(self._socket, question)
        return msgspec.msgpack.decode(receive(self._socket, until), type=Answer)

    def end(self) -> int:
        """Returns the exit status. Kills the process if it still runs."""
        self._socket.close()
        try:
            return self._process.wait(0.05)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def _last_words(status: int, seconds: float) -> Answer:
    if status == -signal.SIGPROF:
        return Answer(f"it takes longer than {seconds:g} s to compile", wrong=True)
    return Answer("it is too deeply nested or needs too much memory to compile", wrong=True)


def _busy(why: str) -> RequestError:
    return RequestError(f"{why}; send the request again", code="server_overloaded", status=503)


def _end_all(idle: list[_Process]) -> None:
    """End the idle processes. The others end with this process, which has the other end of their sockets."""
    for process in idle:
        process.end()
