"""A running test server, a neighbour that must not notice what others do to it, and what must hold after every test.

I0, the invariant: nothing runs, waits or holds KV; threads, descriptors, shared memory and temporary files of the
server's processes are back where they were; it is ready; its log has nobody's prompt and no key; and the next
canonical request gets the same bytes as ever.
"""

from __future__ import annotations

import json
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmcore_devtools import fake_answer, sockets
from llmcore_devtools.server import RunningServer

KEY = "sk-harness-7f3a"
"""The key that tests use where a server wants one; it must never be in a log."""

SECRET = "marrow of the prompt"
"""Stands in the canonical request's prompt, and in whatever else a test calls secret; it must never be in a log."""

CANONICAL = {"inputs": f"canonical {SECRET}", "parameters": {"max_new_tokens": 7, "return_details": True}}

STEP_SECONDS = 0.002
"""Length of a step of the harness's servers."""

GAP_SECONDS = 0.2
"""The neighbour's p99 between two events, on an idle machine."""

SLACK = 10.0
"""How many times longer than on an idle machine an answer may take here. `pytest --idle` makes it 1."""

SPARE_THREADS, SPARE_FDS = 3, 3
"""What a process may keep of what its first requests made (pools that fill up, files that stay open)."""

PATIENCE = 60.0
"""Seconds for what takes no time on a machine that does nothing else; nothing that is tested ends with them."""

WORKER = "llmcore_server.http.worker"
"""What `House.processes` calls the HTTP worker."""

Answer = tuple[int, dict[str, str], bytes]


def expected(prompt: Sequence[int], n_tokens: int) -> str:
    """The text that greedy decoding gives after the ids `prompt`, whoever else is there."""
    return "".join(chr(33 + token) for token in fake_answer(prompt, n_tokens))


def allowed(seconds: float) -> float:
    """Returns the seconds that an answer may take here if it may take `seconds` on an idle machine."""
    return SLACK * seconds


