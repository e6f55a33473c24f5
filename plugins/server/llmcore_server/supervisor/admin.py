"""The admin listener as its supervisor sees it: a child that gets the server's status, and is never waited for."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from llmcore.api.bridge import ModelFacts
from llmcore.api.errors import ConfigError

from llmcore_server.messages import AdminLaunch, EngineStatus, Probe, ServerFacts, rows
from llmcore_server.server_status import Overview
from llmcore_server.settings import Server
from llmcore_server.supervisor.child import Child, Spawner
from llmcore_server.supervisor.engine import Engine
from llmcore_server.supervisor.entrance import bind, listen, listener_url
from llmcore_server.supervisor.figures import Sinks
from llmcore_server.supervisor.restart import Kind

MODULE = "llmcore_server.http.admin.process"
NAME = "admin-0"
TELL_SECONDS = 0.5


class Admin(Kind):
    """Its socket, bound and listening from the start, and the process that serves it.

    Raises ConfigError for an address that cannot be used.
    """

    def __init__(self, spawner: Spawner) -> None:
        super().__init__("the admin listener", spawner)
        self._due, self._told = 0.0, ""
        self._stepped, self._probing = 0.0, False
        server = spawner.config.section(Server)
        self._socket = None if server.disable_admin else _bind(server)

    @property
    def rows(self) -> tuple[tuple[str, str], ...]:
        """Its line of the start-up summary."""
        return () if self._socket is None else (("dashboard", f"{listener_url(self._socket)}/dashboard"),)

    @property
    def _wanted(self) -> int:
        return int(self._socket is not None)

    def _spawn(self) -> Child:
        assert self._socket is not None
        fd, mailbox = self._socket.fileno(), self._spawner.directory.address(NAME)
        return self._spawner.spawn(MODULE, AdminLaunch, NAME, (fd,), mailbox=mailbox, unread=8, listen_fd=fd)

    def tell(
        self,
        not_ready: str,
        engines: tuple[EngineStatus, ...],
        facts: ModelFacts | None,
        server: ServerFacts,
        sinks: Sinks,
    ) -> None:
        """Send the status, when it is time, or when an awaited step has finished."""
        if not self._running:
            return
        now, newest = time.monotonic(), max(engine.stepped for engine in engines)
        stepped, self._stepped = newest > self._stepped, newest
        news = not_ready != self._told or (stepped and self._probing)
        if now < self._due and not news:
            return
        self._told = not_ready
        self._due, self._probing = now + TELL_SECONDS, self._probing and not stepped
        figures = sinks.figures()
        overview = Overview(
            reason=not_ready,
            server=server,
            engines=engines,
            facts=facts,
            page=sinks.newest,
            ended=dict(sinks.ended),
            first_tokens=tuple(sinks.first_tokens),
            gaps=figures.gaps,
            counts=rows(figures),
        )
        for child in self.children():
            child.tell(overview)

    def probe(self, engines: Sequence[Engine]) -> None:
        """It asks whether a step can be done."""
        self._probing = True
        for engine in engines:
            engine.tell(Probe())

    @property
    def hopeless(self) -> bool:
        """Always False: requests are served without it."""
        return False

    def close(self) -> None:
        """Close what is open; the process must have ended."""
        super().close()
        if self._socket is not None:
            self._socket.close()


def _bind(server: Server) -> socket.socket:
    """On `--admin_port`; without one on the port after the server's, or any that is free."""
    asked, port = server.admin_port, server.port
    beside = port + 1 if 0 < port < 65535 else 0
    try:
        return _listen(server, beside if asked is None else asked)
    except ConfigError:
        if asked is not None or not beside:
            raise
        return _listen(server, 0)


def _listen(server: Server, port: int) -> socket.socket:
    bound = bind(server.admin_host, port, "admin_")
    try:
        listen(bound, "admin_")
    except ConfigError:
        bound.close()
        raise
    return bound
