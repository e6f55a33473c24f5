"""The link between the ranks of a group: a mailbox of each, with sockets in the server's run directory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import zmq
from llmcore.api.engine import Answer, Broke, FromRank, Led, RankLost, RankReady, ToRank, join
from llmcore.registry.registry import Registry

from llmcore_server.engine.beats import Beats, device_name
from llmcore_server.messages import EngineLaunch, Mailbox, Outlet

_LOOK_SECONDS = 0.25
"""The longest wait between two looks for a signal. The supervisor ends a rank that waits for a dead one."""


class RankLink:
    """Rank 0's Link to the ranks whose mailboxes are `mailboxes`; their answers come to `answers`. For one thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], mailboxes: Sequence[str], answers: str) -> None:
        self._outlets = [Outlet(context, mailbox) for mailbox in mailboxes]
        self._inbox: Mailbox[FromRank] = Mailbox(context, answers, FromRank)
        self._heard: list[deque[RankReady | Answer]] = [deque() for _ in mailboxes]

    def send(self, message: ToRank) -> None:
        """Send it to every other rank, without waiting. Raises RankLost for a rank that reads nothing."""
        for rank, outlet in enumerate(self._outlets, 1):
            if not outlet.send(message):
                raise RankLost(f"rank {rank} does not read its messages; restart the server")

    def gather(self) -> list[RankReady | Answer]:
        """Wait for the next message of every other rank. Raises RankLost for a rank that broke."""
        while not all(self._heard):
            self._inbox.wait(_LOOK_SECONDS)
            for message in self._inbox.drain():
                if isinstance(message, Broke):
                    raise RankLost(f"rank {message.rank} failed: {message.text}")
                self._heard[message.rank - 1].append(message)
        return [messages.popleft() for messages in self._heard]

    def close(self) -> None:
        """Close all sockets; what was sent has a moment to leave."""
        for outlet in self._outlets:
            outlet.close()
        self._inbox.close()


class RankUplink:
    """Another rank's Uplink: its own mailbox, and that of rank 0 for answers. For one thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], mailbox: str, answers: str) -> None:
        self._inbox: Mailbox[ToRank] = Mailbox(context, mailbox, ToRank)
        self._outlet = Outlet(context, answers)
        self._unread: deque[ToRank] = deque()

    def receive(self) -> ToRank:
        """Wait for the next message. Raises RankLost for one that is not valid: a step would be missing."""
        while not self._unread:
            self._inbox.wait(_LOOK_SECONDS)
            self._unread.extend(self._inbox.drain())
            if self._inbox.dropped:
                raise RankLost("a message of rank 0 could not be read; install the same llmcore for every rank")
        return self._unread.popleft()

    def send(self, message: FromRank) -> None:
        """Send it, without waiting."""
        self._outlet.send(message)

    def close(self) -> None:
        """Close both sockets."""
        self._outlet.close()
        self._inbox.close()


@contextmanager
def led(launch: EngineLaunch, registry: Registry, context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Led | None]:
    """The other ranks of rank 0's group, which end in good order with the block; None if it has none."""
    if launch.config.model.ranks == 1:
        yield None
        return
    device = device_name(registry, launch.config.model.device, launch.device)
    beats = Beats(context, launch.name, launch.control, launch.beat_seconds, device)
    link = RankLink(context, launch.mailboxes, launch.answers)
    ranks = Led(link, beats, join(launch.store, 0, launch.config.model.ranks))
    yield ranks
    ranks.end()
    link.close()
    beats.close()
