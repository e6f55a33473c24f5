"""A server under mixed load for as long as you like: does anything grow?

    python benchmarks/soak.py [--minutes 10] [--clients 24] [--workers 2]

The server is `llmcore testserver`'s (supervisor, HTTP workers, the engine with the fake model). Its clients ask for
streams and whole answers of every length in two dialects, over kept and fresh connections; ABORTED of them leave in
the middle, SHORT want one token, and some ask for what is refused. The first WARM_REQUESTS per worker fill pools and
caches; `--minutes` begin after them. Every minute and at the end a row per process says how its memory grows (MB per
hour, least squares over all samples after the warm-up, with the standard error), and how many threads and descriptors
it has; a row for the server, its live KV slots and requests while nothing is asked.

Exit code 1 when something grows: memory by more than GROWTH_MB per hour, beyond three standard errors and by more
than RESOLUTION_MB; threads or descriptors beyond what they were after the warm-up; live slots or requests while
nothing is asked; answers that are wrong or missing; a process that was replaced. The last line says which growth this
run was long enough to see: half an hour sees GROWTH_MB per hour.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from llmcore.testing import fake_answer, write_fake_model
from llmcore.testing.server import RunningServer, serving
from llmcore.testing.sockets import call, connect, read_reply, request
from processes import Figures, figures

ABORTED, SHORT, REFUSED = 0.3, 0.2, 0.05
GROWTH_MB = 1.0
RESOLUTION_MB = 0.5
"""An allocator asks for memory in pieces up to this large; less than one is no growth."""

WARM_REQUESTS = 15_000
"""Per worker: by then pools and caches have filled up, in workers and in the engine (benchmarks/README.md)."""

SPARE = 3
"""Threads and descriptors that a process may have beyond what it had after the warm-up."""

SAMPLE_SECONDS = 2.0
PATIENCE = 60.0

VOCABULARY = 94
LONGEST = 600
"""Prompts and answers are up to this long, in tokens, most of them short, so that there are many; together they do not
fit the cache, so that it evicts."""


@dataclass
class Tally:
    """What clients have seen, by kind. For any thread."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str) -> None:
        """One more."""
        with self._lock:
            self.counts[kind] += 1

    def fail(self, what: str) -> None:
        """Something that must not happen; the first few are kept."""
        with self._lock:
            self.counts["errors"] += 1
            if len(self.wrong) < 5:
                self.wrong.append(what)


class Client(threading.Thread):
    """Sends one request after the other until `over`, and rests while `resting` is set."""

    def __init__(self, port: int, seed: int, tally: Tally, over: threading.Event, resting: threading.Event) -> None:
        super().__init__(name=f"client-{seed}")
        self._port = port
        self._rng = random.Random(seed)
        self._tally = tally
        self._over = over
        self._resting = resting

    def run(self) -> None:
        """Until the end."""
        while not self._over.is_set():
            if self._resting.is_set():
                time.sleep(0.05)
                continue
            try:
                self._request()
            except OSError as error:
                self._tally.fail(f"{type(error).__name__}: {error}")
                time.sleep(0.1)

    def _request(self) -> None:
        rng = self._rng
        if rng.random() < REFUSED:
            status, _, answer = call(self._port, "POST", "/generate", {"inputs": [1], "parameters": {"top_p": 7}})
            self._check(status == 400, "refused", f"{status} {answer[:200]!r} for a bad top_p")
            return
        prompt = [rng.randrange(VOCABULARY) for _ in range(_length(rng))]
        wanted = 1 if rng.random() < SHORT else 1 + _length(rng)
        asked = rng.choice((self._openai, self._lightllm))(prompt, wanted)
        with connect(self._port, PATIENCE) as sock:
            for _ in range(rng.choice((1, 1, 3))):
                sock.sendall(asked)
                if rng.random() < ABORTED:
                    if rng.random() < 0.7:
                        sock.recv(4096)
                    time.sleep(rng.random() * 0.2)
                    self._tally.add("aborted")
                    return
                status, headers, answer = read_reply(sock)
                text = "".join(chr(33 + token) for token in fake_answer(prompt, wanted))
                self._check(status == 200 and text == _text(answer), "answered", f"{status} {answer[:200]!r}")
                if headers.get("connection") == "close" or self._resting.is_set():
                    return

    def _openai(self, prompt: list[int], wanted: int) -> bytes:
        streamed = self._rng.random() < 0.5
        body = {"prompt": prompt, "max_tokens": wanted, "temperature": 0, "stream": streamed, "ignore_eos": True}
        return request("POST", "/v1/completions", body)

    def _lightllm(self, prompt: list[int], wanted: int) -> bytes:
        path = self._rng.choice(("/generate", "/generate_stream"))
        parameters = {"max_new_tokens": wanted, "do_sample": False, "ignore_eos": True}
        return request("POST", path, {"inputs": prompt, "parameters": parameters})

    def _check(self, right: bool, kind: str, otherwise: str) -> None:
        if right:
            self._tally.add(kind)
        else:
            self._tally.fail(otherwise)


