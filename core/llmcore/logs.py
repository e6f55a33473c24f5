"""Where log lines go: standard error, as text or as JSON, by way of a thread, so that an unread log stops nothing.

`logger.info(text, extra=fields(request=...))` adds keys to JSON lines; every line of a request carries its id.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import queue
import sys
import threading
import time
import traceback
from typing import Any

import orjson

from llmcore.config import Reports
from llmcore.counters import TALLIES
from llmcore.errors import reraise_if_stopping

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

MAX_LINES = 10_000
"""Lines that may wait to be written; further ones are dropped and counted."""

MAX_TEXT = 1 << 20
"""Characters of a line, or of a JSON line's message or exception; of longer ones the middle is left out."""

LAST_SECONDS = 1.0
"""How long what waits has to leave when the process ends."""

_STDERR = 2
_FIELDS = "llmcore_fields"


def _print(data: Any) -> None:
    """Write bytes to standard error; on a full disk, or where its reader has gone, they are lost, and nothing else."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(_STDERR, data) :]


class _StandardError(io.RawIOBase):
    """Standard error that never fails whoever prints on it."""

    def writable(self) -> bool:
        """Always."""
        return True

    def fileno(self) -> int:
        """The descriptor."""
        return _STDERR

    def isatty(self) -> bool:
        """Whether people look at it."""
        return os.isatty(_STDERR)

    def write(self, data: Any) -> int:
        """All of `data`, as far as it is taken."""
        _print(data)
        return len(data)


def guard_standard_streams() -> None:
    """What this process prints on standard error raises nothing from now on. And a standard descriptor that it was
    started without becomes /dev/null: else a socket may get the number, and its client our log."""
    for number, stream in enumerate((sys.__stdin__, sys.__stdout__, sys.__stderr__)):
        if stream is None:
            with contextlib.suppress(OSError):
                null = os.open(os.devnull, os.O_RDWR)
                os.set_inheritable(null, True)
                if null != number:
                    os.dup2(null, number)
                    os.close(null)
    own = sys.__stderr__
    if own is not None and sys.stderr is own:
        sys.stderr = io.TextIOWrapper(_StandardError(), own.encoding, "backslashreplace", write_through=True)


def fields(**values: Any) -> dict[str, Any]:
    """`extra` of a log call: more keys of its JSON line."""
    return {_FIELDS: values}


class TextFormatter(logging.Formatter):
    """A line of text, and below it the exception."""

    def __init__(self) -> None:
        super().__init__(TEXT_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        return _shortened(super().format(record))


class JsonFormatter(logging.Formatter):
    """One object per line: time (UTC, ISO 8601), level, logger, process, message, and what `fields` added."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        milliseconds = f"{int(record.msecs):03d}Z"
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S.", time.gmtime(record.created)) + milliseconds,
            "level": record.levelname,
            "logger": record.name,
            "process": self._process,
            "message": _shortened(record.getMessage()),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = _shortened("".join(traceback.format_exception(*record.exc_info)))
        return orjson.dumps(_sayable(line), default=repr, option=orjson.OPT_NON_STR_KEYS).decode()


class Behind(logging.Handler):
    """Writes from a thread of its own: whoever logs never waits for standard error."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process
        self._lines: queue.Queue[str] = queue.Queue(MAX_LINES)
        threading.Thread(target=self._run, name="log", daemon=True).start()
        atexit.register(self.flush)

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line, or drop it."""
        try:
            line = self.format(record)
        except BaseException as error:  # noqa: BLE001 - as logging has it, a line that cannot be made ends nothing
            reraise_if_stopping(error)
            self.handleError(record)
            return
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            TALLIES.count("dropped_log_lines", self._process)

    def flush(self) -> None:
        """Let what waits be written, for a moment."""
        deadline = time.monotonic() + LAST_SECONDS
        while self._lines.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.005)

    def _run(self) -> None:
        while True:
            line = (self._lines.get() + "\n").encode("utf-8", "backslashreplace")
            # Not by way of sys.stderr: Python waits for its lock when it ends, and a write may never return.
            _print(line)
            self._lines.task_done()


def log_to_stderr(reports: Reports, process: str) -> None:
    """Set up this process's log; `process` is its name in JSON lines. Replaces what was set up before."""
    handler = Behind(process)
    handler.setFormatter(JsonFormatter(process) if reports.log_format == "json" else TextFormatter())
    logging.basicConfig(level=reports.log_level, handlers=[handler], force=True)


def _shortened(text: str) -> str:
    """`text` of at most about MAX_TEXT characters: an exception may quote all that a plugin was handed."""
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]} [{len(text) - 2 * half:,} characters left out] {text[-half:]}"


def _sayable(value: Any) -> Any:
    """`value` with text that UTF-8 cannot say (half of a surrogate pair) written as escapes."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _sayable(item) for key, item in value.items()}
    return value
