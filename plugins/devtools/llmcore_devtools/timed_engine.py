"""`python -m llmcore_devtools.timed_engine FD`: the real engine, which logs when client disconnects reach it.

For every abort it appends a line to the file that `config.plugin_options["abort_log"]` names. The line has the
time.monotonic() at which the engine took the message, and the number of steps until one request fewer was running or
waiting. If that was the last request, no slot may be live either.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import zmq
from llmcore.api.bridge import Abort
from llmcore.engine.engine import Engine, Events
from llmcore_server.engine.process import EngineProcess, main
from llmcore_server.messages import EngineLaunch, ToEngine


@dataclass
class _Leaving:
    """An abort whose request still counts. `most`: the number of requests that are left without it."""

    taken: float
    most: int
    steps: int = 0


class TimedEngine(EngineProcess):
    """The engine process, which logs aborts."""

    def __init__(self, launch: EngineLaunch, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        super().__init__(launch, context)
        self._notes = open(launch.config.plugin_options["abort_log"], "a", buffering=1)  # noqa: SIM115 - until the end
        self._leaving: list[_Leaving] = []

    def _handle(self, engine: Engine, message: ToEngine) -> None:
        if not isinstance(message.body, Abort):
            super()._handle(engine, message)
            return
        load = engine.load()
        leaving = _Leaving(time.monotonic(), load.running + load.waiting - 1)
        super()._handle(engine, message)
        self._leaving.append(leaving)
        self._look(engine, steps=0)

    def _step(self, engine: Engine) -> list[Events]:
        steps = super()._step(engine)
        self._look(engine, steps=bool(steps))
        return steps

    def _look(self, engine: Engine, steps: int) -> None:
        if not self._leaving:
            return
        load = engine.load()
        counted = load.running + load.waiting
        still = []
        for leaving in self._leaving:
            leaving.steps += steps
            if counted <= leaving.most and (counted or not load.kv_live):
                self._notes.write(f"{leaving.taken} {leaving.steps}\n")
            else:
                still.append(leaving)
        self._leaving = still


if __name__ == "__main__":
    sys.exit(main(TimedEngine))
