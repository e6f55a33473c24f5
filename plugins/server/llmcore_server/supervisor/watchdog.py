"""When a process counts as hung."""

from __future__ import annotations

import time

from llmcore_server.messages import Snapshot

START_SECONDS = 60.0
"""The most seconds until any child but the engine serves; they take a second or two."""
LOADING_SECONDS = 1800.0
"""The most seconds without progress while an engine loads. It reports nothing while it reads one huge file from a slow
disk, or compiles kernels for the first time. A longer silence counts as a disk or a device that no longer answers."""
MOST_BETWEEN_LOOKS = 0.5
"""The supervisor looks at least twice in this time, unless it stands still itself."""


class Clock:
    """Seconds in which children could have been heard. It measures the patience with them.

    The time between two looks counts as MOST_BETWEEN_LOOKS at most. If the supervisor itself stood still, its children
    probably did so too: a container was paused, a virtual machine moved, a laptop slept.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._looked = time.monotonic()

    def look(self) -> None:
        """The supervisor is about to read its messages."""
        now = time.monotonic()
        self.now += min(now - self._looked, MOST_BETWEEN_LOOKS)
        self._looked = now


class Watchdog:
    """An engine: work is pending and no step has finished, or nothing at all was heard, for `timeout` seconds.

    Paused while the engine says that it compiles or captures. Until it is ready, what counts is progress of its
    loading, with a patience of LOADING_SECONDS. `now` is a Clock's, here and everywhere.
    """

    def __init__(self, timeout: float, now: float, title: str = "the engine") -> None:
        self._timeout = timeout
        self._title = title
        self._progress = now
        self._steps = -1
        self._paused = False
        self._loading = True

    def loaded_more(self, now: float) -> None:
        """The engine got on with loading."""
        self._progress = now

    def ready(self, now: float) -> None:
        """It serves from now on."""
        self._progress = now
        self._loading = False

    def heard(self, snapshot: Snapshot, now: float) -> None:
        """The engine reported."""
        load = snapshot.load
        idle = load.running + load.waiting == 0
        if idle or snapshot.paused or self._paused or load.steps != self._steps:
            self._progress = now
        self._steps = load.steps
        self._paused = snapshot.paused

    def hung(self, now: float) -> str:
        """The reason to kill it, or ""."""
        seconds = LOADING_SECONDS if self._loading else self._timeout
        if self._paused or now - self._progress <= seconds:
            return ""
        if self._loading:
            return f"{self._title} has got no further with loading for {seconds:g} s"
        return f"{self._title} has finished no step for {seconds:g} s"


class Silence:
    """Any other child: nothing was heard for `timeout` seconds; for START_SECONDS where nothing was heard ever."""

    def __init__(self, timeout: float, now: float) -> None:
        self._timeout = timeout
        self._heard = now
        self._spoke = False

    def begin(self, now: float) -> None:
        """It can speak from now on."""
        self._heard = now

    def heard(self, now: float) -> None:
        """It said something."""
        self._heard = now
        self._spoke = True

    def hung(self, now: float) -> str:
        """The reason to kill it, without its name, or ""."""
        seconds = self._timeout if self._spoke else START_SECONDS
        if now - self._heard <= seconds:
            return ""
        return f"was silent for {seconds:g} s" if self._spoke else f"did not serve within {seconds:g} s"
