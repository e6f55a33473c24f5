"""The status of the server: its readiness and its figures, for workers, the admin listener and the log."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from llmcore.api.counters import TALLIES
from llmcore.config import Config

from llmcore_server.messages import HEARTBEAT_SECONDS, State
from llmcore_server.settings import Server
from llmcore_server.supervisor.figures import Sinks, ThroughputLog
from llmcore_server.supervisor.processes import Processes

logger = logging.getLogger(__name__)


STARTING = "the server is starting"


@dataclass(frozen=True)
class Pace:
    """Seconds between two reports of figures: from the engine, and to the workers, which show them."""

    engine: float = HEARTBEAT_SECONDS
    workers: float = 1.0


class Status:
    """The status of one server. `not_ready`: the reason why it takes no requests, or ""."""

    def __init__(self, config: Config, sinks: Sinks, processes: Processes, pace: Pace) -> None:
        self._server = config.section(Server)
        self._processes = processes
        self._pace = pace
        self.sinks = sinks
        self.not_ready = STARTING
        self._throughput = ThroughputLog(config.section(Server).log_stats_interval, time.monotonic())
        self._due = 0.0

    def hurry(self) -> None:
        """Report at once, because a new worker knows nothing yet."""
        self._due = 0.0

    def report(self) -> None:
        """To workers and to the log, when it is time."""
        now = time.monotonic()
        if now >= self._due:
            self.publish()
        if not self._server.disable_log_stats and (line := self._throughput.line(self._processes.load(), now)):
            logger.info(line)

    def publish(self) -> None:
        """Send every worker the state that health and metrics routes answer from."""
        self._due = time.monotonic() + self._pace.workers
        load, engines = self._processes.load(), self._processes.statuses()
        self.sinks.snapshot(load, engines)
        self._processes.workers.tell(
            State(
                ready=not self.not_ready,
                reason=self.not_ready,
                load=load,
                engines=engines,
                page=self.sinks.page(),
                server=self._processes.facts(),
            )
        )

    def tell_admin(self) -> None:
        """The same to the admin listener, which wants it more often."""
        processes = self._processes
        reason = self.not_ready or processes.workers.absence
        facts = processes.model() if any(engine.facts for engine in processes.engines) else None
        processes.admin.tell(reason, processes.statuses(), facts, processes.facts(), self.sinks)

    def recount(self) -> None:
        """An engine has died or come back, so the totals begin anew."""
        self._throughput = ThroughputLog(
            self._server.log_stats_interval, time.monotonic(), before=self._processes.load()
        )

    def renewed(self) -> None:
        """Another engine serves."""
        self.recount()
        self.not_ready = ""
        TALLIES.count("engine_restarts")
        logger.info("another engine serves")
