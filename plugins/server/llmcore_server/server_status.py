"""The status of the whole server: the supervisor's message to the admin listener, and the answer of `/server_info`."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import orjson
from llmcore import __version__
from llmcore.api.bridge import Load, ModelFacts
from llmcore.config import Config, options_of, settings, shown_settings
from llmcore.config.setting import HIDDEN

from llmcore_server.messages import EngineStatus, ServerFacts
from llmcore_server.settings import SECTIONS, Access


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """Sent twice a second, and when something that is waited for has happened.

    `reason`: why requests are not taken, "" while they are. `facts`: None until an engine is ready. `page`: (content
    type, body) of `/metrics`. `ended`: requests that ended, by their `finish`.
    `first_tokens` and `gaps`: times to first tokens and between tokens, counted by bucket of `counters.GAP_SECONDS`.
    `counts`: (name, labels, total) of `counters.COUNTS`.
    """

    reason: str
    server: ServerFacts
    engines: tuple[EngineStatus, ...]
    facts: ModelFacts | None
    page: tuple[str, bytes]
    ended: dict[str, int]
    first_tokens: tuple[int, ...]
    gaps: tuple[int, ...]
    counts: tuple[tuple[str, tuple[str, ...], int], ...]

    @property
    def load(self) -> Load:
        """The figures of all engines together."""
        return total(one.load for one in self.engines)


def total(loads: Iterable[Load]) -> Load:
    """The figures of several engines together; those of one as they are. `taken` is that of the oldest."""
    some = list(loads)
    if len(some) == 1:
        return some[0]
    plain = [name for name in Load.__struct_fields__ if name not in ("cache", "taken", "kv_granule")]
    cache: Counter[str] = Counter()
    for load in some:
        cache.update(load.cache)
    return Load(
        **{name: sum(getattr(load, name) for load in some) for name in plain},
        kv_granule=max(load.kv_granule for load in some),
        taken=min((load.taken for load in some if load.taken), default=0.0),
        cache=dict(cache),
    )


def server_info(
    config: Config,
    server: ServerFacts | None,
    facts: ModelFacts | None,
    engines: Sequence[EngineStatus],
    reason: str,
) -> bytes:
    """The body of the answer, as JSON. The model's part is null until an engine is ready, and the server's until the
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
        "load": total(one.load for one in engines).figures() if engines else None,
        "engines": [{"name": one.name, "serves": one.serves, "load": one.load.figures()} for one in engines],
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
