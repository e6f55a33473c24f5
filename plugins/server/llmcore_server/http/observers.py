"""What plugins are told of requests that have ended, on a thread of its own: who takes long holds up no stream."""

from __future__ import annotations

import queue
import threading

from llmcore.api.counters import TALLIES
from llmcore.api.protocols import RequestRecord
from llmcore.registry.registry import Registry

MOST = 10_000
"""Records that may wait for a plugin that takes long; further ones are dropped and counted."""

LAST_SECONDS = 1.0
"""How long what waits has when the worker ends."""

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
        """Have them told, soon."""
        if not self._plugins:
            return
        try:
            self._records.put_nowait(record)
        except queue.Full:
            for plugin in self._plugins:
                TALLIES.count("plugin_failures", plugin, _HOOK)

    def close(self) -> None:
        """Let what waits be told, for a moment."""
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
