"""`python -m llmcore_server.engine.process FD`: the engine as a process of a server."""

from __future__ import annotations

import itertools
import logging
import signal
import time
from types import FrameType

import zmq
from llmcore.api.bridge import Abort, FinishChoice, Prompt, Submit
from llmcore.api.engine import DeviceLost, Engine, Events, build_engine, refusal
from llmcore.api.errors import RequestError
from llmcore.registry.loader import build_registry

from llmcore_server import child
from llmcore_server.engine.admission import Admission
from llmcore_server.engine.link import led
from llmcore_server.engine.workers import Workers
from llmcore_server.limits import bounds
from llmcore_server.messages import (
    SUPERVISOR,
    EngineLaunch,
    EngineReady,
    Heartbeat,
    Hello,
    Mailbox,
    Outlet,
    Probe,
    Progress,
    Shutdown,
    Snapshot,
    Tallied,
    Tally,
    ToEngine,
    ToSupervisor,
    WorkerGone,
)
from llmcore_server.settings import Admission as AdmissionSettings

logger = logging.getLogger(__name__)

_STUCK_SECONDS = 0.001
"""Pause when there is work, but none that a step could do now."""

_PROMPT = Prompt.of([0])
"""The prompt of a step that is asked for when nothing runs: one token, the first of every vocabulary."""

_LOOK_SECONDS = 0.05
"""Seconds between two checks for requests that have waited too long."""


class EngineProcess:
    """The mailbox, the workers behind it, and the loop between them and the engine."""

    def __init__(self, launch: EngineLaunch, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._launch = launch
        self._stopping = False
        self._control = Outlet(context, launch.control)
        self._workers = Workers(context, lambda request: self._admission.ended(request))
        self._context = context
        self._probes = itertools.count()
        self._probing = False
        self._tally = Tally(launch.name)

    def run(self) -> None:
        """Build the engine, report that it is ready, and serve until told to end."""
        registry = build_registry(self._launch.config)
        with registry.lifetime(self._launch.config), led(self._launch, registry, self._context) as ranks:
            engine = build_engine(self._launch.config, registry, self._progress, ranks, self._launch.device)
            child.freeze()
            self._admission = Admission(bounds(self._launch.config, engine.facts), engine.queue_stats)
            self._inbox: Mailbox[ToEngine] = Mailbox(self._context, self._launch.mailbox, ToEngine)
            signal.signal(child.STOP, self._stop)
            self._tell(EngineReady(engine.facts))
            self._serve(engine)
            self._inbox.close()
            self._workers.close()
            self._control.close()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """The supervisor asks: end after this step."""
        self._stopping = True

    def _serve(self, engine: Engine) -> None:
        due = look = 0.0
        patience = self._launch.config.section(AdmissionSettings).queue_timeout
        while not self._stopping:
            if engine.idle:
                self._inbox.wait(self._launch.report_seconds)
            for message in self._inbox.drain():
                self._handle(engine, message)
            self._workers.drop_late(engine.abort)
            if patience and time.monotonic() >= look:
                look = time.monotonic() + _LOOK_SECONDS
                self._workers.post(engine.expire(patience))
            self._tell_workers()  # of room, before a step that may be long
            steps = self._step(engine)
            self._admission.stepped()
            self._tell_workers()
            if not steps and not engine.idle:
                self._inbox.wait(_STUCK_SECONDS)
            if self._probing and engine.idle:
                self._probing, due = False, 0.0
            if time.monotonic() >= due:
                due = time.monotonic() + self._launch.report_seconds
                self._tell(Snapshot(engine.load()))
                if news := self._tally.news(self._inbox):
                    self._tell(news)

    def _step(self, engine: Engine) -> list[Events]:
        try:
            steps = engine.step()
        except DeviceLost as error:
            for events in engine.abandon(str(error)):
                self._workers.post(events)
            raise
        for events in steps:
            self._workers.post(events)
        return steps

    def _handle(self, engine: Engine, message: ToEngine) -> None:
        owner, body = message.sender, message.body
        match body:
            case Submit():
                self._submit(engine, body, owner)
            case Abort():
                engine.abort(body.id, owner)
                self._workers.ended(owner, body.id)
            case FinishChoice():
                engine.finish(body.id, body.choice, body.n_tokens, owner)
                self._workers.ended(owner, body.id, body.choice)
            case Hello():
                self._workers.add(owner, body.mailbox)
                self._workers.tell(self._admission.told)
            case Heartbeat():
                self._workers.heard(owner, body.seen)
            case WorkerGone():
                self._workers.remove(body.worker, engine.abort)
            case Probe():
                self._probe(engine)
            case Shutdown():
                self._stopping = True

    def _probe(self, engine: Engine) -> None:
        """Answer the question whether a step can be done: do one, unless another is under way, and report at once."""
        if engine.idle:
            self._probing = True
            score = bool(engine.facts.scores)
            # Its own salt keeps it from any prefix that a client has cached.
            probe = Submit(id=next(self._probes), prompt=_PROMPT, max_new_tokens=1, score=score, salt=b"probe")
            engine.submit(probe, SUPERVISOR)

    def _submit(self, engine: Engine, request: Submit, owner: int) -> None:
        """Give the engine the request of a worker, or tell the worker why it is refused."""
        try:
            self._admission.check(request)
            engine.submit(request, owner)
        except RequestError as error:
            self._tell_workers()  # that the queue is full, before one hears of the refusal
            self._workers.post({owner: refusal(request, error)})
        else:
            self._admission.began(request)
            self._workers.began(owner, request)

    def _tell_workers(self) -> None:
        news = self._admission.news()
        if news is not None:
            self._workers.tell(news)

    def _progress(self, stage: str, done: int, total: int) -> None:
        self._tell(Progress(stage, done, total))

    def _tell(self, body: EngineReady | Progress | Snapshot | Tallied) -> None:
        self._control.send(ToSupervisor(self._launch.name, body))


def main(kind: type[EngineProcess] = EngineProcess) -> int:
    """The process; its exit code."""
    return child.run(EngineLaunch, lambda launch, context: kind(launch, context).run())


if __name__ == "__main__":
    child.leave(main())
