"""The order in which logits processors are made: few at once, and no client keeps the others waiting."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

PLACES = 3
"""Requests whose processors are made at once."""

MOST_LARGE = 2
"""Requests with large arguments among them: a small one always finds a place that no large one can hold."""

MOST_OF_A_CLIENT = PLACES - 1
"""Requests of one client among them: another client always finds a place that this one cannot hold."""

LARGE_BYTES = 4096
"""Arguments of more bytes are large. The length of a grammar bounds most of what it costs to compile."""

T = TypeVar("T")


@dataclass(eq=False)
class _Client(Generic[T]):
    """`lanes`: its small and its large requests that wait, in order of arrival. `latest`: the lane of its last turn.
    `running`: its places. `served`: the number of its last turn."""

    lanes: tuple[deque[T], deque[T]] = field(default_factory=lambda: (deque(), deque()))
    latest: deque[T] | None = None
    running: int = 0
    served: int = 0

    def next(self, lanes: int) -> deque[T] | None:
        """The one of the first `lanes` lanes that has the client's next turn; None: the client may not have one."""
        if self.running >= MOST_OF_A_CLIENT:
            return None
        return min((lane for lane in self.lanes[:lanes] if lane), key=lambda lane: lane is self.latest, default=None)


class Turns(Generic[T]):
    """The requests that wait for a place, and those that have one. Any thread may use it; nothing blocks.

    The next turn goes to the client with the fewest places, among those to the one whose last turn is longest ago. Its
    small and its large requests have its turns alternately, so a small one waits for one large one at most.
    """

    def __init__(self) -> None:
        self._clients: dict[int, _Client[T]] = {}
        self._placed: dict[T, tuple[int, bool]] = {}
        """Request -> (its client, whether it is large), for each that has a place."""
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def wait(self, what: T, client: int, size: int) -> None:
        """`what` wants a place; `size`: bytes of its arguments."""
        with self._lock:
            mine = self._clients.setdefault(client, _Client())
            mine.lanes[size > LARGE_BYTES].append(what)

    def take(self) -> T | None:
        """The request that has the next turn, and a place from now on; None while none may have one."""
        with self._lock:
            lanes = 2 if sum(large for _, large in self._placed.values()) < MOST_LARGE else 1
            able = [number for number, client in self._clients.items() if client.next(lanes)]
            if len(self._placed) >= PLACES or not able:
                return None
            number = min(able, key=lambda n: (self._clients[n].running, self._clients[n].served))
            client = self._clients[number]
            lane = client.next(lanes)
            assert lane is not None
            what = lane.popleft()
            client.latest = lane
            client.running += 1
            client.served = next(self._numbers)
            self._placed[what] = number, lane is client.lanes[1]
            return what

    def leave(self, what: T) -> bool:
        """`what` gives its place back; False: it has none."""
        with self._lock:
            if what not in self._placed:
                return False
            number, _ = self._placed.pop(what)
            client = self._clients[number]
            client.running -= 1
            if not client.running and not any(client.lanes):
                del self._clients[number]
            return True
