"""The observers of finished requests: the hook of plugins, on its own thread, and a line in the log.

A slow plugin delays no stream. The log line never has a text of the request.
"""

from __future__ import annotations

import logging
import queue
import threading

from llmcore.api.counters import TALLIES
from llmcore.api.protocols import RequestRecord
from llmcore.registry.registry import Registry

from llmcore_server.logs import fields

logger = logging.getLogger("llmcore.request")

MOST = 10_000
"""Records that may wait for a plugin that takes long; further ones are dropped and counted."""

LAST_SECONDS = 1.0
"""The seconds that waiting records have when the worker ends."""

_HOOK = "on_request_finished"


class Observers:
    """An observer of `Front` that calls the hook. For any thread."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._plugins = [plugin.name for plugin in registry.implementers(_HOOK)]
        self._records: queue.Queue[RequestRecord | None] = queue.Queue(MOST)
        self._thread = threading.Thread(target=self._run, name="observers", daemon=True)
        if self._plugins:
            self._thread.start()

    def __call__(self, record: RequestRecord) -> None:
        """Queue the record for the plugins."""
        if not self._plugins:
            return
        try:
            self._records.put_nowait(record)
        except queue.Full:
            for plugin in self._plugins:
                TALLIES.count("plugin_failures", plugin, _HOOK)

    def close(self) -> None:
        """Wait a moment for the records that are queued."""
        if not self._plugins:
            return
        try:
            self._records.put(None, timeout=LAST_SECONDS)
        except queue.Full:
            return
        self._thread.join(LAST_SECONDS)

    def _run(self) -> None:
        while (record := self._records.get()) is not None:
            self._registry.call(_HOOK, record=record)


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
