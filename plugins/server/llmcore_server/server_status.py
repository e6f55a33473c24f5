"""The status of the whole server: the supervisor's message to the admin listener, and the answer of `/server_info`."""

from __future__ import annotations

import platform
from typing import Any

import msgspec
import orjson
from llmcore import __version__
from llmcore.api.bridge import Load, ModelFacts
from llmcore.config import Config, options_of, settings, shown_settings
from llmcore.config.setting import HIDDEN

from llmcore_server.messages import ServerFacts
from llmcore_server.settings import SECTIONS, Access


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """Sent twice a second, and when something that is waited for has happened.

    `reason`: why requests are not taken, "" while they are. `stepped`: time.monotonic() when the newest finished step
    was heard of, 0.0 before the first. `facts`: None until the engine is ready. `page`: (content type, body) of
    `/metrics`. `ended`: requests that ended, by their `finish`.
    `first_tokens` and `gaps`: times to first tokens and between tokens, counted by bucket of `counters.GAP_SECONDS`.
    `counts`: (name, labels, total) of `counters.COUNTS`.
    """

    reason: str
    stepped: float
    server: ServerFacts
    load: Load
    facts: ModelFacts | None
    page: tuple[str, bytes]
    ended: dict[str, int]
    first_tokens: tuple[int, ...]
    gaps: tuple[int, ...]
    counts: tuple[tuple[str, tuple[str, ...], int], ...]


def server_info(
    config: Config, server: ServerFacts | None, facts: ModelFacts | None, load: Load | None, reason: str
) -> bytes:
    """The body of the answer, as JSON. The engine's part is null until it is ready, and the server's until the
    supervisor has told of it. `reason`: why no requests are taken, "" while they are."""
    names = model_names(config)
    answer = {
        "version": __version__,
        "python": platform.python_version(),
        "url": None if server is None else server.url,
        "ready": not reason,
        "reason": reason,
        "started": None if server is None else server.started,
        "uptime_seconds": None if server is None else server.uptime,
        "model": None if facts is None else {"name": names[0], "aliases": names[1:], **_facts(facts)},
        "summary": {} if facts is None else dict(facts.report),
        "load": None if load is None else load.figures(),
        "processes": [] if server is None else msgspec.to_builtins(server.processes),
        "plugins": [{"name": one.name, "dist": one.dist, "version": one.version} for one in config.discovered],
        "settings": _settings(config),
    }
    return orjson.dumps(answer, default=list)


def _settings(config: Config) -> dict[str, Any]:
    """Clients see them, so the path of the private key is hidden."""
    shown = shown_settings(config, settings(spec for section in SECTIONS for spec in options_of(section)))
    return shown | {"ssl_keyfile": HIDDEN if config.section(Access).ssl_keyfile else None}


def model_names(config: Config) -> tuple[str, ...]:
    """Every `--model_name`, else the name of the model's directory or file."""
    return config.model.model_name or (config.model.path.name,)


def _facts(facts: ModelFacts) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(facts)
    return {name: value for name, value in built.items() if name != "report"}
