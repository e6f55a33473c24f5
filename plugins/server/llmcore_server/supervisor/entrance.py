"""The way in for clients: the listening socket, which every worker inherits, and with `--ssl` the TLS terminator.

The supervisor binds the socket before anything slow happens.
"""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from llmcore.api.errors import ConfigError
from llmcore.config import Config

from llmcore_server.child import STOP
from llmcore_server.http.certificate import server_context
from llmcore_server.messages import Addresses, TlsLaunch
from llmcore_server.settings import Access, Server
from llmcore_server.supervisor.child import Child
from llmcore_server.supervisor.restart import Single
from llmcore_server.supervisor.rundir import RunDirectory
from llmcore_server.supervisor.watchdog import Clock

BACKLOG = 2048


def bind(host: str, port: int, option: str = "") -> socket.socket:
    """A socket bound to `host`:`port` that does not listen yet: clients are refused until the server is ready.

    Raises ConfigError where the address cannot be had; `option` is what its options begin with.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ConfigError(
            f"--{option}host {host}: {error.strerror}; give an address of this machine, or 0.0.0.0"
        ) from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _explain(error, host, port, option) from error
    return listener


def listen(listener: socket.socket, option: str = "") -> None:
    """Let connections in. Raises ConfigError if another server took the port meanwhile."""
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _explain(error, host, port, option) from error


def listener_url(listener: socket.socket) -> str:
    """Where clients on this machine reach the server."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _explain(error: OSError, host: str, port: int, option: str) -> ConfigError:
    reasons = {
        errno.EADDRINUSE: f"port {port} on {host} is in use; stop who listens there, or choose another --{option}port",
        errno.EACCES: f"port {port} needs privileges this user lacks; choose a --{option}port above 1023",
        errno.EADDRNOTAVAIL: f"{host} is no address of this machine; choose another --{option}host, or 0.0.0.0",
    }
    return ConfigError(reasons.get(error.errno or 0, f"cannot listen on {host}:{port}: {error.strerror}"))


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
        self._public = bind(config.section(Server).host, config.section(Server).port)
        self._path = str(directory.path / "http")
        self.workers = self._private() if self._tls else self._public

    @property
    def url(self) -> str:
        """Where clients on this machine reach the server."""
        url = listener_url(self._public)
        return url.replace("http://", "https://", 1) if self._tls else url

    @property
    def ready(self) -> bool:
        """Whether connections are taken as far as the workers' socket."""
        return self._served or not self._tls

    def listen(self) -> None:
        """Let connections in."""
        self._open = True
        listen(self._public)
        if self._tls:
            listen(self.workers)

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
