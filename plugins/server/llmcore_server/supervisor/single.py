"""A child of which there is one at a time: started again when it has died, killed when it hangs."""

from __future__ import annotations

import time
from collections.abc import Callable

from llmcore_server.supervisor.backoff import Starts
from llmcore_server.supervisor.child import Child
from llmcore_server.supervisor.watchdog import Clock, Silence


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
