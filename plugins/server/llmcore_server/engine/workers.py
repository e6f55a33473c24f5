"""The HTTP workers as the engine process sees them: their mailboxes, and the check that they keep up."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import zmq
from llmcore.api.bridge import Finish, StepEvents, Submit

from llmcore_server.messages import HEARTBEAT_SECONDS, Intake, Outlet

logger = logging.getLogger(__name__)

LATE_SECONDS = 1.0
"""The most seconds by which a heartbeat, or the confirmation of a step, may be late."""
BEHIND_BYTES = 64 << 20
"""The most bytes of events that a worker may leave unconfirmed."""

AbortRequest = Callable[[int, int], None]
"""(request, owner)."""


@dataclass
class _Worker:
    """One worker. `unseen`: (stamp, bytes, when) of steps not confirmed; `open`: request -> running choices;
    `requests`: the requests themselves.

    `heard` and `when` are times of `Workers.clock`.
    """

    outlet: Outlet
    heard: float
    unseen: deque[tuple[float, int, float]] = field(default_factory=deque)
    unseen_bytes: int = 0
    open: dict[int, set[int]] = field(default_factory=dict)
    requests: dict[int, Submit] = field(default_factory=dict)


class Workers:
    """All workers by number. Nothing here blocks: a worker loses the messages that it does not take.

    `over` is called for every request that ended, whatever the reason.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], over: Callable[[Submit], object] = lambda _: None
    ) -> None:
        self._context = context
        self._over = over
        self._workers: dict[int, _Worker] = {}
        # The time between two looks counts as a heartbeat at most. If the engine itself stood still, in a long step or
        # with the whole machine, a worker had no chance to be heard.
        self.clock = 0.0
        self._looked = time.monotonic()

    def add(self, owner: int, mailbox: str) -> None:
        """A worker said hello."""
        try:
            outlet = Outlet(self._context, mailbox)
        except zmq.ZMQError as error:
            logger.warning("worker %d has no mailbox that can be reached: %s", owner, error)
            return
        self._workers[owner] = _Worker(outlet, self.clock)

    def heard(self, owner: int, seen: float) -> None:
        """A heartbeat: the worker has handled everything up to stamp `seen`."""
        worker = self._workers.get(owner)
        if worker is None:
            return
        worker.heard = self.clock
        while worker.unseen and worker.unseen[0][0] <= seen:
            worker.unseen_bytes -= worker.unseen.popleft()[1]

    def began(self, owner: int, request: Submit) -> None:
        """A worker submitted a request."""
        if owner in self._workers:
            self._workers[owner].open[request.id] = set(range(request.n))
            self._workers[owner].requests[request.id] = request

    def ended(self, owner: int, request: int, choice: int | None = None) -> None:
        """A choice, or with None a whole request, takes no more events."""
        worker = self._workers.get(owner)
        if worker is None or request not in worker.open:
            return
        left = worker.open[request]
        left.discard(-1 if choice is None else choice)
        if choice is None or not left:
            self._close(worker, request)

    def tell(self, message: Intake) -> None:
        """Send it to all."""
        for worker in self._workers.values():
            worker.outlet.send(message)

    def post(self, events: Mapping[int, StepEvents]) -> None:
        """Send each worker the events of its own requests."""
        for owner, mine in events.items():
            worker = self._workers.get(owner)
            if worker is None:
                continue
            for request, choice, finish in zip(mine.request, mine.choice, mine.finish, strict=True):
                if finish:
                    self.ended(owner, request, choice)
            size = worker.outlet.send(mine)
            worker.unseen.append((mine.stamp, size or BEHIND_BYTES, self.clock))
            worker.unseen_bytes += size or BEHIND_BYTES

    def drop_late(self, abort: AbortRequest) -> None:
        """End every request of a worker that is silent or behind. Call it when the mailbox has been read."""
        now = time.monotonic()
        self.clock += min(now - self._looked, HEARTBEAT_SECONDS)
        self._looked = now
        for owner, worker in self._workers.items():
            if not worker.open:
                continue
            why = _lateness(worker, self.clock)
            if why is not None:
                logger.warning("worker %d %s; its %d requests are ended", owner, why, len(worker.open))
                self._end_all(owner, worker, abort)

    def remove(self, owner: int, abort: AbortRequest) -> None:
        """A worker has died."""
        worker = self._workers.pop(owner, None)
        if worker is not None:
            for request in list(worker.open):
                abort(request, owner)
                self._close(worker, request)
            worker.outlet.close(0.0)

    def close(self) -> None:
        """Close every outlet; what is queued has a moment to leave."""
        for worker in self._workers.values():
            worker.outlet.close()

    def _close(self, worker: _Worker, request: int) -> None:
        del worker.open[request]
        self._over(worker.requests.pop(request))

    def _end_all(self, owner: int, worker: _Worker, abort: AbortRequest) -> None:
        """If the worker comes back, it finds that its requests were ended."""
        rows = [(request, choice) for request, choices in worker.open.items() for choice in sorted(choices)]
        for request in list(worker.open):
            abort(request, owner)
            self._close(worker, request)
        worker.unseen.clear()
        worker.unseen_bytes = 0
        worker.heard = self.clock
        worker.outlet.send(
            StepEvents(
                stamp=time.monotonic(),
                request=[request for request, _ in rows],
                choice=[choice for _, choice in rows],
                count=[0] * len(rows),
                tokens=[],
                finish=[int(Finish.ABORT)] * len(rows),
            )
        )


def _lateness(worker: _Worker, clock: float) -> str | None:
    """The reason why a worker cannot keep its requests, or None."""
    allowed = LATE_SECONDS + HEARTBEAT_SECONDS
    if clock - worker.heard > allowed:
        return f"was silent for {clock - worker.heard:.1f} s"
    if worker.unseen_bytes > BEHIND_BYTES:
        return f"has {worker.unseen_bytes >> 20} MiB of events unread"
    if worker.unseen and clock - worker.unseen[0][2] > allowed:
        return f"is {clock - worker.unseen[0][2]:.1f} s behind"
    return None
