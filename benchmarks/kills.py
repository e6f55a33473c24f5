"""Kills HTTP workers and the engine with SIGKILL while streams run, and checks the effect on clients.

    python benchmarks/kills.py [--kills 200] [--seed 1] [--streams 16] [--workers 2] [--patience 10]

The server is real. It has the fake model and `--health_monitor`. The seed decides what is killed and when. Clients
stream greedy answers all the time, and retry whatever happens. After every kill the server must be ready with as many
processes as before, and must answer, before the next kill. The script prints:

- hung: clients that waited longer than `--patience` seconds for a byte, an end or a connection (0)
- wrong: answers that ended as if complete and are not the model's (0)
- leaked: live slots after all clients have left, and processes or run directories that outlive the server (0)
- ready: seconds from a kill until the server is whole again, by what was killed

Exit code 1 if any of the first three is not 0.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmcore_devtools import fake_answer, sockets, write_fake_model
from llmcore_devtools.server import ENGINE_MODULE, RunningServer, serving
from llmcore_server.supervisor import Pace

WORKER = "llmcore_server.http.worker"
RETRY_SECONDS = 0.25
"""Seconds that a client waits after anything but a complete answer."""
READY_SECONDS = 60.0
PAUSE_SECONDS = 1.0
"""The longest pause between two kills, in seconds."""
TOKENS = 200


def answer(prompt: Sequence[int]) -> str:
    """Returns the fake model's answer."""
    return "".join(chr(33 + token) for token in fake_answer(prompt, TOKENS))


@dataclass
class Client(threading.Thread):
    """Streams answers until told to stop. `outcomes` counts the ends of its requests."""

    port: int
    prompt: tuple[int, ...]
    stopping: threading.Event
    patience: float
    outcomes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    __hash__ = threading.Thread.__hash__

    def run(self) -> None:
        """Ask, read, ask again."""
        body = {"prompt": list(self.prompt), "max_tokens": TOKENS, "temperature": 0, "stream": True}
        request = sockets.request("POST", "/v1/completions", body)
        while not self.stopping.is_set():
            outcome = self._ask(request)
            self.outcomes[outcome] += 1
            if outcome != "whole":
                self.stopping.wait(RETRY_SECONDS)

    def _ask(self, request: bytes) -> str:
        try:
            with sockets.connect(self.port, self.patience) as sock:
                sock.sendall(request)
                status, _, data = sockets.read_reply(sock)
        except TimeoutError:
            return "hung"
        except OSError:
            return "cut"
        if status != 200:
            return "refused" if status == 503 else f"status {status}"
        if b'"error"' in data:
            return "error"
        events = [json.loads(line[6:]) for line in data.split(b"\n\n") if line.startswith(b"data: {")]
        text = "".join(event["choices"][0]["text"] for event in events)
        return "whole" if b"[DONE]" in data and text == answer(self.prompt) else "wrong"


@dataclass
class Findings:
    """The findings of a run."""

    kills: Counter[str]
    outcomes: Counter[str]
    ready: dict[str, list[float]]
    leaked_slots: int
    left_behind: int

    @property
    def clean(self) -> bool:
        """True if everything that should be zero is zero."""
        known = {"whole", "error", "refused", "cut"}
        return not (set(self.outcomes) - known or self.leaked_slots or self.left_behind)

    def lines(self) -> list[str]:
        """Returns text for people."""
        killed = ", ".join(f"{n} {what}" for what, n in sorted(self.kills.items()))
        ends = ", ".join(f"{n:,} {what}" for what, n in self.outcomes.most_common())
        waits = [
            f"{what} p50 {statistics.median(times):.2f} s, max {max(times):.2f} s"
            for what, times in sorted(self.ready.items())
        ]
        return [
            f"kills      {sum(self.kills.values())} ({killed})",
            f"requests   {ends}",
            f"hung       {self.outcomes['hung']}",
            f"wrong      {self.outcomes['wrong']}",
            f"leaked     {self.leaked_slots} slots, {self.left_behind} processes or directories",
            f"ready      {'; '.join(waits)}",
        ]


