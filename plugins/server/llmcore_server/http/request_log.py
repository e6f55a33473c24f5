"""A line in the log for every request that has ended: what it was, how long it took, why it ended. Never its text."""

from __future__ import annotations

import logging

from llmcore.api.protocols import RequestRecord

from llmcore_server.logs import fields

logger = logging.getLogger("llmcore.request")


def log_request(record: RequestRecord) -> None:
    """An observer of `Front`. In JSON every figure is a key of its own; `request` joins it with other lines."""
    if not logger.isEnabledFor(logging.INFO):
        return
    first = None if record.first_token is None else round(record.first_token, 6)
    how = f"{record.finish} ({record.cause})" if record.cause else record.finish
    logger.info(
        "request %s: %s, %d in (%d cached), %d out, first token %s, %.3f s%s",
        record.request_id,
        how,
        record.prompt_tokens,
        record.cached_tokens,
        record.output_tokens,
        "never" if first is None else f"{first:.3f} s",
        record.duration,
        f", key {record.key}" if record.key else "",
        extra=fields(
            request=record.request_id,
            dialect=record.dialect,
            model=record.model,
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens,
            output_tokens=record.output_tokens,
            max_new_tokens=record.max_new_tokens,
            finish=record.finish,
            cause=record.cause,
            first_token_seconds=first,
            duration_seconds=round(record.duration, 6),
            key=record.key,
        ),
    )
