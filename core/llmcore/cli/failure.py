"""The report of a failed command: a panel on a terminal, one line elsewhere, the traceback in a file."""

from __future__ import annotations

import os
import tempfile
import traceback

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from llmcore.api.errors import LlmcoreError, StartupError

_BUG = "this is a bug in llmcore or a plugin; report it with the traceback (LLMCORE_DEBUG=1 shows it here)"


def show_failure(error: Exception, console: Console | None = None) -> None:
    """Print the cause, the fix and the traceback's file on standard error."""
    console = console or Console(stderr=True, highlight=False)
    log = _log_of(error)
    if not console.is_terminal:
        text = str(error) if isinstance(error, LlmcoreError) else f"{type(error).__name__}: {error}; {_BUG}"
        shown = log is not None and log not in text
        console.print(f"error: {text}" + (f" (traceback: {log})" if shown else ""), markup=False, soft_wrap=True)
        return
    cause, fix = cause_and_fix(error)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, row in (("cause", cause), ("fix", fix), ("traceback", log)):
        if row:
            table.add_row(Text(label), Text(row))
    title = "llmcore could not start" if isinstance(error, StartupError) else "llmcore failed"
    console.print(Panel(table, title=title, title_align="left", border_style="red", expand=False))


def cause_and_fix(error: Exception) -> tuple[str, str]:
    """(cause, fix) of an error. The fix is empty if the error's text has only one part."""
    if not isinstance(error, LlmcoreError):
        return f"{type(error).__name__}: {error}", _BUG
    text = error.message if isinstance(error, StartupError) else str(error)
    # An error's text is the cause, then the fix: after the last semicolon, or else after the first sentence.
    cause, found, fix = text.rpartition("; ")
    if not found:
        cause, found, fix = text.partition(". ")
    if not found:
        cause, fix = text, ""
    if not fix and isinstance(error, StartupError):
        fix = "the traceback shows where it failed"
    return cause, fix


def _log_of(error: Exception) -> str | None:
    """The file with the traceback, or None: an error that names its own fix needs no traceback."""
    if isinstance(error, StartupError):
        return error.log
    if isinstance(error, LlmcoreError):
        return None
    try:
        descriptor, path = tempfile.mkstemp(prefix="llmcore-", suffix=".log")
        with os.fdopen(descriptor, "w") as file:
            traceback.print_exception(error, file=file)
    except OSError:
        return None
    return path
