"""The processes of one server: how they are started, how dead or hung ones are replaced, and why a child ended."""

from __future__ import annotations

import logging
import math
import signal
import time

import msgspec
import zmq
from llmcore.api.bridge import Load, ModelFacts
from llmcore.api.counters import TALLIES
from llmcore.api.errors import ConfigError, LlmcoreError, ServerError, StartupError
from llmcore.config.process import memory_note

from llmcore_server.messages import EngineStatus, Process, ServerFacts, WorkerGone
from llmcore_server.server_status import total
from llmcore_server.supervisor.admin import Admin
from llmcore_server.supervisor.child import Child, Spawner
from llmcore_server.supervisor.engine import Engine
from llmcore_server.supervisor.entrance import Entrance
from llmcore_server.supervisor.group import Grouping
from llmcore_server.supervisor.restart import MOST_IN_VAIN, Kind
from llmcore_server.supervisor.rundir import PREFIX, RunDirectory
from llmcore_server.supervisor.workers import Workers, number_of

logger = logging.getLogger(__name__)


LEAST = ("max_input_len", "max_total_len", "kv_tokens", "max_running")
"""The facts that engines of one model may have in different sizes, because their devices have other memory left."""


class Failures:
    """Words for children that have ended."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory

    def obituary(self, child: Child) -> str:
        """The end of a child, for people: "failed: ... (log: ...)"."""
        words = child.last_words
        cause = f"failed: {words.message}" if words else child.ending + memory_note()
        kept = self._directory.keep_log(child.name)
        return cause + (f" (log: {kept})" if kept else "")

    def lost(self, end: str) -> ServerError:
        """The error that ends a server whose run directory was deleted. `end`: the event that needed it."""
        path = self._directory.path
        return ServerError(
            f"{end}, and no process can be started, because {path} was deleted, where this server's sockets are; "
            f"start the server again, and keep what cleans {path.parent} away from {path.parent}/{PREFIX}*"
        )

    def hopeless(self, end: str) -> ServerError:
        """The error that ends a server that cannot be reached. `end`: the end of the last child that should serve."""
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
    """The engines, the HTTP workers, the end of TLS and the admin listener. `close` in any case.

    `poller` wakes at the end of any of them. Raises ConfigError for an address or a certificate that cannot be used.
    """

    def __init__(self, spawner: Spawner, engine_module: str, grouping: Grouping, report_seconds: float) -> None:
        self._directory = spawner.directory
        self._clock = spawner.clock
        self._warned = False
        self.poller = zmq.Poller()
        self.failures = Failures(spawner.directory)
        self.engines = [
            Engine(index, engine_module, spawner, report_seconds, grouping) for index in range(spawner.config.model.dp)
        ]
        self.entrance = Entrance(spawner)
        self.admin = Admin(spawner)
        self._facts = ServerFacts(url=self.entrance.url, started=time.time(), began=time.monotonic())
        self.workers = Workers(spawner, self.entrance.workers, tuple(engine.mailbox for engine in self.engines))
        self._kinds: tuple[Kind, ...] = (self.workers, self.entrance, self.admin)

    # --- the children

    def ranks(self) -> list[Child]:
        """The ranks of all engines."""
        return [rank for engine in self.engines for rank in engine.ranks]

    def all(self) -> list[Child]:
        """Every child that was not forgotten."""
        return self.ranks() + [child for kind in self._kinds for child in kind.children()]

    def facts(self) -> ServerFacts:
        """Its address, its start and its processes."""
        processes = tuple(Process(child.name, child.pid, child.alive) for child in self.all())
        return msgspec.structs.replace(self._facts, processes=processes)

    def starting(self) -> list[Child]:
        """Engines and workers that do not read their mailboxes yet."""
        loading = [rank for engine in self.engines if engine.facts is None for rank in engine.ranks]
        return loading + self.workers.starting()

    def called(self, name: str) -> list[Engine]:
        """The engine of that name, unless it does not run."""
        return [engine for engine in self.engines if engine.name == name and engine.ranks]

    def serving(self) -> list[Engine]:
        """The engines to which workers can send requests."""
        return [engine for engine in self.engines if engine.serves and engine.known]

    def model(self) -> ModelFacts:
        """The facts of the model as the engines that run it have them: each of them takes what they say."""
        found = [engine.facts for engine in self.engines if engine.facts is not None]
        least = {name: min(getattr(facts, name) for facts in found) for name in LEAST}
        return msgspec.structs.replace(found[0], **least)

    def load(self) -> Load:
        """The figures of all engines together."""
        return total(engine.load for engine in self.engines)

    def statuses(self) -> tuple[EngineStatus, ...]:
        """Every engine as others see it."""
        return tuple(
            EngineStatus(engine.name, engine.serves and engine.known, engine.stepped, engine.load)
            for engine in self.engines
        )

    def heard(self, name: str) -> None:
        """The child called `name`, which is not an engine, said something."""
        for kind in self._kinds:
            kind.heard(name)

    def wait(self, seconds: float) -> None:
        """Wait for a message, the end of a child or a signal, at most `seconds`."""
        for ready, _ in self.poller.poll(math.ceil(seconds * 1000)):
            if isinstance(ready, int):
                self.poller.unregister(ready)  # a child that has ended; its pidfd would wake us again and again
        self._clock.look()

    # --- starting

    def spawn_engine(self, engine: Engine) -> None:
        """Start an engine that does not run, if it is time, and it can be started now."""
        if not engine.ranks and (engine.due is None or time.monotonic() < engine.due):
            return
        for rank in engine.ranks or engine.spawn():
            if rank.pidfd not in self.poller:
                self.poller.register(rank.pidfd, zmq.POLLIN)

    def spawn_missing(self) -> None:
        """Start the children beside the engines that should run and do not, when it is time."""
        for kind in self._kinds:
            while child := kind.spawn_missing():
                self.poller.register(child.pidfd, zmq.POLLIN)

    # --- what dies or hangs

    def replace_dead(self) -> None:
        """Restart each process that died, except engines: HTTP workers, ends of TLS, the admin listener.

        Raises ServerError if another one would not serve either.
        """
        self._look_at_directory()
        for child in self.workers.reap():
            self._unwatch(child)
        for kind in self._kinds:
            for dead in kind.ended():
                self._unwatch(dead.child)
                end = f"{dead.child.name} {self.failures.obituary(dead.child)}"
                if kind is self.workers:
                    TALLIES.count("worker_restarts")
                    for engine in self.engines:
                        engine.tell(WorkerGone(number_of(dead.child)))
                kind.forget(dead)
                self._go_on(end, hopeless=kind.hopeless)
        self.spawn_missing()

    def kill_hung(self) -> None:
        """Kill the children that make no progress; they are replaced like all that die."""
        for engine in self.engines:
            self._end_broken(engine)
            if not (why := engine.hung):
                continue
            if len(engine.ranks) > 1:
                engine.end = why
                logger.error("%s; its group is ended", why)
            for rank in engine.ranks:
                self.failures.kill_hung(rank, why if len(engine.ranks) == 1 else f"{rank.name} is of this group")
        for kind in self._kinds:
            for child, why in kind.hung():
                self.failures.kill_hung(child, f"{child.name} {why}")

    def obituary(self, engine: Engine) -> str:
        """The end of a dead engine, for people."""
        self._end_broken(engine)  # it may have died since the last look
        if engine.end:
            return engine.end
        assert engine.dead is not None
        return f"{engine.title} {self.failures.obituary(engine.dead)}"

    def startup_error(self, engine: Engine) -> LlmcoreError:
        """The error that ends a start-up because of this engine, which is dead."""
        assert engine.dead is not None
        self._end_broken(engine)
        if not engine.end:
            return self.failures.startup_error(engine.dead)
        return StartupError(
            f"{engine.end}; start the server again, or give --health_monitor, which starts another in its place"
        )

    def _end_broken(self, engine: Engine) -> None:
        """End a group of ranks of which one has failed: the others would wait for it for ever."""
        broken = engine.broken
        if broken is None or engine.end:
            return
        engine.end = f"{engine.place(broken)}; it {self.failures.obituary(broken)}"
        for rank in engine.ranks:
            rank.kill()

    def forget_engine(self, engine: Engine) -> None:
        """Make room for a dead engine's replacement."""
        for rank in engine.ranks:
            self._unwatch(rank)
        engine.forget()

    def close(self) -> None:
        """End all that still run, at once, and close what is open to them."""
        children = self.all()
        for child in children:
            child.send(signal.SIGKILL)
        for child in children:
            child.kill()
        for engine in self.engines:
            engine.forget()
        for kind in self._kinds:
            kind.close()

    def _look_at_directory(self) -> None:
        if not self._directory.lost:
            return
        if self.entrance.lost:
            raise self.failures.lost("nobody can connect")
        if not self._warned:
            self._warned = True
            logger.error("%s was deleted: nothing that dies can be replaced any more", self._directory.path)

    def _go_on(self, end: str, *, hopeless: bool) -> None:
        """Log that another child will start. Raises ServerError if it would end as this one did."""
        if self._directory.lost:
            raise self.failures.lost(end)
        if hopeless:
            raise self.failures.hopeless(end)
        logger.error("%s; starting another", end)

    def _unwatch(self, child: Child) -> None:
        if child.pidfd in self.poller:
            self.poller.unregister(child.pidfd)
