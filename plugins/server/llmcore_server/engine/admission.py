"""The exact bound on waiting requests. The engine has all requests, so it is the place to be exact.

A request waits if the next step lacks a place or KV for it. If the last step left no request over, the free places and
slots are added to the bound: as many requests as can run may come at once. An empty queue takes any request.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable

from llmcore.api.bridge import Submit
from llmcore.api.engine import QueueStats

from llmcore_server.limits import Bounds, too_many, too_many_of_key
from llmcore_server.messages import Intake

RETRY_SECONDS = 60
"""Most that `Retry-After` says; the least is 1."""

PACE_SECONDS = 30.0
"""The estimate of the queue's pace counts the ends of requests in the last seconds, this number of them."""

CALM_SECONDS = 5.0
"""A queue that was empty for this time is a new one."""

SLACK = 20
"""After the queue was full, workers hear of room again when one in this number of the waiting requests has left."""


class Pace:
    """The rate at which choices end while others wait for their places."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._ends = 0.0

    def restart(self) -> None:
        """Begin again, because a new queue has formed."""
        self._since, self._ends = time.monotonic(), 0.0

    def ended(self, choices: int) -> None:
        """Count the end of this number of choices."""
        self._ends += choices

    def seconds(self, choices: int) -> int:
        """The estimated seconds until this number of choices has ended. Without any end so far it assumes one soon."""
        now = time.monotonic()
        if now - self._since > PACE_SECONDS:  # half of the past is forgotten
            self._since, self._ends = now - PACE_SECONDS / 2, self._ends / 2
        seconds = choices * (now - self._since) / (self._ends + 1.0)
        return min(max(math.ceil(seconds), 1), RETRY_SECONDS)


class Admission:
    """`queue_stats`: what waits in the engine now."""

    def __init__(self, bounds: Bounds, queue_stats: Callable[[], QueueStats]) -> None:
        self._bounds = bounds
        self._queue_stats = queue_stats
        self._pace = Pace()
        self._left_over = False
        self._crowded = 0.0
        self._retry = 1
        self._clients: Counter[int] = Counter()
        self._told = Intake(full=False, retry_after=1)

    def check(self, request: Submit) -> None:
        """Raise RequestError (429) if there is no room for the request."""
        bounds, n = self._bounds, request.choices
        open_now = self._clients[request.client] if request.client >= 0 else 0
        if open_now and open_now + n > bounds.per_key:
            raise too_many_of_key(bounds.per_key, self._pace.seconds(1))
        now = self._queue_stats()
        if now.choices and not self._fits(now, n, len(request.prompt)):
            self._retry = self._pace.seconds(now.choices)
            raise too_many(self._retry)

    def began(self, request: Submit) -> None:
        """Count a request that was taken."""
        if request.client >= 0:
            self._clients[request.client] += request.choices

    def ended(self, request: Submit) -> None:
        """Count the end of a request, whatever its reason."""
        self._pace.ended(request.choices)
        if request.client >= 0:
            self._clients[request.client] -= request.choices

    def stepped(self) -> None:
        """A step was planned. The requests that wait now found no room in it."""
        self._left_over = self._queue_stats().choices > 0
        if self._left_over:
            now = time.monotonic()
            if now - self._crowded > CALM_SECONDS:
                self._pace.restart()
            self._crowded = now

    def news(self) -> Intake | None:
        """The news for workers, or None if nothing has changed."""
        now = self._queue_stats()
        full = now.choices > 0 and not self._fits(now, 1, 1)
        if self._told.full and not full:
            least = self._bounds.waiting // SLACK, self._bounds.tokens // SLACK
            full = now.choices > 0 and not self._fits(now, max(least[0], 1), max(least[1], 1))
        if full:
            self._retry = self._pace.seconds(now.choices)
        news = Intake(full, self._retry)
        if news == self._told:
            return None
        self._told = news
        return news

    @property
    def told(self) -> Intake:
        """The newest message to workers."""
        return self._told

    def _fits(self, now: QueueStats, choices: int, tokens: int) -> bool:
        """True if this number of choices, with this number of prompt tokens, may wait too."""
        places, slots = (0, 0) if self._left_over else (now.places, now.slots)
        bounds = self._bounds
        return now.choices + choices <= bounds.waiting + places and now.tokens + tokens <= bounds.tokens + slots
