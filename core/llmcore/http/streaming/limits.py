"""What one connection may take of time and memory, and one process of files."""

from __future__ import annotations

import resource
from dataclasses import dataclass, field

from llmcore.errors import ConfigError
from llmcore.http.bodies import Bounds


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Times are in seconds, sizes in bytes. What passes one is answered if it can be, and its connection closes."""

    bounds: Bounds = field(default_factory=Bounds)
    bodies: int = 1 << 30
    """What all bodies that were not handed on yet may take together."""
    head_seconds: float = 10.0
    """From the first byte of a request to the end of its header, and from connecting to the first byte."""
    body_seconds: float = 30.0
    """For the body, and as much more as what has come would take at `rate`."""
    rate: int = 32 << 10
    """Bytes a second that a sender of a body, and a reader of a long answer, must reach in the long run."""
    idle_seconds: float = 75.0
    """How long a connection is kept for a next request; longer than the minute that proxies keep theirs."""
    backlog: int = 1 << 20
    """A reader of a stream for which more than this lies unsent is cut off."""
    backlog_seconds: float = 30.0
    """So is any whose backlog has not been empty for this long."""
    linger_seconds: float = 2.0
    """After a refusal: how long to go on reading what is thrown away, so that the answer is not lost to a reset."""
    per_address: int = 0
    """Connections of one address; 0 for any number, as proxies have but one."""


def raise_open_files(need: int) -> None:
    """Raise this process's limit of open files to `need`; ConfigError where the system forbids it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= need or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and hard < need:
        raise ConfigError(
            f"{need} open files are needed and the hard limit is {hard}; raise it with `ulimit -Hn {need}` "
            "(LimitNOFILE= in a systemd unit, --ulimit nofile= in docker), or lower --max_connections"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
