"""When a process counts as hung."""

from __future__ import annotations

from llmcore.wire import Snapshot


class Watchdog:
    """An engine: work is pending and no step has finished, or nothing at all was heard, for `timeout` seconds.

    Starts with the engine's readiness; paused while the engine says that it compiles or captures.
    """

    def __init__(self, timeout: float, now: float) -> None:
        self._timeout = timeout
        self._progress = now
        self._steps = -1
        self._paused = False

    def heard(self, snapshot: Snapshot, now: float) -> None:
        """The engine reported."""
        load = snapshot.load
        idle = load.running + load.waiting == 0
        if idle or snapshot.paused or self._paused or load.steps != self._steps:
            self._progress = now
        self._steps = load.steps
        self._paused = snapshot.paused

    def hung(self, now: float) -> bool:
        """Whether to kill it."""
        return not self._paused and now - self._progress > self._timeout


class Silence:
    """Any other child: nothing was heard for `timeout` seconds. Starts with its readiness."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._heard: float | None = None

    def heard(self, now: float) -> None:
        """It said something."""
        self._heard = now

    def hung(self, now: float) -> bool:
        """Whether to kill it."""
        return self._heard is not None and now - self._heard > self._timeout
