"""What a request was made of is freed when it is over, and not when a collector of cycles comes by: until then it
would pile up, and what a process has taken once at most it keeps."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from llmcore.text.tokenizer import load_tokenizer
from llmcore_devtools import sockets as raw
from llmcore_devtools.dialect import FakeBridge, fake_front
from llmcore_devtools.tokenizer import write_tokenizer
from llmcore_lightllm.routes import routes as lightllm
from llmcore_openai.routes import routes as openai
from llmcore_server.chat.request_parsing import Choice
from llmcore_server.http.app import build_app
from llmcore_server.http.front import Front
from llmcore_server.http.generation import Generation
from llmcore_server.http.reply import Reply
from llmcore_server.http.streaming import HttpServer
from llmcore_server.http.streaming.tasks import StreamTask
from served import PATIENCE, until

MADE = (Choice, Generation, Reply, StreamTask)
"""Not the connection and what it read: a thread of waitress keeps its last one until the next."""

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
TEXT = {"prompt": "hello", "max_tokens": 5}
PARAMETERS = {"inputs": "hello", "parameters": {"max_new_tokens": 5}}
ASKED: list[tuple[str, dict[str, Any]]] = [
    *[("/v1/chat/completions", CHAT | {"stream": stream}) for stream in (False, True)],
    *[("/v1/completions", TEXT | {"stream": stream, "logprobs": 1}) for stream in (False, True)],
    ("/v1/completions", TEXT | {"n": 2, "best_of": 3}),
    *[(path, PARAMETERS) for path in ("/generate", "/generate_stream")],
]


class Server:
    """Two dialects on a scripted engine, in this process."""

    def __init__(self, model: Path) -> None:
        self.bridge = FakeBridge(wait=True)
        fake = fake_front(self.bridge, load_tokenizer(model))
        front = Front(**{field.name: getattr(fake, field.name) for field in fields(Front)})
        app = build_app((route, "test") for make in (openai, lightllm) for route in make(front))
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(listener.getsockname()[1])
        self._server = HttpServer(app, listener, connections=10, encoder=app.encoder)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()

    def end(self) -> None:
        self._server.stop(0)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    yield server
    server.end()


def made() -> list[object]:
    return [one for one in gc.get_objects() if isinstance(one, MADE)]


@pytest.fixture(autouse=True)
def all_is_freed() -> Iterator[None]:
    """No collector runs, and yet nothing stays that was made meanwhile."""
    gc.collect()
    before = made()  # by other tests of this process
    gc.disable()
    try:
        yield
        until(lambda: len(made()) <= len(before))
    finally:
        gc.enable()


def answer(server: Server, choices: int = 1) -> None:
    until(lambda: len(server.bridge._open) == choices)
    while server.bridge._open:
        server.bridge.step()


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_an_answered_request_is(server: Server, path: str, body: dict[str, Any]) -> None:
    with raw.connect(server.port) as sock:
        sock.sendall(raw.request("POST", path, body))
        answer(server, body.get("best_of", 1))
        assert raw.read_reply(sock)[0] == 200


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_a_request_whose_client_leaves_is(server: Server, path: str, body: dict[str, Any]) -> None:
    with raw.connect(server.port) as sock:
        sock.sendall(raw.request("POST", path, body))
        until(lambda: len(server.bridge._open) == body.get("best_of", 1))
        server.bridge.step()
    until(lambda: not server.bridge._open)


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_a_request_that_fails_in_the_engine_is(server: Server, path: str, body: dict[str, Any]) -> None:
    server.bridge.error = ("engine_failed", "it broke")
    try:
        with raw.connect(server.port) as sock:
            sock.sendall(raw.request("POST", path, body))
            answer(server, body.get("best_of", 1))
            assert raw.read_reply(sock)[0] in (200, 503)
    finally:
        server.bridge.error = None


def test_refused_requests_are(server: Server) -> None:
    refused = {"/v1/chat/completions": {"messages": 3}, "/generate": {"inputs": ""}, "/nowhere": {}}
    with raw.connect(server.port) as sock:
        for path, body in refused.items():
            sock.sendall(raw.request("POST", path, body))
            assert raw.read_reply(sock)[0] in (400, 404)
        sock.sendall(b"no HTTP at all\r\n\r\n")
        assert raw.read_reply(sock)[0] == 400


def test_a_request_on_a_kept_connection_is_before_that_closes(server: Server) -> None:
    before = len(made())
    with raw.connect(server.port) as sock:
        for _ in range(5):
            sock.sendall(raw.request("POST", "/generate", PARAMETERS))
            answer(server)
            assert raw.read_reply(sock)[0] == 200
        until(lambda: len(made()) <= before)
