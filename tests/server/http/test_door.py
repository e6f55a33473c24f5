"""Who comes in, over sockets: what a request without a key costs, and who is served while others attack."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import falcon
import orjson
import pytest
from llmcore.api.counters import TALLIES
from llmcore.api.errors import RequestError
from llmcore_devtools import sockets as raw
from llmcore_server.http.access import HostNames, SameOrigin, network
from llmcore_server.http.admission import Gate
from llmcore_server.http.app import build_app
from llmcore_server.http.front import Route
from llmcore_server.http.reply import Reply
from llmcore_server.http.streaming import HttpServer, Limits, detach
from llmcore_server.limits import Bounds
from llmcore_server.messages import Intake
from llmcore_server.settings import Access
from served import PATIENCE, last_word, until

KEYS = ("sk-first", "sk-second")
ATTACKERS = 33
BODY = 256 << 10
"""What an attacker announces, of which it keeps one byte back."""
POOL = 4 << 20
PAGE = "https://app.example"
EXPECT = "Expect: 100-continue\r\n"


def key(name: str) -> str:
    return f"Authorization: Bearer {name}\r\n"


def begun(more: str = "", path: str = "/echo", method: str = "POST", length: int | None = BODY) -> bytes:
    """The head of a request whose body is to follow; in chunks without `length`."""
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{more}{framing}\r\n\r\n".encode()


class Echo:
    """Says how much has come."""

    def on_get(self, req: falcon.Request, resp: falcon.Response, **fields: str) -> None:
        resp.data = b"a page"

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        resp.data = b"%d" % len(req.bounded_stream.read())


class Later:
    """Streams, from a thread of its own, when it is told to."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        self.replies.append(detach(req.env, resp))


class Only:
    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        resp.data = b"posted"


def flat(error: RequestError) -> bytes:
    return orjson.dumps({"message": error.message, "status": error.status})


class House:
    """A server of an application with doors."""

    def __init__(self, access: Access, guard: SameOrigin | None, gate: Gate | None, **limits: Any) -> None:
        self.later = Later()
        routes = [Route("/echo", Echo(), flat), Route("/queued", Only(), queued=True), Route("/health", Echo())]
        routes += [Route("/only", Only()), Route("/later", self.later), Route("/stream/{name}", Echo())]
        app = build_app([(route, "demo") for route in routes], access, guard=guard, gate=gate)
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(listener.getsockname()[1])
        self.server = HttpServer(
            app, listener, connections=600, admit=app.admit, encoder=app.encoder, limits=Limits(**limits)
        )
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()

    def ask(self, data: bytes, address: str = "127.0.0.1") -> tuple[int, dict[str, str], bytes]:
        with self.connect(address) as sock:
            sock.sendall(data)
            return raw.read_reply(sock)

    @contextmanager
    def connect(self, address: str = "127.0.0.1") -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE, (address, 0)) as sock:
            yield sock

    @property
    def kept(self) -> int:
        """Bytes of bodies that the server holds."""
        return int(self.server.limits.bodies - self.server.pool._free)

    def end(self) -> None:
        self.server.stop(0)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


@contextmanager
def serving(
    *keys: str,
    guard: SameOrigin | None = None,
    gate: Gate | None = None,
    access: Mapping[str, Any] | None = None,
    **limits: Any,
) -> Iterator[House]:
    house = House(Access(api_keys=keys, **(access or {})), guard, gate, **{"bodies": POOL, **limits})
    try:
        yield house
        until(lambda: not house.kept)
    finally:
        house.end()


def attack(house: House, stack: ExitStack, more: str = "", addresses: int = 1, length: int | None = BODY) -> None:
    """33 connections that announce a body each and stop one byte short of it."""
    body = b"x" * (BODY - 1)
    for i in range(ATTACKERS):
        sock = stack.enter_context(house.connect(f"127.0.0.{1 + i % addresses}"))
        with suppress(ConnectionError):
            sock.sendall(begun(more, length=length) + (b"" if length else b"%X\r\n" % BODY) + body)


