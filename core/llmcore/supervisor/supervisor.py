"""The parent of all processes of a server: starts and watches them, replaces workers, leaves nothing behind."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import zmq

from llmcore.bridge import Load
from llmcore.config import Config, with_plugins
from llmcore.errors import LlmcoreError
from llmcore.plugins import build_registry, discover
from llmcore.supervisor.admin import Admin
from llmcore.supervisor.backoff import BackOff
from llmcore.supervisor.child import Child
from llmcore.supervisor.engine import Engine
from llmcore.supervisor.entrance import Entrance
from llmcore.supervisor.failures import Failures
from llmcore.supervisor.figures import Sinks, ThroughputLog
from llmcore.supervisor.rundir import RunDirectory
from llmcore.supervisor.stops import Stopped, Stops
from llmcore.supervisor.texts import check_options, prepare_tokenizer, with_parsers
from llmcore.supervisor.workers import Workers
from llmcore.tallies import TALLIES
from llmcore.wire import (
    Addresses,
    Alive,
    EngineGone,
    EngineReady,
    Failed,
    Finished,
    Mailbox,
    ModelFacts,
    Probe,
    Progress,
    Shutdown,
    Snapshot,
    State,
    Tallied,
    ToSupervisor,
    WorkerGone,
    WorkerReady,
)

logger = logging.getLogger(__name__)

ENGINE_MODULE = "llmcore.engine.process"
TICK_SECONDS = 0.25
STATE_SECONDS = 1.0
FAREWELL_SECONDS = 1.0
"""How long workers still answer (503) after the engine has died."""
GONE = EngineGone("the engine has stopped")
LAST_SECONDS = 2.0
"""How long a child that was told to end may take, on top of its grace."""


@dataclass(frozen=True)
class Notices:
    """What the command line wants to hear of.

    `progress(stage, done, total)` while the engine starts; `ready(url, facts)` once, when requests are accepted.
    """

    progress: Callable[[str, int, int], None] = lambda stage, done, total: None
    ready: Callable[[str, ModelFacts], None] = lambda url, facts: None


def serve(config: Config, notices: Notices | None = None, *, engine_module: str = ENGINE_MODULE) -> int:
    """Run a server until it is told to stop; the exit code: 0 after SIGTERM or SIGINT, 1 if the engine died.

    For the main thread. Raises ConfigError or PluginError for settings that cannot work, StartupError when a child
    cannot start. The first signal lets open requests finish for `drain_timeout` seconds, the second ends
    everything at once.
    """
    if not config.discovered:
        config = with_plugins(config, discover(config.plugins.plugins))
    stops = Stops()
    with stops.counting():
        supervisor = Supervisor(config, notices or Notices(), stops)
        try:
            return supervisor.run(engine_module)
        finally:
            supervisor.close()


class Supervisor:
    """One server's processes. `close` in any case."""

    def __init__(self, config: Config, notices: Notices, stops: Stops) -> None:
        self._config = config
        self._notices = notices
        self._stops = stops
        self._registry = build_registry(config)
        self._sinks = Sinks(self._registry, config.reports)
        self._directory = RunDirectory(config.server.zmq_mode)
        self._addresses = Addresses(self._directory.address("engine"), self._directory.address("control"))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._entrance = Entrance(config, self._directory, self._addresses)
            self._admin = Admin(config, self._directory, self._addresses, self._context, self._entrance.url)
        except LlmcoreError:
            self._directory.remove()
            raise
        self._control: Mailbox[ToSupervisor] = Mailbox(self._context, self._addresses.control, ToSupervisor)
        self._poller = zmq.Poller()
        self._poller.register(self._control.socket, zmq.POLLIN)
        self._workers = Workers(config, self._context, self._directory, self._addresses, self._entrance.workers)
        self._engines: list[Engine] = []
        self._failures = Failures(self._directory)
        self._throughput = ThroughputLog(config.server.log_stats_interval, time.monotonic())
        self._backoff = BackOff(config.server.restart_pause, config.server.restart_limit)
        self._state_due = 0.0
        self._not_ready = "the server is starting"

    # --- its life

    def run(self, engine_module: str) -> int:
        """Start everything, watch it, and stop it in order; the exit code."""
        self._registry.call("on_startup", config=self._config)
        check_options(self._registry, self._config)
        self._spawn_missing()
        engine = self._spawn_engine(engine_module)
        try:
            with self._stops.interrupting():  # while the engine loads
                tokenizer_dir = prepare_tokenizer(self._registry, self._config, self._directory.path)
        except Stopped:
            return 0
        if not self._start(engine, tokenizer_dir):
            return 0
        code = self._watch(engine, engine_module)
        served = self._drain(0.0 if code else self._config.server.drain_timeout)
        self._registry.call("on_shutdown")
        return code if served else 1

    def close(self) -> None:
        """End whatever still runs, at once, and remove the run directory."""
        children = self._children()
        for child in children:
            child.send(signal.SIGKILL)
        for child in children:
            child.kill()
        for engine in self._engines:
            engine.close()
        self._workers.close()
        self._entrance.close()
        self._admin.close()
        self._sinks.close()
        self._control.close()
        self._context.term()
        self._directory.remove()

    def _start(self, engine: Engine, tokenizer_dir: str) -> bool:
        """Wait for the engine, then start the workers and wait for them; False if told to stop meanwhile."""
        if not self._wait_until(lambda: engine.facts is not None) or engine.facts is None:
            return False
        self._entrance.listen()
        config, facts = with_parsers(self._registry, self._config, engine.facts, tokenizer_dir)
        facts = msgspec.structs.replace(facts, report=(*facts.report, *self._admin.rows))
        self._workers.prepare(config, facts, tokenizer_dir)
        self._spawn_missing()
        if not self._wait_until(lambda: self._workers.all_ready() and self._entrance.ready):
            return False
        self._not_ready = ""
        self._publish_load(engine.load)
        self._notices.ready(self._entrance.url, facts)
        return True

    def _wait_until(self, ready: Callable[[], bool]) -> bool:
        """Handle messages until `ready`; False if told to stop, StartupError if a child ends."""
        while not ready():
            if self._stops.count:
                return False
            self._turn()
            for child in self._children():
                if child in self._failures or not child.alive:
                    child.wait(1.0)
                    self._hear_all()
                    raise self._failures.startup_error(child)
        return True

    def _watch(self, engine: Engine, engine_module: str) -> int:
        """Until told to stop (0), or the engine is gone and there is to be no other (1)."""
        while not self._stops.count:
            self._turn()
            self._look_after(engine.load)
            if not engine.child.alive:
                revived = self._revive(engine, engine_module)
                if revived is None:
                    return 0 if self._stops.count else 1
                engine = revived
        return 0

    def _revive(self, dead: Engine, engine_module: str) -> Engine | None:
        """Another engine in place of a dead one; None if there is to be none, or the server is asked to stop.

        Workers answer 503 meanwhile. They are replaced too: what they know of the model came from the dead engine.
        """
        while True:
            pause = self._backoff.pause(time.monotonic()) if self._config.server.health_monitor else None
            self._announce_death(dead, pause)
            if pause is None:
                return None
            self._unwatch(dead.child)
            self._engines.remove(dead)
            dead.close()
            until = time.monotonic() + pause
            while time.monotonic() < until and not self._stops.count:
                self._turn(until)
                self._look_after(dead.load)
            if self._stops.count:
                return None
            engine = dead = self._spawn_engine(engine_module)
            while engine.facts is None and engine.child.alive and not self._stops.count:
                self._turn()
                self._look_after(engine.load)
            if engine.facts is not None:
                break
            if self._stops.count:
                return None
            self._hear_all()
        self._throughput = ThroughputLog(self._config.server.log_stats_interval, time.monotonic())
        self._not_ready = ""
        self._workers.renew(engine.facts)
        self._spawn_missing()
        TALLIES.count("engine_restarts")
        logger.info("another engine serves")
        return engine

    def _drain(self, grace: float) -> bool:
        """Workers first, so that the engine serves their last requests; a second signal cuts it short.

        Whether the engine served until then.
        """
        self._not_ready = "the server is shutting down"
        served = all(engine.child.alive for engine in self._engines)
        self._publish_load(self._engines[0].load if self._engines else Load())
        self._workers.tell(Shutdown(grace))
        for _ in self._until_ended(self._workers.children(), grace + LAST_SECONDS):
            self._end_hung()
            for engine in self._engines:
                self._report(engine.load)
                if served and not engine.child.alive:
                    served = False
                    logger.error("the engine %s; open requests end", self._failures.obituary(engine.child))
                    self._workers.tell(GONE)
        self._entrance.stop()
        for engine in self._engines:
            engine.tell(Shutdown())
        self._wait_for_end([engine.child for engine in self._engines] + self._entrance.children(), LAST_SECONDS)
        return served

    def _until_ended(self, children: list[Child], seconds: float) -> Iterator[None]:
        """A turn of the loop at a time, until all have ended, the time is over, or a second signal comes."""
        deadline = time.monotonic() + seconds
        while any(child.alive for child in children) and time.monotonic() < deadline and self._stops.count < 2:
            self._turn(deadline)
            yield

    def _wait_for_end(self, children: list[Child], seconds: float) -> None:
        for _ in self._until_ended(children, seconds):
            pass

    # --- what happens meanwhile

    def _turn(self, until: float = math.inf) -> None:
        """Wait for a message, the end of a child, a signal, the next tick or `until`, and handle what came."""
        seconds = max(0.0, min(TICK_SECONDS, until - time.monotonic()))
        for ready, _ in self._poller.poll(math.ceil(seconds * 1000)):
            if isinstance(ready, int):
                self._poller.unregister(ready)  # a child that has ended; its pidfd would wake us for ever
        self._hear_all()
        self._admin.tell(self._not_ready or self._workers.absence, self._engines, self._children(), self._sinks)

    def _hear_all(self) -> None:
        for message in self._control.drain():
            self._hear(message.sender, message.body)

    def _hear(self, sender: str, body: object) -> None:
        match body:
            case Snapshot():
                for engine in self._called(sender):
                    engine.heard(body)
            case Finished():
                self._sinks.request_finished(body.record)
            case EngineReady():
                for engine in self._called(sender):
                    engine.ready(body.facts)
            case WorkerReady():
                if not any(engine.facts and engine.child.alive for engine in self._engines):
                    self._workers.tell(GONE)  # it began while there was none
                self._workers.ready(sender)
                self._entrance.heard(sender)
                self._admin.heard(sender)
                self._state_due = 0.0
            case Progress():
                self._notices.progress(body.stage, body.done, body.total)
            case Alive():
                self._workers.heard(sender)
                self._entrance.heard(sender)
                self._admin.heard(sender)
            case Tallied():
                self._sinks.tallied(sender, body)
            case Probe():
                self._admin.probe(self._engines)
            case Failed():
                self._failures.said(sender, body)

    def _report(self, load: Load) -> None:
        """To workers and to the log, when it is time."""
        now = time.monotonic()
        if now >= self._state_due:
            self._publish_load(load)
        if not self._config.server.disable_log_stats and (line := self._throughput.line(load, now)):
            logger.info(line)

    def _publish_load(self, load: Load) -> None:
        """Send every worker the state that health and metrics routes answer from."""
        self._state_due = time.monotonic() + STATE_SECONDS
        TALLIES.set("dropped_messages", "supervisor", total=self._control.dropped)
        self._sinks.snapshot(load)
        self._workers.tell(
            State(ready=not self._not_ready, reason=self._not_ready, load=load, page=self._sinks.page())
        )

    def _look_after(self, load: Load) -> None:
        """Whether the engine serves, is waited for, or loads: all others are kept running, and are told how it is."""
        self._replace()
        self._end_hung()
        self._report(load)

    def _end_hung(self) -> None:
        """Kill what does not get on with its work; it is replaced like everything that dies."""
        seconds = self._config.server.watchdog_timeout
        for engine in self._engines:
            if engine.hung and engine.child.alive:
                self._failures.kill_hung(engine.child, f"the engine has finished no step for {seconds} s")
        for child in [*self._workers.hung(), *self._entrance.hung(), *self._admin.hung()]:
            self._failures.kill_hung(child, f"{child.name} was silent for {seconds} s")

    def _replace(self) -> None:
        """Start another worker, or end of TLS, for each that died."""
        for child in self._workers.reap():
            self._unwatch(child)
        for worker in self._workers.ended():
            logger.error("%s %s; starting another", worker.child.name, self._failures.obituary(worker.child))
            TALLIES.count("worker_restarts")
            for engine in self._engines:
                engine.tell(WorkerGone(worker.number))
            self._unwatch(worker.child)
            self._workers.forget(worker)
        for part in (self._entrance, self._admin):
            if (ended := part.ended()) is not None:
                logger.error("%s %s; starting another", ended.name, self._failures.obituary(ended))
                self._unwatch(ended)
                part.forget()
        self._spawn_missing()

    def _spawn_missing(self) -> None:
        while child := self._workers.spawn_missing() or self._entrance.spawn_missing() or self._admin.spawn_missing():
            self._poller.register(child.pidfd, zmq.POLLIN)

    def _spawn_engine(self, engine_module: str) -> Engine:
        engine = Engine(engine_module, self._config, self._directory, self._addresses, self._context)
        self._engines.append(engine)
        self._poller.register(engine.child.pidfd, zmq.POLLIN)
        return engine

    def _announce_death(self, engine: Engine, pause: float | None) -> None:
        """Streams end with an error now; workers say 503 until another engine serves, or for a moment.

        `pause`: seconds until another engine starts; None: the server ends.
        """
        then = "the server ends" if pause is None else f"another starts in {pause:g} s"
        logger.error("the engine %s; %s", self._failures.obituary(engine.child), then)
        self._workers.tell(GONE)
        self._not_ready = GONE.message
        self._publish_load(engine.load)
        if pause is None:
            self._wait_for_end(self._workers.children(), FAREWELL_SECONDS)

    # --- small things

    def _unwatch(self, child: Child) -> None:
        if child.pidfd in self._poller:
            self._poller.unregister(child.pidfd)

    def _children(self) -> list[Child]:
        engines = [engine.child for engine in self._engines]
        return [*engines, *self._workers.children(), *self._entrance.children(), *self._admin.children()]

    def _called(self, name: str) -> list[Engine]:
        """The engine of that name, unless it has died and been forgotten."""
        return [engine for engine in self._engines if engine.child.name == name]
