"""The bridge of an HTTP worker: one engine or several in other processes, reached by messages.

`submit`, `abort` and `finish` may be called from any thread. One thread, the hub, runs `run`: it receives, hands every
request its events and keeps the heartbeat. It first merges all steps that have queued up, so a worker that fell behind
writes once per request and not once per step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec
import zmq
from llmcore.api.balancing import Balancer
from llmcore.api.bridge import (
    ChoiceEvent,
    Finish,
    FinishChoice,
    Load,
    ModelFacts,
    Sink,
    StepEvents,
    Submit,
    Subscribers,
    explode,
)
from llmcore.api.counters import TALLIES
from llmcore.api.errors import RequestError
from llmcore.api.protocols import RequestRecord

from llmcore_server.http.admission import Gate
from llmcore_server.http.deadlines import Deadlines
from llmcore_server.http.fleet import LOST, EngineLink, Fleet
from llmcore_server.http.streaming.loop import SendBatch
from llmcore_server.limits import bounds
from llmcore_server.messages import (
    HEARTBEAT_SECONDS,
    Alive,
    EngineBack,
    EngineGone,
    EngineLoad,
    Finished,
    Intake,
    Mailbox,
    Outlet,
    Routed,
    Shutdown,
    State,
    Tallied,
    Tally,
    ToSupervisor,
    ToWorker,
    WorkerLaunch,
    WorkerReady,
)

_REASON = "the server is shutting down"
_ENDING = ("server_overloaded", "The server is shutting down; send the request again later.")


class FleetBridge:
    """`bridge.Bridge` over the wire to one engine or several, for one worker. `balancer` chooses among several."""

    def __init__(
        self, launch: WorkerLaunch, facts: ModelFacts, *, on_shutdown: Callable[[float], None], balancer: Balancer
    ) -> None:
        self._worker = launch.worker
        self._name = launch.name
        self._on_shutdown = on_shutdown
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._mailbox: Mailbox[ToWorker] = Mailbox(self._context, launch.mailbox, ToWorker)
        self._control = Outlet(self._context, launch.control)
        self._sending = threading.Lock()
        self._fleet = Fleet(self._context, launch, facts.kv_tokens, balancer, self._control, self._sending)
        self._requests = Subscribers(self._fleet.abandon)
        self._poller = zmq.Poller()
        self._watched: list[EngineLink] = []
        self._poller.register(self._mailbox.socket, zmq.POLLIN)
        self._tally = Tally(launch.name)
        self._stopping = threading.Event()
        self._over = threading.Event()
        limits = bounds(launch.config, facts, engines=len(launch.engines))
        self.gate = Gate(limits, self._unready)
        self.deadlines = Deadlines()
        self.send_batch = SendBatch()
        self._informed = threading.Event()
        self.state = State(ready=True)

    # --- Bridge

    def submit(self, request: Submit, sink: Sink) -> None:
        """Queue `request`. Raises RequestError (503) when no engine is there, or the engine does not keep up."""
        self._requests.open(request, sink)
        if not self._fleet.send(request):
            self._requests.close(request.id)
            raise RequestError("The server has too much to do; try again later.", code="server_overloaded", status=503)

    def abort(self, request_id: int) -> None:
        """End every choice of a request."""
        if self._requests.close(request_id):
            self._fleet.abandon(request_id)

    def finish(self, request_id: int, choice: int, n_tokens: int) -> None:
        """End one choice at its first `n_tokens` tokens."""
        if self._requests.close_choice(request_id, choice):
            self._fleet.finish(FinishChoice(request_id, choice, n_tokens))
            if request_id not in self._requests:
                self._fleet.forget(request_id, whole=True)

    def load(self) -> Load:
        """The supervisor's newest copy of the engines' figures together, about a second old."""
        return self.state.load

    # --- for the worker

    @property
    def dropped(self) -> int:
        """The number of messages that were not valid."""
        return self._mailbox.dropped + self._fleet.dropped

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
            self._wait(self.deadlines.patience(HEARTBEAT_SECONDS))
            self._handle(self._mailbox.drain())
            for link in self._fleet.links():
                self._take(link)
            self.deadlines.expire()
            if self._over.is_set():
                self._requests.end_all()
            if time.monotonic() >= due:
                due = time.monotonic() + HEARTBEAT_SECONDS
                self._fleet.beat()
                if alive():
                    self._tell(Alive())
                TALLIES.set("dropped_messages", self._name, total=self.dropped)
                if news := self._tally.news():
                    self._tell(news)
        self._mailbox.close()
        self._fleet.close()
        with self._sending:
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

    def _unready(self) -> RequestError | None:
        refusal = self._requests.refusal
        if refusal is not None or self.state.ready:
            return refusal
        text = f"The server takes no requests now: {self.state.reason or 'it is not ready'}."
        return RequestError(text, code="server_overloaded", status=503)

    def _tell(self, body: WorkerReady | Alive | Finished | Tallied) -> None:
        with self._sending:
            self._control.send(ToSupervisor(self._name, body))

    def _wait(self, seconds: float) -> None:
        """Until a message has come, or `seconds` are over."""
        links = self._fleet.links()
        if links != self._watched:
            self._watched, self._poller = links, zmq.Poller()
            for socket in (self._mailbox.socket, *(link.mailbox.socket for link in links)):
                self._poller.register(socket, zmq.POLLIN)
        self._poller.poll(int(seconds * 1000))

    def _handle(self, messages: Sequence[ToWorker]) -> None:
        for message in messages:
            match message:
                case State():
                    self.state = message
                    self._informed.set()
                case EngineLoad():
                    self._fleet.told(message.engine, message.load)
                case Routed():
                    self._fleet.routed(message)
                case EngineGone():
                    self._lose(message)
                case EngineBack():
                    self._fleet.connect(message.engine)
                    self.gate.hear(self._fleet.intake)
                case Shutdown():
                    self._on_shutdown(message.grace)

    def _take(self, link: EngineLink) -> None:
        """Handle what an engine has sent."""
        steps: list[StepEvents] = []
        for message in link.mailbox.drain():
            match message:
                case StepEvents():
                    steps.append(message)
                case Intake():
                    link.intake = message
                    self.gate.hear(self._fleet.intake)
        if steps:
            with self.send_batch:
                for request, event in merge(steps):
                    self._deliver(link, request, event)
            link.seen = steps[-1].stamp

    def _deliver(self, link: EngineLink, number: int, event: ChoiceEvent) -> None:
        sent = self._fleet.sent.get(number)
        if sent is None or sent.link is not link:  # it is over, or has moved on
            return
        if event.error is not None and event.error[0] == LOST[0]:
            if not self._fleet.move(sent):
                self._requests.end(number, event.error)
            return
        news = sent.news(event)
        if news is not None:
            self._requests.deliver(number, news)
        if event.finish is not Finish.RUNNING and number not in self._requests:
            self._fleet.forget(number, whole=True)

    def _lose(self, gone: EngineGone) -> None:
        """An engine has died. Its requests move on to others; those that no other takes end with an error."""
        link = self._fleet.link(gone.engine)
        if link is None:
            return
        self._take(link)
        left = self._fleet.lose(link)
        if not self._fleet.links():
            self._requests.refuse(LOST)
            self._over.set()
            self.state = msgspec.structs.replace(self.state, ready=False, reason=gone.message)
            return
        self.gate.hear(self._fleet.intake)
        with self.send_batch:
            for sent in left:
                if not self._fleet.move(sent):
                    self._requests.end(sent.request.id, LOST)


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
