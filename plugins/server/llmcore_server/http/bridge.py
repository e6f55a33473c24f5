"""The bridge of an HTTP worker: an engine in another process, reached by messages.

`submit`, `abort` and `finish` may be called from any thread. One thread, the hub, runs `run`: it receives, hands every
request its events and keeps the heartbeat. It first merges all steps that have queued up, so a worker that fell behind
writes once per request and not once per step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec
import zmq
from llmcore.api.bridge import (
    Abort,
    ChoiceEvent,
    Finish,
    FinishChoice,
    Load,
    Sink,
    StepEvents,
    Submit,
    Subscribers,
    explode,
)
from llmcore.api.errors import RequestError
from llmcore.api.protocols import RequestRecord

from llmcore_server.http.admission import Gate
from llmcore_server.http.deadlines import Deadlines
from llmcore_server.http.streaming.loop import SendBatch
from llmcore_server.limits import bounds
from llmcore_server.messages import (
    HEARTBEAT_SECONDS,
    Alive,
    EngineGone,
    Finished,
    Heartbeat,
    Hello,
    Intake,
    Mailbox,
    Outlet,
    Shutdown,
    State,
    Tallied,
    Tally,
    ToEngine,
    ToSupervisor,
    ToWorker,
    WorkerLaunch,
    WorkerReady,
)

logger = logging.getLogger(__name__)

_LOST = ("engine_failed", "The engine has stopped; the request can be sent again when the server is back.")
_REASON = "the server is shutting down"
_ENDING = ("server_overloaded", "The server is shutting down; send the request again later.")


class WireBridge:
    """`bridge.Bridge` over the wire, for one worker."""

    def __init__(self, launch: WorkerLaunch, *, on_shutdown: Callable[[float], None]) -> None:
        self._worker = launch.worker
        self._name = launch.name
        self._on_shutdown = on_shutdown
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._mailbox: Mailbox[ToWorker] = Mailbox(self._context, launch.mailbox, ToWorker)
        self._engines = [Outlet(self._context, endpoint) for endpoint in launch.engines]
        self._control = Outlet(self._context, launch.control)
        self._sending = threading.Lock()
        self._requests = Subscribers(lambda request: self._to_engine_of(request, Abort(request)))
        self._seen = 0.0
        self._tally = Tally(launch.name)
        self._stopping = threading.Event()
        self._over = threading.Event()
        facts = launch.facts
        limits = bounds(launch.config, max_running=facts.max_running, kv_tokens=facts.kv_tokens)
        self.gate = Gate(limits, self._unready)
        self.deadlines = Deadlines()
        self.send_batch = SendBatch()
        self._informed = threading.Event()
        self.state = State(ready=True)
        self._to_engines(Hello(launch.mailbox))

    # --- Bridge

    def submit(self, request: Submit, sink: Sink) -> None:
        """Queue `request`. Raises RequestError (503) when the engine is gone or does not keep up."""
        self._requests.open(request, sink)
        if not self._to_engine_of(request.id, request):
            self._requests.close(request.id)
            raise RequestError("The server has too much to do; try again later.", code="server_overloaded", status=503)

    def abort(self, request_id: int) -> None:
        """End every choice of a request."""
        if self._requests.close(request_id):
            self._to_engine_of(request_id, Abort(request_id))

    def finish(self, request_id: int, choice: int, n_tokens: int) -> None:
        """End one choice at its first `n_tokens` tokens."""
        if self._requests.close_choice(request_id, choice):
            self._to_engine_of(request_id, FinishChoice(request_id, choice, n_tokens))

    def load(self) -> Load:
        """The supervisor's newest copy of the engine's figures, about a second old."""
        return self.state.load

    # --- for the worker

    @property
    def dropped(self) -> int:
        """The number of messages that were not valid."""
        return self._mailbox.dropped

    def announce(self) -> None:
        """Tell the supervisor that this worker can serve."""
        self._tell(WorkerReady())

    def await_state(self, seconds: float) -> None:
        """Wait for the supervisor's first message. Before it, figures and metrics would be empty."""
        self._informed.wait(seconds)

    def report(self, record: RequestRecord) -> None:
        """Pass the figures of a finished request on to the metric sinks."""
        self._tell(Finished(record))

    def run(self, alive: Callable[[], bool] = lambda: True) -> None:
        """The hub: receive until `stop`, and tell the supervisor that this worker lives while `alive` says so."""
        due = 0.0
        while not self._stopping.is_set():
            self._mailbox.wait(self.deadlines.patience(HEARTBEAT_SECONDS))
            self._handle(self._mailbox.drain())
            self.deadlines.expire()
            if self._over.is_set():
                self._requests.end_all()
            if time.monotonic() >= due:
                due = time.monotonic() + HEARTBEAT_SECONDS
                self._to_engines(Heartbeat(self._seen))
                if alive():
                    self._tell(Alive())
                if news := self._tally.news(self._mailbox):
                    self._tell(news)
        self._mailbox.close()
        with self._sending:
            for engine in self._engines:
                engine.close()
            self._control.close()

    def drain(self) -> None:
        """Refuse new requests and let open ones go on. From any thread."""
        self._requests.refuse(_ENDING)
        self.state = msgspec.structs.replace(self.state, ready=False, reason=_REASON)

    def end_all(self) -> None:
        """End open requests with an error, within a heartbeat, and refuse new ones. From any thread."""
        self._requests.refuse(_ENDING)
        self._over.set()

    def stop(self) -> None:
        """End `run` within a heartbeat."""
        self._stopping.set()

    # --- inside

    def _to_engine_of(self, request_id: int, body: Submit | Abort | FinishChoice) -> bool:
        """Tell the engine of this request; the requests of a worker go to the engines in turn. False if it is lost."""
        with self._sending:
            if not self._engines:
                return False
            return self._engines[request_id % len(self._engines)].send(ToEngine(self._worker, body)) > 0

    def _to_engines(self, body: Hello | Heartbeat) -> None:
        with self._sending:
            for engine in self._engines:
                engine.send(ToEngine(self._worker, body))

    def _unready(self) -> RequestError | None:
        refusal = self._requests.refusal
        if refusal is not None or self.state.ready:
            return refusal
        text = f"The server takes no requests now: {self.state.reason or 'it is not ready'}."
        return RequestError(text, code="server_overloaded", status=503)

    def _lose_engines(self) -> None:
        """Another engine may take the place and the address of the dead one. It must not get messages for that one."""
        with self._sending:
            for engine in self._engines:
                engine.close(0.0)
            self._engines = []

    def _tell(self, body: WorkerReady | Alive | Finished | Tallied) -> None:
        with self._sending:
            self._control.send(ToSupervisor(self._name, body))

    def _handle(self, messages: Sequence[ToWorker]) -> None:
        steps: list[StepEvents] = []
        for message in messages:
            match message:
                case StepEvents():
                    steps.append(message)
                case State():
                    self.state = message
                    self._informed.set()
                case EngineGone():
                    self._lose_engines()
                    self._requests.refuse(_LOST)
                    self._over.set()
                    self.state = msgspec.structs.replace(self.state, ready=False, reason=message.message)
                case Intake():
                    self.gate.hear(message)
                case Shutdown():
                    self._on_shutdown(message.grace)
        if steps:
            with self.send_batch:
                for request, event in merge(steps):
                    self._requests.deliver(request, event)
            self._seen = steps[-1].stamp


