"""The admin listener as its supervisor sees it: a child that is told how the server is, and never waited for."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence

import zmq
from llmcore.api.bridge import Load
from llmcore.api.errors import ConfigError
from llmcore.config import Config

from llmcore_server.messages import Addresses, AdminLaunch, Outlet, Probe, ServerFacts
from llmcore_server.server_status import Overview, rows
from llmcore_server.settings import Server
from llmcore_server.supervisor.child import Child
from llmcore_server.supervisor.engine import Engine
from llmcore_server.supervisor.entrance import bind, listen, listener_url
from llmcore_server.supervisor.figures import Sinks
from llmcore_server.supervisor.restart import Single
from llmcore_server.supervisor.rundir import RunDirectory
from llmcore_server.supervisor.watchdog import Clock

MODULE = "llmcore_server.http.admin.process"
NAME = "admin-0"
TELL_SECONDS = 0.5


class Admin(Single):
    """Its socket, bound and listening from the start, and the process that serves it.

    Raises ConfigError for an address that cannot be had.
    """

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        addresses: Addresses,
        context: zmq.Context[zmq.Socket[bytes]],
        clock: Clock,
    ) -> None:
        super().__init__(NAME, "the admin listener", config.section(Server).watchdog_timeout, clock)
        self._config = config
        self._directory = directory
        self._addresses = addresses
        self._context = context
        self._outlet: Outlet | None = None
        self._due, self._told = 0.0, ""
        self._steps, self._stepped, self._probing = 0, 0.0, False
        self._socket = None if config.section(Server).disable_admin else _bind(config)

    @property
    def rows(self) -> tuple[tuple[str, str], ...]:
        """Its line of the start-up summary."""
        return () if self._socket is None else (("dashboard", f"{listener_url(self._socket)}/dashboard"),)

    def spawn_missing(self) -> Child | None:
        """Start the process where one is wanted and none runs."""
        bound = self._socket
        return None if bound is None else self._start(lambda: self._spawn(bound))

    def _spawn(self, bound: socket.socket) -> Child:
        launch = AdminLaunch(
            name=NAME,
            parent=os.getpid(),
            log=str(self._directory.log(NAME)),
            addresses=self._addresses,
            config=self._config,
            mailbox=self._directory.address(NAME),
            listen_fd=bound.fileno(),
        )
        outlet = Outlet(self._context, launch.mailbox, most=8)
        try:
            child = Child(MODULE, launch, (bound.fileno(),))
        except OSError:
            outlet.close(0.0)
            raise
        self._outlet = outlet
        return child

    def tell(self, not_ready: str, engines: Sequence[Engine], server: ServerFacts, sinks: Sinks) -> None:
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
                server=server,
                load=load,
                facts=engine.facts if engine is not None else None,
                page=sinks.newest,
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

    def forget(self) -> None:
        """Make room for its replacement."""
        if self._outlet is not None:
            self._outlet.close(0.0)
            self._outlet = None
        super().forget()

    @property
    def hopeless(self) -> bool:
        """Never: requests are served without it."""
        return False

    def close(self) -> None:
        """Close what is open; the process must have ended."""
        self.forget()
        if self._socket is not None:
            self._socket.close()


def _bind(config: Config) -> socket.socket:
    """On `--admin_port`; without one on the port after the server's, or any that is free."""
    asked, port = config.section(Server).admin_port, config.section(Server).port
    beside = port + 1 if 0 < port < 65535 else 0
    try:
        return _listen(config, beside if asked is None else asked)
    except ConfigError:
        if asked is not None or not beside:
            raise
        return _listen(config, 0)


def _listen(config: Config, port: int) -> socket.socket:
    bound = bind(config.section(Server).admin_host, port, "admin_")
    try:
        listen(bound, "admin_")
    except ConfigError:
        bound.close()
        raise
    return bound
