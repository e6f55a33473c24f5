"""Every process that tells plugins of its start tells them once of its end, whatever came between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from llmcore_devtools import check_plugin, registry_of

WITNESS = """
import os
import time
from llmcore.api import ConfigError, DialectSpec, hookimpl

def note(word):
    with open({notes!r}, "a") as file:
        file.write(f"{{word}} {{os.getpid()}}\\n")

@hookimpl
def on_startup():
    note("start")

@hookimpl
def on_shutdown():
    note("end")

def hang(where):
    if where == {where!r}:
        note("here")
        time.sleep(300)

@hookimpl
def on_model_built():
    hang("engine")

@hookimpl
def register_dialects():
    yield DialectSpec(name="witness", make=f"{{__name__}}:make")

def make(front):
    hang("worker")
    if {where!r} == "failure":
        raise ConfigError("there is no more room; make some")
    return []
"""


class Witnessed:
    """`llmcore testserver` with a plugin that hangs, or fails, at a place of the start."""

    def __init__(self, directory: Path, where: str) -> None:
        self._notes = directory / "notes"
        plugin = directory / "witness.py"
        plugin.write_text(WITNESS.format(notes=str(self._notes), where=where))
        command = [sys.executable, "-m", "llmcore.cli", "testserver", "--port", "0", "--plugins", str(plugin)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)

    def noted(self, word: str) -> list[str]:
        """Process ids that noted `word`."""
        text = self._notes.read_text() if self._notes.exists() else ""
        return [pid for said, pid in (line.split() for line in text.splitlines()) if said == word]

    def ended(self, *processes: int) -> None:
        """One of these numbers of processes started, and each ended once."""
        assert len(self.noted("start")) in processes
        assert Counter(self.noted("end")) == Counter(self.noted("start"))


@pytest.mark.parametrize(
    ("where", "number", "processes", "everybody"),
    [("engine", signal.SIGINT, (2, 3), False), ("worker", signal.SIGTERM, (3,), True)],
)
def test_a_start_that_is_interrupted(
    tmp_path: Path, where: str, number: signal.Signals, processes: tuple[int, ...], everybody: bool
) -> None:
    """While the engine starts, the worker may have started or not."""
    server = Witnessed(tmp_path, where)
    deadline = time.monotonic() + 120
    while not server.noted("here"):
        assert time.monotonic() < deadline and server.process.poll() is None, "it did not come so far"
        time.sleep(0.02)
    pid = server.process.pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if everybody else ():
        os.kill(int(child), number)
    server.process.send_signal(number)
    said = server.process.communicate(timeout=120)[1]
    assert server.process.returncode == 0 and "Traceback" not in said, said
    server.ended(*processes)


def test_a_start_that_fails(tmp_path: Path) -> None:
    server = Witnessed(tmp_path, "failure")
    said = server.process.communicate(timeout=120)[1]
    assert server.process.returncode == 2 and "there is no more room; make some" in said
    server.ended(3)


SINK = """
from llmcore.api import ConfigError, MetricSinkSpec, hookimpl

started = []

@hookimpl
def on_startup(config):
    started.append(config)

@hookimpl
def register_metric_sinks():
    yield MetricSinkSpec(name="late", make=f"{__name__}:Late")

class Late:
    def __init__(self):
        raise ConfigError(f"the sink was made after {len(started)} starts; go on")
"""


def test_a_sink_is_made_after_the_start_was_told(tmp_path: Path) -> None:
    plugin = tmp_path / "late.py"
    plugin.write_text(SINK)
    command = [sys.executable, "-m", "llmcore.cli", "testserver", "--port", "0", "--plugins", str(plugin)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "the sink was made after 1 starts" in done.stderr
    assert "metric sink 'late' of plugin 'late' failed to start" in done.stderr and "Traceback" not in done.stderr


def test_the_conformance_kit_tells_of_the_start_first(tmp_path: Path) -> None:
    plugin = tmp_path / "late.py"
    plugin.write_text(SINK.replace("{len(started)} starts", "{len(started)} starts in the kit"))
    with pytest.raises(AssertionError, match="after 1 starts in the kit"):
        check_plugin(registry_of(str(plugin)), "late")
