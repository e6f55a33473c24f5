"""Answers to several clients, and pieces of streams, sent one right after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable

MOST = 16
"""So many are kept before they are sent: more are hardly cheaper, and all but the last wait for the others."""


class SendBatch:
    """Keeps what is posted while somebody has it open (`with`), until there are `MOST` or one of them closes it;
    otherwise sends it at once.

    Who reads many answers in one process, as a proxy on this machine does, is woken by the first of several that come
    together and is still awake for the others; to be woken for each would take a third of the sender's time. For any
    thread. What is given as `send` must neither raise nor come back here.
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
        """Call `send` with `data`, now or soon, after what was posted before."""
        with self._lock:
            if self._open:
                self._kept.append((send, data))
                if len(self._kept) == MOST:
                    self._send()
                return
        send(data)

    def flush(self) -> None:
        """Send what is kept: something that was not posted is to follow it."""
        with self._lock:
            self._send()

    def _send(self) -> None:
        for send, data in self._kept:
            send(data)
        self._kept.clear()
