"""`python -m llmcore_devtools.clock_engine FD`: an engine whose tokens tell the time. It loads servers steadily.

At fixed intervals it sends each worker one message, with one token for each of the worker's requests. The token
encodes the time. A benchmark can then measure the time from the engine to the client, through the real detokenizer,
stop check and JSON. Options in `config.plugin_options`:

- ``clock_ids``: a file of little-endian int32 ids. The i-th id means the CLOCK_MONOTONIC time i * TICK_SECONDS. After
  the last id, the first one follows. The ids should be words, so that the text of several can be split again.
- ``clock_rate``: messages per second (30). Below 1, streams are open and idle.
"""

from __future__ import annotations

import sys
import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from llmcore.api.bridge import Abort, Finish, FinishChoice, Load, ModelFacts, StepEvents, Submit
from llmcore_server import child
from llmcore_server.messages import (
    EngineLaunch,
    EngineReady,
    Hello,
    Mailbox,
    Outlet,
    Progress,
    Shutdown,
    Snapshot,
    ToEngine,
    ToSupervisor,
    WorkerGone,
)

TICK_SECONDS = 250e-6

KV_TOKENS = 10_000_000

FACTS = ModelFacts(
    architecture="Clock",
    vocab_size=1 << 18,
    max_input_len=8000,
    max_total_len=8192,
    kv_tokens=KV_TOKENS,
    max_running=10_000,
)


@dataclass
class _Owner:
    """A worker: the outlet for its events, and the number of tokens that each of its requests still gets."""

    outlet: Outlet
    left: dict[int, int] = field(default_factory=dict)


class ClockEngine:
    """One engine process."""

    def __init__(self, launch: EngineLaunch, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        options = launch.config.plugin_options
        self._launch = launch
        self._context = context
        self._ids = array("i", Path(options["clock_ids"]).read_bytes()).tolist()
        self._period = 1 / options.get("clock_rate", 30)
        self._workers: dict[int, _Owner] = {}
        self._steps = self._tokens = self._aborts = 0
        self._stopping = False

    def run(self) -> None:
        """Serve until told to stop."""
        control = Outlet(self._context, self._launch.control)
        inbox: Mailbox[ToEngine] = Mailbox(self._context, self._launch.mailbox, ToEngine)
        control.send(ToSupervisor(self._launch.name, Progress("weights", 1, 1)))
        control.send(ToSupervisor(self._launch.name, EngineReady(FACTS)))
        told, turn = 0.0, time.monotonic()
        while not self._stopping:
            inbox.wait(max(0.0, min(turn - time.monotonic(), self._launch.report_seconds)))
            for message in inbox.drain():
                self._handle(message)
            now = time.monotonic()
            if now >= turn:
                turn = max(turn + self._period, now)
                self._turn()
            if now >= told:
                told = now + self._launch.report_seconds
                control.send(ToSupervisor(self._launch.name, Snapshot(self._load())))
        inbox.close()
        for outlet in (control, *(worker.outlet for worker in self._workers.values())):
            outlet.close()

    def _handle(self, message: ToEngine) -> None:
        owner, body = message.sender, message.body
        match body:
            case Submit():
                self._workers[owner].left[body.id] = body.max_new_tokens
            case Abort() | FinishChoice():
                self._aborts += self._workers[owner].left.pop(body.id, None) is not None
            case Hello():
                self._workers[owner] = _Owner(Outlet(self._context, body.mailbox))
            case WorkerGone():
                self._workers.pop(body.worker).outlet.close(0.0)
            case Shutdown():
                self._stopping = True

    def _turn(self) -> None:
        """Send one token for every request."""
        self._steps += 1
        for worker in self._workers.values():
            left = worker.left
            if not left:
                continue
            requests = list(left)
            finish = [Finish.LENGTH if count <= 1 else Finish.RUNNING for count in left.values()]
            worker.left = {request: count - 1 for request, count in left.items() if count > 1}
            self._tokens += len(requests)
            ones = [1] * len(requests)
            stamp = time.monotonic()
            token = self._ids[int(stamp / TICK_SECONDS) % len(self._ids)]
            worker.outlet.send(
                StepEvents(
                    stamp=stamp,
                    request=requests,
                    choice=[0] * len(requests),
                    count=ones,
                    tokens=[token] * len(requests),
                    finish=[int(why) for why in finish],
                )
            )

    def _load(self) -> Load:
        running = sum(len(worker.left) for worker in self._workers.values())
        return Load(
            running=running,
            kv_live=running,
            kv_free=KV_TOKENS - running,
            kv_total=KV_TOKENS,
            steps=self._steps,
            output_tokens=self._tokens,
            aborts=self._aborts,
            taken=time.time(),
        )


def main() -> int:
    """The process; its exit code."""
    launch = child.begin(EngineLaunch)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        ClockEngine(launch, context).run()
    except Exception as error:  # noqa: BLE001 - reported to the supervisor, as the real engine does
        child.report_failure(launch, error)
        return 1
    context.term()
    return 0


if __name__ == "__main__":
    sys.exit(main())
