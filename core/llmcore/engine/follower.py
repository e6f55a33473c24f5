"""Any rank of a group but the first: it does what rank 0 says, in order. It reports no tokens.

A rank packs each plan itself and compares a check of that with rank 0's. It reports a difference before it
enqueues anything, because ranks that enqueue different collectives wait for each other for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import numpy as np

from llmcore.api.errors import reraise_if_stopping, text_of
from llmcore.config import Config
from llmcore.engine.graphs import Action
from llmcore.engine.memory import kv_room
from llmcore.engine.model_runner import Launched, ModelRunner
from llmcore.engine.parts import Parts, load_parts, ready_of, silent, tables_of
from llmcore.engine.profile import take_workspaces
from llmcore.engine.rank_messages import (
    Answer,
    Ask,
    Begin,
    Broke,
    Drawn,
    End,
    Follow,
    Go,
    Limit,
    Make,
    Pulse,
    Question,
    RankLost,
    Uplink,
)
from llmcore.engine.upload import Tables
from llmcore.layers.mesh import Mesh
from llmcore.registry.registry import Registry
from llmcore.sched.plan import decode


class Follower:
    """Rank `rank`, which has the part `mesh` of the model, on device number `device` (None: `rank`).

    `number`: its newest step, 0 before the first. `ready` is called once, when the engine is.
    """

    def __init__(
        self,
        rank: int,
        uplink: Uplink,
        pulse: Pulse,
        mesh: Mesh | None = None,
        device: int | None = None,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        self.number = 0
        self._mesh = mesh or Mesh()
        self._rank = rank
        self._device = rank if device is None else device
        self._uplink = uplink
        self._pulse = pulse
        self._ready = ready
        self._tables: Tables | None = None
        self._runner: ModelRunner | None = None
        self._graphs_before = 0
        self._flying: deque[Launched] = deque()

    def run(self, config: Config, registry: Registry) -> None:
        """Load the model on its device, and follow rank 0 until it ends.

        Raises RankLost where the rank fails; rank 0 hears of that too.
        """
        try:
            self._pulse(0, "loading")
            parts = load_parts(config, registry, silent, self._device, self._mesh)
            self._uplink.send(ready_of(parts, self._rank))
            self._serve(parts)
        except BaseException as error:
            reraise_if_stopping(error)
            where = f"step {self.number}" if self.number else "its start"
            self._uplink.send(Broke(self._rank, self.number, text_of(error)))
            raise RankLost(f"rank {self._rank} failed in {where}: {text_of(error)}") from error

    def _serve(self, parts: Parts) -> None:
        """Do what rank 0 says until it ends in good order. Raises what a step raises, and RankLost."""
        while True:
            self._pulse(self.number, "idle")
            match message := self._uplink.receive():
                case Follow():
                    self._step(parts, message)
                case Drawn():
                    self._place(parts, message)
                case Begin():
                    parts.limits = message.limits
                    self._tables = tables_of(parts)
                    take_workspaces(parts.loaded.model.attention_kernels, parts.limits)
                    self._answer(0)
                case Make():
                    self._make(parts, message)
                case Limit():
                    self._mesh.set_limit(message.seconds)
                    self._ready()
                case Ask():
                    self._answer(self._asked(parts)[message.what](message.value))
                case End():
                    return
                case Go():
                    raise RankLost("rank 0 agreed on a capture that this rank has not made")

    def _step(self, parts: Parts, message: Follow) -> None:
        runner = self._made()
        self.number = message.number
        action = Action(message.action)
        self._pulse(self.number, "capturing" if action == Action.CAPTURE else "launching")
        prepared = runner.prepare(decode(message.plan))
        if prepared.check != message.check:
            raise RankLost(
                f"it packs the step differently from rank 0 (here {prepared.key}); ranks must run the same files of "
                "llmcore and its plugins"
            )
        self._flying.append(runner.enqueue(prepared, action, self._agree))
        if self._flying[-1].logits is None:
            self._catch_up(parts.device.ahead)

    def _place(self, parts: Parts, message: Drawn) -> None:
        """Enter the tokens that rank 0 has drawn."""
        if message.number != self.number or not self._flying or self._flying[-1].logits is None:
            raise RankLost(f"rank 0 sent tokens of step {message.number}, which does not wait for any")
        self._made().place(self._flying[-1], np.frombuffer(message.tokens, "<i4").astype(np.int32), message.late)
        self._catch_up(parts.device.ahead)

    def _catch_up(self, ahead: int) -> None:
        """Wait until at most `ahead` steps are in flight: the next one writes memory that older ones read."""
        while len(self._flying) > ahead:
            self._pulse(self.number, "waiting")
            self._flying.popleft().event.wait()

    def _make(self, parts: Parts, message: Make) -> None:
        self._catch_up(0)
        if self._tables is None:
            raise RankLost("rank 0 asked for a runner before it gave limits")
        self._runner = parts.runner(self._tables, message.kv_tokens, message.graph_bytes)
        self._graphs_before = parts.device.graph_memory if parts.device.graphs else 0
        self._answer(0)

    def _asked(self, parts: Parts) -> Mapping[Question, Callable[[int], int]]:
        """The answer to each question, from its value."""
        device = parts.device

        def room(graphs: int) -> int:
            self._catch_up(0)
            return kv_room(parts.config, device, parts.token_bytes, graphs, parts.left)

        def graph_bytes(_: int) -> int:
            return device.graph_memory - self._graphs_before if device.graphs else 0

        def forget_graphs(_: int) -> int:
            self._catch_up(0)
            self._runner = None  # its graphs go with it
            if device.graphs:
                device.forget_graphs()
            return 0

        return {"kv_room": room, "graph_bytes": graph_bytes, "forget_graphs": forget_graphs}

    def _agree(self, captured: bool) -> bool:
        """True if every rank has captured the step."""
        self._answer(int(captured))
        answer = self._uplink.receive()
        if not isinstance(answer, Go):
            raise RankLost(f"rank 0 sent {type(answer).__name__} instead of a word on the capture")
        return answer.replay

    def _answer(self, value: int) -> None:
        self._uplink.send(Answer(self._rank, value))

    def _made(self) -> ModelRunner:
        if self._runner is None:
            raise RankLost("rank 0 sent a step before it had a runner made")
        return self._runner
