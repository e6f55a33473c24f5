"""A server under mixed load for any length of time: does anything grow?

    python benchmarks/soak.py [--minutes 10] [--rate 0] [--clients 24] [--workers 2]

The server is `llmcore testserver`. Clients ask for streams and whole answers of every length in two dialects, over
kept and fresh connections. ABORTED of them disconnect in the middle, SHORT want one token, and some send requests that
are refused. Some bring a step that runs out of memory: either once, and most of them are answered, or always, and they
get 503. All requests beside them are answered. Every answer is compared with the one that the model must give.
`--rate` is their requests per second together (0: as fast as they can).

The first part of the run, WARM_REQUESTS per worker, fills pools and caches. The second, `--minutes` long, counts.
Every minute and at the end the script prints a row per process. It shows the growth of memory in the second part in MB
per hour. The growth is the median of the slopes between all pairs of points, after Theil and Sen. Beside it is the
range that holds 95 % of such medians. It also shows the threads and descriptors. A row for the server shows its live
KV slots and requests while no client asks, and the cores that everything takes, clients included.

Exit code 1 if something grows:
- memory, by GROWTH_MB per hour or more
- threads or descriptors beyond those after the warm-up
- live slots or requests while no client asks
- answers that are wrong or missing
- a process that was replaced

A short run cannot tell GROWTH_MB per hour from one piece of memory taken late (RESOLUTION_MB), so it requires more
growth. The last line gives the growth that it can detect, and how long a run must be for GROWTH_MB.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from llmcore_devtools import fake_answer, write_fake_model
from llmcore_devtools.server import RunningServer, serving
from llmcore_devtools.sockets import call, connect, read_reply, request
from llmcore_server import supervisor
from processes import Figures, Window, figures

ABORTED, SHORT, REFUSED, FAULTY = 0.3, 0.2, 0.05, 0.01
GROWTH_MB = 1.0
RESOLUTION_MB = 0.5
"""An allocator takes memory in pieces up to this size, so less than one piece does not count as growth."""

WARM_REQUESTS = 15_000
"""Requests per worker until pools and caches are full, in workers and in the engine."""

SPARE = 3
"""Threads and descriptors that a process may have beyond those after the warm-up."""

SAMPLE_SECONDS = 2.0
POINTS = 60
"""Samples of the second part are joined to this many points, each the median of its time. So a momentary peak of many
requests does not count as growth."""

PATIENCE = 300.0
"""Seconds for an answer, and until nothing runs. Others may keep the machine busy for minutes, but a hang is
forever."""

VOCABULARY = 94
LONGEST = 600
"""Upper limit of prompts and answers, in tokens. Most are short, so that there are many. Together they exceed the
cache, so that it evicts."""

FAULTS = {"oom": VOCABULARY, "oom_once": VOCABULARY + 1}
"""Tokens that no other prompt has, for steps that run out of memory. `oom_once` fails every other step that has it: a
request that is in a step with another of them may also fail when it runs alone, and gets 503."""


class Pace:
    """Paces all clients together to a number of requests per second. 0: no limit. For any thread."""

    def __init__(self, rate: float) -> None:
        self._gap = 1 / rate if rate else 0.0
        self._next = 0.0
        self._lock = threading.Lock()

    def wait(self, over: threading.Event) -> None:
        """Wait for this request's turn, or the end."""
        with self._lock:
            turn = max(self._next, time.monotonic())
            self._next = turn + self._gap
        over.wait(turn - time.monotonic())


@dataclass
class Tally:
    """Counts the clients' outcomes by kind. For any thread."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str) -> None:
        """Count one more."""
        with self._lock:
            self.counts[kind] += 1

    def fail(self, what: str) -> None:
        """Count something that must not happen. The first few are printed at once and kept."""
        with self._lock:
            self.counts["errors"] += 1
            if len(self.wrong) < 5:
                self.wrong.append(what)
                print(f"{time.strftime('%H:%M:%S')} wrong: {what}", flush=True)


class Client(threading.Thread):
    """Sends one request after the other at `pace` until `over`, and rests while `resting` is set."""

    def __init__(
        self, port: int, seed: int, tally: Tally, pace: Pace, over: threading.Event, resting: threading.Event
    ) -> None:
        super().__init__(name=f"client-{seed}")
        self._port = port
        self._rng = random.Random(seed)
        self._tally = tally
        self._pace = pace
        self._over = over
        self._resting = resting

    def run(self) -> None:
        """Send requests until the end."""
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
            self._pace.wait(self._over)
            status, _, answer = call(self._port, "POST", "/generate", {"inputs": [1], "parameters": {"top_p": 7}})
            self._check(status == 400, "refused", f"{status} {answer[:200]!r} for a bad top_p")
            return
        prompt = [rng.randrange(VOCABULARY) for _ in range(_length(rng))]
        if faulty := rng.random() < FAULTY:
            prompt.append(rng.choice(list(FAULTS.values())))
        wanted = 1 if rng.random() < SHORT else 1 + _length(rng)
        asked = rng.choice((self._openai, self._lightllm))(prompt, wanted)
        with connect(self._port, PATIENCE) as sock:
            for _ in range(rng.choice((1, 1, 3))):
                self._pace.wait(self._over)
                sock.sendall(asked)
                if rng.random() < ABORTED:
                    if rng.random() < 0.7:
                        sock.recv(4096)
                    time.sleep(rng.random() * 0.2)
                    self._tally.add("aborted")
                    return
                status, headers, answer = read_reply(sock)
                if faulty and status == 503:
                    self._tally.add("without memory")
                else:
                    text = "".join(chr(33 + token) for token in fake_answer(prompt, wanted))
                    right = status == 200 and text == _text(answer) and prompt[-1] != FAULTS["oom"]
                    self._check(right, "tried again" if faulty else "answered", f"{status} {answer[:200]!r}")
                if headers.get("connection") == "close" or self._resting.is_set() or self._over.is_set():
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
    """Returns the generated text of an answer, whole or streamed, in either dialect."""
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

    def slope(self, since: float) -> tuple[float, float, float]:
        """Returns the MB per hour from `since` on, and its range."""
        settled = [(hours, now.rss_mb) for hours, now in self.samples if hours >= since]
        size = math.ceil(len(settled) / POINTS) or 1
        parts = [settled[i : i + size] for i in range(0, len(settled), size)]
        return theil_sen(
            [(statistics.mean(x for x, _ in part), statistics.median(y for _, y in part)) for part in parts]
        )

    def grows(self, since: float) -> list[str]:
        """Returns the figures that grow."""
        settled = [now for hours, now in self.samples if hours >= since]
        if not settled:
            return []
        slope, low, high = self.slope(since)
        found = []
        if slope >= seen(self.samples[-1][0] - since):
            found.append(f"{self.name}: memory by {slope:.1f} MB/h ({low:.1f} to {high:.1f})")
        third = max(1, len(settled) // 3)
        for what in ("threads", "descriptors"):
            first, last = ([getattr(now, what) for now in part] for part in (settled[:third], settled[-third:]))
            before, after = statistics.median(first), statistics.median(last)
            if after > before + SPARE:
                found.append(f"{self.name}: {what} from {before:g} to {after:g}")
        return found


def theil_sen(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Returns the median slope between any two of `points`, and the two slopes between which it lies in 95 of 100
    cases. Kendall's rank correlation says how many slopes lie between the median and each of the two by chance (Sen,
    1968)."""
    slopes = sorted((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2))
    if not slopes:
        return 0.0, -math.inf, math.inf
    n = len(points)
    beside = math.ceil(1.96 * math.sqrt(n * (n - 1) * (2 * n + 5) / 18) / 2)
    low, high = len(slopes) // 2 - beside, (len(slopes) - 1) // 2 + beside
    inside = low >= 0 and high < len(slopes)
    return statistics.median(slopes), *((slopes[low], slopes[high]) if inside else (-math.inf, math.inf))


