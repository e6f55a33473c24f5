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
from enum import IntEnum
from typing import Generic, TypeVar

from llmcore.api.errors import reraise_if_stopping
from llmcore.api.protocols import Device, Graph

logger = logging.getLogger(__name__)

T = TypeVar("T")

CAPTURED_AT = 4
"""A capture keeps the host, and every stream, about as long as a few launches: rare steps are not worth one."""


class Action(IntEnum):
    """The way in which a step is enqueued. Ranks that compute a step together must all do the same."""

    LAUNCH = 0
    CAPTURE = 1
    REPLAY = 2


Agree = Callable[[bool], bool]
"""Called after a capture with whether it succeeded here; whether it did on every rank, so that it can be replayed."""


def _alone(captured: bool) -> bool:
    """The agreement of one rank."""
    return captured


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

    def decide(self, key: object, layout: object) -> Action:
        """The way to enqueue the next step of `key` and `layout`. Call it once for each step: it counts them."""
        if self._found(key, layout) is not None:
            return Action.REPLAY
        self._seen[key, layout] += 1
        often = self._seen[key, layout] >= CAPTURED_AT
        return Action.CAPTURE if often and not self._full else Action.LAUNCH

    def run(self, key: object, layout: object, work: Callable[[], T], action: Action, agree: Agree = _alone) -> T:
        """Enqueue `work`, which does the same over the same tensors whenever `key` and `layout` are the same.

        A capture on which the ranks do not `agree` is dropped; then `work` is launched and no other step is captured.
        Raises LookupError for a step to replay that was not captured.
        """
        if action == Action.LAUNCH:
            return work()
        if action == Action.CAPTURE and not agree(self._capture(key, layout, work) is not None):
            self._captured.pop(key, None)
            self._full = True
            return work()
        found = self._found(key, layout)
        if found is None:
            raise LookupError(f"the step of {key} was not captured here and is to be replayed")
        found.graph.replay()
        return found.result

    def _found(self, key: object, layout: object) -> _Captured[T] | None:
        found = self._captured.get(key)
        return found if found is not None and found.layout == layout else None

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