def merge(steps: Sequence[StepEvents]) -> Iterable[tuple[int, ChoiceEvent]]:
    """The events of several steps, one per (request, choice), in the order in which the first of each came."""
    if len(steps) == 1:
        return explode(steps[0])
    merged: dict[tuple[int, int], ChoiceEvent] = {}
    for step in steps:
        for request, event in explode(step):
            before = merged.get((request, event.choice))
            if before is None:
                merged[request, event.choice] = event
            elif before.finish is Finish.RUNNING:
                merged[request, event.choice] = _join(before, event)
    return [(request, event) for (request, _), event in merged.items()]


def _join(a: ChoiceEvent, b: ChoiceEvent) -> ChoiceEvent:
    logprobs: tuple[float, ...] = ()
    if a.logprobs or b.logprobs:  # a step in which no row asked has none; this row did not ask then
        logprobs = (a.logprobs or (0.0,) * len(a.tokens)) + (b.logprobs or (0.0,) * len(b.tokens))
    return ChoiceEvent(
        choice=a.choice,
        tokens=a.tokens + b.tokens,
        finish=b.finish,
        logprobs=logprobs,
        top=a.top + b.top,
        cached=max(a.cached, b.cached),
        error=b.error,
        scores=b.scores,
        prompt_logprobs=a.prompt_logprobs or b.prompt_logprobs,
        prompt_ranks=a.prompt_ranks or b.prompt_ranks,
        prompt_top=a.prompt_top or b.prompt_top,
        pooled=b.pooled,
        unenforced=a.unenforced or b.unenforced,
    )