def seen(hours: float) -> float:
    """Returns the least MB per hour that a second part of this length counts as growth."""
    return max(GROWTH_MB, RESOLUTION_MB / hours)


class Soak:
    """The server, its clients and the observations. `warm_requests`: number of requests after which the time
    counts."""

    def __init__(self, server: RunningServer, clients: int, pace: Pace, seconds: float, warm_requests: int) -> None:
        self._server = server
        self._seconds = seconds
        self._warm_requests = warm_requests
        self._warm = math.inf
        """Hours from the start to the end of the warm-up."""
        self._held: dict[str, float] = {}
        self._tally = Tally()
        self._over, self._resting = threading.Event(), threading.Event()
        self._clients = [Client(server.port, i, self._tally, pace, self._over, self._resting) for i in range(clients)]
        pids = {"supervisor": server.process.pid, **server.children()}
        self._watched = [Watched(name.removeprefix("llmcore_server."), pid) for name, pid in pids.items()]
        self._left: list[str] = []
        self._window = self._new_window()

    def _new_window(self) -> Window:
        return Window([os.getpid(), *(watched.pid for watched in self._watched)])

    def run(self) -> list[str]:
        """Runs the load. Returns everything that grew."""
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
        """True if every process is still there."""
        for watched in self._watched:
            try:
                watched.samples.append((hours, figures(watched.pid)))
            except OSError:
                self._left.append(f"{watched.name} has ended: {self._server.log.read_text(errors='replace')[-2000:]}")
                return False
        return True

    def _rest(self) -> None:
        """Pause all clients. Then nothing may run, wait or hold slots."""
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
        held = ", ".join(f"{name.removeprefix('llmcore_')} {value:.0f}" for name, value in self._held.items())
        try:
            cores, others = self._window.cores()
            self._window = self._new_window()
            used = f"{sum(cores.values()):.2f} cores, others {others:.2f}"
        except OSError:
            used = "a process has ended"
        print(f"after {minutes:.1f} min: {counts}; at rest: {held}; {used}")
        print(f"  {'process':16}{'RSS MB':>9}{'MB/h':>9}{'from':>8}{'to':>8}{'threads':>9}{'descriptors':>13}")
        for watched in self._watched:
            now = watched.samples[-1][1]
            slope, low, high = watched.slope(self._warm)
            sizes = f"{now.rss_mb:9.1f}{slope:9.1f}{low:8.1f}{high:8.1f}{now.threads:9}{now.descriptors:13}"
            print(f"  {watched.name:16}{sizes}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="after the warm-up")
    parser.add_argument("--rate", type=float, default=0.0, help="requests per second, of all clients")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        model = write_fake_model(Path(scratch) / "fake", step_delay=0.001, faults=FAULTS)
        settings = {"httpserver_workers": arguments.workers, "max_total_token_num": 20_000}
        with serving(model, disable_log_stats=True, pace=supervisor.Pace(), **settings) as server:
            warm = WARM_REQUESTS * arguments.workers
            pace = Pace(arguments.rate)
            grown = Soak(server, arguments.clients, pace, arguments.minutes * 60, warm).run()
    for what in grown:
        print(f"GROWS OR WRONG: {what}")
    told = seen(arguments.minutes / 60)
    print("something grows" if grown else f"nothing grows by {told:.1f} MB per hour or more")
    if told > GROWTH_MB:
        needed = RESOLUTION_MB / GROWTH_MB * 60
        print(
            f"{arguments.minutes:g} min do not tell less from nothing: {GROWTH_MB:g} MB per hour takes {needed:g} min"
        )
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
