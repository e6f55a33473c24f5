"""An engine as its supervisor sees it."""

from __future__ import annotations

import time

import zmq
from llmcore.api.bridge import Load, ModelFacts

from llmcore_server.messages import (
    SUPERVISOR,
    Beat,
    EngineLaunch,
    Probe,
    RankLaunch,
    Shutdown,
    Snapshot,
    ToEngine,
    WorkerGone,
)
from llmcore_server.settings import Server
from llmcore_server.supervisor.child import Child, Spawner
from llmcore_server.supervisor.group import Group, Grouping
from llmcore_server.supervisor.restart import BackOff, Starts
from llmcore_server.supervisor.watchdog import Watchdog


class Engine:
    """One engine of a server: a list of ranks, which is empty while the engine does not run.

    Rank 0 has the scheduler and the mailbox, at `mailbox`. The end of any rank is the end of the engine.
    `facts`: None until the engine is ready. `load`: its newest snapshot. `stepped`: time.monotonic() when its newest
    finished step was heard of, 0.0 before the first. `end`: why the rest of a group was ended. `known`: workers know
    how to reach it. `due`: when it may be started, as time.monotonic(); None if it is not replaced.
    """

    def __init__(
        self, index: int, module: str, spawner: Spawner, report_seconds: float, grouping: Grouping | None = None
    ) -> None:
        self.name = f"engine-{index}"
        self.mailbox = spawner.directory.address(self.name)
        self.ranks: list[Child] = []
        self.facts: ModelFacts | None = None
        self.load = Load()
        self.stepped = 0.0
        self.end = ""
        self.known = True
        self.due: float | None = 0.0
        self.index = index
        server, alone = spawner.config.section(Server), spawner.config.model.dp == 1
        self.title = "the engine" if alone else self.name
        self.backoff = BackOff(server.restart_pause, server.restart_limit)
        self._module = module
        self._grouping = grouping or Grouping()
        self._group: Group | None = None
        self._spawner = spawner
        self._report_seconds = report_seconds
        self._starts = Starts(self.title)
        self._watchdog = self._watch()

    def spawn(self) -> list[Child]:
        """Start its ranks, if it is time. Returns them, or none if they cannot be started now."""
        ranks = self._starts.start(self._spawn_ranks)
        if ranks is not None:
            self.ranks, self.end = ranks, ""
            self._watchdog = self._watch()
            if len(ranks) > 1:
                self._group = Group(self.name, ranks, self._grouping.patience, self._spawner.clock.now)
        return self.ranks

    @property
    def alive(self) -> bool:
        """True while all its ranks run."""
        return bool(self.ranks) and self.dead is None

    @property
    def dead(self) -> Child | None:
        """A rank that has ended."""
        return next((rank for rank in self.ranks if not rank.alive), None)

    @property
    def serves(self) -> bool:
        """True while requests can be sent to it."""
        return self.facts is not None and self.alive

    @property
    def hung(self) -> str:
        """The reason to kill it, or ""."""
        if not self.alive:
            return ""
        why = self._watchdog.hung(self._spawner.clock.now)
        if self._group is None:
            return why
        if why:
            return f"{why}: a kernel or a collective hangs; {self._group.states}"
        return self._group.hung(self._spawner.clock.now)

    @property
    def broken(self) -> Child | None:
        """The rank of a group of several that failed first.

        A rank that waits for one that has ended fails too, with words about a lost connection. One that ended without
        words did not wait.
        """
        if self._group is None:
            return None
        return min((rank for rank in self.ranks if rank.failed), key=lambda rank: rank.spoke, default=None)

    def place(self, rank: Child) -> str:
        """A rank of a group of several, for people, with what it did when it was last heard."""
        assert self._group is not None
        number = self.ranks.index(rank)
        return f"{self._group.place(number)}: {self._group.doing(number)}"

    def loaded_more(self) -> None:
        """Take note that loading made progress."""
        self._watchdog.loaded_more(self._spawner.clock.now)

    def ready(self, facts: ModelFacts) -> None:
        """Take note that it serves."""
        self.facts = facts
        self._watchdog.ready(self._spawner.clock.now)
        if self._group is not None:
            self._group.ready(self._spawner.clock.now)

    def beat(self, beat: Beat) -> None:
        """Take note of what a rank does."""
        if self._group is not None:
            self._group.heard(beat.pid, beat, self._spawner.clock.now)

    def heard(self, snapshot: Snapshot) -> None:
        """Take note of its report."""
        if snapshot.load.steps > self.load.steps:
            self.stepped = time.monotonic()
        self.load = snapshot.load
        self._watchdog.heard(snapshot, self._spawner.clock.now)

    def tell(self, body: WorkerGone | Probe | Shutdown) -> None:
        """Send it a message."""
        for rank in self.ranks[:1]:
            rank.tell(ToEngine(SUPERVISOR, body))

    def retire(self) -> None:
        """It has ended, and is not replaced."""
        self.facts, self.load = None, Load()

    def forget(self) -> None:
        """End the ranks that still run, and make room for new ones."""
        for rank in self.ranks:
            rank.kill()
            rank.close()
        self.ranks, self.facts, self.load, self.stepped, self._group = [], None, Load(), 0.0, None

    def _spawn_ranks(self) -> list[Child]:
        """Start all its ranks, or none. Raises OSError and ZMQError."""
        spawner, grouping = self._spawner, self._grouping
        count = spawner.config.model.ranks
        names, device = [f"{self.name}.{rank}" for rank in range(1, count)], self.index * count
        links = [spawner.directory.address(name) for name in names]
        answers = spawner.directory.address(f"{self.name}.answers") if links else ""
        store = spawner.directory.path / f"{self.name}.store"
        store.unlink(missing_ok=True)  # of ranks that have ended
        ranks: list[Child] = []
        try:
            ranks.append(
                spawner.spawn(
                    self._module,
                    EngineLaunch,
                    self.name,
                    mailbox=self.mailbox,
                    report_seconds=self._report_seconds,
                    device=device,
                    store=str(store),
                    mailboxes=tuple(links),
                    answers=answers,
                    beat_seconds=grouping.patience.beat,
                )
            )
            for rank, (name, link) in enumerate(zip(names, links, strict=True), 1):
                ranks.append(
                    spawner.spawn(
                        grouping.module,
                        RankLaunch,
                        name,
                        rank=rank,
                        device=device + rank,
                        store=str(store),
                        link=link,
                        answers=answers,
                        beat_seconds=grouping.patience.beat,
                    )
                )
        except (OSError, zmq.ZMQError):
            for child in ranks:
                child.kill()
                child.close()
            raise
        return ranks

    def _watch(self) -> Watchdog:
        timeout = self._spawner.config.section(Server).watchdog_timeout
        return Watchdog(timeout, self._spawner.clock.now, self.title)
