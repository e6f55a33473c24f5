"""Signals that ask a server to stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from llmcore.api.errors import Stopped

from llmcore_server.child import FROM_OUTSIDE

MEANINGLESS = (signal.SIGUSR1, signal.SIGUSR2)
"""Would end the process without cleaning up, unless somebody took note of them."""


@dataclass
class Stops:
    """How often the process was asked to stop."""

    count: int = 0
    _interrupts: bool = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, FROM_OUTSIDE count and do nothing else, but for those that are ignored, as SIGHUP is under nohup.

        From then on they are ignored: the process ends, with the exit code that it has by now.
        """

        def on_signal(number: int, frame: object) -> None:
            self.count += 1
            if self._interrupts:
                raise Stopped

        for number in FROM_OUTSIDE:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, on_signal)
        for number in MEANINGLESS:  # not SIG_IGN, which children would inherit
            signal.signal(number, lambda *_: None)
        try:
            yield
        finally:
            for number in (*FROM_OUTSIDE, *MEANINGLESS):
                signal.signal(number, signal.SIG_IGN)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Inside, they raise Stopped too."""
        self._interrupts = True
        try:
            yield
        finally:
            self._interrupts = False
