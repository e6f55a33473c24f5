"""A plugin that records which functions of llmcore run in an HTTP worker and in the engine; see `trace_walk.py`.

`--walk_dir` names a folder. The first byte of its file `round` is the number of the recording, or OFF. Its file
`watched` lists functions. Each process appends lines of JSON to `<module>.jsonl`. A line is a function that a thread
runs for the first time in a recording, a call of a watched function with the names and types of its arguments, or a
return from a watched function.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinMethodType, CodeType, FrameType, FunctionType, MethodType
from typing import Any

from llmcore.api import hookimpl, option, options_of
from llmcore.config import Config

OFF = 0
MODULES = {"llmcore_server.http.worker": "worker", "llmcore_server.engine.process": "engine"}
"""Recorded processes: the module that runs as `__main__`, and the name of the process."""

ROOT = Path(__file__).resolve().parent.parent
ROOMS = tuple(str(ROOT / room) for room in ("core", "plugins"))


@dataclass(frozen=True, kw_only=True)
class Walk:
    """The option of this plugin."""

    walk_dir: str = option("", "Folder for the lines of functions that ran.")


def type_of(value: Any) -> str:
    """Returns a name for the type of `value` that is the same in every run: `list[int]`, `Submit`."""
    if value is None:
        return "None"
    if isinstance(value, FunctionType | MethodType | BuiltinMethodType | type):
        return value.__qualname__
    name = type(value).__qualname__
    if type(value) in (list, tuple) and value:
        return f"{name}[{', '.join(sorted({type_of(item) for item in value}))}]"
    return name


class Recorder:
    """Records the calling thread, and every thread that starts after it."""

    def __init__(self, folder: Path, module: str) -> None:
        with (folder / "round").open("rb") as file:
            self._round = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
        self._watched = frozenset((folder / "watched").read_text().split())
        self._lines = os.open(folder / f"{module}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._known: set[tuple[int, CodeType, int]] = set()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, result: Any) -> None:
        """Called by Python when a function begins or ends, and when it calls a function that is written in C."""
        code, now = frame.f_code, self._round[0]
        if now == OFF or not code.co_filename.startswith(ROOMS):
            return
        key = (now, code, threading.get_ident())
        if key not in self._known:
            self._known.add(key)
            self._write(now, code, "run")
        if code.co_qualname not in self._watched:
            return
        if event == "call":
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            self._write(now, code, "call", arrives={name: type_of(frame.f_locals[name]) for name in names})
        elif event == "return":
            self._write(now, code, "return", leaves=type_of(result))

    def _write(self, now: int, code: CodeType, event: str, **types: Any) -> None:
        file, function = os.path.relpath(code.co_filename, ROOT), code.co_qualname
        thread, at = threading.current_thread().name, time.monotonic()
        line = {"round": now, "event": event, "file": file, "function": function, "thread": thread, "at": at, **types}
        os.write(self._lines, json.dumps(line).encode() + b"\n")


@hookimpl
def register_options() -> Any:
    """The folder."""
    return options_of(Walk)


@hookimpl
def on_startup(config: Config) -> None:
    """Record, if this is one of MODULES."""
    spec = sys.modules["__main__"].__spec__
    if spec is not None and spec.name in MODULES:
        Recorder(Path(config.section(Walk).walk_dir), spec.name)