def until(condition: Callable[[], object], what: str = "", seconds: float = PATIENCE) -> None:
    """Wait until `condition()` is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"did not happen: {what}"
        time.sleep(0.01)


@dataclass(frozen=True)
class Held:
    """What one process has: threads, descriptors, maps of /dev/shm."""

    threads: int
    fds: int
    shm: int

    @classmethod
    def of(cls, pid: int) -> Held:
        """Raises OSError if it has just ended."""
        proc = Path(f"/proc/{pid}")
        return cls(
            threads=len(list((proc / "task").iterdir())),
            fds=len(list((proc / "fd").iterdir())),
            shm=(proc / "maps").read_text().count("/dev/shm/"),
        )

    def within(self, baseline: Held) -> bool:
        """Whether nothing was kept since `baseline`."""
        return (
            self.threads <= baseline.threads + SPARE_THREADS
            and self.fds <= baseline.fds + SPARE_FDS
            and self.shm <= baseline.shm
        )


@dataclass
class House:
    """A server under test. `key`: what its requests bring; `wants`: further settings its tests should know."""

    server: RunningServer
    key: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    first: bytes = b""
    baseline: dict[str, Held] = field(default_factory=dict)
    files: int = 0
    unlogged: list[str] = field(default_factory=lambda: [SECRET, KEY])
    """Texts that must not be in the log; a test may add its own."""

    @property
    def port(self) -> int:
        """Where it listens, on 127.0.0.1."""
        return self.server.port

    # --- asking

    def headers(self, more: Mapping[str, str] | None = None) -> str:
        """Header lines: the key's, and `more`."""
        lines = {**({"Authorization": f"Bearer {self.key}"} if self.key else {}), **(more or {})}
        return "".join(f"{name}: {value}\r\n" for name, value in lines.items())

    def request(self, path: str, body: Any, *, headers: Mapping[str, str] | None = None) -> bytes:
        """The bytes of a POST."""
        return sockets.request("POST", path, body, headers=self.headers(headers))

    def post(self, path: str, body: Any, *, headers: Mapping[str, str] | None = None) -> Answer:
        """Status, headers and body of a request on a connection of its own."""
        with sockets.connect(self.port, PATIENCE) as sock:
            sock.sendall(self.request(path, body, headers=headers))
            return sockets.read_reply(sock)

    def get(self, path: str) -> Answer:
        """Status, headers and body."""
        with sockets.connect(self.port) as sock:
            sock.sendall(sockets.request("GET", path, headers=self.headers()))
            return sockets.read_reply(sock)

    def send(self, data: bytes) -> Answer:
        """What the bytes of a request are answered with."""
        with sockets.connect(self.port, PATIENCE) as sock:
            sock.sendall(data)
            return sockets.read_reply(sock)

    def text(self, prompt: Sequence[int], n_tokens: int) -> str:
        """The greedy answer to the ids `prompt`."""
        body = {"prompt": list(prompt), "max_tokens": n_tokens, "temperature": 0}
        status, _, answer = self.post("/v1/completions", body)
        assert status == 200, answer
        return str(json.loads(answer)["choices"][0]["text"])

    def figures(self) -> dict[str, float]:
        """Every figure of /metrics without labels, by its name after `llmcore_`."""
        page = self.get("/metrics")[2].decode()
        return {m[1]: float(m[2]) for m in re.finditer(r"^llmcore_(\w+) (\S+)$", page, re.M)}

    def is_ready(self) -> bool:
        """Whether a worker says so; one that is replaced with its engine may close a connection unheard."""
        try:
            return self.get("/readiness")[0] == 200
        except ConnectionError:
            return False

    # --- I0

    def settle(self) -> None:
        """Note how a server looks that has worked, and works no more: what `check` compares with."""
        for path, body in (
            ("/generate", CANONICAL),
            ("/v1/completions", {"prompt": [1, 2], "max_tokens": 3, "stream": True}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
        ):
            for _ in range(4):
                status, _, answer = self.post(path, body)
                assert status == 200, answer
        self.is_whole()
        self.baseline = {name: Held.of(pid) for name, pid in self.processes().items()}
        self.files = self.count_files()

    def check(self, *, processes: bool = True) -> None:
        """I0. `processes` False leaves out what new processes cannot be compared in."""
        until(self.is_ready, "ready again")
        self.is_whole()
        if processes:
            self.has_no_more()
        self.log_is_clean()

    def canonical(self) -> None:
        """The canonical request gets the same bytes as ever."""
        status, _, answer = self.post("/generate", CANONICAL)
        self.first = self.first or answer
        assert (status, answer) == (200, self.first)

    def is_whole(self, seconds: float = PATIENCE) -> None:
        """The canonical request gets its answer, and in figures from after it nothing runs, waits or holds KV."""
        self.canonical()
        answered = time.time()
        deadline = time.monotonic() + seconds
        while True:
            now = self.figures()
            parts = now["kv_live"] + now["kv_cached"] + now["kv_free"]
            assert parts == now["kv_total"], now
            idle = (now["kv_live"], now["batch_current_size"], now["queue_size"]) == (0, 0, 0)
            if idle and now["kv_total"] > 0 and now["engine_figures_timestamp_seconds"] >= answered:
                return
            assert time.monotonic() < deadline, now
            time.sleep(0.02)

    def processes(self) -> dict[str, int]:
        """Process ids of the server's processes, its supervisor included."""
        return {"supervisor": self.server.process.pid, **self.server.children()}

    def has_no_more(self) -> None:
        """Threads, descriptors, shared memory and temporary files are back where they were."""
        deadline = time.monotonic() + PATIENCE
        while True:
            now = {name: Held.of(pid) for name, pid in self.processes().items()}
            files = self.count_files()
            kept = {n: (held, self.baseline.get(n)) for n, held in now.items() if not self._same(n, held)}
            if not kept and len(now) == len(self.baseline) and files <= self.files:
                return
            assert time.monotonic() < deadline, (kept, sorted(now), files, self.files)
            time.sleep(0.02)

    def _same(self, name: str, held: Held) -> bool:
        return name in self.baseline and held.within(self.baseline[name])

    def resident(self) -> int:
        """Bytes of memory that the server's processes have, all together."""
        total = 0
        for pid in self.processes().values():
            text = Path(f"/proc/{pid}/status").read_text()
            total += int(re.search(r"^VmRSS:\s+(\d+) kB", text, re.M)[1]) << 10  # type: ignore[index]
        return total

    def worker_cpu(self) -> float:
        """Seconds of processor time that the first HTTP worker has had; other processes of the machine add little."""
        tasks = Path(f"/proc/{self.processes()[WORKER]}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def count_files(self) -> int:
        """Temporary files of the server, and what lies in its run directory."""
        return sum(1 for _ in self.server.temporary.rglob("*"))

    def log_is_clean(self) -> None:
        """Nobody's prompt and no key is in the log, nor in what crashes left behind."""
        for path in (self.server.log, *self.server.temporary.rglob("*.log")):
            text = path.read_text(errors="replace")
            for secret in self.unlogged:
                assert secret not in text, f"{path} holds {secret!r}"

    # --- the neighbour

    @contextmanager
    def neighbour(self, *, events: int = 100, gap: float | None = None) -> Iterator[Neighbour]:
        """A greedy stream that runs while the block does, and until `events` events have come since it began.

        What came is the answer it would get alone, and 99 of 100 events came within `gap` seconds of the one before,
        allowed(GAP_SECONDS) for None.
        """
        neighbour = Neighbour(self)
        neighbour.start()
        try:
            until(lambda: neighbour.times or neighbour.error, "the neighbour's first event")
            yield neighbour
            start = len(neighbour.times)
            enough = max(events, start + 2)
            until(lambda: len(neighbour.times) >= enough or neighbour.error, "the neighbour goes on")
        finally:
            neighbour.stop()
        neighbour.check(allowed(GAP_SECONDS) if gap is None else gap)


class Neighbour(threading.Thread):
    """Streams one greedy answer after another until it is stopped. `times`: when each event came."""

    PROMPT = (11, 23, 42)
    TOKENS = 1000

    def __init__(self, house: House) -> None:
        super().__init__(name="neighbour", daemon=True)
        self.times: list[float] = []
        self.gaps: list[float] = []
        self.answers: list[str] = []
        self.error: Exception | None = None
        self._house = house
        self._stopping = threading.Event()

    def run(self) -> None:
        """Until `stop`."""
        try:
            while not self._stopping.is_set():
                self._stream()
        except Exception as error:  # noqa: BLE001 - `check` raises it
            self.error = error

    def stop(self) -> None:
        """Leave, and wait for the thread."""
        self._stopping.set()
        self.join(PATIENCE)

    def check(self, gap: float) -> None:
        """Everything that came is what comes to one who is alone, and it came in time."""
        if self.error is not None:
            raise AssertionError(f"the neighbour's stream broke: {self.error}") from self.error
        whole = expected(self.PROMPT, self.TOKENS)
        for text in self.answers:
            assert whole.startswith(text), "the neighbour's answer is not what it would be alone"
        worst = percentile(self.gaps, 0.99)
        assert worst < gap, f"p99 of {len(self.gaps)} gaps is {worst * 1000:.0f} ms"

    def _stream(self) -> None:
        body = {"prompt": list(self.PROMPT), "max_tokens": self.TOKENS, "temperature": 0, "stream": True}
        with sockets.connect(self._house.port) as sock:
            sock.sendall(self._house.request("/v1/completions", body))
            status, _, data = sockets.read_head(sock)
            assert status == 200, data
            self.answers.append("")
            before = 0.0
            while not self._stopping.is_set():
                # Events are single chunks; what is cut in the middle is looked at when the rest is there.
                *events, data = data.split(b"\n\n")
                for event in events:
                    _, found, payload = event.partition(b"data: ")
                    if not found:
                        continue
                    if payload == b"[DONE]":
                        assert self.answers[-1] == expected(self.PROMPT, self.TOKENS)
                        return
                    message = json.loads(payload)
                    assert "error" not in message, message
                    self.answers[-1] += message["choices"][0]["text"]
                    now = time.monotonic()
                    if before:
                        self.gaps.append(now - before)
                    before = now
                    self.times.append(now)
                more = sock.recv(1 << 16)
                assert more, "closed in the middle"
                data += more


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of `values` lie."""
    if len(values) < 2:
        return max(values, default=0.0)
    return statistics.quantiles(values, n=1000, method="inclusive")[round(share * 1000) - 1]