def measure(kills: int, seed: int, streams: int, workers: int, patience: float) -> Findings:
    """Kills and returns the findings."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        model = write_fake_model(Path(directory) / "fake", step_delay=0.002)
        options = {"health_monitor": True, "restart_pause": 0.0, "restart_limit": 0, "max_total_token_num": 20_000}
        with serving(model, httpserver_workers=workers, pace=Pace(), **options) as server:
            seen: set[int] = set()
            stopping = threading.Event()
            clients = [Client(server.port, (3 + i, 40 + i, 7), stopping, patience) for i in range(streams)]
            for client in clients:
                client.start()
            killed: Counter[str] = Counter()
            ready: dict[str, list[float]] = {}
            for _ in range(kills):
                time.sleep(draw.uniform(0.0, PAUSE_SECONDS))
                what, took = kill_one(server, draw, workers, seen)
                killed[what] += 1
                ready.setdefault(what, []).append(took)
            stopping.set()
            for client in clients:
                client.join(2 * patience)
            outcomes = sum((client.outcomes for client in clients), Counter[str]())
            outcomes["hung"] += sum(client.is_alive() for client in clients)
            leaked, run_directory = live_slots(server), directory_of(server)
            seen |= set(server.children().values())
        left = sum(Path(f"/proc/{pid}").exists() for pid in seen) + run_directory.exists()
    return Findings(killed, +outcomes, ready, leaked, left)


def kill_one(server: RunningServer, draw: random.Random, workers: int, seen: set[int]) -> tuple[str, float]:
    """Kills a process and waits until the server is whole again. Returns (what it was, seconds)."""
    before = server.children()
    seen |= set(before.values())
    what = draw.choice(["engine", "worker"])
    victims = [pid for name, pid in before.items() if name.startswith(ENGINE_MODULE if what == "engine" else WORKER)]
    victim = draw.choice(victims)
    os.kill(victim, signal.SIGKILL)
    start = time.monotonic()
    while not whole(server, workers, victim):
        if time.monotonic() - start > READY_SECONDS:
            raise SystemExit(f"{what} {victim} was killed, and nothing is ready:\n{server.log.read_text()}")
        time.sleep(0.02)
    return what, time.monotonic() - start


def whole(server: RunningServer, workers: int, victim: int) -> bool:
    """True if every process runs, and a new client is served."""
    children = server.children()
    names = [name.partition("#")[0] for name in children]
    if victim in children.values() or ENGINE_MODULE not in names or names.count(WORKER) != workers:
        return False
    try:
        body = {"prompt": [9, 9, 9], "max_tokens": 1}
        served = sockets.call(server.port, "POST", "/v1/completions", body)[0] == 200
        return served and sockets.call(server.port, "GET", "/readiness")[0] == 200
    except OSError:
        return False


def live_slots(server: RunningServer) -> int:
    """Returns the slots in use after all clients have left. It waits some seconds for what is on its way."""
    deadline = time.monotonic() + READY_SECONDS
    while True:
        page = sockets.call(server.port, "GET", "/metrics")[2].decode()
        figures = {name: float(value) for name, value in re.findall(r"^llmcore_(\w+) (\S+)$", page, re.M)}
        lost = figures["kv_total"] - figures["kv_free"] - figures["kv_cached"]
        if not lost or time.monotonic() > deadline:
            return int(lost)
        time.sleep(0.1)


def directory_of(server: RunningServer) -> Path:
    """Returns the run directory of a server."""
    links = (Path(os.readlink(file)) for file in Path(f"/proc/{server.process.pid}/fd").iterdir())
    return next(link.parent for link in links if link.name == "lock")


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--patience", type=float, default=10.0)
    arguments = parser.parse_args()
    findings = measure(**vars(arguments))
    print("\n".join(findings.lines()))
    return 0 if findings.clean else 1


if __name__ == "__main__":
    sys.exit(main())
