"""The ranks of an engine as its supervisor watches them. They compute every step together, so none can go on alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmcore_server.messages import HEARTBEAT_SECONDS, Beat
from llmcore_server.supervisor.child import Child

RANK_MODULE = "llmcore_server.engine.rank"

_UNWATCHED = ("loading", "capturing")
"""A rank that does this may keep all its threads from running for long."""
_STATES = {
    "loading": "loads its model",
    "idle": "waits for a plan",
    "launching": "launches",
    "capturing": "captures",
    "waiting": "waits for the device",
}


@dataclass(frozen=True)
class Patience:
    """The most seconds that a rank may be in a state in which the others cannot go on."""

    beat: float = HEARTBEAT_SECONDS
    """Seconds between two `Beat`s."""
    stopped: float = 1.0
    """Stopped by a signal."""
    silent: float = 5.0
    """Without a Beat, once the engine is ready."""
    launching: float = 10.0
    """Behind in launching a step that another rank has launched, once the engine is ready; ranks compile before."""
    joining: float = 60.0
    """From its start to its first Beat."""


@dataclass(frozen=True)
class Grouping:
    """The ranks of each engine of a server: the module of all but the first, and how long they may be silent."""

    module: str = RANK_MODULE
    patience: Patience = Patience()


class _Rank:
    """One rank. Times are a Clock's. `late`: since when it is behind with `at`, None if it is not."""

    def __init__(self, child: Child, now: float) -> None:
        self.child = child
        self.heard = now
        self.at: Beat | None = None
        self.stopped: float | None = None
        self.late: tuple[Beat, float] | None = None

    @property
    def doing(self) -> str:
        """Its newest Beat, for people."""
        if self.at is None:
            return "has not joined"
        return _STATES.get(self.at.doing, self.at.doing) + (f" in step {self.at.number}" if self.at.number else "")


class Group:
    """The ranks of the engine called `name`, of more than one rank. `now` is a Clock's, here and everywhere."""

    def __init__(self, name: str, ranks: Sequence[Child], patience: Patience, now: float) -> None:
        self._name = name
        self._patience = patience
        self._ready = False
        self._ranks = [_Rank(child, now) for child in ranks]

    def heard(self, pid: int, beat: Beat, now: float) -> None:
        """The rank with this process id has sent a Beat; that of an older group is ignored."""
        for rank in self._ranks:
            if rank.child.pid == pid:
                rank.heard, rank.at = now, beat

    def ready(self, now: float) -> None:
        """The engine serves: from now on silence counts."""
        self._ready = True
        for rank in self._ranks:
            rank.heard = now

    def hung(self, now: float) -> str:
        """The reason to kill the group, or ""."""
        for number, rank in enumerate(self._ranks):
            if why := self._fault(rank, now):
                return f"{self.place(number)} {why}; {self._rest(number)}"
        return ""

    def place(self, number: int) -> str:
        """A rank, for people."""
        rank = self._ranks[number]
        device = f", {rank.at.device}" if rank.at is not None else ""
        return f"rank {number} of {self._name} (pid {rank.child.pid}{device})"

    def doing(self, number: int) -> str:
        """The activity of a rank when it was last heard, and those of the others."""
        return f"it {self._ranks[number].doing}; {self._rest(number)}"

    @property
    def states(self) -> str:
        """The activity of every rank."""
        return self._rest(-1)

    def _rest(self, number: int) -> str:
        """The activities of all ranks but this one."""
        return "; ".join(f"rank {other} {rank.doing}" for other, rank in enumerate(self._ranks) if other != number)

    def _fault(self, rank: _Rank, now: float) -> str:
        limits = self._patience
        rank.stopped = None if not rank.child.stopped else now if rank.stopped is None else rank.stopped
        if rank.stopped is not None and now - rank.stopped >= limits.stopped:
            return f"was stopped by a signal {limits.stopped:g} s ago"
        if rank.at is None:
            return f"has not joined within {limits.joining:g} s" if now - rank.heard > limits.joining else ""
        if self._ready and rank.at.doing not in _UNWATCHED and now - rank.heard > limits.silent:
            return f"was silent for {limits.silent:g} s"
        if not self._ready or not self._behind(rank.at):
            rank.late = None
        elif rank.late is None or rank.late[0] != rank.at:
            rank.late = (rank.at, now)
        elif now - rank.late[1] > limits.launching:
            return f"has not launched a step within {limits.launching:g} s that others have: it {rank.doing}"
        return ""

    def _behind(self, at: Beat) -> bool:
        """True if another rank has launched a step that the rank with this Beat has not."""
        if at.doing not in ("idle", "launching"):
            return False
        launched = at.number - (at.doing == "launching")
        return any(
            other.at is not None and other.at.number - (other.at.doing in ("launching", "capturing")) > launched
            for other in self._ranks
        )
