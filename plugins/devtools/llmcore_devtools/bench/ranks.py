"""The other ranks of an engine that a benchmark steps by hand: processes as a server starts them, without a server."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import zmq
from llmcore.api.engine import Led, join
from llmcore.config import Config
from llmcore_server.engine.link import RankLink
from llmcore_server.messages import HEARTBEAT_SECONDS, RankLaunch
from llmcore_server.supervisor.child import Child
from llmcore_server.supervisor.group import RANK_MODULE


@contextmanager
def led(config: Config) -> Iterator[Led | None]:
    """The other ranks that `--tp` asks for; None if it asks for none. Their log files go when the block ends."""
    if config.model.ranks == 1:
        yield None
        return
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with tempfile.TemporaryDirectory() as folder:
        store, answers = f"{folder}/store", f"ipc://{folder}/answers"
        links = [f"ipc://{folder}/rank-{rank}" for rank in range(1, config.model.ranks)]
        children = [
            Child(
                RANK_MODULE,
                RankLaunch(
                    name=f"rank-{rank}",
                    parent=os.getpid(),
                    log=f"{folder}/rank-{rank}.log",
                    control=f"ipc://{folder}/control",  # without a supervisor behind it
                    config=config,
                    rank=rank,
                    device=rank,
                    store=store,
                    link=link,
                    answers=answers,
                    beat_seconds=HEARTBEAT_SECONDS,
                ),
            )
            for rank, link in enumerate(links, 1)
        ]
        try:
            ranks = Led(
                RankLink(context, links, answers), lambda number, doing: None, join(store, 0, config.model.ranks)
            )
            yield ranks
            ranks.end()
        finally:
            for child in children:
                child.wait(10.0)  # it may have something to write
                child.kill()
                child.close()
