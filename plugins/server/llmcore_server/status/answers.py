"""Answers of the routes that say how the server is, for the OpenAPI document.

A member that is UNSET here is left out of an answer where it does not apply.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType


class HealthAnswer(Struct):
    """The answer of /health."""

    message: Literal["Ok", "Error"]
    """`Ok` while requests can be served."""


class StatusAnswer(Struct):
    """The answer of /readiness and /liveness."""

    status: Literal["ok", "error"]
    """`ok`, or `error` with status 503."""
    reason: str | UnsetType = UNSET
    """The reason why the server takes no requests."""


class VersionAnswer(Struct):
    """The answer of GET /version."""

    version: str
    """The version of llmcore."""


class ProcessEntry(Struct):
    """One process of the server."""

    name: str
    """Its name in logs."""
    pid: int
    """Its process id."""
    alive: bool
    """True while it runs."""


class EngineEntry(Struct):
    """One engine of the server."""

    name: str
    """Its name in logs and metrics."""
    serves: bool
    """True while requests can be sent to it."""
    load: dict[str, float]
    """Its figures."""


class PluginEntry(Struct):
    """One plugin that is installed."""

    name: str
    """The plugin's name."""
    dist: str
    """The distribution that it came with."""
    version: str
    """The version of that."""


class ServerInfoAnswer(Struct):
    """The answer of GET /server_info."""

    version: str
    """The version of llmcore."""
    python: str
    """The version of Python."""
    url: str | None
    """The address of the server."""
    ready: bool
    """True while it takes requests."""
    reason: str
    """The reason why it takes none, or an empty text."""
    started: float | None
    """The time of the server's start, in seconds since 1970."""
    uptime_seconds: float | None
    """The time since then."""
    model: dict[str, Any] | None
    """The served model: its names, its architecture and its limits."""
    summary: dict[str, str]
    """The lines of the start-up summary: kernels, KV and more."""
    load: dict[str, float] | None
    """The figures of all engines together: what runs, what waits, and how full the KV pool is."""
    engines: list[EngineEntry]
    """The server's engines."""
    processes: list[ProcessEntry]
    """The server's processes."""
    plugins: list[PluginEntry]
    """The plugins that are installed."""
    settings: dict[str, Any]
    """Every setting, without what is secret."""
