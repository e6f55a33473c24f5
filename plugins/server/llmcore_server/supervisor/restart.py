"""When a child is started again, and when it is not; the children of one kind."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import zmq
from llmcore.config.process import shortage_of

from llmcore_server.settings import Server
from llmcore_server.supervisor.child import Child, Spawner
from llmcore_server.supervisor.watchdog import Silence

T = TypeVar("T")

logger = logging.getLogger(__name__)

MOST_SECONDS = 60.0
"""The longest pause before an engine."""
WINDOW_SECONDS = 600.0
"""Deaths of engines longer ago than this are forgotten."""

YOUNG_SECONDS = 2.0
"""A process of any other kind that died younger than this is replaced after a pause of this length."""
MOST_IN_VAIN = 3
"""The most children of a kind that may die in a row before they serve, if no other of the kind serves."""


class BackOff:
    """Pauses before the replacement of an engine: `first` seconds, doubled with every death in a window of time.

    After `limit` deaths the engine is not replaced; 0 sets no limit.
    """

    def __init__(self, first: float, limit: int) -> None:
        self._first = first
        self._limit = limit
        self._deaths: list[float] = []

    def pause(self, now: float) -> float | None:
        """Seconds to wait after a death at `now`; None if it has died too often."""
        self._deaths = [death for death in self._deaths if now - death < WINDOW_SECONDS] + [now]
        before = len(self._deaths) - 1
        if self._limit and before >= self._limit:
            return None
        return min(self._first * 2.0 ** min(before, 60), MOST_SECONDS)


class Starts:
    """The starts of children of one kind. `what`: the kind, for people."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._not_before = 0.0
        self._in_vain = 0

    def start(self, spawn: Callable[[], T]) -> T | None:
        """The result of `spawn`; None during the pause after the last one, or if no child can be started."""
        if time.monotonic() < self._not_before:
            return None
        try:
            return spawn()
        except (OSError, zmq.ZMQError) as error:  # out of memory, processes or files for now; the rest goes on
            self._not_before = time.monotonic() + YOUNG_SECONDS
            why = shortage_of(error) or str(error)
            logger.error("%s cannot be started: %s; trying again in %g s", self._what, why, YOUNG_SECONDS)
            return None

    def died(self, born: float, ready: bool, now: float) -> None:
        """A child that was started at `born` has ended; `ready`: it had served."""
        self._in_vain = 0 if ready else self._in_vain + 1
        if now - born < YOUNG_SECONDS:
            self._not_before = now + YOUNG_SECONDS

    @property
    def hopeless(self) -> bool:
        """True if another one would end as the last ones did."""
        return self._in_vain >= MOST_IN_VAIN


@dataclass(eq=False)
class Running:
    """A child that runs. `serves`: it has said something since it was `born` (time.monotonic())."""

    child: Child
    silence: Silence
    born: float = field(default_factory=time.monotonic)
    serves: bool = False


class Kind:
    """The children of one kind: a child that has died is replaced, and one that is silent for too long is killed.

    `what`: the kind, for people.
    """

    def __init__(self, what: str, spawner: Spawner) -> None:
        self._spawner = spawner
        self._running: list[Running] = []
        self._starts = Starts(what)

    @property
    def _wanted(self) -> int:
        """The number of children that should run."""
        raise NotImplementedError

    def _spawn(self) -> Child:
        """Start one. Raises OSError."""
        raise NotImplementedError

    def spawn_missing(self) -> Child | None:
        """Start one child if fewer run than should. None if all run, or the pause after a death is not over."""
        if len(self._running) >= self._wanted:
            return None
        child = self._starts.start(self._spawn)
        if child is not None:
            silence = Silence(self._spawner.config.section(Server).watchdog_timeout, self._spawner.clock.now)
            self._running.append(Running(child, silence))
        return child

    def heard(self, name: str) -> None:
        """The child called `name` said something. If it is of this kind, it serves."""
        for running in self._running:
            if running.child.name == name:
                running.serves = True
                running.silence.heard(self._spawner.clock.now)

    def hung(self) -> list[tuple[Child, str]]:
        """The children that run and hang, and their faults."""
        found = [(running.child, running.silence.hung(self._spawner.clock.now)) for running in self._running]
        return [(child, why) for child, why in found if why and child.alive]

    def ended(self) -> list[Running]:
        """The children that have died."""
        return [running for running in self._running if not running.child.alive]

    def forget(self, running: Running) -> None:
        """Make room for the replacement of a child that has died."""
        self._running.remove(running)
        running.child.close()
        self._starts.died(running.born, running.serves, time.monotonic())

    def children(self) -> list[Child]:
        """Their processes."""
        return [running.child for running in self._running]

    @property
    def hopeless(self) -> bool:
        """True if another one would end as the last ones did, and the server cannot do without."""
        return self._starts.hopeless

    def close(self) -> None:
        """Close what is open to them; they must have ended."""
        for child in self.children():
            child.close()
        self._running = []
