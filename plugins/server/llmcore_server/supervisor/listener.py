"""The listening socket: bound by the supervisor before anything slow happens, inherited by every worker."""

from __future__ import annotations

import errno
import socket

from llmcore.api.errors import ConfigError

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


def url(listener: socket.socket) -> str:
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
