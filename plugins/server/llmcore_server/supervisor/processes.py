"""The processes of one server: how they are started, how dead or hung ones are replaced, and why a child ended."""

from __future__ import annotations

import logging
import math
import signal
import time

import msgspec
import zmq
from llmcore.api.counters import TALLIES
from llmcore.api.errors import ConfigError, LlmcoreError, ServerError, StartupError
from llmcore.config import Config
from llmcore.config.process import memory_note

from llmcore_server.messages import Addresses, Process, ServerFacts, WorkerGone
from llmcore_server.supervisor.admin import Admin
from llmcore_server.supervisor.child import Child
from llmcore_server.supervisor.engine import Engine
from llmcore_server.supervisor.entrance import Entrance
from llmcore_server.supervisor.restart import MOST_IN_VAIN, Starts
from llmcore_server.supervisor.rundir import PREFIX, RunDirectory
from llmcore_server.supervisor.watchdog import Clock
from llmcore_server.supervisor.workers import Workers

logger = logging.getLogger(__name__)


class Failures:
    """Words for children that have ended."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory

    def obituary(self, child: Child) -> str:
        """What became of a child that has ended: "failed: ... (log: ...)"."""
        words = child.last_words
        cause = f"failed: {words.message}" if words else child.ending + memory_note()
        kept = self._directory.keep_log(child.name)
        return cause + (f" (log: {kept})" if kept else "")

    def lost(self, end: str) -> ServerError:
        """The error that ends a server whose run directory was deleted; `end`: what it was needed for."""
        path = self._directory.path
        return ServerError(
            f"{end}, and no process can be started, because {path} was deleted, where this server's sockets are; "
            f"start the server again, and keep what cleans {path.parent} away from {path.parent}/{PREFIX}*"
        )

    def hopeless(self, end: str) -> ServerError:
        """The error that ends a server nobody can reach; `end`: what became of the last who should have served."""
        return ServerError(
            f"{end}, as all {MOST_IN_VAIN} that were started in a row; mend its cause, and start the server again"
        )

    def kill_hung(self, child: Child, what: str) -> None:
        """End a child that hangs; its stacks go with the message to the log."""
        child.kill_with_stacks()
        kept = self._directory.keep_log(child.name)
        logger.error("%s and is killed%s", what, f"; its stacks are in {kept}" if kept else "")

    def startup_error(self, child: Child) -> LlmcoreError:
        """The error that ends a start-up because of this child."""
        words = child.last_words
        if words is not None and words.usage:
            return ConfigError(words.message)
        cause = words.message if words else f"it {child.ending}{memory_note()}"
        if child.killed:
            cause += "; start the server again, or give --health_monitor, which starts another in its place"
        kept = self._directory.keep_log(child.name)
        return StartupError(f"{child.name} could not start: {cause}", log=None if kept is None else str(kept))


class Processes:
    """The engine, the HTTP workers, the end of TLS and the admin listener. `close` in any case.

    `poller` wakes at the end of any of them. Raises ConfigError for addresses that cannot be had, or a certificate
    that cannot be used.
    """

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        addresses: Addresses,
        context: zmq.Context[zmq.Socket[bytes]],
        report_seconds: float,
    ) -> None:
        self._config = config
        self._directory = directory
        self._addresses = addresses
        self._context = context
        self._report_seconds = report_seconds
        self._warned = False
        self._clock = Clock()
        self._engine_starts = Starts("the engine")
        self.poller = zmq.Poller()
        self.failures = Failures(directory)
        self.engines: list[Engine] = []
        self.entrance = Entrance(config, directory, addresses, self._clock)
        self.admin = Admin(config, directory, addresses, context, self._clock)
        self._facts = ServerFacts(url=self.entrance.url, started=time.time(), began=time.monotonic())
        self.workers = Workers(config, context, directory, addresses, self.entrance.workers, self._clock)

    # --- who is there

    def all(self) -> list[Child]:
        """Every child that was not forgotten."""
        engines = [engine.child for engine in self.engines]
        return [*engines, *self.workers.children(), *self.entrance.children(), *self.admin.children()]

    def facts(self) -> ServerFacts:
        """Its address, its start and its processes."""
        processes = tuple(Process(child.name, child.pid, child.alive) for child in self.all())
        return msgspec.structs.replace(self._facts, processes=processes)

    def starting(self) -> list[Child]:
        """Engines and workers that do not read their mailboxes yet."""
        engines = [engine.child for engine in self.engines if engine.facts is None]
        return engines + self.workers.starting()

    def called(self, name: str) -> list[Engine]:
        """The engine of that name, unless it has died and been forgotten."""
        return [engine for engine in self.engines if engine.child.name == name]

    def engine_serves(self) -> bool:
        """Whether there is an engine that requests can be sent to."""
        return any(engine.facts and engine.child.alive for engine in self.engines)

    def heard(self, name: str) -> None:
        """The child called `name`, no engine, said something."""
        self.workers.heard(name)
        self.entrance.heard(name)
        self.admin.heard(name)

    def wait(self, seconds: float) -> None:
        """Until a message or the end of a child comes, a signal, or the time is over."""
        for ready, _ in self.poller.poll(math.ceil(seconds * 1000)):
            if isinstance(ready, int):
                self.poller.unregister(ready)  # a child that has ended; its pidfd would wake us for ever
        self._clock.look()

    # --- starting

    def spawn_engine(self, module: str) -> Engine | None:
        """Start an engine; None where none can be started now."""
        engine = self._engine_starts.start(
            lambda: Engine(
                module,
                self._config,
                self._directory,
                self._addresses,
                self._context,
                self._report_seconds,
                self._clock,
            )
        )
        if engine is not None:
            self.engines.append(engine)
            self.poller.register(engine.child.pidfd, zmq.POLLIN)
        return engine

    def spawn_missing(self) -> None:
        """Start what should run beside the engine and does not, where it is time."""
        while child := self.workers.spawn_missing() or self.entrance.spawn_missing() or self.admin.spawn_missing():
            self.poller.register(child.pidfd, zmq.POLLIN)

    # --- what dies or hangs

    def replace_dead(self) -> None:
        """Restart each process that died, except engines: HTTP workers, ends of TLS, the admin listener.

        Raises ServerError if another one would not serve either.
        """
        self._look_at_directory()
        for child in self.workers.reap():
            self._unwatch(child)
        for worker in self.workers.ended():
            end = self._end_of(worker.child)
            TALLIES.count("worker_restarts")
            for engine in self.engines:
                engine.tell(WorkerGone(worker.number))
            self.workers.forget(worker)
            self._go_on(end, hopeless=self.workers.hopeless)
        for single in (self.entrance, self.admin):
            if (dead := single.ended()) is not None:
                end = self._end_of(dead)
                single.forget()
                self._go_on(end, hopeless=single.hopeless)
        self.spawn_missing()

    def kill_hung(self) -> None:
        """Kill what does not get on with its work; it is replaced like everything that dies."""
        for engine in self.engines:
            if why := engine.hung:
                self.failures.kill_hung(engine.child, why)
        for child, why in [*self.workers.hung(), *self.entrance.hung(), *self.admin.hung()]:
            self.failures.kill_hung(child, f"{child.name} {why}")

    def forget_engine(self, engine: Engine) -> None:
        """Make room for a dead engine's replacement."""
        self._unwatch(engine.child)
        self.engines.remove(engine)
        engine.close()

    def close(self) -> None:
        """End whatever still runs, at once, and close what is open to it."""
        children = self.all()
        for child in children:
            child.send(signal.SIGKILL)
        for child in children:
            child.kill()
        for engine in self.engines:
            engine.close()
        self.workers.close()
        self.entrance.close()
        self.admin.close()

    def _look_at_directory(self) -> None:
        if not self._directory.lost:
            return
        if self.entrance.lost:
            raise self.failures.lost("nobody can connect")
        if not self._warned:
            self._warned = True
            logger.error("%s was deleted: nothing that dies can be replaced any more", self._directory.path)

    def _end_of(self, child: Child) -> str:
        """What became of a child that has ended; it is watched no more."""
        self._unwatch(child)
        return f"{child.name} {self.failures.obituary(child)}"

    def _go_on(self, end: str, *, hopeless: bool) -> None:
        """Another is to be started: say so. ServerError where it would end as this one did."""
        if self._directory.lost:
            raise self.failures.lost(end)
        if hopeless:
            raise self.failures.hopeless(end)
        logger.error("%s; starting another", end)

    def _unwatch(self, child: Child) -> None:
        if child.pidfd in self.poller:
            self.poller.unregister(child.pidfd)
