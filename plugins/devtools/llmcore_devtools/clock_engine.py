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
from pathlib import Path

import zmq
from llmcore.api.bridge import Abort, Finish, FinishChoice, ModelFacts, StepEvents, Submit
from llmcore_server.messages import (
    EngineLaunch,
    Hello,
    ToEngine,
)

from llmcore_devtools.fake_engine import EngineWithoutModel, main

TICK_SECONDS = 250e-6

FACTS = ModelFacts(
    architecture="Clock",
    vocab_size=1 << 18,
    max_input_len=8000,
    max_total_len=8192,
    kv_tokens=10_000_000,
    max_running=10_000,
)


class ClockEngine(EngineWithoutModel):
    """The engine whose tokens tell the time. `left`: per worker, the tokens that each of its requests still gets."""

    facts = FACTS

    def __init__(self, launch: EngineLaunch, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        super().__init__(launch, context)
        self.ids = array("i", Path(self.options["clock_ids"]).read_bytes()).tolist()
        self.period = 1 / self.options.get("clock_rate", 30)
        self.left: dict[int, dict[int, int]] = {}
        self.turn = time.monotonic()

    def patience(self) -> float:
        """Until the next message is due."""
        return max(0.0, self.turn - time.monotonic())

    def handle(self, message: ToEngine) -> None:
        """Handle one message of a worker or of the supervisor."""
        owner, body = message.sender, message.body
        match body:
            case Submit():
                self.left[owner][body.id] = body.max_new_tokens
            case Abort() | FinishChoice():
                self.aborts += self.left[owner].pop(body.id, None) is not None
            case Hello():
                self.left[owner] = {}
        super().handle(message)

    def forget(self, worker: int) -> None:
        """End the requests of a worker that died."""
        self.left.pop(worker, None)

    def held(self) -> tuple[int, int]:
        """The number of running requests, and the slots that they hold: one each."""
        running = sum(map(len, self.left.values()))
        return running, running

    def advance(self) -> None:
        """Send one token for every request, if it is time."""
        now = time.monotonic()
        if now < self.turn:
            return
        self.turn = max(self.turn + self.period, now)
        self.steps += 1
        for worker, left in self.left.items():
            if not left:
                continue
            requests = list(left)
            finish = [Finish.LENGTH if count <= 1 else Finish.RUNNING for count in left.values()]
            self.left[worker] = {request: count - 1 for request, count in left.items() if count > 1}
            self.output_tokens += len(requests)
            stamp = time.monotonic()
            token = self.ids[int(stamp / TICK_SECONDS) % len(self.ids)]
            self.workers[worker].send(
                StepEvents(
                    stamp=stamp,
                    request=requests,
                    choice=[0] * len(requests),
                    count=[1] * len(requests),
                    tokens=[token] * len(requests),
                    finish=[int(why) for why in finish],
                )
            )


if __name__ == "__main__":
    sys.exit(main(ClockEngine))
