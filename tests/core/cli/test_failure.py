"""What a command that failed shows: a panel on a terminal, one line elsewhere."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from llmcore.api.errors import ConfigError, LlmcoreError, StartupError
from llmcore.cli.display import cause_and_fix, show_failure
from rich.console import Console


def shown(error: Exception, *, terminal: bool) -> str:
    out = io.StringIO()
    show_failure(error, Console(file=out, force_terminal=terminal, color_system=None, width=100))
    return out.getvalue()


@pytest.mark.parametrize(
    ("text", "cause", "fix"),
    [
        ("port 80 is in use; choose another --port", "port 80 is in use", "choose another --port"),
        ("cannot be read: a; b; correct it", "cannot be read: a; b", "correct it"),
        ("No model is given. Pass its directory: x.", "No model is given", "Pass its directory: x."),
        ("it is broken", "it is broken", ""),
    ],
)
def test_cause_and_fix(text: str, cause: str, fix: str) -> None:
    assert cause_and_fix(ConfigError(text)) == (cause, fix)


def test_a_panel_has_cause_and_fix() -> None:
    text = shown(ConfigError("port 80 is in use; choose another --port"), terminal=True)
    assert re.search(r"cause +port 80 is in use +│", text) and re.search(r"fix +choose another --port", text)
    assert text.count("╭") == 1 and "traceback" not in text


def test_a_child_that_could_not_start_names_its_file() -> None:
    error = StartupError("engine-0 could not start: KeyError: 'x'", log="/tmp/llmcore-engine-0-a.log")
    text = shown(error, terminal=True)
    assert "llmcore could not start" in text and re.search(r"traceback +/tmp/llmcore-engine-0-a.log", text)
    line = "error: engine-0 could not start: KeyError: 'x' (log: /tmp/llmcore-engine-0-a.log)\n"
    assert shown(error, terminal=False) == line


@pytest.mark.parametrize("terminal", [True, False])
def test_a_defect_leaves_its_traceback_in_a_private_file(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    try:
        raise ZeroDivisionError("[bold]odd[/bold]")
    except ZeroDivisionError as error:
        text = shown(error, terminal=terminal)
    (log,) = tmp_path.iterdir()
    assert log.name in re.sub(r"[\s│]", "", text)
    assert "Traceback" not in text and "ZeroDivisionError: [bold]odd" in text
    assert "test_failure.py" in log.read_text() and log.stat().st_mode & 0o077 == 0


def test_a_disk_without_room_changes_only_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert shown(LlmcoreError("it is broken"), terminal=False) == "error: it is broken\n"
    assert "ValueError: x" in shown(ValueError("x"), terminal=False)


def test_a_server_that_cannot_start_shows_one_panel_on_a_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "llmcore.cli", "serve", "--model_dir", str(tmp_path / "none")]
    done = subprocess.run(command, stderr=theirs, stdout=subprocess.PIPE, timeout=60, check=False)
    os.close(theirs)
    said = b""
    with suppress(OSError):  # that is how a terminal that nobody writes to any more ends
        while more := os.read(ours, 65536):
            said += more
    os.close(ours)
    text = said.decode()
    assert done.returncode == 2
    assert text.count("╭") == 1 and "cause" in text and "fix" in text and "Traceback" not in text
