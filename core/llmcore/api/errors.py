"""Errors that people read: what is wrong, then what to do about it."""

from __future__ import annotations

import difflib
import signal
import threading
from collections.abc import Iterable


class LlmcoreError(Exception):
    """Base of every error that llmcore raises on purpose; its text names the fix."""


class ConfigError(LlmcoreError):
    """An option, file or model directory that cannot work. The start ends with exit code 2."""


class StartupError(LlmcoreError):
    """A process of a server could not start. Its text is the cause, in one line.

    `log`: the file with the traceback, if there is one.
    """

    def __init__(self, message: str, *, log: str | None = None) -> None:
        super().__init__(message + (f" (log: {log})" if log else ""))
        self.message = message
        self.log = log


class ServerError(LlmcoreError):
    """A running server cannot go on: one of its processes died, and a new one would not help. Exit code 1."""


class PluginError(LlmcoreError):
    """A plugin that could not be found, imported or registered."""


class ResolveError(LlmcoreError):
    """A choice has no candidate left, or more than one."""


class RequestError(LlmcoreError):
    """A request that cannot be served.

    `status`: the HTTP status, 4xx or 5xx. `code`: a known code that every dialect can encode, for example
    ``context_length_exceeded``. `param`: the field at fault, as the client's dialect names it, or None.
    `retry_after`: seconds after which a client may repeat a request that got 429 or 503.
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
    """This process was asked to stop. The signal handler raises it at whatever line the process then runs."""


def reraise_if_stopping(error: BaseException) -> None:
    """Raise `error` again if it means that this process must stop.

    Any other error is a failure of the plugin, kernel or native library that raised it, even a BaseException: a Rust
    library's panic, sys.exit(), a KeyboardInterrupt. Code that survives such a failure catches BaseException and
    calls this function first.
    """
    if isinstance(error, Stopped) or (isinstance(error, KeyboardInterrupt) and _ctrl_c_raises()):
        raise error


def _ctrl_c_raises() -> bool:
    """True if Ctrl-C raises KeyboardInterrupt here: in the main thread, and not in a server, which ignores SIGINT."""
    on_main = threading.current_thread() is threading.main_thread()
    return on_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def message_of(error: BaseException) -> str:
    """An exception's text, as valid UTF-8. It never raises, even if the exception's own code does."""
    try:
        text = str(error)
    except BaseException as broken:  # noqa: BLE001 - foreign exceptions are foreign code
        reraise_if_stopping(broken)
        text = ""
    return text.encode(errors="replace").decode()


def text_of(error: BaseException) -> str:
    """An exception's type, and its `message_of` if that is not empty."""
    message = message_of(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """ " Did you mean a or b?" with the names in `known` that resemble `wrong`, or "" if none does."""
    close = difflib.get_close_matches(wrong, list(known), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(close)}?" if close else ""
