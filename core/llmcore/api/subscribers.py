"""The open requests of a bridge, and the sinks that get their events."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from llmcore.api.bridge import ChoiceEvent, Finish, Sink, Submit
from llmcore.api.errors import RequestError, reraise_if_stopping

logger = logging.getLogger(__name__)

_RUNNING = Finish.RUNNING
_BUG = ("internal_error", "The server failed to handle this request.")


@dataclass(slots=True)
class _Open:
    """A request that has not ended: the sink of its events, and the choices that still run."""

    sink: Sink
    choices: set[int]


class Subscribers:
    """Sinks of open requests.

    Any thread may call it, except `deliver` and `end_all`: they call sinks, so they run on the bridge's own thread.
    `abort` tells the engine that a request is over, even if the engine still computes it.
    """

    def __init__(self, abort: Callable[[int], object]) -> None:
        self._abort = abort
        self._open: dict[int, _Open] = {}
        self._lock = threading.Lock()
        self._refusal: tuple[str, str] | None = None

    def __len__(self) -> int:
        return len(self._open)

    @property
    def refusal(self) -> RequestError | None:
        """The error that `open` raises, or None if it raises none."""
        refusal = self._refusal
        return None if refusal is None else RequestError(refusal[1], code=refusal[0], status=503)

    def open(self, request: Submit, sink: Sink) -> None:
        """Send the events of `request` to `sink` from now on. Raises RequestError (503) after `refuse`."""
        with self._lock:
            refusal = self.refusal
            if refusal is not None:
                raise refusal
            self._open[request.id] = _Open(sink, set(range(request.n)))

    def close(self, request: int) -> bool:
        """Send nothing more to the sink of `request`. Returns True if the request was open."""
        with self._lock:
            return self._open.pop(request, None) is not None

    def close_choice(self, request: int, choice: int) -> bool:
        """Send no more events of one choice. Returns True if the choice was open."""
        return self._sink(request, choice, last=True) is not None

    def deliver(self, request: int, event: ChoiceEvent) -> None:
        """Pass an event to its request's sink, if it is open. If the sink raises, only this request ends."""
        sink = self._sink(request, event.choice, last=event.finish is not _RUNNING)
        if sink is not None:
            self._call(request, sink, event)

    def refuse(self, error: tuple[str, str]) -> None:
        """Make `open` raise `error`, a (code, message), from now on. Only the first call counts."""
        with self._lock:
            self._refusal = self._refusal or error

    def end_all(self) -> None:
        """End every open request with the error of `refuse`."""
        with self._lock:
            ending, self._open = self._open, {}
        for request, entry in ending.items():
            self._abort(request)
            for choice in sorted(entry.choices):
                self._call(request, entry.sink, _ended_by(choice, self._refusal or _BUG))

    def _sink(self, request: int, choice: int, *, last: bool) -> Sink | None:
        if not last:  # every token takes this path, without the lock: one lookup in a dict needs none
            entry = self._open.get(request)
            return None if entry is None or choice not in entry.choices else entry.sink
        with self._lock:
            entry = self._open.get(request)
            if entry is None or choice not in entry.choices:
                return None
            entry.choices.discard(choice)
            if not entry.choices:
                del self._open[request]
            return entry.sink

    def _call(self, request: int, sink: Sink, event: ChoiceEvent) -> None:
        try:
            sink(event)
        except BaseException as error:
            reraise_if_stopping(error)
            logger.exception("the sink of a request failed")
            if self.close(request):
                self._abort(request)
            if event.error is None:
                self._call(request, sink, _ended_by(event.choice, _BUG))


def _ended_by(choice: int, error: tuple[str, str]) -> ChoiceEvent:
    """The event that ends a choice with an error, (code, message)."""
    return ChoiceEvent(choice=choice, tokens=(), finish=Finish.ERROR, error=error)
