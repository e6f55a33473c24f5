"""A server registers at its proxy, and leaves it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from llmcore.api.errors import ConfigError
from llmcore.registry.loader import configure
from llmcore_server.settings import Registration
from llmcore_server.supervisor import registration
from llmcore_server.supervisor.registration import Registered, own_url


class Proxy:
    """Keeps what is posted. `answers`: those to come, then the last one again and again. `known`: its nodes."""

    def __init__(self, *answers: tuple[int, Any]) -> None:
        self.answers = [*answers]
        self.got: list[tuple[str, Any, str | None]] = []
        self.known: Any = {}
        self.asked: list[str] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                proxy.got.append((self.path, body, self.headers["authorization"]))
                self.respond(*(proxy.answers.pop(0) if len(proxy.answers) > 1 else proxy.answers[0]))

            def do_GET(self) -> None:
                proxy.asked.append(self.path)
                self.respond(200, proxy.known)

            def respond(self, status: int, answer: Any) -> None:
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@contextmanager
def proxying(*answers: tuple[int, Any]) -> Iterator[Proxy]:
    proxy = Proxy(*answers)
    threading.Thread(target=proxy.server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield proxy
    finally:
        proxy.server.shutdown()
        proxy.server.server_close()


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_it_registers_with_lmdeploys_body_and_deregisters() -> None:
    with proxying((200, "Added successfully")) as proxy:
        server = Registered(Registration(proxy_url=f"{proxy.url}/", proxy_key="k"), "127.0.0.1")
        server.begin("http://127.0.0.1:9", ("m", "n"))
        until(lambda: proxy.got)
        added = {"url": "http://127.0.0.1:9", "status": {"models": ["m", "n"], "role": 1}}
        assert proxy.got == [("/nodes/add", added, "Bearer k")]
        server.end()
        assert proxy.got[1:] == [("/nodes/remove", {"url": "http://127.0.0.1:9"}, "Bearer k")]


def test_it_tries_again_and_says_so_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(registration, "FIRST_PAUSE", 0.01)
    failures = [(500, "no"), (200, "Failed to add, please check the input url."), (403, "no")]
    with proxying(*failures, (200, {"message": "Added successfully"})) as proxy, caplog.at_level("INFO"):
        server = Registered(Registration(proxy_url=proxy.url, node_url="http://me:1"), "0.0.0.0")
        server.begin("http://127.0.0.1:9", ("m",))
        until(lambda: "registered at" in caplog.text)
        assert len(proxy.got) == 4 and caplog.text.count("cannot register") == 1
        assert proxy.got[0][1]["url"] == "http://me:1" and proxy.got[0][2] is None
        server.end()


def test_it_registers_again_at_a_proxy_that_no_longer_knows_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registration, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(registration, "LONGEST_PAUSE", 0.01)
    with proxying((200, "Added successfully")) as proxy, caplog.at_level("INFO"):
        proxy.known = {"http://127.0.0.1:9": {"models": ["m"]}, "http://other:1": {}}
        server = Registered(Registration(proxy_url=proxy.url), "127.0.0.1")
        server.begin("http://127.0.0.1:9", ("m",))
        until(lambda: len(proxy.asked) > 3)
        assert len(proxy.got) == 1 and set(proxy.asked) == {"/nodes/status?url=http%3A%2F%2F127.0.0.1%3A9"}
        proxy.known = {"http://other:1": {}}
        until(lambda: len(proxy.got) == 2)
        assert proxy.got[1] == proxy.got[0]
        proxy.known = False
        until(lambda: "no list of nodes: false" in caplog.text)
        proxy.known = {"http://127.0.0.1:9": None}
        server.end()
        assert proxy.got[-1][0] == "/nodes/remove" and caplog.text.count("cannot register") == 1


def test_a_proxy_that_is_not_there_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registration, "FIRST_PAUSE", 60.0)
    monkeypatch.setattr(registration, "FAREWELL_SECONDS", 60.0)
    with proxying((200, "")) as proxy:
        pass
    server = Registered(Registration(proxy_url=proxy.url), "127.0.0.1")
    server.begin("http://127.0.0.1:9", ("m",))
    until(lambda: "cannot register" in caplog.text)
    began = time.monotonic()
    server.end()
    assert time.monotonic() - began < 30.0
    Registered(Registration(), "127.0.0.1").end()


def test_a_server_on_every_address_names_the_one_that_reaches_the_proxy() -> None:
    assert own_url("https://127.0.0.1:9", "0.0.0.0", "http://127.0.0.1:1") == "https://127.0.0.1:9"
    assert own_url("http://10.0.0.1:9", "10.0.0.1", "http://127.0.0.1:1") == "http://10.0.0.1:9"


@pytest.mark.parametrize("url", ["proxy:80", "ftp://h", "http://u:SECRET@h", "http://h:x", "http://h?q", "http://"])
@pytest.mark.parametrize("name", ["proxy_url", "node_url"])
def test_a_url_that_cannot_work(name: str, url: str) -> None:
    with pytest.raises(ConfigError, match="write http://HOST:PORT") as caught:
        configure(**{"proxy_url": "http://h", name: url})
    assert "SECRET" not in str(caught.value)


def test_a_key_needs_a_proxy(caplog: pytest.LogCaptureFixture) -> None:
    configure(proxy_key="k")
    assert "proxy_url names no proxy" in caplog.text
    with pytest.raises(ConfigError, match="no header can carry"):
        configure(proxy_url="http://h", proxy_key="a b")
