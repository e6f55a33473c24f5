"""The first lines of every child process: read the launch struct, die with the parent, know where tracebacks go."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn, TextIO, TypeVar

import zmq
from llmcore.api.errors import ConfigError, LlmcoreError, PluginError, Stopped, message_of, text_of
from llmcore.config.process import die_with_parent, shortage_of

from llmcore_server.logs import log_to_stderr
from llmcore_server.messages import LastWords, Launch, decode_launch, encode
from llmcore_server.settings import Logging

L = TypeVar("L", bound=Launch)

FROM_OUTSIDE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Service managers and terminals send these signals to every process of a server at once, to end it. Only the
supervisor heeds them: it lets open requests finish, for which it needs all its children."""

STOP = signal.SIGUSR2
"""The supervisor asks a child to end with this signal, which no other process sends."""

STACKS = signal.SIGUSR1
"""The supervisor ends a child that hangs with this signal. The child first writes every thread's stack to its log."""

MAX_WORDS = 10_000
"""Characters of `LastWords.message`: a plugin's exception may hold megabytes."""


def begin(kind: type[L]) -> L:
    """The launch struct from the descriptor named by the only argument.

    From here on the process gets SIGKILL when its parent dies, ignores FROM_OUTSIDE, which were blocked when it was
    started, and ends on STACKS.
    """
    papers = _papers()
    os.set_inheritable(papers, False)
    try:
        launch = decode_launch(os.pread(papers, os.fstat(papers).st_size, 0), kind)
    except ConfigError as error:
        _leave_word(error)
        sys.exit(1)
    die_with_parent(launch.parent)
    for number in FROM_OUTSIDE:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FROM_OUTSIDE)
    os.umask(0o077)
    log = _open_log(launch)
    faulthandler.enable(log)
    faulthandler.register(STACKS, log, chain=True)  # the default handler comes after it, and ends the process
    log_to_stderr(launch.config.section(Logging), launch.name)
    return launch


def _open_log(launch: Launch) -> TextIO:
    """The log file; standard error where the disk has no room for one."""
    try:
        return open(launch.log, "a", encoding="utf-8", errors="backslashreplace")
    except OSError:
        return open(os.dup(2), "w", encoding="utf-8", errors="backslashreplace")


def freeze() -> None:
    """Take the objects that exist from the garbage collector. They live as long as the process, and a look through
    them would delay every stream by tens of milliseconds. Call it when the process is ready."""
    gc.collect()
    gc.freeze()


def raise_on_stop() -> None:
    """Let STOP raise Stopped, until another handler takes its place, so that the child can clean up."""

    def stop(number: int, frame: object) -> None:
        signal.signal(STOP, signal.SIG_IGN)
        raise Stopped

    signal.signal(STOP, stop)


def run(kind: type[L], work: Callable[[L, zmq.Context[zmq.Socket[bytes]]], None]) -> int:
    """The whole life of a child of the engine: `work(launch, context)` until it returns or STOP comes. The exit code.

    It raises SystemExit as `begin` does. Any other error becomes the last words, and code 1.
    """
    launch = begin(kind)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    raise_on_stop()
    try:
        work(launch, context)
    except Stopped:
        return 0
    except BaseException as error:  # noqa: BLE001 - the supervisor gets one line, the log file the traceback
        report_failure(launch, error)
        return 1
    context.term()
    return 0


def leave(code: int) -> NoReturn:
    """End this process once its exit handlers have run, without the interpreter's own end.

    There a library may wait for ever: the communicators of ranks wait for captured steps that still refer to them.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def report_failure(launch: Launch, error: BaseException) -> None:
    """Leave the supervisor one line for people, and append the traceback to the log file."""
    with contextlib.suppress(OSError), _open_log(launch) as file:
        traceback.print_exception(error, file=file)
    _leave_word(error)


def _leave_word(error: BaseException) -> None:
    words = last_words_of(error)
    with contextlib.suppress(OSError):  # without memory for it
        os.pwrite(_papers(), encode(words), os.fstat(_papers()).st_size)


def last_words_of(error: BaseException) -> LastWords:
    """The words for an error that ends a process; they name what the machine ran out of, if it did."""
    named = isinstance(error, LlmcoreError)
    shortage = None if named and not isinstance(error, PluginError) else shortage_of(error)
    message = message_of(error) if named else text_of(error)
    if shortage is not None:
        message = f"{message[: MAX_WORDS - len(shortage)]}; {shortage}"
    return LastWords(message[:MAX_WORDS], usage=named or shortage is not None)


def _papers() -> int:
    """The descriptor with the launch struct, which is open to the end."""
    return int(sys.argv[1])
