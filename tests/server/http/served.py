"""A server in this process whose replies the test sends itself."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import falcon
from llmcore.api.errors import RequestError
from llmcore_devtools import sockets as raw
from llmcore_server.http.access import ANYBODY, Entry
from llmcore_server.http.app import RequestIds
from llmcore_server.http.errors import EncodeError, openai_error
from llmcore_server.http.reply import Reply
from llmcore_server.http.streaming import HttpServer, Limits, detach

PATIENCE = 30.0
"""Seconds for what takes no time on a machine that does nothing else."""


class Detached:
    """A resource whose replies the test sends itself."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.left: list[Reply] = []
        self.arrived = threading.Condition()

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        reply = detach(req.env, resp)
        reply.on_close(lambda: self.left.append(reply))
        if req.get_param_as_bool("fail"):
            raise RequestError("no")
        with self.arrived:
            self.replies.append(reply)
            self.arrived.notify_all()

    def wait(self, n: int) -> list[Reply]:
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.replies) >= n, PATIENCE)
        return self.replies


class Plain:
    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        resp.data = b"plain"


Judge = Callable[[str, str, Mapping[str, str]], RequestError | Entry | None]
"""Admit, or the refusal alone that is in its Entry."""


def entry(found: RequestError | Entry | None) -> Entry:
    return found if isinstance(found, Entry) else Entry(found)


class Served:
    def __init__(
        self,
        connections: int = 600,
        admit: Judge = lambda *_: ANYBODY,
        encoder: Callable[[str], EncodeError] = lambda path: openai_error,
        **limits: Any,
    ) -> None:
        self.detached = Detached()
        app = falcon.App(middleware=[RequestIds()])
        app.add_route("/detached", self.detached)
        app.add_route("/plain", Plain())
        app.add_error_handler(RequestError, self._refuse)
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(listener.getsockname()[1])
        self.server = HttpServer(
            app,
            listener,
            connections=connections,
            admit=lambda *asked: entry(admit(*asked)),
            encoder=encoder,
            limits=Limits(**limits),
        )
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()

    @staticmethod
    def _refuse(req: falcon.Request, resp: falcon.Response, error: Exception, params: object) -> None:
        resp.status, resp.data = 400, b"refused"

    def end(self) -> None:
        self.server.stop(0)
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


def until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "did not happen"
        time.sleep(0.002)


def soon(seconds: float, once: Callable[[], float]) -> None:
    """One of ten tries, of which each says how long it took, takes no longer: a busy machine holds up some of them."""
    took: list[float] = []
    while not took or took[-1] >= seconds:
        assert len(took) < 10, took
        took.append(once())


POST = raw.request("POST", "/detached", {})


@contextmanager
def serving(**settings: Any) -> Iterator[Served]:
    """A server; when it ends no body is left in its pool."""
    served = Served(**settings)
    try:
        yield served
        pool = served.server.pool
        until(lambda: pool._free == served.server.limits.bodies)
    finally:
        served.end()


def last_word(sock: socket.socket) -> bytes:
    """Everything until the server closes."""
    data = b""
    with suppress(ConnectionError):
        while more := sock.recv(65536):
            data += more
    return data


def encoder(path: str) -> EncodeError:
    """Of the dialect that has /detached, and of whoever else."""

    def encode(error: RequestError) -> bytes:
        return b'{"mine":%d}' % error.status

    return encode if path == "/detached" else openai_error
