"""Errors that people read: what is wrong, then what to do about it."""

from __future__ import annotations

import difflib
import signal
import threading
from collections.abc import Iterable


class LlmcoreError(Exception):
    """Base of every error that llmcore raises on purpose; its text names the fix."""


class ConfigError(LlmcoreError):
    """An option, file or model directory that cannot work; start-up ends with exit code 2."""


class StartupError(LlmcoreError):
    """A process of a server could not start: its own one-line cause. `log`: the file with its traceback, if any."""

    def __init__(self, message: str, *, log: str | None = None) -> None:
        super().__init__(message + (f" (log: {log})" if log else ""))
        self.message = message
        self.log = log


class ServerError(LlmcoreError):
    """A server that ran cannot go on: a process of it died, and starting another mends nothing. Exit code 1."""


class PluginError(LlmcoreError):
    """A plugin that could not be found, imported or registered."""


class ResolveError(LlmcoreError):
    """No candidate, or more than one, is left for a choice."""


class RequestError(LlmcoreError):
    """A request that cannot be served: 4xx (or 5xx) with the field that is at fault.

    `code` is one of the known codes every dialect can encode, e.g. ``context_length_exceeded``;
    `param` is the name of the field in the client's own dialect, or None; `retry_after` says in how many seconds a
    429 or 503 is worth another try.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        retry_after: int = 1,
    ):
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status
        self.retry_after = retry_after


class Stopped(BaseException):
    """This process was asked to stop, and the handler of that signal raised this wherever it was then."""


def reraise_if_stopping(error: BaseException) -> None:
    """Raise `error` again if it is this process's own end, and none of the code's that it came through.

    What plugins, kernels and native libraries raise is a failure of theirs, be it no Exception: a Rust library's
    panic, sys.exit(), a KeyboardInterrupt. Whoever goes on without them catches BaseException, and calls this first.
    """
    if isinstance(error, Stopped) or (isinstance(error, KeyboardInterrupt) and _ctrl_c_raises()):
        raise error


def _ctrl_c_raises() -> bool:
    """Python raises KeyboardInterrupt in the main thread only, and in no process of a server: these ignore SIGINT."""
    on_main = threading.current_thread() is threading.main_thread()
    return on_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def message_of(error: BaseException) -> str:
    """An exception's text, whatever code it is of: valid UTF-8, and never another exception."""
    try:
        text = str(error)
    except BaseException as broken:  # noqa: BLE001 - foreign exceptions are foreign code
        reraise_if_stopping(broken)
        text = ""
    return text.encode(errors="replace").decode()


def text_of(error: BaseException) -> str:
    """Its type, and its `message_of` where there is one."""
    message = message_of(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """ " Did you mean a or b?" with the names in `known` that resemble `wrong`, "" where none does."""
    close = difflib.get_close_matches(wrong, list(known), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(close)}?" if close else ""
