"""The bridge to an engine in the same process: one thread steps it and calls the sinks."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass

from llmcore.bridge import Abort, ChoiceEvent, Finish, FinishChoice, Load, Sink, StepEvents, Submit, explode
from llmcore.engine.engine import Engine
from llmcore.errors import RequestError

logger = logging.getLogger(__name__)

_OWNER = 0
_IDLE_SECONDS = 1.0
_SNAPSHOT_SECONDS = 0.1


@dataclass
class _Open:
    """A request that has not ended: where its events go, and which choices still run."""

    sink: Sink
    choices: set[int]


class LocalBridge:
    """`bridge.Bridge` without processes. Its methods may be called from any thread, sinks' included."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: deque[Submit | Abort | FinishChoice] = deque()
        self._open: dict[int, _Open] = {}
        self._wake = threading.Event()
        self._closing = False
        self._failure: str | None = None
        self._load = engine.load()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Submit, sink: Sink) -> None:
        """Queue `request`. What is wrong with it comes as an event; RequestError (503) when the engine is gone."""
        if self._failure is not None or self._closing:
            message = self._failure or "the engine is closed"
            raise RequestError(message, code="engine_failed", status=503)
        self._open[request.id] = _Open(sink, set(range(request.n)))
        self._post(request)

    def abort(self, request_id: int) -> None:
        """End every choice of a request."""
        if self._open.pop(request_id, None) is not None:
            self._post(Abort(request_id))

    def finish(self, request_id: int, choice: int, n_tokens: int) -> None:
        """End one choice at its first `n_tokens` tokens."""
        if self._close_choice(request_id, choice):
            self._post(FinishChoice(request_id, choice, n_tokens))

    def load(self) -> Load:
        """A snapshot, at most a tenth of a second old."""
        return self._load

    def close(self) -> None:
        """End the thread; what is open gets an error."""
        self._closing = True
        self._wake.set()
        self._thread.join()

    def _post(self, message: Submit | Abort | FinishChoice) -> None:
        self._inbox.append(message)
        self._wake.set()

    def _run(self) -> None:
        due = 0.0
        try:
            while not self._closing:
                self._drain()
                if self._engine.idle:
                    self._load = self._engine.load()
                    self._wake.wait(_IDLE_SECONDS)
                    self._wake.clear()
                    continue
                for events in self._engine.step():
                    if _OWNER in events:
                        self._deliver(events[_OWNER])
                if time.monotonic() >= due:
                    due = time.monotonic() + _SNAPSHOT_SECONDS
                    self._load = self._engine.load()
            self._fail_all("the engine was closed")
        except Exception as error:
            logger.exception("the engine failed")
            self._failure = f"the engine failed: {error}"
            self._fail_all(self._failure)

    def _drain(self) -> None:
        while self._inbox:
            message = self._inbox.popleft()
            match message:
                case Submit():
                    self._submit(message)
                case Abort():
                    self._engine.abort(message.id)
                case FinishChoice():
                    self._engine.finish(message.id, message.choice, message.n_tokens)

    def _submit(self, request: Submit) -> None:
        try:
            self._engine.submit(request)
        except RequestError as error:
            self._deliver(refusal(request, error))

    def _deliver(self, events: StepEvents) -> None:
        for request, event in explode(events):
            entry = self._open.get(request)
            if entry is None or event.choice not in entry.choices:
                continue
            if event.finish is not Finish.RUNNING:
                self._close_choice(request, event.choice)
            try:
                entry.sink(event)
            except Exception:
                logger.exception("the sink of a request failed")
                self.abort(request)

    def _close_choice(self, request: int, choice: int) -> bool:
        entry = self._open.get(request)
        if entry is None or choice not in entry.choices:
            return False
        entry.choices.discard(choice)
        if not entry.choices:
            self._open.pop(request, None)
        return True

    def _fail_all(self, message: str) -> None:
        for entry in list(self._open.values()):
            for choice in sorted(entry.choices):
                entry.sink(
                    ChoiceEvent(choice=choice, tokens=(), finish=Finish.ERROR, error=("engine_failed", message))
                )
        self._open.clear()


def refusal(request: Submit, error: RequestError) -> StepEvents:
    """The events that end every choice of a request that was not accepted."""
    choices = list(range(max(request.n, 1)))
    return StepEvents(
        stamp=time.monotonic(),
        request=[request.id] * len(choices),
        choice=choices,
        count=[0] * len(choices),
        tokens=[],
        finish=[Finish.ERROR] * len(choices),
        error={row: (error.code or "invalid_value", error.message) for row in choices},
    )
