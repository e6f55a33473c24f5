"""The hook for finished requests, on a thread of its own: a slow plugin delays no stream."""

from __future__ import annotations

import queue
import threading

from llmcore.api.counters import TALLIES
from llmcore.api.protocols import RequestRecord
from llmcore.registry.registry import Registry

MOST = 10_000
"""Records that may wait for a plugin that takes long; further ones are dropped and counted."""

LAST_SECONDS = 1.0
"""The seconds that waiting records have when the worker ends."""

HOOK = "on_request_finished"
"""The name of the hook."""


class Observers:
    """An observer of `Front` that calls the hook of at least one plugin. For any thread."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._plugins = [plugin.name for plugin in registry.implementers(HOOK)]
        self._records: queue.Queue[RequestRecord | None] = queue.Queue(MOST)
        self._thread = threading.Thread(target=self._run, name="observers", daemon=True)
        self._thread.start()

    def __call__(self, record: RequestRecord) -> None:
        """Queue the record for the plugins."""
        try:
            self._records.put_nowait(record)
        except queue.Full:
            for plugin in self._plugins:
                TALLIES.count("plugin_failures", plugin, HOOK)

    def close(self) -> None:
        """Wait a moment for the records that are queued."""
        try:
            self._records.put(None, timeout=LAST_SECONDS)
        except queue.Full:
            return
        self._thread.join(LAST_SECONDS)

    def _run(self) -> None:
        while (record := self._records.get()) is not None:
            self._registry.call(HOOK, record=record)