# --- requests without a key ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [BODY, None])
@pytest.mark.parametrize("more", ["", EXPECT, key("sk-third"), "x-api-key: sk-third\r\n"])
def test_a_request_without_a_key_is_refused_by_its_head(more: str, length: int | None) -> None:
    with serving(*KEYS) as house:
        for method in ("POST", "HEAD", "PUT", "OPTIONS"):
            with house.connect() as sock:
                sock.sendall(begun(more, method=method, length=length))
                answer = last_word(sock)
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 401 ") and b"\r\nWWW-Authenticate: Bearer" in head
            assert b"\r\nConnection: close" in head and b"\r\nX-Request-Id: " in head
            assert method == "HEAD" or json.loads(body)["status"] == 401
            assert method != "HEAD" or body == b""


@pytest.mark.parametrize(("length", "body"), [(1 << 40, b""), (None, b"not a size\r\n"), (None, b"FFFFFFFF\r\n")])
def test_a_request_without_a_key_hears_nothing_about_its_body(length: int | None, body: bytes) -> None:
    with serving(*KEYS) as house, house.connect() as sock:
        sock.sendall(begun(length=length) + body)
        head, _, _ = last_word(sock).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 401 ") and b"\r\nConnection: close" in head


@pytest.mark.parametrize("path", ["/echo", "/nowhere", "/stream/x", "/docs", "/openapi.json", "//health"])
def test_no_path_is_open_that_is_not_listed(path: str) -> None:
    with serving(*KEYS) as house:
        for method in ("GET", "POST", "DELETE"):
            status, headers, _ = house.ask(begun(path=path, method=method, length=0))
            assert (status, headers["www-authenticate"]) == (401, "Bearer")


def test_who_sends_its_body_all_the_same_can_read_the_refusal() -> None:  # row 67
    body = b"x" * (8 << 20)
    with serving(*KEYS) as house:
        for data in (
            begun(length=len(body)) + body,
            begun(length=None) + b"%X\r\n" % len(body) + body + b"\r\n0\r\n\r\n",
        ):
            assert house.ask(data)[0] == 401
            assert house.kept == 0


def test_a_flood_after_a_refusal_ends() -> None:
    with serving(*KEYS, linger_bytes=1 << 20) as house, house.connect() as sock:
        sock.sendall(begun(length=32 << 20))
        with pytest.raises(ConnectionError):
            for _ in range(512):
                sock.sendall(b"x" * 65536)
    with serving(*KEYS, linger_seconds=0.5, longest_linger_seconds=1.0) as house, house.connect() as sock:
        sock.sendall(begun())
        start = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() - start < PATIENCE:
                sock.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() - start >= 1.0


@pytest.mark.parametrize("length", [BODY, None])
def test_bodies_without_a_key_keep_nobody_out(length: int | None) -> None:  # row 67
    with serving(*KEYS) as house, ExitStack() as stack:
        attack(house, stack, length=length)
        for name in KEYS:
            assert house.kept == 0
            for _ in range(5):
                assert house.ask(begun(key(name)) + b"x" * BODY)[::2] == (200, b"%d" % BODY)
            until(lambda: not house.kept)


@pytest.mark.parametrize(
    "head",
    [
        begun(path="/health"),
        begun(path="/health", length=None) + b"%X\r\n" % BODY,
        begun(path="/health", method="GET"),
        begun(f"Origin: {PAGE}\r\nAccess-Control-Request-Method: POST\r\n", method="OPTIONS"),
    ],
)
def test_what_needs_no_key_keeps_no_body(head: bytes) -> None:  # row 67
    with serving(*KEYS, access={"allow_origins": (PAGE,)}) as house, house.connect() as sock:
        sock.sendall(head + b"x" * (BODY - 1))
        for _ in range(20):
            assert house.kept == 0
            time.sleep(0.005)
        sock.sendall(b"x\r\n0\r\n\r\n" if b"chunked" in head else b"x")
        status, _, body = raw.read_head(sock)
        assert status == (204 if b"OPTIONS" in head else 200)
        assert not body or body in (b"0", b"a page")


def test_a_refusal_behind_another_answer_can_be_read_too() -> None:
    body = b"x" * (4 << 20)
    with serving(*KEYS) as house, house.connect() as sock:
        sock.sendall(begun(key(KEYS[0]), length=3) + b"abc" + begun(length=len(body)) + body)
        answer = last_word(sock)
        assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"401"]


