"""The cost of idle connections: CPU time of a small request beside 0, 500 and 2,000 of them.

    python benchmarks/connections.py [--requests 2000]

One HTTP server with a trivial application runs in its own process. One client asks for a few bytes again and again.
`served` requests go through a thread, `refused` ones are rejected by their head. CPU is that of all threads of the
server's process. `idle` is its CPU in a second without requests.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import falcon
from llmcore.api.errors import RequestError
from llmcore_devtools import sockets
from llmcore_server.http.access import ANYBODY, Entry
from llmcore_server.http.streaming import HttpServer, Limits, raise_open_files

CROWDS = (0, 500, 2000)


class Plain:
    """Answers a few bytes."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """GET."""
        resp.data = b"plain"


def serve(listener: socket.socket) -> None:
    """Run the server in its process."""
    app = falcon.App()
    app.add_route("/plain", Plain())
    full = Entry(RequestError("full", code="queue_full", status=429))
    limits = Limits(head_seconds=600.0, idle_seconds=600.0)
    admit = lambda method, path, headers: full if path == "/refused" else ANYBODY  # noqa: E731
    HttpServer(app, listener, connections=4096, admit=admit, limits=limits).run()


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time of all current threads, in steps of a nanosecond."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def measure(pid: int, sock: socket.socket, path: str, requests: int) -> tuple[float, float]:
    """Returns the microseconds of the server's CPU per request, and p50 of the time to its answer."""
    data, times = sockets.request("GET", path), []
    before = cpu_seconds(pid)
    for _ in range(requests):
        start = time.perf_counter()
        sock.sendall(data)
        sockets.read_reply(sock)
        times.append(time.perf_counter() - start)
    return (cpu_seconds(pid) - before) / requests * 1e6, statistics.median(times) * 1e6


def main() -> None:
    """Print one line for each number of connections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--serve", type=int, metavar="DESCRIPTOR", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        serve(socket.socket(fileno=given.serve))
        return
    raise_open_files(max(CROWDS) + 64)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    descriptor = listener.fileno()
    server = subprocess.Popen([sys.executable, __file__, "--serve", str(descriptor)], pass_fds=(descriptor,))
    heads = ("idle connections", "served, us CPU", "p50 us", "refused, us CPU", "p50 us", "idle, ms/s")
    print("".join(f"{head:>17}" for head in heads))
    with ExitStack() as stack:
        sock = stack.enter_context(sockets.connect(port))
        crowd: list[socket.socket] = []
        for wanted in CROWDS:
            while len(crowd) < wanted:
                crowd.append(stack.enter_context(sockets.connect(port)))
            time.sleep(0.5)
            before = cpu_seconds(server.pid)
            time.sleep(2.0)
            resting = (cpu_seconds(server.pid) - before) / 2 * 1e3
            found = [measure(server.pid, sock, path, given.requests) for path in ("/plain", "/refused")]
            print(f"{wanted:17}" + "".join(f"{figure:17.0f}" for pair in found for figure in pair), end="")
            print(f"{resting:17.1f}", flush=True)
    server.terminate()


if __name__ == "__main__":
    main()
