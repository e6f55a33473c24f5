"""The HTTP workers of one server: always as many as were asked for, each with a number of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import time

import msgspec
from llmcore.api.bridge import ModelFacts
from llmcore.config import Config

from llmcore_server.messages import Shutdown, WorkerLaunch, encode
from llmcore_server.settings import Server
from llmcore_server.supervisor.child import Child, Spawner
from llmcore_server.supervisor.restart import Kind, Running

WORKER_MODULE = "llmcore_server.http.worker"

RETIRED_SECONDS = 5.0
"""The most seconds that a worker may take to end after it was told to."""

_NAME = "worker-"


class Workers(Kind):
    """The workers on one listening socket. A number is never used twice, so a dead worker's requests stay its own.

    `engines`: the endpoints of the engines' mailboxes.
    """

    def __init__(self, spawner: Spawner, listener: socket.socket, engines: tuple[str, ...]) -> None:
        super().__init__("a worker", spawner)
        self._listener = listener
        self._engines = engines
        self._config = spawner.config
        self._tokenizer_dir: str | None = None
        self._facts: ModelFacts | None = None
        self._pipes: list[int] = []
        """The ends, for facts, of pipes to workers that wait for them."""
        self._retired: list[Running] = []
        self._next = 0

    @property
    def _wanted(self) -> int:
        return 0 if self._tokenizer_dir is None else self._config.section(Server).httpserver_workers

    def _spawn(self) -> Child:
        number, self._next = self._next, self._next + 1
        name, fd = f"{_NAME}{number}", self._listener.fileno()
        reader, writer = os.pipe()
        try:
            worker = self._spawner.spawn(
                WORKER_MODULE,
                WorkerLaunch,
                name,
                (fd, reader),
                mailbox=self._spawner.directory.address(name),
                thread_caches=False,
                config=self._config,
                worker=number,
                engines=self._engines,
                listen_fd=fd,
                facts_fd=reader,
                tokenizer_dir=self._tokenizer_dir,
            )
        except BaseException:
            os.close(writer)
            raise
        finally:
            os.close(reader)
        self._pipes.append(writer)
        self._tell_facts()
        return worker

    def prepare(self, config: Config, tokenizer_dir: str) -> None:
        """Set what workers are started with. `spawn_missing` starts them; they load the tokenizer and wait."""
        self._config, self._tokenizer_dir = config, tokenizer_dir

    def know(self, facts: ModelFacts) -> None:
        """The model is known: let the workers serve it."""
        self._facts = facts
        self._tell_facts()
        for worker in self._running:
            worker.silence.begin(self._spawner.clock.now)

    def _tell_facts(self) -> None:
        """Write the facts to all workers that wait for them. A pipe has room for them."""
        if self._facts is None:
            return
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # it has died, and is replaced
                os.write(pipe, encode(self._facts))
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in self._pipes:
            os.close(pipe)
        self._pipes = []

    def hung(self) -> list[tuple[Child, str]]:
        """See Kind. Workers that wait for the model are silent."""
        return [] if self._facts is None else super().hung()

    def close(self) -> None:
        """See Kind."""
        super().close()
        self._close_pipes()

    def renew(self, facts: ModelFacts) -> None:
        """End every worker, to be replaced by one that knows these facts. Connections wait meanwhile."""
        if self._facts is None:
            return
        self._facts = msgspec.structs.replace(facts, report=self._facts.report)
        self.tell(Shutdown())
        for worker in self._running:
            worker.born = time.monotonic()
        self._retired += self._running
        self._running = []

    def reap(self) -> list[Child]:
        """The workers of `renew` that have ended, or had to be killed because they took too long."""
        overdue = time.monotonic() - RETIRED_SECONDS
        ended = [worker for worker in self._retired if not worker.child.alive or worker.born < overdue]
        for worker in ended:
            worker.child.kill()
            self._retired.remove(worker)
            worker.child.close()
        return [worker.child for worker in ended]

    def all_ready(self) -> bool:
        """True if as many workers as were asked for accept connections."""
        return sum(worker.serves for worker in self._running) == self._config.section(Server).httpserver_workers

    @property
    def absence(self) -> str:
        """The reason why connections are not accepted, or ""."""
        serving = any(worker.serves and worker.child.alive for worker in self._running)
        return "" if serving else "no HTTP worker serves"

    @property
    def hopeless(self) -> bool:
        """True if connections are not accepted, and another worker would not accept them either."""
        return super().hopeless and bool(self.absence)

    def children(self) -> list[Child]:
        """Their processes."""
        return [worker.child for worker in (*self._running, *self._retired)]

    def starting(self) -> list[Child]:
        """The processes that do not read their mailbox yet."""
        return [worker.child for worker in self._running if not worker.serves]

    def tell(self, message: object, but: str = "") -> None:
        """Send every worker a message, but not the one of this name; one that does not read its mailbox misses it."""
        for worker in self._running if self._facts is not None else ():  # else they wait, and would read it late
            if worker.child.name != but:
                worker.child.tell(message)


def number_of(worker: Child) -> int:
    """The number of a worker."""
    return int(worker.name.removeprefix(_NAME))
