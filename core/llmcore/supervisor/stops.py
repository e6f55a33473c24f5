"""Signals that ask a server to stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from llmcore.errors import Stopped

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What service managers, terminals and terminals that go away send."""


@dataclass
class Stops:
    """How often the process was asked to stop."""

    count: int = 0
    _interrupts: bool = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, SIGNALS count and do nothing else, but for those that are ignored, as SIGHUP is under nohup."""

        def on_signal(number: int, frame: object) -> None:
            self.count += 1
            if self._interrupts:
                raise Stopped

        heeded = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, on_signal) for number in heeded}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Inside, they raise Stopped too."""
        self._interrupts = True
        try:
            yield
        finally:
            self._interrupts = False
