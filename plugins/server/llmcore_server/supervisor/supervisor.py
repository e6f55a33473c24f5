"""The parent of all processes of a server: starts and watches them, replaces workers, leaves nothing behind."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import msgspec
import zmq
from llmcore.api.errors import ConfigError, LlmcoreError, Stopped
from llmcore.api.specs import OptionSpec
from llmcore.config import Config, settings, without_private
from llmcore.registry.loader import build_registry
from llmcore.registry.registry import Registry

from llmcore_server.child import FROM_OUTSIDE, STOP
from llmcore_server.messages import EngineBack, EngineGone, Shutdown
from llmcore_server.server_status import model_names
from llmcore_server.settings import Push, Registration, Server
from llmcore_server.supervisor.child import Child, Spawner
from llmcore_server.supervisor.engine import Engine
from llmcore_server.supervisor.fetching import Fetching
from llmcore_server.supervisor.figures import Sinks
from llmcore_server.supervisor.group import Grouping
from llmcore_server.supervisor.mail import STOPPED, Mail, Notices
from llmcore_server.supervisor.processes import Processes
from llmcore_server.supervisor.registration import Registered
from llmcore_server.supervisor.rundir import RunDirectory
from llmcore_server.supervisor.status import STARTING, Pace, Status
from llmcore_server.supervisor.texts import check_options, prepare_tokenizer, with_parsers

logger = logging.getLogger(__name__)

MEANINGLESS = (signal.SIGUSR1, signal.SIGUSR2)
"""Without a handler they would end the process before it has cleaned up."""


@dataclass
class Stops:
    """The number of times that the process was asked to stop."""

    count: int = 0
    _interrupts: bool = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, FROM_OUTSIDE are counted and have no other effect. Ignored ones stay ignored, as SIGHUP under nohup.

        Afterwards all are ignored: the process ends, with the exit code that it has by then.
        """

        def on_signal(number: int, frame: object) -> None:
            self.count += 1
            if self._interrupts:
                raise Stopped

        for number in FROM_OUTSIDE:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, on_signal)
        for number in MEANINGLESS:  # not SIG_IGN, which children would inherit
            signal.signal(number, lambda *_: None)
        try:
            yield
        finally:
            for number in (*FROM_OUTSIDE, *MEANINGLESS):
                signal.signal(number, signal.SIG_IGN)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Inside, they raise Stopped too."""
        self._interrupts = True
        try:
            yield
        finally:
            self._interrupts = False


ENGINE_MODULE = "llmcore_server.engine.process"
TICK_SECONDS = 0.25
FAREWELL_SECONDS = 1.0
"""The time for which workers still answer (503) after the engine has died."""
LAST_SECONDS = 2.0
"""The time that a child may take to end, on top of its grace."""
UNDO_SECONDS = 5.0
"""The same for a child that is still starting, because it may be in the middle of something."""


def serve(
    config: Config,
    notices: Notices | None = None,
    *,
    engine_module: str = ENGINE_MODULE,
    pace: Pace | None = None,
    grouping: Grouping | None = None,
) -> int:
    """Run a server until it is told to stop; the exit code: 0 after SIGTERM or SIGINT, 1 if its last engine died.

    For the main thread. Raises ConfigError or PluginError for settings that cannot work, StartupError when a child
    cannot start, ServerError when one cannot be replaced. The first signal lets open requests finish for
    `drain_timeout` seconds, the second ends everything at once. Afterwards they are ignored: the process is to end.
    """
    if not config.discovered:
        config = replace(config, discovered=build_registry(config).offered)
    if config.model.ranks > 1 and engine_module != ENGINE_MODULE:
        raise ConfigError(f"--tp {config.model.tp}: this server's engine has no model that processes could share")
    stops = Stops()
    registry = build_registry(config)
    with stops.counting(), registry.lifetime(config):
        supervisor = Supervisor(
            config,
            registry,
            notices or Notices(),
            stops,
            pace or Pace(),
            (engine_module, grouping or Grouping()),
        )
        try:
            return supervisor.run()
        finally:
            supervisor.close()


class Supervisor:
    """One server's life: its start, its work and its end. `close` in any case.

    It is made after `on_startup`, on which a metric sink may build. `engines`: their module, and the ranks of each.
    """

    def __init__(
        self,
        config: Config,
        registry: Registry,
        notices: Notices,
        stops: Stops,
        pace: Pace,
        engines: tuple[str, Grouping],
    ) -> None:
        self._config = config
        self._server = config.section(Server)
        self._notices = notices
        self._stops = stops
        self._registry = registry
        sinks = Sinks(self._registry, config.section(Push))
        self._directory = RunDirectory(self._server.zmq_mode)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        brought = settings(spec for spec, _ in registry.specs(OptionSpec))
        self._spawner = spawner = Spawner(without_private(config, brought), self._directory, self._context)
        try:
            self._processes = Processes(spawner, *engines, pace.engine)
        except LlmcoreError:
            self._directory.remove()
            raise
        self._engines = self._processes.engines
        self._status = Status(config, sinks, self._processes, pace)
        self._mail = Mail(self._context, spawner.control, self._processes, self._status, notices)
        self._registered = Registered(config.section(Registration), self._server.host)
        self._serves = False

    def run(self) -> int:
        """Start everything, watch it, and stop it in order; the exit code."""
        code, grace = 1, 0.0
        try:
            started = self._start()
            code = self._watch() if started else 0
            grace = 0.0 if code or not started else self._server.drain_timeout
        finally:  # also after an error: a child may have something to put away
            served = self._drain(grace)
        return code if served else 1

    def close(self) -> None:
        """End all that still run, at once, and remove the run directory."""
        self._processes.close()
        self._status.sinks.close()
        self._mail.close()
        self._context.term()
        self._directory.remove()

    # --- the start

    def _start(self) -> bool:
        """Start everything. True once requests are accepted, False if told to stop meanwhile."""
        check_options(self._registry, self._config)
        processes = self._processes
        processes.spawn_missing()
        if not (self._find_model() and self._wait_until(self._engines_run)):
            return False
        try:
            with self._stops.interrupting():  # while the engine loads
                tokenizer_dir = prepare_tokenizer(self._registry, self._config, self._directory.path)
        except Stopped:
            return False
        config, parsers = with_parsers(self._registry, self._spawner.config, tokenizer_dir)
        processes.workers.prepare(config, tokenizer_dir)
        if not self._wait_until(lambda: all(engine.facts is not None for engine in self._engines)):
            return False
        processes.entrance.listen()
        facts = processes.model()
        report = (*facts.report, *parsers, *self._rows(), *processes.admin.rows)
        self._status.not_ready = ""  # the first that workers hear: none refuses a request because of older news
        processes.workers.know(msgspec.structs.replace(facts, report=report))
        if not self._wait_until(self._all_ready):
            return False
        self._serves, self._status.not_ready = True, ""
        self._status.publish()
        self._registered.begin(processes.entrance.url, model_names(self._config))
        self._notices.ready(processes.entrance.url, msgspec.structs.replace(processes.model(), report=report))
        return True

    def _find_model(self) -> bool:
        """Fetch the model if it is given by its name. False if told to stop meanwhile."""
        if self._config.model.path.exists():
            return True
        with Fetching(self._config, self._registry, self._notices.progress) as found:
            if not self._wait_until(found.done):
                return False
        self._config = found.result()
        self._spawner.config = replace(self._spawner.config, model=self._config.model, revision=self._config.revision)
        return True

    def _rows(self) -> tuple[tuple[str, str], ...]:
        """The line of the start-up summary about several engines."""
        model = self._config.model
        return (("engines", f"{model.dp}, each with {model.ranks} of {model.tp} processes"),) if model.dp > 1 else ()

    def _engines_run(self) -> bool:
        """Start the engines that do not run. Returns True if all run."""
        for engine in self._engines:
            self._processes.spawn_engine(engine)
        return all(engine.ranks for engine in self._engines)

    def _all_ready(self) -> bool:
        processes = self._processes
        return (
            len(processes.serving()) == len(self._engines)
            and processes.workers.all_ready()
            and processes.entrance.ready
        )

    def _wait_until(self, ready: Callable[[], bool]) -> bool:
        """Handle messages until `ready`; False if told to stop.

        A child that a signal ends meanwhile is replaced, as it is later. A child that ends by itself raises
        StartupError, or ConfigError with the child's own words, because another one would end in the same way.
        """
        while not ready():
            if self._stops.count:
                return False
            self._processes.spawn_missing()
            self._turn()
            self._processes.kill_hung()
            for child in self._processes.all():
                if child.last_words or not (child.alive or child.killed):
                    child.wait(1.0)
                    raise self._processes.failures.startup_error(child)
            self._processes.replace_dead()
            for engine in self._engines:
                dead = engine.dead
                if dead is not None and dead.killed and not self._bury(engine):
                    raise self._processes.startup_error(engine)
                self._look_after_engine(engine)
        return True

    # --- while it serves

    def _watch(self) -> int:
        """Watch until told to stop (0), or all engines are gone and none is replaced (1)."""
        while not self._stops.count:
            self._turn()
            self._look_after()
            for engine in self._engines:
                if engine.dead is not None and engine.due is not None:
                    self._bury(engine)
                self._look_after_engine(engine)
            if not any(self._hopes()):
                return 1
        return 0

    def _look_after(self) -> None:
        """Keep all children but dead engines running, and tell them the status, whatever state the engines are in."""
        self._processes.replace_dead()
        self._processes.kill_hung()
        self._status.report()

    def _hopes(self) -> list[Engine]:
        """The engines that run or will."""
        return [engine for engine in self._engines if engine.due is not None]

    def _look_after_engine(self, engine: Engine) -> None:
        """Start an engine that has died, when it is time, and let it serve once it can."""
        if engine.known or engine.due is None:
            return
        self._processes.spawn_engine(engine)
        if engine.facts is None or not engine.alive:
            return
        others = self._processes.serving()
        engine.known = True
        if others:
            self._processes.workers.tell(EngineBack(engine.index))
        else:  # workers know the model from engines that are gone
            self._processes.workers.renew(self._processes.model())
            self._processes.spawn_missing()
        self._status.renewed()
        if not self._serves:
            self._status.not_ready = STARTING

    def _bury(self, engine: Engine) -> bool:
        """Deal with the death of an engine. False if it is not replaced.

        Its requests move on to other engines. Without any, they end with an error, and workers answer 503 until
        another engine serves, or for a moment. Raises ServerError if another one could not start.
        """
        pause = engine.backoff.pause(time.monotonic()) if self._server.health_monitor else None
        end, lost = self._processes.obituary(engine), pause is not None and self._directory.lost
        engine.due = None if pause is None else time.monotonic() + pause
        engine.known = False
        last = lost or not self._hopes()
        then = "the server ends" if last else "the others go on" if pause is None else f"another starts in {pause:g} s"
        logger.error("%s; %s", end, then)
        self._processes.workers.tell(EngineGone(engine.index, STOPPED))
        if not self._serves:
            self._status.not_ready = STARTING
        elif not self._processes.serving():
            self._status.not_ready = STOPPED
        if pause is None:
            engine.retire()
        self._status.publish()
        self._status.recount()
        if last:
            self._wait_for_end(self._processes.workers.children(), FAREWELL_SECONDS)
        if lost:
            raise self._processes.failures.lost(end)
        if pause is not None:
            self._processes.forget_engine(engine)
        return pause is not None

    # --- the end

    def _drain(self, grace: float) -> bool:
        """End workers first, so that the engines serve their last requests. A second signal cuts it short.

        Returns True if the engines served until then.
        """
        engines, workers = self._engines, self._processes.workers
        self._status.not_ready = "the server is shutting down"
        serving = [engine for engine in engines if engine.facts is not None]
        served = not serving or any(engine.alive for engine in serving)
        self._status.publish()
        self._registered.end()
        workers.tell(Shutdown(grace))
        starting, began = self._processes.starting(), time.monotonic()
        for child in starting:  # they read no messages yet
            child.send(STOP)
        longest = max(grace + LAST_SECONDS, UNDO_SECONDS if starting else 0.0)
        for _ in self._until_ended([*workers.children(), *starting], longest):
            self._processes.kill_hung()
            if time.monotonic() - began > UNDO_SECONDS:
                for child in self._processes.starting():
                    child.kill()
            self._status.report()
            for engine in [engine for engine in serving if served and engine.dead is not None]:
                serving.remove(engine)
                served = bool(serving)
                then = "its requests move on" if served else "open requests end"
                logger.error("%s; %s", self._processes.obituary(engine), then)
                workers.tell(EngineGone(engine.index, STOPPED))
        self._processes.entrance.stop()
        for engine in engines:
            engine.tell(Shutdown())
        self._wait_for_end(self._processes.ranks() + self._processes.entrance.children(), LAST_SECONDS)
        return served

    def _until_ended(self, children: list[Child], seconds: float) -> Iterator[None]:
        """Yield after each turn of the loop until all have ended, the time is over, or a second signal comes."""
        deadline = time.monotonic() + seconds
        while any(child.alive for child in children) and time.monotonic() < deadline and self._stops.count < 2:
            self._turn(deadline)
            yield

    def _wait_for_end(self, children: list[Child], seconds: float) -> None:
        for _ in self._until_ended(children, seconds):
            pass

    # --- at all times

    def _turn(self, until: float = math.inf) -> None:
        """Wait for a message, the end of a child, a signal, the next tick or `until`, and handle messages."""
        self._processes.wait(max(0.0, min(TICK_SECONDS, until - time.monotonic())))
        self._mail.read()
        self._status.tell_admin()
