"""The engine process as its supervisor sees it."""

from __future__ import annotations

import os

import zmq
from llmcore.api.bridge import Load, ModelFacts
from llmcore.config import Config

from llmcore_server.messages import (
    SUPERVISOR,
    Addresses,
    EngineLaunch,
    Outlet,
    Probe,
    Shutdown,
    Snapshot,
    ToEngine,
    WorkerGone,
)
from llmcore_server.settings import Server
from llmcore_server.supervisor.child import Child
from llmcore_server.supervisor.rundir import RunDirectory
from llmcore_server.supervisor.watchdog import Clock, Watchdog

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
        clock: Clock,
    ) -> None:
        launch = EngineLaunch(
            name=NAME,
            parent=os.getpid(),
            log=str(directory.log(NAME)),
            addresses=addresses,
            config=config,
            report_seconds=report_seconds,
        )
        self._clock = clock
        self._watchdog = Watchdog(config.section(Server).watchdog_timeout, clock.now)
        self.facts: ModelFacts | None = None
        self.load = Load()
        self._outlet = Outlet(context, addresses.engine)
        try:
            self.child = Child(module, launch)
        except OSError:
            self._outlet.close(0.0)
            raise

    def loaded_more(self) -> None:
        """It got on with loading."""
        self._watchdog.loaded_more(self._clock.now)

    def ready(self, facts: ModelFacts) -> None:
        """It serves."""
        self.facts = facts
        self._watchdog.ready(self._clock.now)

    def heard(self, snapshot: Snapshot) -> None:
        """It reported."""
        self.load = snapshot.load
        self._watchdog.heard(snapshot, self._clock.now)

    def tell(self, body: WorkerGone | Probe | Shutdown) -> None:
        """Send it a message."""
        self._outlet.send(ToEngine(SUPERVISOR, body))

    @property
    def hung(self) -> str:
        """Why it is to be killed, "" while it gets on with its work."""
        return self._watchdog.hung(self._clock.now) if self.child.alive else ""

    def close(self) -> None:
        """Close what is open to it; it must have ended."""
        self._outlet.close(0.0)
        self.child.close()
