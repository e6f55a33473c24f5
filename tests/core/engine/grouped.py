"""A group of ranks in one process: each rank but the first is a thread, and messages are encoded as on a socket."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from queue import Queue
from typing import Any, cast

import msgspec
import torch
from llmcore.config import Config
from llmcore.config.tree import START_SECONDS
from llmcore.engine.build import build_engine
from llmcore.engine.engine import Engine
from llmcore.engine.follower import Follower
from llmcore.engine.leader import Led
from llmcore.engine.model_runner import ModelRunner
from llmcore.engine.rank_messages import Answer, Broke, FromRank, RankLost, RankReady, ToRank
from llmcore.layers.mesh import Mesh
from llmcore.ops.comm import Peers
from llmcore.registry.registry import Registry

TO_RANK: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
FROM_RANK: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)

WAIT = 60.0


class Queues:
    """A rank's two queues: an Uplink."""

    def __init__(self) -> None:
        self.down: Queue[bytes] = Queue()
        self.up: Queue[bytes] = Queue()

    def receive(self) -> ToRank:
        return TO_RANK.decode(self.down.get(timeout=WAIT))

    def send(self, message: FromRank) -> None:
        self.up.put(msgspec.msgpack.encode(message))


class QueueLink:
    """A Link to the ranks behind `queues`. `sent`: what rank 0 has sent."""

    def __init__(self, queues: list[Queues]) -> None:
        self.queues = queues
        self.sent: list[ToRank] = []
        self.change: Callable[[ToRank], ToRank] = lambda message: message

    def send(self, message: ToRank) -> None:
        self.sent.append(message)
        for queue in self.queues:
            queue.down.put(msgspec.msgpack.encode(self.change(message)))

    def gather(self) -> list[RankReady | Answer]:
        found: list[RankReady | Answer] = []
        for queue in self.queues:
            message = FROM_RANK.decode(queue.up.get(timeout=WAIT))
            if isinstance(message, Broke):
                raise RankLost(f"rank {message.rank}: {message.text}")
            found.append(message)
        return found


class ThreadGroup:
    """Ranks 1 to `ranks` - 1, with their own configs by `config_of(rank, config)`. `errors`: what ended them.
    `ready`: the ranks that know that the engine is ready."""

    def __init__(self, ranks: int = 2) -> None:
        self.queues = [Queues() for _ in range(ranks - 1)]
        self.link = QueueLink(self.queues)
        self.peers = [Peers(rank, ranks, cast("Any", None), cast("Any", None), START_SECONDS) for rank in range(ranks)]
        self.led = Led(self.link, partial(self._note, 0), self._mesh(0))
        self.did: list[tuple[int, int, str]] = []
        self.errors: list[BaseException] = []
        self.threads: list[threading.Thread] = []
        self.followers: list[Follower] = []
        self.ready: list[int] = []
        self.engine: Engine | None = None
        self.config_of: Callable[[int, Config], Config] = lambda rank, config: config

    def build(self, config: Config, registry: Registry, progress: Any = None) -> Engine:
        """`build_engine` for the group."""
        for rank, queues in enumerate(self.queues, 1):
            self.followers.append(
                Follower(
                    rank, queues, partial(self._note, rank), self._mesh(rank), ready=partial(self.ready.append, rank)
                )
            )
            args = (self.followers[-1], self.config_of(rank, config), registry)
            thread = threading.Thread(target=self._follow, args=args, daemon=True)
            self.threads.append(thread)
            thread.start()
        self.engine = build_engine(config, registry, progress, self.led)
        return self.engine

    def end(self) -> None:
        """End all ranks in good order; their errors are raised."""
        if self.threads:
            self.led.end()
        self.join()
        if self.errors:
            raise self.errors[0]
        if self.engine is not None and self.engine._runner._untold is None:
            self._compare(self.engine._runner._runner)

    def _compare(self, leads: ModelRunner) -> None:
        """Every rank holds the same state of requests, and the same KV; padding aside."""
        mine = leads._tables
        for follower in self.followers:
            runner = follower._runner
            its = runner._tables
            for one, other in zip(
                (mine.history, mine.lengths, mine.computed, mine.ints.T, mine.floats.T, *mine.granules),
                (its.history, its.lengths, its.computed, its.ints.T, its.floats.T, *its.granules),
                strict=True,
            ):
                assert torch.equal(one[: mine.scratch], other[: mine.scratch])
            for group, same in zip(leads.groups, runner.groups, strict=True):
                for layer, kv in group.kv.items():
                    for one, other in zip(kv, same.kv[layer], strict=True):
                        assert torch.equal(one[: group.padding], other[: group.padding])

    def _mesh(self, rank: int) -> Mesh:
        """Every rank has the whole model, so none calls its peers."""
        return Mesh(peers=dict.fromkeys(("attn_tp", "moe_tp"), self.peers[rank]))

    def join(self) -> None:
        """Wait until all ranks have ended."""
        for thread in self.threads:
            thread.join(WAIT)
            assert not thread.is_alive(), "a rank hangs"

    def _note(self, rank: int, number: int, doing: str) -> None:
        self.did.append((rank, number, doing))

    def _follow(self, follower: Follower, config: Config, registry: Registry) -> None:
        try:
            follower.run(config, registry)
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.errors.append(error)
