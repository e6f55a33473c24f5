"""Requests whose logits processors are being made, on threads of their own: a step never waits for a grammar."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from llmcore.bridge import Submit
from llmcore.engine.threads import Threads
from llmcore.errors import RequestError, reraise_if_stopping
from llmcore.sched.bound import Bound

logger = logging.getLogger(__name__)

MAKE_SECONDS = 10.0
"""How long the processors of one request may take to make."""

_THREADS = 2

Key = tuple[int, int]
"""(owner, request id)."""

Bind = Callable[[Submit], Sequence[Bound]]


@dataclass(frozen=True, eq=False)
class Made:
    """A request and its processors by choice, or why it cannot be served."""

    request: Submit
    owner: int
    result: Sequence[Bound] | RequestError


@dataclass(frozen=True, eq=False)
class _Asked:
    request: Submit
    owner: int
    since: float


class Making:
    """All of them, oldest first. `bind` makes a request's processors, on another thread; the rest is the engine's."""

    def __init__(self, bind: Bind) -> None:
        self._bind = bind
        self._open: dict[Key, _Asked] = {}
        self._done: SimpleQueue[tuple[_Asked, Sequence[Bound] | RequestError]] = SimpleQueue()
        self._threads = Threads("processors-make", _THREADS)

    def __len__(self) -> int:
        return len(self._open)

    def requests(self) -> Iterator[Submit]:
        """Every one of them."""
        return (asked.request for asked in self._open.values())

    def begin(self, request: Submit, owner: int) -> None:
        """Have the processors of `request` made."""
        key = (owner, request.id)
        if key in self._open:
            raise RequestError(f"request {request.id} exists already", code="invalid_value")
        asked = self._open[key] = _Asked(request, owner, time.monotonic())
        self._threads.run(lambda: self._make(asked))

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
        self._threads.tend()
        late = time.monotonic() - MAKE_SECONDS
        for asked in [asked for asked in self._open.values() if asked.since < late]:
            name = asked.request.sampling.logits_processors[0].param
            yield self._close(
                asked,
                RequestError(
                    f"{name}: it was not made ready within {MAKE_SECONDS:g} s", param=name, code="invalid_value"
                ),
            )

    def _close(self, asked: _Asked, result: Sequence[Bound] | RequestError) -> Made:
        del self._open[asked.owner, asked.request.id]
        return Made(asked.request, asked.owner, result)

    def _make(self, asked: _Asked) -> None:
        result: Sequence[Bound] | RequestError
        try:
            wanted = self._open.get((asked.owner, asked.request.id)) is asked
            result = self._bind(asked.request) if wanted else ()
        except RequestError as error:
            result = error
            if error.status >= 500:
                _log(asked.request, error.__cause__ or error)
        except BaseException as error:  # noqa: BLE001 - whatever it raises ends its request only
            reraise_if_stopping(error)
            _log(asked.request, error)
            result = RequestError(f"logits_processors: {type(error).__name__}", code="internal_error", status=500)
        self._done.put((asked, result))


def _log(request: Submit, error: BaseException) -> None:
    name = request.request_id or request.id
    logger.error("request %s: its logits processors could not be made", name, exc_info=error)
