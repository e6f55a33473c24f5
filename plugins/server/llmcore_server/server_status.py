"""What the supervisor tells the admin listener: how the whole server is."""

from __future__ import annotations

import msgspec
from llmcore.api.bridge import Load, ModelFacts
from llmcore.api.counters import Counted, ServerFigures

from llmcore_server.messages import ServerFacts


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


def rows(figures: ServerFigures) -> tuple[tuple[str, tuple[str, ...], int], ...]:
    """Its counts as they travel."""
    return tuple((name, labels, total) for (name, labels), total in figures.counts.items())


def counts(rows: tuple[tuple[str, tuple[str, ...], int], ...]) -> dict[Counted, int]:
    """The other way."""
    return {(name, labels): total for name, labels, total in rows}
