"""A plugin that records which functions of llmcore run in an HTTP worker and in the engine. `trace_walk.py` uses it.

    llmcore serve ... --plugins ./scripts/walk_probe.py --walk_dir FOLDER

The first byte of FOLDER/state switches the recorder: `OFF`, or `ON`. When a process ends, it writes
FOLDER/<module>.json: for every function the first call of each thread, in the order in which they began.
"""

from __future__ import annotations

import json
import mmap
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from llmcore.api import hookimpl, option, options_of

OFF, ON = 0, 1
PROCESSES = ("llmcore_server.http.worker", "llmcore_server.engine.process")
ROOT = Path(__file__).resolve().parent.parent
SHOWN_TYPES = 3
"""Types of a tuple's or a list's items that are named."""


@dataclass(frozen=True, kw_only=True)
class Walk:
    """Options of this plugin."""

    walk_dir: str = option("", "Folder for the records of functions that ran.")


@dataclass
class Call:
    """One call. `arrives`: (name, type) of each argument. `leaves`: the type of what it returned, or yielded first.

    `began`: seconds of the clock that all processes of a machine share. A function that had been called before the
    recorder was switched on, for example a thread's loop, has neither `arrives` nor `leaves`.
    """

    file: str
    function: str
    thread: str
    began: float
    arrives: list[tuple[str, str]] = field(default_factory=list)
    leaves: str = ""


def type_of(value: Any) -> str:
    """Returns a short name for the type of `value`, the same in every run."""
    if value is None:
        return "None"
    name = type(value).__qualname__
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        items = sorted({type_of(item) for item in value})
        inner = " | ".join(items[:SHOWN_TYPES])
        return f"{name}[{inner}]" if items else name
    return name


class Recorder:
    """Records calls in all threads of this process that begin after it, and in the current one."""

    def __init__(self, folder: Path) -> None:
        with (folder / "state").open("rb") as file:
            self._state = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
        self._calls: dict[tuple[CodeType, int], Call] = {}
        self._ours: dict[CodeType, str] = {}
        threading.setprofile(self._event)
        sys.setprofile(self._event)

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        if self._state[0] != ON:
            return
        code = frame.f_code
        file = self._ours.get(code)
        if file is None:
            file = self._ours[code] = self._file(code)
        if not file:
            return
        key = (code, threading.get_ident())
        call = self._calls.get(key)
        if call is None:
            call = Call(file, code.co_qualname, threading.current_thread().name, time.monotonic())
            self._calls[key] = call
            if event == "call":
                names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
                call.arrives = [(name, type_of(frame.f_locals.get(name))) for name in names]
        elif event == "return" and not call.leaves:
            call.leaves = type_of(arg)

    @staticmethod
    def _file(code: CodeType) -> str:
        path = Path(code.co_filename)
        if not path.is_relative_to(ROOT) or path == Path(__file__) or ".venv" in path.parts:
            return ""
        return str(path.relative_to(ROOT))

    def write(self, path: Path) -> None:
        """Write all calls as JSON, in the order in which they began."""
        threading.setprofile(None)
        sys.setprofile(None)
        path.write_text(json.dumps([asdict(call) for call in self._calls.values()]))


RECORDER: list[tuple[Recorder, Path]] = []


@hookimpl
def register_options() -> Any:
    """The folder."""
    return options_of(Walk)


@hookimpl
def on_startup(config: Any) -> None:
    """Record in worker and engine."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    folder = Path(config.section(Walk).walk_dir)
    if spec is not None and spec.name in PROCESSES:
        RECORDER.append((Recorder(folder), folder / f"{spec.name}.json"))


@hookimpl
def on_shutdown() -> None:
    """Write what was recorded."""
    for recorder, path in RECORDER:
        recorder.write(path)