def test_requests_after_a_refusal_are_judged_by_themselves() -> None:
    with serving(*KEYS) as house, house.connect() as sock:
        last = begun("Connection: close\r\n", length=2)
        sock.sendall(begun(length=2) + b"{}" + begun(key(KEYS[1]), length=2) + b"{}" + last + b"{}")
        assert re.findall(rb"HTTP/1.1 (\d+)", last_word(sock)) == [b"401", b"200", b"401"]


def test_a_key_in_a_header_of_its_own() -> None:
    with serving(*KEYS) as house:
        own = "x-api-key: sk-second\r\n"
        for more, status in (
            (own, 200),
            (own + key("sk-first"), 200),
            (own + key("other"), 200),
            (own + own, 400),
            ("x_api_key: sk-second\r\n", 401),
            ("x-api-key: Bearer sk-second\r\n", 401),
            ("x-api-key:\r\n", 401),
        ):
            assert house.ask(begun(more, length=0))[0] == status, more


def test_a_body_behind_a_long_answer_is_not_kept_for_long() -> None:
    with serving(body_seconds=0.2) as house, house.connect() as sock:
        sock.sendall(begun(path="/later", method="GET", length=0) + begun() + b"x" * 10_000)
        until(lambda: house.later.replies and house.kept)
        until(lambda: not house.kept)
        house.later.replies[0].respond(200, b"{}")
        assert re.findall(rb"HTTP/1.1 (\d+)", last_word(sock)) == [b"200"]


# --- shares of the pool ----------------------------------------------------------------------------------------------


def refused_bodies() -> int:
    return sum(n for (name, _), n in TALLIES.figures().counts.items() if name == "refused_bodies")


