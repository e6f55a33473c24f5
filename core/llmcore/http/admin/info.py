"""`/server_info`: what runs here, without any secret."""

from __future__ import annotations

import platform
from typing import Any

import msgspec

from llmcore import __version__
from llmcore.config import Config, shown_settings
from llmcore.http.front import model_names
from llmcore.overview import Overview


def server_info(config: Config, url: str, overview: Overview | None, reason: str) -> dict[str, Any]:
    """The body of the answer; the engine's part is null until it is ready."""
    facts = overview.facts if overview is not None else None
    names = model_names(config)
    return {
        "version": __version__,
        "python": platform.python_version(),
        "url": url,
        "ready": not reason,
        "reason": reason,
        "started": overview.started if overview is not None else None,
        "uptime_seconds": overview.uptime if overview is not None else None,
        "model": None if facts is None else {"name": names[0], "aliases": names[1:], **_facts(facts)},
        "summary": {} if facts is None else dict(facts.report),
        "load": None if overview is None else overview.load.figures(),
        "processes": [] if overview is None else msgspec.to_builtins(overview.processes),
        "plugins": [{"name": one.name, "dist": one.dist, "version": one.version} for one in config.discovered],
        "settings": shown_settings(config),
    }


def _facts(facts: msgspec.Struct) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(facts)
    return {name: value for name, value in built.items() if name != "report"}
