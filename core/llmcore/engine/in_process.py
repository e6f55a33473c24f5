"""The bridge to an engine in the same process: one thread steps it and calls the sinks."""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from contextlib import suppress
from queue import Empty, SimpleQueue

from llmcore.api.bridge import Abort, FinishChoice, Load, Sink, StepEvents, Submit, Subscribers, explode
from llmcore.api.errors import RequestError, text_of
from llmcore.engine.engine import Engine, refusal
from llmcore.engine.processors import EXIT_SECONDS

logger = logging.getLogger(__name__)

_OWNER = 0
_IDLE_SECONDS = 1.0
_STUCK_SECONDS = 0.001
"""Pause when there is work, but none that a step could do now."""

_ENDED_SECONDS = 0.1
"""A caller that waits for the thread's answer looks this often whether the thread has ended."""

Message = Submit | Abort | FinishChoice | SimpleQueue[Load]
"""Messages to the engine's thread; it puts a snapshot of its load into a queue."""


class InProcessBridge:
    """`bridge.Bridge` without processes. Its methods may be called from any thread, sinks' included."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: deque[Message] = deque()
        self._requests = Subscribers(lambda request: self._post(Abort(request)))
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def submit(self, request: Submit, sink: Sink) -> None:
        """Queue `request`. Its errors come as events. Raises RequestError (503) when the engine has ended."""
        self._requests.open(request, sink)
        self._post(request)

    def abort(self, request_id: int) -> None:
        """End every choice of a request."""
        if self._requests.close(request_id):
            self._post(Abort(request_id))

    def finish(self, request_id: int, choice: int, n_tokens: int) -> None:
        """End one choice at its first `n_tokens` tokens."""
        if self._requests.close_choice(request_id, choice):
            self._post(FinishChoice(request_id, choice, n_tokens))

    def load(self) -> Load:
        """A snapshot in which everything that was asked for before is done; waits for the running step."""
        if threading.current_thread() is not self._thread:
            answer: SimpleQueue[Load] = SimpleQueue()
            self._post(answer)
            while self._thread.is_alive():
                with suppress(Empty):
                    return answer.get(timeout=_ENDED_SECONDS)
        return self._engine.load()

    def close(self) -> None:
        """End the thread; what is open gets an error."""
        atexit.unregister(self._end)
        self._end(None)

    def _end(self, seconds: float | None = EXIT_SECONDS) -> None:
        """End the thread; without `seconds`, when Python exits: see EXIT_SECONDS."""
        self._closing = True
        self._wake.set()
        self._thread.join(seconds)

    def _post(self, message: Message) -> None:
        self._inbox.append(message)
        self._wake.set()

    def _run(self) -> None:
        message = "the engine was closed"
        try:
            self._serve()
        except BaseException as error:
            logger.exception("the engine failed")
            message = f"the engine failed: {text_of(error)}"
        self._requests.refuse(("engine_failed", message))
        self._requests.end_all()

    def _serve(self) -> None:
        while not self._closing:
            self._drain()
            steps = [] if self._engine.idle else self._engine.step()
            for events in steps:
                if _OWNER in events:
                    self._deliver(events[_OWNER])
            if not steps:
                self._wake.wait(_IDLE_SECONDS if self._engine.idle else _STUCK_SECONDS)
                self._wake.clear()

    def _drain(self) -> None:
        for _ in range(len(self._inbox)):  # later messages wait for the next step, or no step would ever run
            message = self._inbox.popleft()
            match message:
                case Submit():
                    self._submit(message)
                case Abort():
                    self._engine.abort(message.id)
                case FinishChoice():
                    self._engine.finish(message.id, message.choice, message.n_tokens)
                case SimpleQueue():
                    message.put(self._engine.load())

    def _submit(self, request: Submit) -> None:
        try:
            self._engine.submit(request)
        except RequestError as error:
            self._deliver(refusal(request, error))

    def _deliver(self, events: StepEvents) -> None:
        for request, event in explode(events):
            self._requests.deliver(request, event)
