"""The bounds on open requests, for the engine and the HTTP workers. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from llmcore.api.bridge import ModelFacts
from llmcore.api.errors import RequestError
from llmcore.config import Config

from llmcore_server.settings import Access, Admission

WAITING_POOLS = 4
"""Default of `--max_waiting_tokens`, in KV pools."""

NO_BOUND = 1 << 62
"""The bound for an option of 0."""


@dataclass(frozen=True)
class Bounds:
    """The most choices that wait, the most tokens of theirs, and the most choices of one API key that wait or run.

    `open`: the most choices that can wait or run in all.
    """

    waiting: int
    tokens: int
    per_key: int
    open: int


UNBOUNDED = Bounds(NO_BOUND, NO_BOUND, NO_BOUND, NO_BOUND)
"""The bounds of a server that refuses no requests."""


def bounds(config: Config, facts: ModelFacts, *, engines: int = 1) -> Bounds:
    """The bounds by the options, for this number of engines of a model. The options hold for each engine."""
    asked = config.section(Admission)
    waiting = _bound(asked.max_waiting_requests, facts.max_running)
    total = facts.max_running + waiting
    half = total // 2 if len(config.section(Access).api_keys) > 1 else 0
    return Bounds(
        waiting=engines * waiting,
        tokens=engines * _bound(asked.max_waiting_tokens, WAITING_POOLS * facts.kv_tokens),
        per_key=engines * _bound(asked.max_requests_per_key, half),
        open=engines * total,
    )


def _bound(asked: int | None, default: int) -> int:
    return (default if asked is None else asked) or NO_BOUND


def too_many(retry_after: int) -> RequestError:
    """The error for a full queue."""
    return RequestError(
        f"Too many requests wait already; send this one again in {retry_after} s.",
        code="queue_full",
        status=429,
        retry_after=retry_after,
    )


def too_many_of_key(most: int, retry_after: int) -> RequestError:
    """The error for an API key that has its share."""
    return RequestError(
        f"This API key has as many requests open as it may have ({most}); send this one again when one has ended.",
        code="rate_limit_exceeded",
        status=429,
        retry_after=retry_after,
    )
