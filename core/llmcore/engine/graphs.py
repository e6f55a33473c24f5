"""CUDA graphs: the captured steps, and when a step is captured.

A graph is captured at step `CAPTURED_AT` of its key, with nothing in flight. Those before it are launched, which warms
up what a capture cannot (compilation, libraries).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from llmcore.api.errors import reraise_if_stopping
from llmcore.api.protocols import Device, Graph

logger = logging.getLogger(__name__)

T = TypeVar("T")

CAPTURED_AT = 4
"""A capture keeps the host, and every stream, about as long as a few launches: rare steps are not worth one."""


@dataclass(frozen=True)
class _Captured(Generic[T]):
    graph: Graph
    result: T
    layout: object


class Graphs(Generic[T]):
    """Graphs by key, of about `reserve` bytes together. A `layout` says where a step's inputs lie."""

    def __init__(self, device: Device, reserve: int) -> None:
        self._device = device
        self._most = device.graph_memory + reserve
        self._full = False
        self._seen: Counter[object] = Counter()
        self._captured: dict[object, _Captured[T]] = {}

    def __len__(self) -> int:
        return len(self._captured)

    def run(self, key: object, layout: object, work: Callable[[], T]) -> T:
        """Enqueue `work`, which does the same over the same tensors whenever `key` and `layout` are the same."""
        found = self._captured.get(key)
        if found is None or found.layout != layout:
            self._seen[key, layout] += 1
            if self._seen[key, layout] < CAPTURED_AT or self._full:
                return work()
            found = self._capture(key, layout, work)
            if found is None:
                return work()
        found.graph.replay()
        return found.result

    def _capture(self, key: object, layout: object, work: Callable[[], T]) -> _Captured[T] | None:
        """Capture `work` as a CUDA graph. Returns None if that fails; then no other step is captured."""
        self._device.synchronize()
        began = time.perf_counter()
        try:
            graph, result = self._device.capture(work)
        except BaseException as error:
            reraise_if_stopping(error)
            logger.exception("steps of %s cannot be captured; from now on new ones are launched", key)
            self._full = True
            return None
        self._captured[key] = _Captured(graph, result, layout)
        logger.debug("captured %s in %.0f ms", key, (time.perf_counter() - began) * 1e3)
        if self._device.graph_memory >= self._most:
            logger.warning("the memory for captured steps is used up after %d of them", len(self))
            self._full = True
        return self._captured[key]
