"""The time until the engine notices a client disconnect, in every phase of a request.

    python benchmarks/aborts.py [--requests 200] [--step_ms 20] [--streams 32]

The server is real, with the fake model. `--step_ms` sets the duration of its steps. Other streams run at the same
time. One client after the other sends a request, waits until it is in its phase, and closes its connection. The script
prints the milliseconds from just before the close until the engine takes the abort between two steps. It also prints
the most steps for which the request kept its place after that, and with --streams 0 any slot. Exit code 1 if p99 is
above 100 ms or the steps are above 0.
"""

from __future__ import annotations

import argparse
import random
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcore_devtools import write_fake_model
from llmcore_devtools.server import serving
from llmcore_devtools.sockets import call, connect, request
from llmcore_server.supervisor import Pace
from processes import Window

ENGINE = "llmcore_devtools.timed_engine"
LONG = 12_000
"""Tokens of a prompt that takes many steps of CHUNK tokens."""

CHUNK = 256
PATIENCE = 5.0
TARGET_MS = 100.0


@dataclass(frozen=True)
class Phase:
    """A kind of request, and when its client leaves. `full`: all places are taken, so the request waits.

    `answered`: the client leaves after some of the answer has come; else at a random time after it sent the request.
    """

    name: str
    path: str
    prompt: int
    full: bool = False
    answered: bool = False


PHASES = (
    Phase("queued", "/generate_stream", 16, full=True),
    Phase("queued, not streaming", "/generate", 16, full=True),
    Phase("prefill", "/generate_stream", LONG),
    Phase("prefill, not streaming", "/generate", LONG),
    Phase("decode", "/generate_stream", 16, answered=True),
    Phase("decode, not streaming", "/generate", 16),
)


class Notes:
    """The entries that the engine has written so far."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self._file = path.open()
        self._partial = ""

    def next(self) -> tuple[float, int] | None:
        """Returns when the next abort was taken, and the steps it took. None if none comes."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            self._partial += self._file.readline()
            if self._partial.endswith("\n"):
                taken, steps = self._partial.split()
                self._partial = ""
                return float(taken), int(steps)
            time.sleep(0.001)
        return None


def body(rng: random.Random, length: int) -> dict[str, Any]:
    """Returns a request that runs longer than any test waits. No two prompts share a prefix."""
    ids = [rng.randrange(94) for _ in range(length)]
    return {"inputs": ids, "parameters": {"max_new_tokens": 3000, "ignore_eos": True, "do_sample": False}}


@contextmanager
def others(port: int, streams: int, rng: random.Random) -> Iterator[None]:
    """Runs `streams` other streams meanwhile, and reads them."""
    open_, over = [], threading.Event()

    def read() -> None:
        while not over.is_set():
            for sock in open_:
                try:
                    while sock.recv(65536):
                        pass
                except BlockingIOError:
                    pass
            time.sleep(0.05)

    for _ in range(streams):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(request("POST", "/generate_stream", body(rng, 16)))
        sock.setblocking(False)
        open_.append(sock)
    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(1.0)
    try:
        yield
    finally:
        over.set()
        reader.join()
        for sock in open_:
            sock.close()


def leave(port: int, phase: Phase, rng: random.Random, step: float) -> float:
    """Send a request, wait, close. Returns the time.monotonic() just before the close."""
    with connect(port) as sock:
        sock.sendall(request("POST", phase.path, body(rng, phase.prompt)))
        if phase.answered:
            sock.recv(65536)
        time.sleep(step * (2 + rng.random() * 3) + 0.02)
        return time.monotonic()


def measure(phase: Phase, requests: int, streams: int, step: float, scratch: Path) -> bool:
    """Prints one row. Returns True if it is within the limits."""
    rng = random.Random(7)
    log = scratch / f"aborts of {phase.name}"
    model = write_fake_model(scratch / phase.name, max_position=16384, step_delay=step)
    streams = max(streams, phase.full)
    places = {"running_max_req_size": streams + (0 if phase.full else 64), "max_waiting_requests": 64}
    settings = {"chunked_prefill_size": CHUNK, **places}
    options = {"abort_log": str(log)}
    with serving(model, engine_module=ENGINE, plugin_options=options, pace=Pace(), **settings) as server:
        notes = Notes(log)
        with others(server.port, streams, rng):
            window = Window([server.process.pid, *server.children().values()])
            times, steps, lost = [], [], 0
            for _ in range(requests):
                left = leave(server.port, phase, rng, step)
                note = notes.next()
                if note is None:
                    lost += 1
                    continue
                times.append((note[0] - left) * 1e3)
                steps.append(note[1])
            _, busy = window.cores()
        live = _live_at_rest(server.port)
    times.sort()
    at = [times[int(share * (len(times) - 1))] for share in (0.5, 0.99, 1.0)] if times else [float("nan")] * 3
    print(
        f"{phase.name:26}{len(times):9}{lost:6}"
        + "".join(f"{ms:9.1f}" for ms in at)
        + f"{max(steps, default=0):8}{live:9.0f}{busy:8.2f}",
        flush=True,
    )
    return not lost and at[1] <= TARGET_MS and not any(steps) and live == 0


def _live_at_rest(port: int) -> float:
    """Returns the slots in /metrics a moment after all clients have left."""
    deadline, live = time.monotonic() + PATIENCE, float("nan")
    while time.monotonic() < deadline and live != 0:
        time.sleep(0.3)
        page = call(port, "GET", "/metrics")[2].decode()
        live = next(float(line.split()[1]) for line in page.splitlines() if line.startswith("llmcore_kv_live "))
    return live


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--step_ms", type=float, default=20.0)
    parser.add_argument("--streams", type=int, default=32)
    arguments = parser.parse_args(argv)
    print(f"steps of {arguments.step_ms:g} ms, {arguments.streams} streams beside; ms, target {TARGET_MS:g} at p99")
    print(
        f"{'phase':26}{'requests':>9}{'lost':>6}{'p50':>9}{'p99':>9}{'max':>9}{'steps':>8}{'KV live':>9}{'others':>8}"
    )
    with tempfile.TemporaryDirectory() as scratch:
        step, folder = arguments.step_ms / 1e3, Path(scratch)
        good = [measure(phase, arguments.requests, arguments.streams, step, folder) for phase in PHASES]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
