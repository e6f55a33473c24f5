"""The way in for clients: the listening socket, which every worker inherits, and with `--ssl` the TLS terminator.

The supervisor binds the socket before anything slow happens.
"""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from llmcore.api.errors import ConfigError

from llmcore_server.child import STOP
from llmcore_server.http.certificate import server_context
from llmcore_server.messages import TlsLaunch
from llmcore_server.settings import Access, Server
from llmcore_server.supervisor.child import Child, Spawner
from llmcore_server.supervisor.restart import Kind

BACKLOG = 2048


def bind(host: str, port: int, option: str = "") -> socket.socket:
    """A socket bound to `host`:`port` that does not listen yet: clients are refused until the server is ready.

    Raises ConfigError if the address cannot be used. `option`: the beginning of its options' names.
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
    """The address at which clients on this machine reach the server."""
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


class Entrance(Kind):
    """The public socket, and the socket that workers listen on: the same one without TLS.

    Raises ConfigError for an address that cannot be used, or a certificate that cannot be used.
    """

    def __init__(self, spawner: Spawner) -> None:
        super().__init__("the end of TLS", spawner)
        server, access = spawner.config.section(Server), spawner.config.section(Access)
        self._open = False
        self._tls = access.ssl
        if self._tls:
            server_context(access)  # before anything slow happens
        self._public = bind(server.host, server.port)
        self._path = str(spawner.directory.path / "http")
        self.workers = self._private() if self._tls else self._public

    @property
    def url(self) -> str:
        """The address at which clients on this machine reach the server."""
        url = listener_url(self._public)
        return url.replace("http://", "https://", 1) if self._tls else url

    @property
    def ready(self) -> bool:
        """True if connections reach the workers' socket."""
        return not self._tls or any(running.serves for running in self._running)

    def listen(self) -> None:
        """Let connections in."""
        self._open = True
        listen(self._public)
        if self._tls:
            listen(self.workers)

    @property
    def _wanted(self) -> int:
        return int(self._tls and self._open)

    def _spawn(self) -> Child:
        fd = self._public.fileno()
        return self._spawner.spawn(MODULE, TlsLaunch, NAME, (fd,), listen_fd=fd, workers=self._path)

    @property
    def lost(self) -> bool:
        """True if the socket between the end of TLS and the workers was deleted, so that no client comes in."""
        return self._tls and self._open and not Path(self._path).is_socket()

    def stop(self) -> None:
        """Refuse connections: the workers have answered everything."""
        self._public.close()
        for child in self.children():
            child.send(STOP)

    def close(self) -> None:
        """Close what is open; the process must have ended."""
        super().close()
        self._public.close()
        self.workers.close()

    def _private(self) -> socket.socket:
        if len(os.fsencode(self._path)) > MOST_PATH_BYTES:
            raise ConfigError(f"--ssl: the path {self._path} is too long for a socket; set a shorter TMPDIR")
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        inner.bind(self._path)
        return inner
