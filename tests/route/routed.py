"""A router in this process, and nodes whose answers the test writes, byte by byte."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from llmcore_route.server import Router, Settings

PATIENCE = 10.0
"""Seconds for what takes no time on a machine that does nothing else."""

HEALTHY = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: application/json\r\n\r\n{}"
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


class First:
    """A balancer that takes the first candidate, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, tuple[Any, ...]]] = []

    def choose(self, arrival: Any, candidates: Sequence[Any]) -> int:
        self.asked.append((arrival, tuple(candidates)))
        return min(range(len(candidates)), key=lambda i: candidates[i].name)


@dataclass
class Got:
    """A request as a node got it."""

    line: str
    headers: dict[str, str]
    body: bytes
    connection: socket.socket

    @property
    def path(self) -> str:
        return self.line.split(" ")[1]


Answer = Callable[[Got], None]


def whole(status: str = "200 OK", body: bytes = b"{}", *headers: str) -> Answer:
    """An answer of known length."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Content-Type: application/json", *headers]
    data = "\r\n".join(lines).encode() + b"\r\n\r\n" + body
    return lambda got: got.connection.sendall(data)


@dataclass
class FakeNode:
    """A server that answers `/health` by itself, and everything else as `answers` says, path by path."""

    answers: dict[str, Answer] = field(default_factory=dict)
    healthy: bool = True
    got: list[Got] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):  # it was closed before
            self.listener.shutdown(socket.SHUT_RDWR)  # else the thread that accepts would stay there
        self.listener.close()

    def seen(self) -> list[Got]:
        """The requests that are not about health."""
        return [got for got in self.got if got.path not in ("/health", "/ready", "/server_info")]

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as file:
            line = file.readline().decode().strip()
            if not line:
                return
            headers = {}
            while text := file.readline().decode("latin-1").strip():
                name, _, value = text.partition(":")
                headers[name.lower()] = value.strip()
            got = Got(line, headers, file.read(int(headers.get("content-length", 0))), connection)
            self.got.append(got)
            path = got.path.partition("?")[0]
            if path == "/health" and path not in self.answers:
                connection.sendall(HEALTHY if self.healthy else HEALTHY.replace(b"200 OK", b"503 No"))
            elif path in self.answers:
                self.answers[path](got)
            else:
                connection.sendall(NOT_FOUND)


class Routed:
    """A router that runs in a thread."""

    def __init__(self, **settings: Any) -> None:
        self.balancer = First()
        given = {"port": 0, "route_nodes": ("127.0.0.1",), "health_interval": 0.05, "drain_timeout": 5.0}
        self.router = Router(Settings(**{**given, **settings}), self.balancer)
        self.port = int(self.router.url.rpartition(":")[2])
        self._thread = threading.Thread(target=self.router.run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.router.stop()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def add(self, url: str, models: Sequence[str] = ("m",), **more: Any) -> tuple[int, Any]:
        status = {"models": list(models), "role": 1, **more}
        return self.post("/nodes/add", {"url": url, "status": status})

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        status, _, answer = self.send("POST", path, json.dumps(body).encode(), **headers)
        return status, json.loads(answer)

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        status, _, answer = self.send("GET", path, b"", **headers)
        return status, json.loads(answer)

    def send(self, method: str, path: str, body: bytes, **headers: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body or None, named)
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def open(self, path: str, body: Any) -> socket.socket:
        """A connection on which a request was sent."""
        data = json.dumps(body).encode()
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        return connection


@contextmanager
def routed(**settings: Any) -> Iterator[Routed]:
    """A router; it ends with the block."""
    router = Routed(**settings)
    try:
        yield router
    finally:
        router.stop()


@contextmanager
def node(answers: dict[str, Answer] | None = None, **more: Any) -> Iterator[FakeNode]:
    """A node; it ends with the block."""
    fake = FakeNode(answers or {}, **more)
    try:
        yield fake
    finally:
        fake.close()


def until(true: Callable[[], object]) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def read_until(connection: socket.socket, end: bytes) -> bytes:
    """What comes, up to and with `end`."""
    found = b""
    while end not in found:
        data = connection.recv(65536)
        assert data, found
        found += data
    return found


def rest(connection: socket.socket) -> bytes:
    """What comes until the connection ends."""
    found = b""
    while data := connection.recv(65536):
        found += data
    return found
