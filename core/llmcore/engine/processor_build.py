"""Requests whose logits processors are being made, on threads of their own: a step never waits for a grammar.

Clients share the places for it (`turns.Turns`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import msgspec

from llmcore.bridge import Submit
from llmcore.engine.processors import Prepared
from llmcore.engine.threads import Threads
from llmcore.engine.turns import PLACES, Turns
from llmcore.errors import RequestError, reraise_if_stopping
from llmcore.processors import OVERLOADED

logger = logging.getLogger(__name__)

MAKE_SECONDS = 10.0
"""The processors of one request may take this time to make, the wait for a place included."""

LOST_SECONDS = 3.0
"""One that takes longer loses its place to others until it returns."""

MOST_BYTES = 2 << 20
"""Arguments of the processors of one request."""

Key = tuple[int, int]
"""(owner, request id)."""

Bind = Callable[[Submit], Prepared]


@dataclass(frozen=True, eq=False)
class Made:
    """A request and its processors, or why it cannot be served."""

    request: Submit
    owner: int
    result: Prepared | RequestError


@dataclass(eq=False)
class _Asked:
    """`began`: when it got a place (time.monotonic()), None while it waits for one."""

    request: Submit
    owner: int
    since: float
    began: float | None = None


class Making:
    """All of them, oldest first. `bind` makes a request's processors, on another thread; the rest is the engine's."""

    def __init__(self, bind: Bind) -> None:
        self._bind = bind
        self._open: dict[Key, _Asked] = {}
        self._done: SimpleQueue[tuple[_Asked, Prepared | RequestError]] = SimpleQueue()
        self._turns: Turns[_Asked] = Turns()
        self._placed: set[_Asked] = set()
        """Those that have a place, wanted or not."""
        self._threads = Threads("processors-make", PLACES, hung_seconds=lambda: LOST_SECONDS)

    def __len__(self) -> int:
        return len(self._open)

    def requests(self) -> Iterator[Submit]:
        """Every one of them."""
        return (asked.request for asked in self._open.values())

    def begin(self, request: Submit, owner: int) -> None:
        """Have the processors of `request` made. Raises RequestError for arguments that are too long."""
        key = (owner, request.id)
        if key in self._open:
            raise RequestError(f"request {request.id} exists already", code="invalid_value")
        calls = request.sampling.logits_processors
        size = len(msgspec.msgpack.encode(calls))
        if size > MOST_BYTES:
            text = f"{calls[0].param}: it has {size:,} bytes; at most {MOST_BYTES:,} are allowed"
            raise RequestError(text, param=calls[0].param, code="invalid_value")
        asked = self._open[key] = _Asked(request, owner, time.monotonic())
        self._turns.wait(asked, request.client, size)
        self._threads.run(self._serve)

    def forget(self, owner: int, request_id: int) -> None:
        """The request is not wanted any more; one that is not here is no error."""
        self._open.pop((owner, request_id), None)

    def done(self) -> Iterator[Made]:
        """Those that are made since the last call, and those that take too long."""
        while self._open:
            try:
                asked, result = self._done.get_nowait()
            except Empty:
                break
            if self._open.get((asked.owner, asked.request.id)) is asked:
                yield self._close(asked, result)
        yield from self._overdue()

    def clear(self) -> list[tuple[Submit, int]]:
        """Give all of them up; (request, owner) of each."""
        given_up = [(asked.request, asked.owner) for asked in self._open.values()]
        self._open.clear()
        return given_up

    def _overdue(self) -> Iterator[Made]:
        if not self._open:
            return
        now = time.monotonic()
        for asked in list(self._placed):
            if asked.began is not None and now - asked.began > LOST_SECONDS and self._turns.leave(asked):
                self._threads.run(self._serve)
        self._threads.tend()
        for asked in [asked for asked in self._open.values() if now - asked.since > MAKE_SECONDS]:
            yield self._close(asked, _late(asked))

    def _close(self, asked: _Asked, result: Prepared | RequestError) -> Made:
        del self._open[asked.owner, asked.request.id]
        return Made(asked.request, asked.owner, result)

    def _serve(self) -> None:
        """Make what has the next turn; its place may be what others wait for."""
        asked = self._turns.take()
        if asked is not None:
            self._placed.add(asked)
            self._make(asked)
            self._placed.discard(asked)
            self._turns.leave(asked)
            self._threads.run(self._serve)

    def _make(self, asked: _Asked) -> None:
        asked.began = time.monotonic()
        result: Prepared | RequestError
        try:
            wanted = self._open.get((asked.owner, asked.request.id)) is asked
            result = self._bind(asked.request) if wanted else Prepared()
        except RequestError as error:
            result = error
            if error.status >= 500:
                _log(asked.request, error.__cause__ or error)
        except BaseException as error:  # noqa: BLE001 - whatever it raises ends its request only
            reraise_if_stopping(error)
            _log(asked.request, error)
            result = RequestError(f"logits_processors: {type(error).__name__}", code="internal_error", status=500)
        self._done.put((asked, result))


def _late(asked: _Asked) -> RequestError:
    """The error of a request whose processors were not made within MAKE_SECONDS."""
    name = asked.request.sampling.logits_processors[0].param
    if asked.began is None:
        text = f"{name}: the requests before it take too long; send it again"
        return RequestError(text, param=name, code=OVERLOADED, status=503)
    text = f"{name}: it was not made ready within {MAKE_SECONDS:g} s"
    return RequestError(text, param=name, code="invalid_value")


def _log(request: Submit, error: BaseException) -> None:
    name = request.request_id or request.id
    logger.error("request %s: its logits processors could not be made", name, exc_info=error)
