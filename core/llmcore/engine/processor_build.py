"""Requests whose logits processors are being made, on threads of their own: a step never waits for a grammar.

Clients share the places for it (`Turns`).
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from llmcore.api.bridge import Submit
from llmcore.api.errors import RequestError, reraise_if_stopping
from llmcore.api.processors import OVERLOADED
from llmcore.engine.processors import RequestProcessors, Threads

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

    def placed(self) -> list[T]:
        """Those that have a place."""
        with self._lock:
            return list(self._placed)

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


logger = logging.getLogger(__name__)

MAKE_SECONDS = 10.0
"""The processors of one request may take this time to make, the wait for a place included."""

LOST_SECONDS = 3.0
"""One that takes longer loses its place to others until it returns."""

MOST_BYTES = 2 << 20
"""Arguments of the processors of one request."""

Key = tuple[int, int]
"""(owner, request id)."""


@dataclass(eq=False)
class Making:
    """A request whose processors are being made."""

    request: Submit
    owner: int
    since: float
    began: float | None = None
    """When it got a place (time.monotonic()), None while it waits for one."""


Result = RequestProcessors | RequestError
"""The processors of a request, or why it cannot be served."""


class ProcessorBuilder:
    """All of them, oldest first. `bind` makes a request's processors, on another thread; the rest is the engine's."""

    def __init__(self, bind: Callable[[Submit], RequestProcessors]) -> None:
        self._bind = bind
        self.open: dict[Key, Making] = {}
        """The requests whose processors are not made yet."""
        self._done: deque[tuple[Making, Result]] = deque()
        self._turns: Turns[Making] = Turns()
        self._threads = Threads("processors-make", PLACES, hung_seconds=lambda: LOST_SECONDS)

    def begin(self, request: Submit, owner: int) -> None:
        """Have the processors of `request` made. Raises RequestError for arguments that are too long."""
        key = (owner, request.id)
        if key in self.open:
            raise RequestError(f"request {request.id} exists already", code="invalid_value")
        calls = request.sampling.logits_processors
        size = len(msgspec.msgpack.encode(calls))
        if size > MOST_BYTES:
            text = f"{calls[0].param}: it has {size:,} bytes; at most {MOST_BYTES:,} are allowed"
            raise RequestError(text, param=calls[0].param, code="invalid_value")
        making = self.open[key] = Making(request, owner, time.monotonic())
        self._turns.wait(making, request.client, size)
        self._threads.run(self._serve)

    def forget(self, owner: int, request_id: int) -> None:
        """Drop a request; an unknown one is ignored."""
        self.open.pop((owner, request_id), None)

    def done(self) -> Iterator[tuple[Making, Result]]:
        """Those that are made since the last call, and those that take too long."""
        while self._done:
            making, result = self._done.popleft()
            if self._wanted(making):
                del self.open[making.owner, making.request.id]
                yield making, result
        now = time.monotonic()
        for making in self._turns.placed():
            if making.began is not None and now - making.began > LOST_SECONDS and self._turns.leave(making):
                self._threads.run(self._serve)
        self._threads.tend()
        for making in [making for making in self.open.values() if now - making.since > MAKE_SECONDS]:
            del self.open[making.owner, making.request.id]
            yield making, _late(making)

    def _wanted(self, making: Making) -> bool:
        return self.open.get((making.owner, making.request.id)) is making

    def _serve(self) -> None:
        """Make what has the next turn; its place may be what others wait for."""
        making = self._turns.take()
        if making is not None:
            making.began = time.monotonic()
            if self._wanted(making):
                self._done.append((making, self._made(making.request)))
            self._turns.leave(making)
            self._threads.run(self._serve)

    def _made(self, request: Submit) -> Result:
        try:
            return self._bind(request)
        except RequestError as error:
            if error.status >= 500:
                _log(request, error.__cause__ or error)
            return error
        except BaseException as error:  # noqa: BLE001 - whatever it raises ends its request only
            reraise_if_stopping(error)
            _log(request, error)
            return RequestError(f"logits_processors: {type(error).__name__}", code="internal_error", status=500)


def _late(making: Making) -> RequestError:
    """The error of a request whose processors were not made within MAKE_SECONDS."""
    name = making.request.sampling.logits_processors[0].param
    if making.began is None:
        text = f"{name}: the requests before it take too long; send it again"
        return RequestError(text, param=name, code=OVERLOADED, status=503)
    text = f"{name}: it was not made ready within {MAKE_SECONDS:g} s"
    return RequestError(text, param=name, code="invalid_value")


def _log(request: Submit, error: BaseException) -> None:
    name = request.request_id or request.id
    logger.error("request %s: its logits processors could not be made", name, exc_info=error)
