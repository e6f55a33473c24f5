"""One replica of a simulated fleet: a queue, a prefix cache, KV memory, and the time that prompts and answers take."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from llmcore.fleet.hits import CHUNK


@dataclass(frozen=True)
class Machine:
    """Rates and sizes of a replica. The defaults are about those of a model of 30 billion parameters on an H100."""

    speed: float = 1.0
    """Divides all times."""
    prefill_rate: float = 8_000.0
    """Tokens of prompts per second."""
    step: float = 0.02
    """Seconds of a step with one row that decodes."""
    step_row: float = 0.0001
    """Seconds that another row adds to a step."""
    step_kv: float = 1e-7
    """Seconds that a token in KV adds to a step."""
    step_tokens: int = 2_048
    """Tokens of a prompt in one step."""
    rows: int = 128
    """Requests that run at once."""
    kv: int = 150_000
    """Tokens that KV holds, of running requests and of cached prefixes."""

    def decode(self, rows: int, live: int) -> float:
        """Seconds of a step of `rows` requests with `live` tokens in KV."""
        return (self.step + self.step_row * rows + self.step_kv * live) / self.speed

    def prefill(self, tokens: int, rows: int = 0, live: int = 0) -> float:
        """Seconds until the first token of a prompt of which `tokens` tokens are not cached. Its steps also decode."""
        steps = -(-max(tokens, 1) // self.step_tokens)
        return tokens / self.prefill_rate / self.speed + steps * self.decode(rows, live)


class Work(Protocol):
    """A request, as a replica sees it."""

    @property
    def prompt(self) -> int:
        """Tokens of its prompt."""

    @property
    def answer(self) -> int:
        """Tokens of its answer."""

    def chunks(self, tokens: int) -> list[int]:
        """The chunks of its first tokens."""


@dataclass(slots=True)
class Running:
    """A request that has left the queue. `live`: tokens in KV that it uses beside the cached ones."""

    number: int
    work: Work
    hit: int
    live: int


class Replica:
    """Prompts are computed in their order, short ones together. A request waits while its prompt and answer have no
    room in KV.

    An answer keeps the pace that the batch had at its first token.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.queue: deque[tuple[int, Work]] = deque()
        self.waiting = 0
        """Tokens of prompts that wait. The cached part of each is known when it starts."""
        self.live = 0
        self.running: dict[int, Running] = {}
        self.computing: list[Running] = []
        self._cache: OrderedDict[int, None] = OrderedDict()

    @property
    def requests(self) -> int:
        """Requests that wait or run."""
        return len(self.queue) + len(self.running)

    def cached(self, chunks: Sequence[int]) -> int:
        """Tokens at the beginning of a prompt that the prefix cache has."""
        found = 0
        for chunk in chunks:
            if chunk not in self._cache:
                break
            found += CHUNK
        return found

    def add(self, number: int, work: Work) -> None:
        """A request arrives."""
        self.queue.append((number, work))
        self.waiting += work.prompt - min(self.cached(work.chunks(work.prompt)), work.prompt - 1)

    def start(self) -> float | None:
        """Takes the next prompts into `computing`, as many as fit into a step. Returns the seconds until their first
        tokens, or None if none can start now."""
        if self.computing:
            return None
        rows, live, tokens = len(self.running), self.live, 0
        while self.queue and len(self.running) < self.machine.rows:
            number, work = self.queue[0]
            chunks = work.chunks(work.prompt)
            hit = min(self.cached(chunks), work.prompt - 1)
            needed = work.prompt - hit + work.answer
            if self.running and self.live + needed > self.machine.kv:
                break
            if self.computing and tokens + work.prompt - hit > self.machine.step_tokens:
                break
            self.queue.popleft()
            self.running[number] = Running(number, work, hit, needed)
            self.computing.append(self.running[number])
            self.live += needed
            tokens += work.prompt - hit
            self._keep(chunks)
        return self.machine.prefill(tokens, rows, live) if self.computing else None

    def computed(self) -> list[tuple[Running, float]]:
        """The prompts are computed. Returns them with the seconds until each one's answer is complete."""
        done, self.computing = self.computing, []
        computed = sum(running.work.prompt - running.hit for running in done)
        self.waiting = max(0, self.waiting - computed) if self.queue else 0
        pace = self.machine.decode(len(self.running), self.live)
        return [(running, running.work.answer * pace) for running in done]

    def finish(self, number: int) -> None:
        """An answer is complete. Its KV stays cached while there is room."""
        done = self.running.pop(number)
        self.live -= done.live
        self._keep(done.work.chunks(done.work.prompt + done.work.answer))

    def _keep(self, chunks: Sequence[int]) -> None:
        cache = self._cache
        for chunk in reversed(chunks):
            cache[chunk] = None
            cache.move_to_end(chunk)
        room = max(0, self.machine.kv - self.live) // CHUNK
        while len(cache) > room:
            cache.popitem(last=False)