@pytest.mark.parametrize("length", [BODY, None])
def test_one_key_does_not_fill_the_pool(length: int | None) -> None:  # row 68
    before = refused_bodies()
    with serving(*KEYS) as house, ExitStack() as stack:
        attack(house, stack, key(KEYS[0]), addresses=9, length=length)
        until(lambda: refused_bodies() - before >= ATTACKERS // 2 - 1)
        assert house.kept <= POOL // 2 + BODY
        for _ in range(5):
            assert house.ask(begun(key(KEYS[1])) + b"x" * BODY)[0] == 200
        assert house.ask(begun(path="/health", method="GET", length=0))[0] == 200
        status, headers, _ = house.ask(begun(key(KEYS[0]), length=4 * BODY) + b"x" * (4 * BODY - 1))
        assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")


def test_one_address_does_not_fill_the_pool() -> None:  # row 68
    with serving() as house, ExitStack() as stack:
        attack(house, stack)
        until(lambda: house.kept >= POOL // 2 - BODY)
        for _ in range(5):
            assert house.ask(begun() + b"x" * BODY, "127.0.0.2")[0] == 200


@pytest.mark.parametrize("with_keys", [False, True])
def test_many_clients_that_fill_the_pool_together_make_room(with_keys: bool) -> None:  # row 68
    keys = [f"sk-{i}" for i in range(ATTACKERS + 1)] if with_keys else []
    with serving(*keys, bodies=16 * BODY) as house, ExitStack() as stack:
        for i in range(ATTACKERS):
            sock = stack.enter_context(house.connect(f"127.0.0.{i + 2}"))
            with suppress(ConnectionError):
                sock.sendall(begun(key(keys[i]) if keys else "") + b"x" * (BODY - 1))
        until(lambda: house.kept > 15 * BODY)
        before = refused_bodies()
        for size in (10, 10_000, BODY // 2):
            assert house.ask(begun(key(keys[-1]) if keys else "", length=size) + b"x" * size)[0] == 200
        assert refused_bodies() > before or house.kept < 15 * BODY


def test_an_ipv6_client_is_its_network() -> None:
    assert network("2001:db8:1:2::1") == network("2001:db8:1:2:ffff::7") != network("2001:db8:1:3::1")
    assert (network("::ffff:10.0.0.1"), network("10.0.0.1"), network("")) == ("10.0.0.1", "10.0.0.1", "")


# --- web pages of others ---------------------------------------------------------------------------------------------


def from_page(path: str, method: str = "POST", more: str = "", length: int = 0) -> bytes:
    return begun(f"Origin: {PAGE}\r\n{more}", path, method, length)


@pytest.mark.parametrize("keys", [(), KEYS])
@pytest.mark.parametrize("path", ["/echo", "/only", "/stream/x", "/nowhere", "/health", "/docs", "*"])
def test_every_preflight_of_a_listed_origin_is_answered(path: str, keys: tuple[str, ...]) -> None:
    with serving(*keys, access={"allow_origins": (PAGE,)}) as house:
        for method in ("POST", "GET", "DELETE"):
            asked = f"Access-Control-Request-Method: {method}\r\nAccess-Control-Request-Headers: authorization\r\n"
            with house.connect() as sock:
                sock.sendall(from_page(path, "OPTIONS", asked))
                status, headers, _ = raw.read_head(sock)
            assert status == 204
            assert headers["access-control-allow-origin"] == PAGE
            assert headers["access-control-allow-methods"] == method
            assert headers["access-control-allow-headers"] == "authorization"


def test_a_page_can_read_why_it_was_refused() -> None:
    gate = Gate(Bounds(waiting=4, tokens=100, per_key=3, open=6))
    gate.hear(Intake(full=True, retry_after=7))
    guard = SameOrigin(HostNames(()), (PAGE,))
    known = key(KEYS[0])
    origins = {"allow_origins": (PAGE,)}
    with serving(*KEYS, gate=gate, guard=guard, access=origins, body_seconds=0.3, rate=1 << 20) as house:
        for data, status in (
            (from_page("/echo"), 401),
            (from_page("/echo", length=BODY), 401),
            (from_page("/queued", more=known), 429),
            (from_page("/nowhere", more=known), 404),
            (from_page("/only", "GET", known), 405),
            (from_page("/echo", more=known, length=33 << 20), 413),
            (from_page("/echo", more=known, length=9) + b"x", 408),
            (from_page("/echo", more=known).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + b"x", 400),
            (from_page("/echo").replace(b"Host: localhost", b"Host: evil.test"), 403),
        ):
            got, headers, _ = house.ask(data)
            assert got == status
            assert headers["access-control-allow-origin"] == PAGE, status
            assert headers["vary"] == "Origin" and "retry-after" in headers["access-control-expose-headers"]
        assert "access-control-allow-origin" not in house.ask(begun("Origin: https://evil.test\r\n", length=0))[1]


# --- HEAD ------------------------------------------------------------------------------------------------------------


def test_head_is_get_without_a_body() -> None:
    with serving() as house, house.connect() as sock:
        for path, status in (("/echo", 200), ("/stream/x", 200), ("/only", 405), ("/nowhere", 404)):
            heads = []
            for method in ("HEAD", "GET"):
                sock.sendall(begun(path=path, method=method, length=0))
                heads.append(raw.read_head(sock) if method == "HEAD" else raw.read_reply(sock))
            (got, headers, body), (of_get, get_headers, _) = heads
            assert (got, body) == (of_get, b"") == (status, b"")
            if status != 404:  # this error names the method
                assert headers["content-length"] == get_headers["content-length"]
        assert "HEAD" in raw.call(house.port, "DELETE", "/echo")[1]["allow"]


@pytest.mark.parametrize("stream", [False, True])
def test_head_of_what_is_answered_later(stream: bool) -> None:
    with serving() as house, house.connect() as sock:
        sock.sendall(begun(path="/later", method="HEAD", length=0))
        until(lambda: house.later.replies)
        (reply,) = house.later.replies
        if stream:
            reply.stream(b"data: x\n\n")
            reply.end()
            head, _, body = last_word(sock).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200") and b"text/event-stream" in head and body == b""
            return
        reply.respond(503, b'{"status":"error"}')
        status, headers, body = raw.read_head(sock)
        assert (status, headers["content-length"], body) == (503, "18", b"")
        sock.sendall(begun(path="/echo", method="GET", length=0))
        assert raw.read_reply(sock)[2] == b"a page"
