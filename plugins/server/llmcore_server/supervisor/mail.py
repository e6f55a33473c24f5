"""The mailbox of the supervisor, and the receivers of its messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import zmq
from llmcore.api.bridge import ModelFacts
from llmcore.api.counters import TALLIES

from llmcore_server.messages import (
    Alive,
    Beat,
    EngineGone,
    EngineLoad,
    EngineReady,
    Finished,
    Mailbox,
    Probe,
    Progress,
    Routed,
    Snapshot,
    Tallied,
    ToSupervisor,
    WorkerReady,
)
from llmcore_server.supervisor.processes import Processes
from llmcore_server.supervisor.status import Status

STOPPED = "the engine has stopped"
"""Why a server without an engine is not ready."""


@dataclass(frozen=True)
class Notices:
    """The events that the command line shows.

    `progress(stage, done, total)` while the engine starts; `ready(url, facts)` once, when requests are accepted.
    """

    progress: Callable[[str, int, int], None] = lambda stage, done, total: None
    ready: Callable[[str, ModelFacts], None] = lambda url, facts: None


class Mail:
    """The mailbox at `endpoint`, which `processes.poller` watches too."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        processes: Processes,
        status: Status,
        notices: Notices,
    ) -> None:
        self._processes = processes
        self._status = status
        self._notices = notices
        self._mailbox: Mailbox[ToSupervisor] = Mailbox(context, endpoint, ToSupervisor)
        processes.poller.register(self._mailbox.socket, zmq.POLLIN)

    def read(self) -> None:
        """Handle everything that has come."""
        for message in self._mailbox.drain():
            self._handle(message.sender, message.body)
        TALLIES.set("dropped_messages", "supervisor", total=self._mailbox.dropped)

    def close(self) -> None:
        """Nothing comes any more."""
        self._mailbox.close()

    def _handle(self, sender: str, body: object) -> None:
        processes = self._processes
        match body:
            case Snapshot():
                for engine in processes.called(sender):
                    engine.heard(body)
                    if len(processes.engines) > 1:
                        processes.workers.tell(EngineLoad(engine.index, body.load))
            case Routed():
                processes.workers.tell(body, but=sender)
            case Finished():
                self._status.sinks.request_finished(body.record)
            case EngineReady():
                for engine in processes.called(sender):
                    engine.ready(body.facts)
            case WorkerReady():
                serving = processes.serving()
                for engine in processes.engines:
                    if engine not in serving:  # it began while this one was gone
                        processes.workers.tell(EngineGone(engine.index, STOPPED))
                processes.heard(sender)
                self._status.hurry()
            case Beat():
                for engine in processes.engines:
                    engine.beat(body)
            case Progress():
                for engine in processes.called(sender):
                    engine.loaded_more()
                self._notices.progress(body.stage, body.done, body.total)
            case Alive():
                processes.heard(sender)
            case Tallied():
                self._status.sinks.tallied(sender, body)
            case Probe():
                processes.admin.probe(processes.engines)
