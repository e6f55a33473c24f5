"""Logging to standard error, as text or as JSON. A thread writes the lines, so an unread log stops nothing.

`logger.info(text, extra=fields(request=...))` adds keys to JSON lines; every line of a request carries its id.
`log_request` writes the line of a finished request, which never has a text of the request.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import threading
import time
import traceback
from typing import Any

import orjson
from llmcore.api.counters import TALLIES
from llmcore.api.errors import reraise_if_stopping
from llmcore.api.protocols import RequestRecord

from llmcore_server.settings import Logging

_requests = logging.getLogger("llmcore.request")

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

MAX_LINES = 10_000
"""Lines that may wait to be written; further ones are dropped and counted."""

MAX_TEXT = 1 << 20
"""Most characters of a line, or of a JSON line's message or exception. Longer ones lose their middle."""

LAST_SECONDS = 1.0
"""Seconds that waiting lines have to be written when the process ends."""

_STDERR = 2
_FIELDS = "llmcore_fields"


def fields(**values: Any) -> dict[str, Any]:
    """The argument `extra` of a log call: more keys for its JSON line."""
    return {_FIELDS: values}


class TextFormatter(logging.Formatter):
    """A line of text, with the exception below it."""

    def __init__(self) -> None:
        super().__init__(TEXT_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        return _shortened(super().format(record))


class JsonFormatter(logging.Formatter):
    """One object per line: time (UTC, ISO 8601), level, logger, process, message, and the keys of `fields`."""

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
    """Writes from a thread of its own, so that a thread that logs never waits for standard error."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process
        self._lines: queue.Queue[str] = queue.Queue(MAX_LINES)
        threading.Thread(target=self._run, name="log", daemon=True).start()
        atexit.register(self.flush)

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line, or drop it if the queue is full."""
        try:
            line = self.format(record)
        except BaseException as error:  # noqa: BLE001 - as in logging, a line that cannot be formatted ends nothing
            reraise_if_stopping(error)
            self.handleError(record)
            return
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            TALLIES.count("dropped_log_lines", self._process)

    def flush(self) -> None:
        """Wait up to LAST_SECONDS until waiting lines are written."""
        deadline = time.monotonic() + LAST_SECONDS
        while self._lines.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.005)

    def _run(self) -> None:
        while True:
            line = (self._lines.get() + "\n").encode("utf-8", "backslashreplace")
            # Not through sys.stderr: Python waits for its lock at exit, and a write may never return.
            with contextlib.suppress(OSError):  # the disk is full, or the reader has gone
                while line:
                    line = line[os.write(_STDERR, line) :]
            self._lines.task_done()


def log_to_stderr(settings: Logging, process: str) -> None:
    """Set up this process's log; `process` is its name in JSON lines. Replaces any earlier set-up."""
    handler = Behind(process)
    handler.setFormatter(JsonFormatter(process) if settings.log_format == "json" else TextFormatter())
    logging.basicConfig(level=settings.log_level, handlers=[handler], force=True)


def log_request(record: RequestRecord) -> None:
    """An observer of `Front`. In JSON every figure is a key of its own; `request` joins it with other lines."""
    if not _requests.isEnabledFor(logging.INFO):
        return
    first = None if record.first_token is None else round(record.first_token, 6)
    how = f"{record.finish} ({record.cause})" if record.cause else record.finish
    _requests.info(
        "request %s: %s, %d in (%d cached), %d out, first token %s, %.3f s%s",
        record.request_id,
        how,
        record.prompt_tokens,
        record.cached_tokens,
        record.output_tokens,
        "never" if first is None else f"{first:.3f} s",
        record.duration,
        f", key {record.key}" if record.key else "",
        extra=fields(
            request=record.request_id,
            dialect=record.dialect,
            model=record.model,
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens,
            output_tokens=record.output_tokens,
            max_new_tokens=record.max_new_tokens,
            finish=record.finish,
            cause=record.cause,
            first_token_seconds=first,
            duration_seconds=round(record.duration, 6),
            key=record.key,
        ),
    )


def _shortened(text: str) -> str:
    """`text` cut to about MAX_TEXT characters, because an exception may quote a whole input of a plugin."""
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]} [{len(text) - 2 * half:,} characters left out] {text[-half:]}"


def _sayable(value: Any) -> Any:
    """`value` with text that UTF-8 cannot encode (half of a surrogate pair) written as escapes."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _sayable(item) for key, item in value.items()}
    return value
