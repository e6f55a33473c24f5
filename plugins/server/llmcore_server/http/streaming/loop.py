"""The main loop. Descriptors stay registered with the kernel, so a turn costs as much as what is ready, not what is
open. Answers to several clients are sent one right after the other.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable

MOST = 16
"""The most pieces that are kept before they are sent. More are hardly cheaper, and all but the last wait."""


class SendBatch:
    """Keeps posted pieces while a thread has it open (`with`), until there are `MOST` or a thread closes it; otherwise
    sends them at once.

    A process that reads many answers, such as a proxy on this machine, wakes up at the first of several that come
    together, and is still awake for the others. Waking it up for each would take a third of the sender's time. For any
    thread. `send` must neither raise nor call this object.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._kept: list[tuple[Callable[[bytes], None], bytes]] = []

    def __enter__(self) -> None:
        with self._lock:
            self._open += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._open -= 1
            self._send()

    def post(self, send: Callable[[bytes], None], data: bytes) -> None:
        """Call `send` with `data`, now or soon, after all that was posted before."""
        with self._lock:
            if self._open:
                self._kept.append((send, data))
                if len(self._kept) == MOST:
                    self._send()
                return
        send(data)

    def flush(self) -> None:
        """Send the kept pieces, before data that is not posted."""
        with self._lock:
            self._send()

    def _send(self) -> None:
        for send, data in self._kept:
            send(data)
        self._kept.clear()


READ, WRITE = select.EPOLLIN, select.EPOLLOUT

GONE = select.EPOLLHUP | select.EPOLLERR
"""Reported for every descriptor, whatever is asked for: nothing can be read or sent any more, or there is an error."""

Handler = Callable[[int], None]
"""Called with the events when a descriptor is ready; it must not raise."""


class Loop:
    """Watches descriptors. All but `call` is for the loop's own thread. `send_batch` is open while handlers run."""

    def __init__(self, send_batch: SendBatch) -> None:
        self._send_batch = send_batch
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._rung = False
        self._calls: deque[Callable[[], None]] = deque()
        self._handlers: dict[int, Handler] = {}
        self.add(self._bell, READ, self._heard)

    def __len__(self) -> int:
        return len(self._handlers)

    def add(self, descriptor: int, events: int, handler: Handler) -> None:
        """Call `handler` whenever one of `events`, or of GONE, is there."""
        self._handlers[descriptor] = handler
        self._epoll.register(descriptor, events)

    def change(self, descriptor: int, events: int) -> None:
        """Watch for these from now on."""
        self._epoll.modify(descriptor, events)

    def remove(self, descriptor: int) -> None:
        """Before `descriptor` is closed."""
        if self._handlers.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def later(self, function: Callable[[], None]) -> None:
        """Call `function` after the handlers of this turn."""
        self._calls.append(function)

    def call(self, function: Callable[[], None]) -> None:
        """The same, and wake the loop. From any thread, and from signal handlers, as no lock is taken."""
        self._calls.append(function)
        if not self._rung:
            self._rung = True
            os.eventfd_write(self._bell, 1)

    def turn(self, seconds: float) -> None:
        """Wait at most `seconds`, call the handlers of ready descriptors, then the functions of `later` and `call`."""
        handlers = self._handlers
        ready = self._epoll.poll(seconds)
        with self._send_batch:
            for descriptor, events in ready:
                handler = handlers.get(descriptor)
                if handler is not None:
                    handler(events)
        for _ in range(len(self._calls)):
            self._calls.popleft()()

    def close(self) -> None:
        """Stop watching. Calls of other threads have no effect from now on."""
        self._rung = True
        self._handlers.clear()
        self._epoll.close()
        os.close(self._bell)

    def _heard(self, events: int) -> None:
        """Later calls ring again; the calls before this are made in this turn."""
        os.eventfd_read(self._bell)
        self._rung = False
