"""Ends or stops one rank of a served model while it decodes, and prints what clients, the server and the GPU see.

    python benchmarks/rank_faults.py [--model benchmarks/configs/llama-3.1-8b] [--tp 2] [--set NAME=VALUE ...]

The server is real, with random weights and `--health_monitor`. Eight clients stream long greedy answers. When all have
had 100 tokens, which takes captured steps, rank 1 gets SIGKILL; the second time SIGSTOP. Each line has:

- the seconds from the signal until the last stream has ended, until `/readiness` was 503, and until it was 200 again
- the message that clients got
- whether a greedy answer is the one from before, so that the device is usable

Exit code 1 if a client hangs for more than a minute, or an answer differs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmcore_devtools import sockets
from llmcore_devtools.server import RunningServer, serving
from llmcore_server.supervisor.group import RANK_MODULE

CLIENTS, TOKENS = 8, 100
LONGEST = 60.0
"""Seconds after which a client, or the server's return, counts as hung."""


class Stream(threading.Thread):
    """A client. `tokens`: events so far. `ended`: when its stream did, `last` with what."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.port, self.tokens, self.ended, self.last = port, 0, 0.0, ""
        self.start()

    def run(self) -> None:
        body = {"inputs": f"stream {id(self)}", "parameters": {"max_new_tokens": 4000, "ignore_eos": True}}
        with sockets.connect(self.port, timeout=LONGEST) as sock:
            sock.sendall(sockets.request("POST", "/generate_stream", body))
            try:
                while data := sock.recv(65536):
                    self.tokens += data.count(b"data:")
                    self.last = data.decode(errors="replace")
                    if b'"error"' in data or data.endswith(b"0\r\n\r\n"):
                        break
            except OSError as error:
                self.last = repr(error)
        self.ended = time.monotonic()


def answer(port: int) -> Any:
    """A greedy answer, or its failure."""
    body = {"inputs": "the same for everyone", "parameters": {"max_new_tokens": 32, "ignore_eos": True}}
    status, _, data = sockets.call(port, "POST", "/generate", body)
    return json.loads(data)["generated_text"] if status == 200 else f"status {status}"


def readiness(port: int) -> int:
    return sockets.call(port, "GET", "/readiness")[0]


def within(condition: Callable[[], bool], seconds: float) -> float:
    """Seconds until the condition holds; infinity after `seconds`."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() > began + seconds:
            return float("inf")
        time.sleep(0.01)
    return time.monotonic() - began


def befall(server: RunningServer, number: signal.Signals, before: Any) -> bool:
    """Signal rank 1 while clients stream; prints a line. True if all went well."""
    streams = [Stream(server.port) for _ in range(CLIENTS)]
    within(lambda: all(stream.tokens >= TOKENS for stream in streams), LONGEST)
    unready: list[float] = []
    os.kill(server.children()[RANK_MODULE], number)
    began = time.monotonic()

    def look() -> None:
        unready.append(within(lambda: readiness(server.port) == 503, LONGEST))

    watch = threading.Thread(target=look)
    watch.start()
    for stream in streams:
        stream.join(LONGEST)
    watch.join(LONGEST)
    ready = within(lambda: readiness(server.port) == 200, 2 * LONGEST)
    total = time.monotonic() - began
    hung = sum(stream.ended == 0.0 for stream in streams)
    last = max(stream.ended for stream in streams) - began
    same = ready < LONGEST * 2 and answer(server.port) == before
    print(
        f"{number.name:<8} streams ended {last:.2f} s ({hung} hung), 503 {sum(unready):.2f} s, "
        f"ready again {total:.1f} s, {'the same answer as before' if same else 'ANOTHER ANSWER'}\n"
        f"         {streams[0].last.strip()[:300]}",
        flush=True,
    )
    return same and not hung


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "configs" / "llama-3.1-8b")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of llmcore serve")
    options = parser.parse_args()
    settings: dict[str, Any] = {
        **{"load_format": "dummy", "max_req_total_len": 8192, "max_total_token_num": 100_000, "tp": options.tp},
        **{"health_monitor": True, **dict(text.split("=", 1) for text in options.set)},
    }
    began = time.monotonic()
    with serving(options.model, **settings) as server:
        print(f"start: {time.monotonic() - began:.1f} s from the command to ready", flush=True)
        before = answer(server.port)
        fine = [befall(server, number, before) for number in (signal.SIGKILL, signal.SIGSTOP)]
        left = server.children()
    alive = [pid for pid in left.values() if Path(f"/proc/{pid}").exists()]
    print(f"processes that outlive the server: {len(alive)}")
    return 0 if all(fine) and not alive else 1


if __name__ == "__main__":
    sys.exit(main())
