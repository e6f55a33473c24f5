"""Where clients come in: the listening socket, and with `--ssl` the process that ends TLS in front of the workers."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from llmcore.api.errors import ConfigError
from llmcore.config import Config

from llmcore_server.child import STOP
from llmcore_server.http.certificate import server_context
from llmcore_server.messages import Addresses, TlsLaunch
from llmcore_server.settings import Access, Server
from llmcore_server.supervisor import listener as listening
from llmcore_server.supervisor.child import Child
from llmcore_server.supervisor.rundir import RunDirectory
from llmcore_server.supervisor.single import Single
from llmcore_server.supervisor.watchdog import Clock

MODULE = "llmcore_server.http.tls"
NAME = "tls-0"
MOST_PATH_BYTES = 107
"""Longest path of a Unix socket."""


class Entrance(Single):
    """The public socket, and the one that workers listen on: the same without TLS.

    Raises ConfigError for an address that cannot be had, or a certificate that cannot be used.
    """

    def __init__(self, config: Config, directory: RunDirectory, addresses: Addresses, clock: Clock) -> None:
        super().__init__(NAME, "the end of TLS", config.section(Server).watchdog_timeout, clock)
        self._config = config
        self._directory = directory
        self._addresses = addresses
        self._open = False
        self._tls = config.section(Access).ssl
        if self._tls:
            server_context(config.section(Access))  # before anything slow happens
        self._public = listening.bind(config.section(Server).host, config.section(Server).port)
        self._path = str(directory.path / "http")
        self.workers = self._private() if self._tls else self._public

    @property
    def url(self) -> str:
        """Where clients on this machine reach the server."""
        url = listening.url(self._public)
        return url.replace("http://", "https://", 1) if self._tls else url

    @property
    def ready(self) -> bool:
        """Whether connections are taken as far as the workers' socket."""
        return self._served or not self._tls

    def listen(self) -> None:
        """Let connections in."""
        self._open = True
        listening.listen(self._public)
        if self._tls:
            listening.listen(self.workers)

    def spawn_missing(self) -> Child | None:
        """Start the process that ends TLS, where one is needed and none runs."""
        return self._start(self._spawn) if self._tls and self._open else None

    def _spawn(self) -> Child:
        launch = TlsLaunch(
            name=NAME,
            parent=os.getpid(),
            log=str(self._directory.log(NAME)),
            addresses=self._addresses,
            config=self._config,
            listen_fd=self._public.fileno(),
            workers=self._path,
        )
        return Child(MODULE, launch, (self._public.fileno(),))

    @property
    def lost(self) -> bool:
        """Whether somebody has deleted the socket between the end of TLS and the workers: nobody comes in any more."""
        return self._tls and self._open and not Path(self._path).is_socket()

    def stop(self) -> None:
        """Refuse connections: the workers have answered everything."""
        self._public.close()
        if self._child is not None:
            self._child.send(STOP)

    def close(self) -> None:
        """Close what is open; the process must have ended."""
        self.forget()
        self._public.close()
        self.workers.close()

    def _private(self) -> socket.socket:
        if len(os.fsencode(self._path)) > MOST_PATH_BYTES:
            raise ConfigError(f"--ssl: the path {self._path} is too long for a socket; set a shorter TMPDIR")
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        inner.bind(self._path)
        return inner
