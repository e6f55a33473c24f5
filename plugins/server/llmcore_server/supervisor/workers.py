"""The HTTP workers of one server: always as many as were asked for, each with a number of its own."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass

import msgspec
import zmq
from llmcore.api.bridge import ModelFacts
from llmcore.config import Config

from llmcore_server.messages import Addresses, Outlet, Shutdown, WorkerLaunch
from llmcore_server.settings import Server
from llmcore_server.supervisor.child import Child
from llmcore_server.supervisor.restart import Starts
from llmcore_server.supervisor.rundir import RunDirectory
from llmcore_server.supervisor.watchdog import Clock, Silence

WORKER_MODULE = "llmcore_server.http.worker"

RETIRED_SECONDS = 5.0
"""How long a worker that was told to end may take."""


@dataclass
class Worker:
    """One worker process."""

    number: int
    child: Child
    outlet: Outlet
    born: float
    silence: Silence
    ready: bool = False


class Workers:
    """Spawns workers on one listening socket. Numbers are never used twice, so a dead one's requests stay its own."""

    def __init__(
        self,
        config: Config,
        context: zmq.Context[zmq.Socket[bytes]],
        directory: RunDirectory,
        addresses: Addresses,
        listener: socket.socket,
        clock: Clock,
    ) -> None:
        self._config = config
        self._context = context
        self._directory = directory
        self._addresses = addresses
        self._listener = listener
        self._clock = clock
        self._model: tuple[ModelFacts, str] | None = None
        self._workers: list[Worker] = []
        self._retired: list[Worker] = []
        self._next = 0
        self._starts = Starts("a worker")

    def prepare(self, config: Config, facts: ModelFacts, tokenizer_dir: str) -> None:
        """What workers are started with, the model's own settings known: before the first `spawn_missing`."""
        self._config = config
        self._model = (facts, tokenizer_dir)

    def renew(self, facts: ModelFacts) -> None:
        """Every worker ends, to be replaced by one that knows these facts; connections wait meanwhile."""
        if self._model is not None:
            self._model = (msgspec.structs.replace(facts, report=self._model[0].report), self._model[1])
        self.tell(Shutdown())
        for worker in self._workers:
            worker.born = time.monotonic()
        self._retired += self._workers
        self._workers = []

    def reap(self) -> list[Child]:
        """Those of `renew` that have ended, or should have long since."""
        overdue = time.monotonic() - RETIRED_SECONDS
        ended = [worker for worker in self._retired if not worker.child.alive or worker.born < overdue]
        for worker in ended:
            worker.child.kill()
            self._retired.remove(worker)
            worker.outlet.close(0.0)
            worker.child.close()
        return [worker.child for worker in ended]

    def spawn_missing(self) -> Child | None:
        """Start one worker if fewer run than were asked for; None when all are there, or the pause is not over."""
        model = self._model
        if model is None or len(self._workers) >= self._config.section(Server).httpserver_workers:
            return None
        return self._starts.start(lambda: self._spawn(*model))

    def ready(self, name: str) -> None:
        """The worker called `name` accepts connections."""
        for worker in self._called(name):
            worker.ready = True
        self.heard(name)

    def heard(self, name: str) -> None:
        """The worker called `name` lives."""
        for worker in self._called(name):
            worker.silence.heard(self._clock.now)

    def hung(self) -> list[tuple[Child, str]]:
        """Those that run and hang, and what they did."""
        found = [(worker.child, worker.silence.hung(self._clock.now)) for worker in self._workers]
        return [(child, why) for child, why in found if why and child.alive]

    def all_ready(self) -> bool:
        """Whether as many workers as were asked for accept connections."""
        return sum(worker.ready for worker in self._workers) == self._config.section(Server).httpserver_workers

    @property
    def absence(self) -> str:
        """Why nobody accepts connections, if so."""
        return "" if any(worker.ready and worker.child.alive for worker in self._workers) else "no HTTP worker serves"

    @property
    def hopeless(self) -> bool:
        """Whether nobody accepts connections, and another worker would not either."""
        return self._starts.hopeless and bool(self.absence)

    def ended(self) -> list[Worker]:
        """Workers that have died and are not forgotten yet."""
        return [worker for worker in self._workers if not worker.child.alive]

    def forget(self, worker: Worker) -> None:
        """Make room for its replacement."""
        self._workers.remove(worker)
        worker.outlet.close(0.0)
        worker.child.close()
        self._starts.died(worker.born, worker.ready, time.monotonic())

    def children(self) -> list[Child]:
        """Their processes."""
        return [worker.child for worker in (*self._workers, *self._retired)]

    def starting(self) -> list[Child]:
        """The processes that do not read their mailbox yet."""
        return [worker.child for worker in self._workers if not worker.ready]

    def tell(self, message: object) -> None:
        """Send every worker a message; one that does not read its mailbox misses it."""
        for worker in self._workers:
            worker.outlet.send(message)

    def close(self) -> None:
        """Close what is open to them; they must have ended."""
        for worker in (*self._workers, *self._retired):
            worker.outlet.close(0.0)
            worker.child.close()

    def _spawn(self, facts: ModelFacts, tokenizer_dir: str) -> Child:
        number, self._next = self._next, self._next + 1
        name = f"worker-{number}"
        launch = WorkerLaunch(
            name=name,
            parent=os.getpid(),
            log=str(self._directory.log(name)),
            addresses=self._addresses,
            config=self._config,
            worker=number,
            mailbox=self._directory.address(name),
            listen_fd=self._listener.fileno(),
            tokenizer_dir=tokenizer_dir,
            facts=facts,
        )
        outlet = Outlet(self._context, launch.mailbox, most=100)
        try:
            child = Child(WORKER_MODULE, launch, (self._listener.fileno(),), thread_caches=False)
        except OSError:
            outlet.close(0.0)
            raise
        silence = Silence(self._config.section(Server).watchdog_timeout, self._clock.now)
        self._workers.append(Worker(number, child, outlet, time.monotonic(), silence))
        return child

    def _called(self, name: str) -> list[Worker]:
        return [worker for worker in self._workers if worker.child.name == name]
