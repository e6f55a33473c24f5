"""Who is served first, over real sockets with the real engine: `--scheduler priority`, and a plugin's own order."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from llmcore_devtools import write_fake_model
from llmcore_devtools.server import RunningServer, serving
from llmcore_devtools.sockets import call, connect, read_head, request

EXAMPLE = Path(__file__).resolve().parents[3] / "docs" / "examples" / "deadlines" / "deadlines.py"
PATIENCE = 60.0

LONG = 100
"""Tokens of an answer that takes two seconds. So the end of the answer before it is noticed first, on a busy machine
too."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_model(tmp_path_factory.mktemp("models") / "fake", step_delay=0.02)


@pytest.fixture
def start(model: Path) -> Iterator[Callable[..., RunningServer]]:
    """Servers that run one request at a time."""
    running: list[Any] = []

    def started(**settings: Any) -> RunningServer:
        few = {"max_total_token_num": 4000, "running_max_req_size": 1, "max_waiting_requests": 9}
        running.append(serving(model, device="cpu", **few, **settings))
        server: RunningServer = running[-1].__enter__()
        return server

    yield started
    for one in running:
        one.__exit__(None, None, None)


def waiting(server: RunningServer) -> int:
    """Requests in the queue, as metrics say."""
    lines = call(server.port, "GET", "/metrics")[2].decode().splitlines()
    return int(float(next(line.split()[-1] for line in lines if line.startswith("llmcore_queue_size "))))


def order_of(server: RunningServer, requests: list[tuple[str, dict[str, Any]]]) -> list[int]:
    """In which order `requests` end that came one after the other while another ran."""
    ended: list[int] = []

    def ask(number: int, path: str, body: dict[str, Any]) -> None:
        status, _, answer = call(server.port, "POST", path, body)
        assert status == 200, answer
        ended.append(number)

    threads = [threading.Thread(target=ask, args=(number, path, body)) for number, (path, body) in enumerate(requests)]
    with connect(server.port) as long:
        long.sendall(request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 3000, "stream": True}))
        assert read_head(long)[0] == 200
        for count, thread in enumerate(threads, 1):
            thread.start()
            deadline = time.monotonic() + PATIENCE
            while waiting(server) < count and time.monotonic() < deadline:
                time.sleep(0.02)
            assert waiting(server) == count
    for thread in threads:
        thread.join(PATIENCE)
    return ended


def test_lower_numbers_are_answered_first(start: Callable[..., RunningServer]) -> None:
    server = start(scheduler="priority")
    found = order_of(
        server,
        [
            ("/v1/completions", {"prompt": "x", "max_tokens": LONG, "priority": 5}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": LONG}),
            ("/generate", {"inputs": "x", "parameters": {"max_new_tokens": 2, "priority": -1}}),
        ],
    )
    assert found == [2, 1, 0]


def test_a_plugin_orders_by_what_its_dialect_says(start: Callable[..., RunningServer]) -> None:
    server = start(scheduler="deadlines", plugins=["fake-model", str(EXAMPLE)])
    found = order_of(
        server,
        [
            ("/v1/completions", {"prompt": "x", "max_tokens": LONG}),
            ("/soon", {"text": "x", "within": 900.0, "tokens": LONG}),
            ("/soon", {"text": "x", "within": 5.0, "tokens": 2}),
        ],
    )
    assert found == [2, 1, 0]
    status, _, answer = call(server.port, "POST", "/v1/completions", {"prompt": "x", "max_tokens": 2, "priority": 1})
    assert status == 400 and json.loads(answer)["error"]["param"] == "priority"
    assert "--scheduler priority" in json.loads(answer)["error"]["message"]
