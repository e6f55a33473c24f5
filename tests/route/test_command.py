"""`llmcore route` as a process, in front of real servers of the fake model."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from llmcore_devtools.fake_files import write_fake_model
from llmcore_devtools.server import FAKE_ENGINE, serving
from llmcore_server.settings import Registration
from llmcore_server.supervisor import registration
from llmcore_server.supervisor.registration import Registered

PATIENCE = 60.0

LLMCORE = str(Path(sys.executable).parent / "llmcore")


@contextmanager
def routing(*options: str, port: int | None = None) -> Iterator[int]:
    """The port of a router, a free one unless it is given."""
    if port is None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
    command = [LLMCORE, "route", "--port", str(port), "--route-nodes", "127.0.0.1", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "routing at" in line:
                break
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 0


def ask(port: int, method: str, path: str, body: Any = None) -> tuple[int, str, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request(
            method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        return response.status, response.headers["content-type"], response.read()
    finally:
        connection.close()


REQUESTS = {
    "/v1/chat/completions": {"model": "fake", "messages": [{"role": "user", "content": "a b"}], "max_tokens": 3},
    "/v1/completions": {"model": "fake", "prompt": "a b", "max_tokens": 3},
    "/v1/messages": {"model": "fake", "max_tokens": 3, "messages": [{"role": "user", "content": "a b"}]},
    "/v1/responses": {"model": "fake", "input": "a b", "max_output_tokens": 16},
    "/api/chat": {"model": "fake", "messages": [{"role": "user", "content": "a b"}], "options": {"num_predict": 3}},
    "/generate": {"inputs": "a b", "parameters": {"max_new_tokens": 3}},
    "/generate_stream": {"inputs": "a b", "parameters": {"max_new_tokens": 3}},
}


def test_servers_register_answer_in_every_dialect_and_leave(tmp_path: Path) -> None:
    model = write_fake_model(tmp_path / "fake")
    with routing("--routing-strategy", "min_expected_latency") as port:
        given = {"engine_module": FAKE_ENGINE, "proxy_url": f"http://127.0.0.1:{port}", "model_name": ["fake"]}
        with serving(model, **given) as server:
            deadline = time.monotonic() + PATIENCE
            while ask(port, "GET", "/health")[0] != 200:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            status = json.loads(ask(port, "GET", "/nodes/status")[2])
            assert list(status) == [server.url] and status[server.url]["models"] == ["fake"]
            for path, body in REQUESTS.items():
                status_code, kind, answer = ask(port, "POST", path, body)
                assert (status_code, kind) == ask(server.port, "POST", path, body)[:2], (path, answer)
                assert status_code == 200 and answer
            for path in ("/v1/chat/completions", "/api/chat"):
                _, kind, answer = ask(port, "POST", path, {**REQUESTS[path], "stream": True})
                assert "json" in kind or "event-stream" in kind
                assert answer.rstrip().endswith((b"[DONE]", b"}"))
            assert ask(port, "POST", "/v1/chat/completions", {"model": "fake"})[0] == 400
            assert server.stop() == 0
        assert json.loads(ask(port, "GET", "/nodes/status")[2]) == {}


def test_servers_come_back_to_a_router_that_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "LONGEST_PAUSE", 0.05)

    def known(port: int) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(ask(port, "GET", "/nodes/status")[2])
        return answer

    def come(port: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while known(port).keys() != {mine}:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    mine = "http://127.0.0.1:9"
    with routing() as port:
        server = Registered(Registration(proxy_url=f"http://127.0.0.1:{port}"), "127.0.0.1")
        server.begin(mine, ("fake",))
        come(port)
    with routing(port=port):
        come(port)
        assert known(port)[mine]["models"] == ["fake"]
        server.end()
        assert known(port) == {}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "no client may add nodes"),
        (("--route_nodes", "a", "--routing_strategy", "best"), "min_observed_latency"),
        (("--route_nodes", "a/b"), "write HOST or HOST:PORT"),
        (("--admin_key", "a b"), "no header can carry"),
    ],
)
def test_what_cannot_work_ends_the_start(options: tuple[str, ...], said: str) -> None:
    command = [LLMCORE, "route", "--port", "0", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 2 and said in done.stderr, done
