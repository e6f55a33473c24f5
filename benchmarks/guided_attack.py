"""The cost of one key's grammars for another key's small expressions and stream, alone and under attack.

    python benchmarks/guided_attack.py [--seconds 10] [--clients 5] [--model_dir DIR]

Clients of one key attack. One after the other they send grammars that are always new, of each kind in turn. The server
is a real one on loopback, by default with the fake model. The first row is without an attack.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llmcore_devtools import write_fake_model
from llmcore_devtools.server import RunningServer, serving

RULES = 1900
KEYS = {"attacker": "key-of-the-attacker", "neighbour": "key-of-the-neighbour"}
TARGET_SECONDS = 0.3

Fields = dict[str, Any]


def _chain(rule: str, last: str, begin: str = "") -> str:
    lines = [rule.format(i=i, next=i + 1) for i in range(RULES)]
    return "\n".join([*([begin] if begin else []), *lines, last.format(i=RULES)])


KINDS: dict[str, Callable[[int], Fields]] = {
    "Lark": lambda n: {"guided_grammar": _chain('r{i}: "a" r{next}', f'r{{i}}: "{n}"', "start: r0")},
    "EBNF": lambda n: {"guided_grammar": _chain('r{i} ::= "a" r{next}', f'r{{i}} ::= "{n}"', "root ::= r0")},
    "EBNF, refused": lambda n: {
        "guided_grammar": _chain('r{i} ::= "a" r{next} |', f'r{{i}} ::= "{n}"', "root ::= r0")
    },
    "terminals": lambda n: {
        "guided_grammar": "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(30)) + f'\nA30: "{n}"'
    },
    "expressions": lambda n: {"guided_regex": "".join(chr(0x4E00 + (i + n) % 20000) for i in range(1900))},
    "multiples": lambda n: {"guided_json": {"type": "integer", "multipleOf": 99991 - n % 5000}},
    "schema": lambda n: {
        "guided_json": {
            "type": "object",
            "properties": {
                f"k{i}_{n}": {"type": "string", "pattern": f"^[a-z]{{1,{i % 50 + 1}}}(foo|bar)*$"} for i in range(900)
            },
        }
    },
}


class Client:
    """Sends requests with one key."""

    def __init__(self, server: RunningServer, key: str, model: str) -> None:
        self._server = server
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEYS[key]}"}
        self._model = model

    def ask(self, fields: Fields) -> tuple[int, float]:
        """Returns the status and seconds."""
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=60)
        began = time.perf_counter()
        body = {"prompt": "x", "max_tokens": 4, "temperature": 0, **fields}
        connection.request("POST", "/v1/completions", json.dumps(body), self._headers)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return answer.status, time.perf_counter() - began

    def gaps(self, over: threading.Event, longest: int) -> Iterator[float]:
        """Yields the seconds between the events of streams, one stream after the other."""
        while not over.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=60)
            body = {"prompt": "y", "max_tokens": longest, "ignore_eos": True, "stream": True}
            connection.request("POST", "/v1/completions", json.dumps(body), self._headers)
            last = 0.0
            for line in connection.getresponse():
                if line.startswith(b"data:"):
                    now = time.perf_counter()
                    if last:
                        yield now - last
                    last = now
                if over.is_set():
                    break
            connection.close()


def row(server: RunningServer, make: Callable[[int], Fields] | None, seconds: float, clients: int) -> str:
    """Returns the figures of the other client for `seconds`, and the answers that the attackers got."""
    over, numbers, gaps = threading.Event(), itertools.count(1), [0.0]
    attacks: Counter[int] = Counter()
    slowest = [0.0]

    def attack() -> None:
        client = Client(server, "attacker", "")
        while make is not None and not over.is_set():
            status, took = client.ask(make(next(numbers)))
            attacks[status] += 1
            slowest[0] = max(slowest[0], took)

    def listen() -> None:
        for gap in Client(server, "neighbour", "").gaps(over, 1500):
            gaps[0] = max(gaps[0], gap)

    threads = [threading.Thread(target=listen), *(threading.Thread(target=attack) for _ in range(clients))]
    for thread in threads:
        thread.start()
    small: Counter[int] = Counter()
    times, until = [], time.monotonic() + seconds
    neighbour = Client(server, "neighbour", "")
    while time.monotonic() < until:
        status, took = neighbour.ask({"guided_regex": f"[a-z]{{1,{next(numbers)}}}"})
        small[status] += 1
        times.append(took)
        time.sleep(0.2)
    over.set()
    for thread in threads:
        thread.join()
    served = f"{small[200]} of {small.total()}"
    became = ", ".join(f"{count} x {status}" for status, count in sorted(attacks.items())) or "none"
    return f"{gaps[0]:8.3f} {served:>12} {max(times):9.3f}   {became} (slowest {slowest[0]:.2f} s)"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--model_dir", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model_dir or write_fake_model(Path(folder) / "fake")
        settings = {"plugins": ["guided"], "api_keys": tuple(KEYS.values()), "device": "cpu"}
        with serving(model, **settings, max_total_token_num=20000) as server:
            Client(server, "neighbour", "").ask({"guided_regex": "ab"})
            print(f"{'':16} {'longest':>8} {'small':>12} {'slowest':>9}")
            print(f"{'':16} {'gap, s':>8} {'served':>12} {'s':>9}   attack")
            for name, make in (("no attack", None), *KINDS.items()):
                print(f"{name:16} {row(server, make, options.seconds, options.clients)}", flush=True)
    print(f"\ntarget: a gap below {TARGET_SECONDS:g} s beside what the machine adds, and all small ones served")


if __name__ == "__main__":
    main()
