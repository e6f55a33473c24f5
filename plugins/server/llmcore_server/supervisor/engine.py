"""An engine as its supervisor sees it."""

from __future__ import annotations

from llmcore.api.bridge import Load, ModelFacts

from llmcore_server.messages import SUPERVISOR, EngineLaunch, Probe, Shutdown, Snapshot, ToEngine, WorkerGone
from llmcore_server.settings import Server
from llmcore_server.supervisor.child import Child, Spawner
from llmcore_server.supervisor.restart import Starts
from llmcore_server.supervisor.watchdog import Watchdog


class Engine:
    """One engine of a server: a list of ranks, which is empty while the engine does not run. There is one rank today.

    Rank 0 has the scheduler and the mailbox, at `mailbox`. The end of any rank is the end of the engine.
    `facts`: None until the engine is ready. `load`: its newest snapshot.
    """

    def __init__(self, index: int, module: str, spawner: Spawner, report_seconds: float) -> None:
        self.name = f"engine-{index}"
        self.mailbox = spawner.directory.address(self.name)
        self.ranks: list[Child] = []
        self.facts: ModelFacts | None = None
        self.load = Load()
        self._module = module
        self._spawner = spawner
        self._report_seconds = report_seconds
        self._starts = Starts("the engine")
        self._watchdog = self._watch()

    def spawn(self) -> list[Child]:
        """Start its ranks, if it is time. Returns them, or none if they cannot be started now."""
        rank = self._starts.start(
            lambda: self._spawner.spawn(
                self._module, EngineLaunch, self.name, mailbox=self.mailbox, report_seconds=self._report_seconds
            )
        )
        if rank is not None:
            self.ranks = [rank]
            self._watchdog = self._watch()
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
        return self._watchdog.hung(self._spawner.clock.now) if self.alive else ""

    def loaded_more(self) -> None:
        """Take note that loading made progress."""
        self._watchdog.loaded_more(self._spawner.clock.now)

    def ready(self, facts: ModelFacts) -> None:
        """Take note that it serves."""
        self.facts = facts
        self._watchdog.ready(self._spawner.clock.now)

    def heard(self, snapshot: Snapshot) -> None:
        """Take note of its report."""
        self.load = snapshot.load
        self._watchdog.heard(snapshot, self._spawner.clock.now)

    def tell(self, body: WorkerGone | Probe | Shutdown) -> None:
        """Send it a message."""
        for rank in self.ranks[:1]:
            rank.tell(ToEngine(SUPERVISOR, body))

    def forget(self) -> None:
        """End the ranks that still run, and make room for new ones."""
        for rank in self.ranks:
            rank.kill()
            rank.close()
        self.ranks, self.facts, self.load = [], None, Load()

    def _watch(self) -> Watchdog:
        return Watchdog(self._spawner.config.section(Server).watchdog_timeout, self._spawner.clock.now)
