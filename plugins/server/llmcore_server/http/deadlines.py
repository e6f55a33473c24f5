"""Time limits of requests: the limits that a client sends, and the calls that the bridge's thread makes when one is
over.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import falcon
from llmcore.api.errors import RequestError, reraise_if_stopping

logger = logging.getLogger(__name__)

TIMEOUT_HEADER = "x-request-timeout"
"""The header with the seconds after which the client does not want the answer any more."""

_NUMBER = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,15})?")

NO_KEY = -1
"""The client of a server without keys."""


@dataclass(frozen=True)
class Terms:
    """A request's client (the number of its API key), its arrival (time.monotonic()), and the client's own time limit
    in seconds, 0 for none."""

    client: int = NO_KEY
    received: float = field(default_factory=time.monotonic)
    seconds: float = 0.0


def read_terms(req: falcon.Request) -> Terms:
    """The terms of a request. Raises RequestError for a limit that is not a number of seconds."""
    given = req.get_header(TIMEOUT_HEADER)
    return Terms(getattr(req.context, "client", NO_KEY), seconds=0.0 if given is None else _seconds(given))


def number(given: str) -> float | None:
    """The number that a header or a query gives in digits, or None. float() would also take +1, 1_0, 1e9, inf, and
    digits of any script."""
    return float(given) if _NUMBER.fullmatch(given) else None


def _seconds(given: str) -> float:
    seconds = number(given)
    if not seconds:
        raise RequestError(
            f"{TIMEOUT_HEADER}: it is a number of seconds above 0, such as 30 or 0.5",
            param=TIMEOUT_HEADER,
            code="invalid_value",
        )
    return seconds


TICK_SECONDS = 0.02
"""The precision of a limit."""

_WORTH_SWEEPING = 1000


class Deadline:
    """`call` is called at `at` (time.monotonic()) unless `cancel` comes first, which lets go of it."""

    __slots__ = ("at", "call")

    def __init__(self, at: float, call: Callable[[], object]) -> None:
        self.at = at
        self.call: Callable[[], object] | None = call

    def cancel(self) -> None:
        """Cancel the call. From any thread, also after the call."""
        self.call = None


class Deadlines:
    """The deadlines of a worker. Any thread may call `add`; one thread calls `expire`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = itertools.count()
        self._heap: list[tuple[float, int, Deadline]] = []
        self._most = _WORTH_SWEEPING

    def add(self, at: float, call: Callable[[], object]) -> Deadline:
        """Have `call` called at `at`, by `expire`'s thread."""
        deadline = Deadline(at, call)
        with self._lock:
            heapq.heappush(self._heap, (at, next(self._count), deadline))
            if len(self._heap) > self._most:
                self._heap = [entry for entry in self._heap if entry[2].call is not None]
                heapq.heapify(self._heap)
                self._most = max(_WORTH_SWEEPING, 2 * len(self._heap))
        return deadline

    def patience(self, most: float) -> float:
        """Seconds until `expire` should be called again, at most `most`. A new deadline may be due soon."""
        return min(most, TICK_SECONDS) if self._heap else most

    def expire(self) -> None:
        """Make the calls that are due. An error of one is logged, and does not affect the others."""
        now = time.monotonic()
        due: list[Deadline] = []
        with self._lock:
            while self._heap and (self._heap[0][0] <= now or self._heap[0][2].call is None):
                due.append(heapq.heappop(self._heap)[2])
        for deadline in due:
            call = deadline.call
            if call is not None:
                try:
                    call()
                except BaseException as error:
                    reraise_if_stopping(error)
                    logger.exception("ending a request at its time limit failed")
