"""The admin listener as its supervisor sees it: a child that is told how the server is, and never waited for."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence

import zmq

from llmcore.bridge import Load
from llmcore.config import Config
from llmcore.errors import ConfigError
from llmcore.overview import Overview, Process, rows
from llmcore.supervisor import listener as listening
from llmcore.supervisor.backoff import YOUNG_SECONDS, Starts
from llmcore.supervisor.child import Child
from llmcore.supervisor.engine import Engine
from llmcore.supervisor.figures import Sinks
from llmcore.supervisor.rundir import RunDirectory
from llmcore.supervisor.watchdog import Silence
from llmcore.wire import Addresses, AdminLaunch, Outlet, Probe

logger = logging.getLogger(__name__)

MODULE = "llmcore.http.admin.process"
NAME = "admin-0"
TELL_SECONDS = 0.5


class Admin:
    """Its socket, bound and listening from the start, and the process that serves it.

    Raises ConfigError for an address that cannot be had.
    """

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        addresses: Addresses,
        context: zmq.Context[zmq.Socket[bytes]],
        server_url: str,
    ) -> None:
        self._config = config
        self._directory = directory
        self._addresses = addresses
        self._context = context
        self._server_url = server_url
        self._started, self._began = time.time(), time.monotonic()
        self._child: Child | None = None
        self._outlet: Outlet | None = None
        self._silence = Silence(config.server.watchdog_timeout)
        self._born, self._served, self._starts = 0.0, False, Starts()
        self._due, self._told = 0.0, ""
        self._steps, self._stepped, self._probing = 0, 0.0, False
        self._socket = None if config.server.disable_admin else _bind(config)

    @property
    def rows(self) -> tuple[tuple[str, str], ...]:
        """Its line of the start-up summary."""
        return () if self._socket is None else (("dashboard", f"{listening.url(self._socket)}/dashboard"),)

    def spawn_missing(self) -> Child | None:
        """Start the process where one is wanted and none runs."""
        now = time.monotonic()
        if self._socket is None or self._child is not None or not self._starts.due(now):
            return None
        launch = AdminLaunch(
            name=NAME,
            parent=os.getpid(),
            log=str(self._directory.log(NAME)),
            addresses=self._addresses,
            config=self._config,
            mailbox=self._directory.address(NAME),
            listen_fd=self._socket.fileno(),
            url=self._server_url,
        )
        try:
            self._child = Child(MODULE, launch, (self._socket.fileno(),))
        except OSError as error:  # no memory, process or file to be had now; the server goes on
            self._starts.failed(now)
            logger.error("the admin listener cannot be started: %s; trying again in %g s", error, YOUNG_SECONDS)
            return None
        self._born, self._served = now, False
        self._outlet = Outlet(self._context, launch.mailbox, most=8)
        return self._child

    def heard(self, name: str) -> None:
        """The child called `name` said something."""
        if name == NAME:
            self._served = True
            self._silence.heard(time.monotonic())

    def tell(self, not_ready: str, engines: Sequence[Engine], children: Sequence[Child], sinks: Sinks) -> None:
        """Say how the server is, when it is time, or when a step is waited for and has been done."""
        if self._outlet is None:
            return
        engine = engines[-1] if engines else None
        load, now = (engine.load if engine is not None else Load()), time.monotonic()
        stepped = load.steps > self._steps
        if load.steps != self._steps:
            self._steps, self._stepped = load.steps, (now if stepped else 0.0)
        news = not_ready != self._told or (stepped and self._probing)
        if now < self._due and not news:
            return
        self._told = not_ready
        self._due, self._probing = now + TELL_SECONDS, self._probing and not stepped
        figures = sinks.figures()
        self._outlet.send(
            Overview(
                reason=not_ready,
                stepped=self._stepped,
                started=self._started,
                began=self._began,
                load=load,
                facts=engine.facts if engine is not None else None,
                page=sinks.newest,
                processes=tuple(Process(child.name, child.pid, child.alive) for child in children),
                ended=dict(sinks.ended),
                first_tokens=tuple(sinks.first_tokens),
                gaps=figures.gaps,
                counts=rows(figures),
            )
        )

    def probe(self, engines: Sequence[Engine]) -> None:
        """It wants to know whether a step can be done."""
        self._probing = True
        for engine in engines:
            engine.tell(Probe())

    def hung(self) -> list[Child]:
        """The process, if it runs and has been silent for too long."""
        return [child for child in self.children() if self._silence.hung(time.monotonic()) and child.alive]

    def ended(self) -> Child | None:
        """The process, if it has died."""
        return self._child if self._child is not None and not self._child.alive else None

    def forget(self) -> None:
        """Make room for its replacement."""
        if self._child is not None and self._outlet is not None:
            self._outlet.close(0.0)
            self._child.close()
            self._child = self._outlet = None
            self._silence = Silence(self._config.server.watchdog_timeout)
            self._starts.died(self._born, self._served, time.monotonic())

    def children(self) -> list[Child]:
        """Its process."""
        return [] if self._child is None else [self._child]

    def close(self) -> None:
        """Close what is open; the process must have ended."""
        self.forget()
        if self._socket is not None:
            self._socket.close()


def _bind(config: Config) -> socket.socket:
    """On `--admin_port`; without one on the port after the server's, or any that is free."""
    asked, port = config.server.admin_port, config.server.port
    beside = port + 1 if 0 < port < 65535 else 0
    try:
        return _listen(config, beside if asked is None else asked)
    except ConfigError:
        if asked is not None or not beside:
            raise
        return _listen(config, 0)


def _listen(config: Config, port: int) -> socket.socket:
    bound = listening.bind(config.server.admin_host, port, "admin_")
    try:
        listening.listen(bound, "admin_")
    except ConfigError:
        bound.close()
        raise
    return bound
