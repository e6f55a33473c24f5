"""The engine process as its supervisor sees it."""

from __future__ import annotations

import logging
import os
import signal
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
    Shutdown,
    Snapshot,
    ToEngine,
    WorkerGone,
)

logger = logging.getLogger(__name__)

NAME = "engine-0"
STACKS_SECONDS = 0.5
"""How long a hung engine has to write its stacks before it is killed."""


class Engine:
    """Spawned at construction. `facts` are there once it is ready, `load` is its newest snapshot."""

    def __init__(
        self,
        module: str,
        config: Config,
        directory: RunDirectory,
        addresses: Addresses,
        context: zmq.Context[zmq.Socket[bytes]],
    ) -> None:
        launch = EngineLaunch(
            name=NAME, parent=os.getpid(), log=str(directory.log(NAME)), addresses=addresses, config=config
        )
        self._directory = directory
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

    def tell(self, body: WorkerGone | Shutdown) -> None:
        """Send it a message."""
        self._outlet.send(ToEngine(SUPERVISOR, body))

    def kill_if_hung(self) -> None:
        """Have it write its stacks, and end it, if it does not get on with its work."""
        if self._watchdog is None or not self._watchdog.hung(time.monotonic()):
            return
        self.child.send(signal.SIGUSR1)
        self.child.wait(STACKS_SECONDS)
        kept = self._directory.keep_log(NAME)
        where = f"; its stacks are in {kept}" if kept else ""
        logger.error("the engine has finished no step for %d s and is killed%s", self._timeout, where)
        self.child.kill()

    def close(self) -> None:
        """Close what is open to it; it must have ended."""
        self._outlet.close(0.0)
        self.child.close()
