"""Limits on the time and memory of a connection, and on the open files of a process."""

from __future__ import annotations

import resource
from dataclasses import dataclass, field

from llmcore.api.errors import ConfigError, RequestError
from llmcore.config import Config

from llmcore_server.http.strict import Bounds
from llmcore_server.settings import Server

CONNECTIONS = 4096
"""Connections of one HTTP worker, unless more requests than that may run or --max_connections says so."""

SPARE_CONNECTIONS = 256
"""Beside those of requests that run: for waiting ones, health checks and metrics."""

REFUSALS = 512
"""Connections beyond the limit that are told so at one time; further ones are closed without a word."""

FRESH_SECONDS = 0.3
"""Seconds that a server that ends waits for a new connection's first request. Closed at once, it would be reset."""

SPARE_FILES = 128
"""Open files a process needs beside its connections."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Times are in seconds, sizes in bytes. A request beyond one is answered if possible; its connection closes."""

    bounds: Bounds = field(default_factory=Bounds)
    bodies: int = 1 << 30
    """The limit on all bodies together that were not handed on yet."""
    head_seconds: float = 10.0
    """From the first byte of a request to the end of its header, and from connecting to the first byte."""
    body_seconds: float = 10.0
    """A body may arrive at any speed for this time; then at `rate` in every further window of that length."""
    rate: int = 32 << 10
    """Bytes a second that a sender of a body must reach in a window, a reader of a long answer in the long run."""
    idle_seconds: float = 75.0
    """A connection is kept for this time for a next request: longer than the minute that proxies keep theirs."""
    backlog: int = 1 << 20
    """A reader of a stream for which more than this lies unsent is cut off."""
    backlog_seconds: float = 30.0
    """So is any whose backlog has not been empty for this long."""
    linger_seconds: float = 2.0
    """After a refusal the server reads on and throws the bytes away, so that the answer is not lost to a reset. It
    stops when nothing has come for this time."""
    longest_linger_seconds: float = 10.0
    """But not for longer than that in all."""
    linger_bytes: int = 33 << 20
    """Nor for more bytes than that, which is more than the largest body."""
    per_address: int = 0
    """Connections of one address; 0 for any number, as proxies have but one."""


def connections(config: Config) -> int:
    """Most connections of one HTTP worker."""
    running = config.memory.running_max_req_size
    return config.section(Server).max_connections or max(CONNECTIONS, running + SPARE_CONNECTIONS)


def too_many() -> RequestError:
    """The answer to a connection beyond the limit."""
    return RequestError("The server has too many connections; try again.", code="server_overloaded", status=503)


def too_many_of_address(most: int) -> RequestError:
    """The answer to one beyond that of its address."""
    text = f"More than {most} connections are open from your address."
    return RequestError(text, code="server_overloaded", status=429)


def raise_open_files(need: int, wish: int = 0) -> int:
    """Raise this process's limit of open files to `wish` or, where the system forbids it, as far as it goes; the new
    limit. ConfigError where that is less than `need`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wish = max(need, wish)
    if soft == resource.RLIM_INFINITY or soft >= wish:
        return wish
    if hard != resource.RLIM_INFINITY:
        wish = min(wish, hard)
    if wish < need:
        raise ConfigError(
            f"{need} open files are needed and the hard limit is {hard}; raise it with `ulimit -Hn {need}` "
            "(LimitNOFILE= in a systemd unit, --ulimit nofile= in docker), or lower --max_connections"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wish), hard))
    return wish


class BodyPace:
    """Measures by windows of time how fast a body arrives. Neither its announced length nor a fast start counts."""

    __slots__ = ("_before", "_began", "_first", "_limits")

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._began = now
        self._before = 0
        self._first = True

    def is_late(self, now: float, size: int) -> bool:
        """True if a window has ended, at `now`, in which the body was too slow. `size`: bytes of the body so far.

        A window that lasted longer, because this process stood still, asks for as many bytes as any other.
        """
        seconds = self._limits.body_seconds
        if now - self._began < seconds:
            return False
        late = not self._first and size - self._before < self._limits.rate * seconds
        self._began, self._before, self._first = now, size, False
        return late