def _length(rng: random.Random) -> int:
    return int(LONGEST ** (rng.random() ** 3))


def _text(answer: bytes) -> str:
    """The generated text of an answer, whole or streamed, in either dialect."""
    if not answer.startswith(b"data:"):
        whole = json.loads(answer)
        return str(whole["choices"][0]["text"] if "choices" in whole else whole["generated_text"][0])
    parts = []
    for line in answer.split(b"\n"):
        if line.startswith(b"data:") and line != b"data: [DONE]":
            event = json.loads(line[5:])
            parts.append(event["choices"][0]["text"] if "choices" in event else event["token"]["text"])
    return "".join(parts)


@dataclass
class Watched:
    """One process over time: (hours, figures)."""

    name: str
    pid: int
    samples: list[tuple[float, Figures]] = field(default_factory=list)

    def slope(self, since: float) -> tuple[float, float]:
        """MB per hour from `since` on, and its standard error."""
        points = [(hours, now.rss_mb) for hours, now in self.samples if hours >= since]
        if len(points) < 8:
            return 0.0, math.inf
        n = len(points)
        middle, mean = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
        spread = sum((x - middle) ** 2 for x, _ in points)
        slope = sum((x - middle) * (y - mean) for x, y in points) / spread
        rest = sum((y - mean - slope * (x - middle)) ** 2 for x, y in points)
        # Samples follow each other, so errors do too; the number of independent ones is what lag 1 leaves of them.
        errors = [y - mean - slope * (x - middle) for x, y in points]
        lag = sum(a * b for a, b in pairwise(errors)) / rest if rest else 0.0
        independent = max(3.0, n * (1 - lag) / (1 + lag)) if lag < 1 else 3.0
        return slope, math.sqrt(rest / n / (independent - 2) / (spread / n)) if rest else 0.0

    def grows(self, since: float) -> list[str]:
        """What of it does."""
        settled = [now for hours, now in self.samples if hours >= since]
        if not settled:
            return []
        slope, error = self.slope(since)
        found = []
        if slope > 3 * error and slope > seen(self.samples[-1][0] - since):
            found.append(f"{self.name}: memory by {slope:.1f} MB/h")
        third = max(1, len(settled) // 3)
        for what in ("threads", "descriptors"):
            before, after = (min(getattr(now, what) for now in part) for part in (settled[:third], settled[-third:]))
            if after > before + SPARE:
                found.append(f"{self.name}: {what} from {before} to {after}")
        return found


def seen(hours: float) -> float:
    """The growth, in MB per hour, beyond which a run of that length after the warm-up calls it one."""
    return max(GROWTH_MB, RESOLUTION_MB / hours)


class Soak:
    """The server, its clients and what was seen of both. `warm_requests`: after how many the time begins to count."""

    def __init__(self, server: RunningServer, clients: int, seconds: float, warm_requests: int) -> None:
        self._server = server
        self._seconds = seconds
        self._warm_requests = warm_requests
        self._warm = math.inf
        """Hours after the start at which it was warm."""
        self._held: dict[str, float] = {}
        self._tally = Tally()
        self._over, self._resting = threading.Event(), threading.Event()
        self._clients = [Client(server.port, i, self._tally, self._over, self._resting) for i in range(clients)]
        pids = {"supervisor": server.process.pid, **server.children()}
        self._watched = [Watched(name.removeprefix("llmcore."), pid) for name, pid in pids.items()]
        self._left: list[str] = []

    def run(self) -> list[str]:
        """What grew."""
        start = time.monotonic()
        for client in self._clients:
            client.start()
        due, end = start + 60, math.inf
        while (now := time.monotonic()) < end:
            if not self._sample((now - start) / 3600):
                break
            if end == math.inf and self._tally.counts.total() >= self._warm_requests:
                self._warm, end = (now - start) / 3600, now + self._seconds
                print(f"warm after {(now - start) / 60:.1f} min")
            if now >= due:
                due += 60
                self._rest()
                self._print((now - start) / 60)
            time.sleep(SAMPLE_SECONDS)
        self._over.set()
        for client in self._clients:
            client.join()
        self._rest()
        self._print((time.monotonic() - start) / 60)
        grown = [what for watched in self._watched for what in watched.grows(self._warm)]
        return grown + self._left + self._tally.wrong

    def _sample(self, hours: float) -> bool:
        """Whether every process is still there."""
        for watched in self._watched:
            try:
                watched.samples.append((hours, figures(watched.pid)))
            except OSError:
                self._left.append(f"{watched.name} has ended: {self._server.log.read_text(errors='replace')[-2000:]}")
                return False
        return True

    def _rest(self) -> None:
        """Nothing is asked for a moment: then nothing may run, wait or hold slots."""
        self._resting.set()
        deadline = time.monotonic() + PATIENCE
        self._held = {"": 1.0}
        while any(self._held.values()) and time.monotonic() < deadline:
            time.sleep(0.3)
            self._held = self._figures()
        if any(self._held.values()):
            self._left.append(f"left behind: {self._held}")
        self._resting.clear()

    def _figures(self) -> dict[str, float]:
        page = call(self._server.port, "GET", "/metrics")[2].decode()
        rows = (line.split() for line in page.splitlines() if line and line[0] != "#")
        named = {name: float(value) for name, value in rows if "{" not in name}
        wanted = ("llmcore_kv_live", "llmcore_batch_current_size", "llmcore_queue_size")
        return {name: named[name] for name in wanted}

    def _print(self, minutes: float) -> None:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(self._tally.counts.items()))
        print(f"after {minutes:.1f} min: {counts}; at rest: {self._held}")
        print(f"  {'process':16}{'RSS MB':>9}{'MB/h':>9}{'+-':>7}{'threads':>9}{'descriptors':>13}")
        for watched in self._watched:
            now = watched.samples[-1][1]
            slope, error = watched.slope(self._warm)
            sizes = f"{now.rss_mb:9.1f}{slope:9.1f}{error:7.1f}{now.threads:9}{now.descriptors:13}"
            print(f"  {watched.name:16}{sizes}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="after the warm-up")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        model = write_fake_model(Path(scratch) / "fake", step_delay=0.001)
        settings = {"httpserver_workers": arguments.workers, "max_total_token_num": 20_000}
        with serving(model, disable_log_stats=True, **settings) as server:
            warm = WARM_REQUESTS * arguments.workers
            grown = Soak(server, arguments.clients, arguments.minutes * 60, warm).run()
    for what in grown:
        print(f"GROWS OR WRONG: {what}")
    print("something grows" if grown else f"nothing grows by more than {seen(arguments.minutes / 60):.1f} MB per hour")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
