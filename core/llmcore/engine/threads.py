"""Threads for plugins' code: what one of them never gives back is replaced."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

logger = logging.getLogger(__name__)

HUNG_SECONDS = 1.0
"""A thread that works longer than this on one call counts as lost until it returns."""

QUICK = 2
"""Threads that are awake while calls are short: more of them spend their time, and the engine's, on handing Python's
lock to each other."""

WAITED_SECONDS = 0.001
"""Where a call has waited so long, those before it are not short, and one more thread is woken."""

MOST_LOST = 64
"""Threads that are replaced at most; they hold memory as long as they hang."""

EXIT_SECONDS = 5.0
"""How long Python waits for a thread when it exits. It ends daemon threads wherever they are, and within a native
library that is a crash."""


def apart(name: str, call: Callable[[], None]) -> None:
    """Have `call` run on a thread of its own, for as long as it takes."""
    thread = threading.Thread(target=call, name=name, daemon=True)
    thread.start()
    atexit.register(thread.join, EXIT_SECONDS)


class Threads:
    """`count` threads that call functions, started with the first one: QUICK of them while calls are short, more where
    calls wait. They end with the process, which waits for calls that do not hang (see EXIT_SECONDS).

    While some hang in a call there are others in their place, so that calls that hang do not hold up the rest.
    `hung_seconds` says after which time a call hangs. Every method may be called from any thread.
    """

    def __init__(self, name: str, count: int, hung_seconds: Callable[[], float] = lambda: HUNG_SECONDS) -> None:
        self._name = name
        self._count = count
        self._hung_seconds = hung_seconds
        self._work: deque[tuple[float, Callable[[], None]]] = deque()
        """Calls, and since when they wait (time.monotonic())."""
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._awake = 0
        self._quick = min(QUICK, count)
        """How many may be awake while no call has waited: QUICK, and those that hang."""
        self._lock = threading.Lock()
        self._since: dict[threading.Thread, float | None] = {}
        """Thread -> when its call began (time.monotonic()), None while it waits for one."""

    def run(self, work: Callable[[], None]) -> None:
        """Have `work` called soon; it must not raise."""
        if not self._since:
            self.tend()
            atexit.register(self._settle)
        self._work.append((time.monotonic(), work))
        self.hurry()

    def hurry(self) -> None:
        """Wake one more thread if those that are awake do not keep up; call it often while somebody waits."""
        with self._lock:
            if self._work and (self._awake < self._quick or self._waited()):
                self._awake += 1
                self._wake.put(None)

    def tend(self) -> None:
        """Replace threads that hang; call it now and then."""
        with self._lock:
            lost = self._lost()
            self._quick = min(QUICK, self._count) + lost
            missing = min(self._count, self._count + MOST_LOST - len(self._since))
            missing -= len(self._since) - lost
            for _ in range(missing):
                thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._since[thread] = None
                thread.start()
            if lost and missing > 0:
                text = "%d calls of plugins have taken more than %g s; %d more threads serve the others"
                logger.warning(text, lost, self._hung_seconds(), missing)
        self.hurry()

    def _waited(self) -> bool:
        """Whether the oldest call has waited, and there is a thread that sleeps."""
        return self._awake < len(self._since) and time.monotonic() - self._work[0][0] >= WAITED_SECONDS

    def _settle(self) -> None:
        until = time.monotonic() + self._hung_seconds()
        while any(list(self._since.values())) and time.monotonic() < until:
            time.sleep(0.01)

    def _lost(self) -> int:
        late = time.monotonic() - self._hung_seconds()
        return sum(since is not None and since < late for since in self._since.values())

    def _serve(self) -> None:
        me = threading.current_thread()
        while True:
            self._wake.get()
            while work := self._next():
                self._since[me] = time.monotonic()
                work()
                del work
                self._since[me] = None
                if len(self._since) > self._count and self._superfluous(me):
                    return

    def _next(self) -> Callable[[], None] | None:
        """The call that has waited longest; without one the thread goes to sleep."""
        with self._lock:
            if not self._work:
                self._awake -= 1
                return None
            work = self._work.popleft()[1]
        self.hurry()
        return work

    def _superfluous(self, me: threading.Thread) -> bool:
        """Whether `me` hung, was replaced, and is back: then it ends."""
        with self._lock:
            if len(self._since) - self._lost() <= self._count:
                return False
            del self._since[me]
            self._awake -= 1
        self.hurry()
        return True
