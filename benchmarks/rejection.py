"""The time in which a full server refuses requests, with 2,000 clients connected.

    OMP_NUM_THREADS=1 python benchmarks/rejection.py [--connections 2000] [--rate 500] [--seconds 8]

The real supervisor, HTTP worker, scheduler and KV manager run on the fake model in processes of their own. The clients
are another process, and everything stays on 127.0.0.1. 64 requests run and 64 wait, so the queue is and stays full.
Then all further connections, which stay open, ask: `paced`, one after the other at a steady rate; `burst`, all at
once. Every answer must be a 429 with a Retry-After from 1 to 60. A latency ends with the answer's last byte. If paced,
it begins when the request was due, even if the client was late. In a burst it begins when the request's bytes were
sent.
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from llmcore_devtools import sockets
from llmcore_devtools.fake_files import write_fake_model
from llmcore_devtools.server import serving
from llmcore_server.http.streaming.limits import raise_open_files
from llmcore_server.supervisor import Pace

RUNNING = WAITING = 64
TARGET_MS = 50.0
BURSTS = 5


def request(n_tokens: int) -> bytes:
    """Returns a request for an answer of `n_tokens`."""
    body = {"prompt": [1, 2, 3], "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True}
    return sockets.request("POST", "/v1/completions", body)


class Clients:
    """Open connections that send requests, and the answers to them. Latencies are in seconds."""

    def __init__(self, port: int, count: int) -> None:
        self.poll = select.epoll()
        self.socks: list[socket.socket] = []
        self.since: dict[int, float] = {}
        self.latencies: list[float] = []
        self.statuses: Counter[str] = Counter()
        self._port = port
        self._at: dict[int, int] = {}
        self._begun: dict[int, bytes] = {}
        for place in range(count):
            self.socks.append(self._connect(place))

    def ask(self, place: int, data: bytes, due: float | None = None) -> None:
        """Send on connection `place`."""
        sock = self.socks[place]
        sock.send(data)
        self.since[sock.fileno()] = time.perf_counter() if due is None else due

    def receive(self, seconds: float) -> None:
        """Take the answers that come within `seconds`."""
        for fd, _ in self.poll.poll(max(seconds, 0.0)):
            place = self._at[fd]
            try:
                answer = self.socks[place].recv(1 << 16)
            except ConnectionResetError:
                answer = b""
            now = time.perf_counter()
            since = self.since.pop(fd, None)
            if not answer:
                self.statuses["closed"] += since is not None
                self._replace(place)
                continue
            if since is None:
                continue
            answer = self._begun.pop(fd, b"") + answer
            if not _whole(answer):
                self.since[fd], self._begun[fd] = since, answer
                continue
            self.latencies.append(now - since)
            self.statuses[_status(answer)] += 1

    def settle(self, seconds: float = 5.0) -> None:
        """Wait until every request is answered."""
        end = time.perf_counter() + seconds
        while self.since and time.perf_counter() < end:
            self.receive(0.05)
        self.statuses["unanswered"] += len(self.since)
        self.since.clear()

    def take(self) -> tuple[list[float], dict[str, int]]:
        """Returns the latencies and statuses since the last call."""
        found = self.latencies, {status: n for status, n in self.statuses.items() if n}
        self.latencies, self.statuses = [], Counter()
        return found

    def _connect(self, place: int) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self._port), timeout=10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.poll.register(sock, select.EPOLLIN)
        self._at[sock.fileno()] = place
        return sock

    def _replace(self, place: int) -> None:
        old = self.socks[place]
        self.poll.unregister(old)
        del self._at[old.fileno()]
        old.close()
        self.socks[place] = self._connect(place)


def _whole(answer: bytes) -> bool:
    head, found, body = answer.partition(b"\r\n\r\n")
    lengths = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length: ")]
    return bool(found) and len(body) >= sum(int(line.partition(b": ")[2]) for line in lengths)


def _status(answer: bytes) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head[9:12].decode()
    if status != "429":
        return f"{status} {body[:80]!r}"
    waits = [line for line in head.split(b"\r\n") if line.lower().startswith(b"retry-after: ")]
    right = len(waits) == 1 and 1 <= int(waits[0].partition(b": ")[2]) <= 60 and b'"queue_full"' in body
    return "429" if right else f"429 without its header or code: {head!r}"


def be_clients(port: int, connections: int, rate: float, seconds: float) -> None:
    """Run the clients' process: fill the server, ask, and print the measurements as JSON."""
    raise_open_files(connections + 256)
    clients = Clients(port, connections)
    fill = request(100_000)
    for place in range(RUNNING + WAITING):
        clients.ask(place, fill)
        time.sleep(0.005)
    time.sleep(0.5)
    first, asking, data = RUNNING + WAITING, connections - RUNNING - WAITING, request(16)
    held = dict(clients.since)
    clients.since.clear()
    found = {"refused while filling": clients.take()[1]}
    start, n = time.perf_counter(), 0
    while n < rate * seconds:
        due = start + n / rate
        clients.receive(due - time.perf_counter())
        if time.perf_counter() >= due:
            clients.ask(first + n % asking, data, due)
            n += 1
    clients.settle()
    found["paced"] = clients.take()
    for _ in range(BURSTS):
        for place in range(first, connections):
            clients.ask(place, data)
        clients.settle()
        time.sleep(0.3)
    found["burst"] = clients.take()
    found["still running or waiting"] = len(held)
    print(json.dumps(found))


def report(name: str, latencies: Sequence[float], statuses: dict[str, int]) -> float:
    """Prints a line. Returns the p99 in milliseconds."""
    if set(statuses) != {"429"}:
        sys.exit(f"{name}: not only refusals: {statuses}")
    marks = statistics.quantiles(latencies, n=100, method="inclusive")
    p50, p99, most = (1000 * seconds for seconds in (marks[49], marks[98], max(latencies)))
    print(f"{name:<6} {statuses['429']:>6} refused   p50 {p50:7.2f} ms   p99 {p99:7.2f} ms   most {most:7.2f} ms")
    return p99


def main() -> None:
    """Start the server, then the clients. Exit code 1 if the paced p99 is above the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=500.0, help="requests per second, paced")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--step_ms", type=float, default=10.0, help="length of the fake model's step")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.port is not None:
        be_clients(given.port, given.connections, given.rate, given.seconds)
        return
    words = [sys.executable, __file__, f"--connections={given.connections}", f"--rate={given.rate}"]
    limits = {"running_max_req_size": RUNNING, "max_waiting_requests": WAITING, "max_req_total_len": 1 << 18}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "fake"
        model = write_fake_model(path, max_position=1 << 18, step_delay=given.step_ms / 1000)
        with serving(model, max_total_token_num=1 << 21, pace=Pace(), **limits) as server:
            words += [f"--seconds={given.seconds}", f"--port={server.port}"]
            done = subprocess.run(words, stdout=subprocess.PIPE, check=True, timeout=given.seconds + 120)
    found = json.loads(done.stdout)
    print(f"{given.connections} connections, {RUNNING} requests run, {WAITING} wait; {given.rate:g} requests/s paced")
    if found["refused while filling"]:
        sys.exit(f"the queue was full before it should: {found['refused while filling']}")
    worst = report("paced", *found["paced"])
    report("burst", *found["burst"])
    if worst > TARGET_MS:
        sys.exit(f"p99 is above {TARGET_MS:g} ms")


if __name__ == "__main__":
    main()
