"""When a child is started again, and when it is not; and a child of which there is one at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

import zmq
from llmcore.config.process import shortage_of

from llmcore_server.supervisor.child import Child
from llmcore_server.supervisor.watchdog import Clock, Silence

T = TypeVar("T")

logger = logging.getLogger(__name__)

MOST_SECONDS = 60.0
"""The longest pause before an engine."""
WINDOW_SECONDS = 600.0
"""Deaths of engines longer ago than this are forgotten."""

YOUNG_SECONDS = 2.0
"""Any other process that died younger than this is replaced only after as long a pause."""
MOST_IN_VAIN = 3
"""So many of a kind may die in a row before they are ready, where no other of the kind serves."""


class BackOff:
    """Pauses that double with every death in a window of time, from `first` seconds; after `limit` there is none (0:
    there always is)."""

    def __init__(self, first: float, limit: int) -> None:
        self._first = first
        self._limit = limit
        self._deaths: list[float] = []

    def pause(self, now: float) -> float | None:
        """Seconds to wait after a death at `now`; None: it has died too often."""
        self._deaths = [death for death in self._deaths if now - death < WINDOW_SECONDS] + [now]
        before = len(self._deaths) - 1
        if self._limit and before >= self._limit:
            return None
        return min(self._first * 2.0 ** min(before, 60), MOST_SECONDS)


class Starts:
    """Those of one kind of child: engines, workers, ends of TLS, or admin listeners. `what`: the kind, for people."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._not_before = 0.0
        self._in_vain = 0

    def start(self, spawn: Callable[[], T]) -> T | None:
        """What `spawn` makes; None while the pause after the last one is not over, or where none can be started."""
        if time.monotonic() < self._not_before:
            return None
        try:
            return spawn()
        except (OSError, zmq.ZMQError) as error:  # no memory, process or file to be had now; what runs goes on
            self._not_before = time.monotonic() + YOUNG_SECONDS
            why = shortage_of(error) or str(error)
            logger.error("%s cannot be started: %s; trying again in %g s", self._what, why, YOUNG_SECONDS)
            return None

    def died(self, born: float, ready: bool, now: float) -> None:
        """One that was started at `born` has ended; `ready`: it had served."""
        self._in_vain = 0 if ready else self._in_vain + 1
        if now - born < YOUNG_SECONDS:
            self._not_before = now + YOUNG_SECONDS

    @property
    def hopeless(self) -> bool:
        """Whether starting another is no use: it would end as the last ones did."""
        return self._in_vain >= MOST_IN_VAIN


class Single:
    """The child called `name`, if it runs. `what` it is, for people; silent for `timeout` seconds, it hangs."""

    def __init__(self, name: str, what: str, timeout: float, clock: Clock) -> None:
        self._name = name
        self._timeout = timeout
        self._clock = clock
        self._child: Child | None = None
        self._silence = Silence(timeout, clock.now)
        self._starts = Starts(what)
        self._born, self._served = 0.0, False

    def heard(self, name: str) -> None:
        """The child called `name` said something: if it is this one, it serves."""
        if name == self._name:
            self._served = True
            self._silence.heard(self._clock.now)

    def hung(self) -> list[tuple[Child, str]]:
        """The process, if it runs and hangs, and what it did."""
        why = self._silence.hung(self._clock.now)
        return [(child, why) for child in self.children() if why and child.alive]

    def ended(self) -> Child | None:
        """The process, if it has died."""
        return self._child if self._child is not None and not self._child.alive else None

    def forget(self) -> None:
        """Make room for its replacement."""
        if self._child is not None:
            self._child.close()
            self._child = None
            self._starts.died(self._born, self._served, time.monotonic())

    def children(self) -> list[Child]:
        """Its process."""
        return [] if self._child is None else [self._child]

    @property
    def hopeless(self) -> bool:
        """Whether another would end as the last ones did, and the server cannot do without."""
        return self._starts.hopeless

    def _start(self, spawn: Callable[[], Child]) -> Child | None:
        """What `spawn` makes, where none runs and it is time for one."""
        if self._child is not None:
            return None
        self._child = self._starts.start(spawn)
        self._silence = Silence(self._timeout, self._clock.now)
        self._born, self._served = time.monotonic(), False
        return self._child
