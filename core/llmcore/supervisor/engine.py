"""The engine process as its supervisor sees it."""

from __future__ import annotations

import os
import time

import zmq

from llmcore.bridge import Load
from llmcore.config import Config
from llmcore.supervisor.child import Child
from llmcore.supervisor.rundir import RunDirectory
from llmcore.supervisor.watchdog import Watchdog
from llmcore.wire import (
    SUPERVISOR,
    Addresses,
    EngineLaunch,
    ModelFacts,
    Outlet,
    Probe,
    Shutdown,
    Snapshot,
    ToEngine,
    WorkerGone,
)

NAME = "engine-0"


class Engine:
    """Spawned at construction. `facts` are there once it is ready, `load` is its newest snapshot."""

    def __init__(
        self,
        module: str,
        config: Config,
        directory: RunDirectory,
        addresses: Addresses,
        context: zmq.Context[zmq.Socket[bytes]],
        report_seconds: float,
    ) -> None:
        launch = EngineLaunch(
            name=NAME,
            parent=os.getpid(),
            log=str(directory.log(NAME)),
            addresses=addresses,
            config=config,
            report_seconds=report_seconds,
        )
        self._timeout = config.server.watchdog_timeout
        self._outlet = Outlet(context, addresses.engine)
        self._watchdog: Watchdog | None = None
        self.facts: ModelFacts | None = None
        self.load = Load()
        self.child = Child(module, launch)

    def ready(self, facts: ModelFacts) -> None:
        """It serves; from now on it is watched."""
        self.facts = facts
        self._watchdog = Watchdog(self._timeout, time.monotonic())

    def heard(self, snapshot: Snapshot) -> None:
        """It reported."""
        self.load = snapshot.load
        if self._watchdog is not None:
            self._watchdog.heard(snapshot, time.monotonic())

    def tell(self, body: WorkerGone | Probe | Shutdown) -> None:
        """Send it a message."""
        self._outlet.send(ToEngine(SUPERVISOR, body))

    @property
    def hung(self) -> bool:
        """Whether it does not get on with its work."""
        return self._watchdog is not None and self._watchdog.hung(time.monotonic())

    def close(self) -> None:
        """Close what is open to it; it must have ended."""
        self._outlet.close(0.0)
        self.child.close()
