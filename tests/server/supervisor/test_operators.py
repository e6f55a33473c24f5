"""What operators ask of a running server: another engine, keys, other origins, TLS, pushed figures, logs."""

from __future__ import annotations

import base64
import os
import re
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
from llmcore.api.errors import ConfigError
from llmcore_devtools import sockets
from llmcore_devtools.server import FAKE_ENGINE, RunningServer, ServerFailed, serving
from llmcore_devtools.tokenizer import write_tokenizer
from llmcore_server.http.certificate import server_context
from llmcore_server.settings import Access, Push
from llmcore_server.supervisor.figures import Pusher
from llmcore_server.supervisor.restart import BackOff

ECHO = str(Path(__file__).parent / "echo.py")
TLS = Path(__file__).parents[2] / "data" / "tls"
WORKER = "llmcore_server.http.worker"
TERMINATOR = "llmcore_server.http.tls"

fresh = partial(serving, engine_module=FAKE_ENGINE, plugins=(ECHO,))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_tokenizer(tmp_path_factory.mktemp("model"))
    (directory / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    return directory


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.05)


def ready(server: RunningServer) -> bool:
    try:
        return sockets.call(server.port, "GET", "/readiness")[0] == 200
    except ConnectionError:  # of a worker that was replaced with its engine; clients try again
        return False


def idle(page: bytes) -> bool:
    """Whether `/metrics` says that no request holds KV."""
    return re.search(rb"^llmcore_kv_live 0\.0$", page, re.M) is not None


# --- another engine --------------------------------------------------------------------------------------------------


def test_a_dead_engine_is_replaced(model: Path) -> None:
    with fresh(model, health_monitor=True, httpserver_workers=2, restart_pause=3) as server:
        victim = server.children()[FAKE_ENGINE]
        workers = {pid for name, pid in server.children().items() if name.startswith(WORKER)}
        with sockets.connect(server.port) as open_request:
            open_request.sendall(sockets.request("POST", "/echo", {"ids": [1], "n_tokens": 4000}))
            time.sleep(0.1)
            os.kill(victim, signal.SIGKILL)
            assert sockets.read_reply(open_request)[0] == 503
        # the other worker hears of it within a second
        until(lambda: all(sockets.call(server.port, "GET", "/health")[0] == 503 for _ in range(4)))
        assert sockets.call(server.port, "POST", "/echo", {"ids": [1]})[0] == 503
        assert sockets.call(server.port, "GET", "/liveness")[0] == 200
        until(lambda: server.children().get(FAKE_ENGINE) not in (None, victim))
        until(lambda: ready(server))
        until(lambda: len(server.children()) == 4 and not workers & set(server.children().values()))
        for _ in range(20):
            assert orjson.loads(sockets.call(server.port, "POST", "/echo", {"ids": [4, 5]})[2])["ids"][:2] == [4, 5]
        until(lambda: idle(sockets.call(server.port, "GET", "/metrics")[2]))
        assert server.stop() == 0
        log = server.log.read_text()
    assert "the engine was ended by SIGKILL" in log and "another starts in 3 s" in log
    assert "Traceback" not in log


def test_whoever_dies_while_no_engine_is_there_is_replaced(model: Path) -> None:
    with fresh(model, health_monitor=True, restart_pause=60) as server:
        victims = server.children()
        os.kill(victims.pop(FAKE_ENGINE), signal.SIGKILL)
        until(lambda: not ready(server))
        for victim in victims.values():
            os.kill(victim, signal.SIGKILL)
        until(lambda: len(server.children()) == 2 and not set(server.children().values()) & set(victims.values()))
        assert sockets.call(server.port, "POST", "/echo", {"ids": [1]})[0] == 503, "no engine is there yet"
        assert FAKE_ENGINE not in server.children()
        assert server.stop() == 0, "nor need there be one for it to end"


def test_a_hung_engine_is_replaced(model: Path) -> None:
    options = {"fake_hang_token": 13}
    with fresh(model, health_monitor=True, restart_pause=0, watchdog_timeout=2, plugin_options=options) as server:
        with sockets.connect(server.port) as sock:
            sock.sendall(sockets.request("POST", "/echo", {"ids": [13]}))
            assert sockets.read_reply(sock)[0] == 503
        until(lambda: ready(server))
        assert sockets.call(server.port, "POST", "/echo", {"ids": [1]})[0] == 200
        log = server.log.read_text()
        assert "finished no step for 2 s" in log
        stacks = Path(re.search(r"stacks are in (\S+)", log)[1])  # type: ignore[index]
        assert "fake_engine.py" in stacks.read_text()
        assert stacks.stat().st_mode & 0o077 == 0


def test_pauses_double_with_every_death_in_ten_minutes() -> None:
    pauses = BackOff(1.0, 0)
    assert [pauses.pause(float(i)) for i in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert pauses.pause(603.5) == 16, "four of them are older than that"
    assert pauses.pause(2000.0) == 1
    assert [BackOff(0.0, 0).pause(0.0) for _ in range(3)] == [0, 0, 0]


def test_an_engine_that_dies_too_often_is_given_up() -> None:
    pauses = BackOff(1.0, 2)
    assert [pauses.pause(float(i)) for i in range(3)] == [1, 2, None]


def test_a_server_gives_up_with_code_1(model: Path) -> None:
    with fresh(model, health_monitor=True, restart_limit=1, restart_pause=0.1) as server:
        for _ in range(2):
            until(lambda: FAKE_ENGINE in server.children() and ready(server))
            os.kill(server.children()[FAKE_ENGINE], signal.SIGKILL)
            until(lambda: server.process.poll() is not None or not ready(server))
        assert server.process.wait(30) == 1
        assert "another starts in 0.1 s" in server.log.read_text()


# --- keys and origins, as a real client sees them --------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(model: Path) -> Iterator[RunningServer]:
    with fresh(
        model,
        api_keys=("sk-one", "sk-two"),
        allow_origins=("https://app.example",),
        model_name="first,second",
        log_level="DEBUG",
        max_log_len=3,
        chat_template='{"user": "<u>", "assistant": "<a>", "stop_words": ["b"]}',
    ) as server:
        yield server


def connect(server: RunningServer, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)


def test_a_client_without_a_key_is_told(guarded: RunningServer) -> None:
    with pytest.raises(openai.AuthenticationError, match="needs an API key"):
        connect(guarded, "sk-three").models.list()
    for path in ("/echo", "/metrics", "/crash", "/docs", "/nowhere"):
        assert sockets.call(guarded.port, "GET", path)[0] == 401
    assert sockets.call(guarded.port, "GET", "/health")[0] == 200
    assert "sk-" not in guarded.log.read_text()


def test_every_name_of_the_model_is_served(guarded: RunningServer) -> None:
    client = connect(guarded, "sk-two")
    assert [model.id for model in client.models.list()] == ["first", "second"]
    assert client.models.retrieve("second").model_dump()["root"] == "first"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("third")


@pytest.mark.parametrize("stream", [True, False])
def test_a_stream_may_be_read_by_a_listed_origin(guarded: RunningServer, stream: bool) -> None:
    headers = "Origin: https://app.example\r\nAuthorization: Bearer sk-one\r\n"
    body = {"ids": [1], "n_tokens": 2, "stream": stream}
    with sockets.connect(guarded.port) as sock:
        sock.sendall(sockets.request("POST", "/echo", body, headers=headers))
        status, answered, _ = sockets.read_reply(sock)
    assert (status, answered["access-control-allow-origin"]) == (200, "https://app.example")


def test_the_operators_template_and_its_stop_words(guarded: RunningServer) -> None:
    messages: list[Any] = [{"role": "user", "content": "xyb"}]
    client = connect(guarded, "sk-one")
    [choice] = client.chat.completions.create(model="second", messages=messages, max_tokens=50).choices
    assert (choice.message.content, choice.finish_reason) == ("<u>xy", "stop")
    # max_log_len=3, of the text and of the ids
    until(lambda: re.search(r"up to 50 more: '<u>' \[\d+, \d+, \d+\]$", guarded.log.read_text(), re.M))
    assert re.search(r"6 tokens|9 tokens", guarded.log.read_text())


def test_it_is_not_ready_while_no_worker_is_there(guarded: RunningServer) -> None:
    ask = partial(sockets.call, guarded.admin_port, "GET", "/ready")
    until(lambda: ask()[0] == 200)
    os.kill(guarded.children()[WORKER], signal.SIGKILL)
    until(lambda: ask()[0] == 503)
    assert orjson.loads(ask()[2])["reason"] == "no HTTP worker serves"
    until(lambda: ask()[0] == 200)


# --- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def secure(model: Path) -> Iterator[RunningServer]:
    with fresh(
        model, ssl=True, ssl_certfile=str(TLS / "cert.pem"), ssl_keyfile=str(TLS / "key.pem"), api_keys="sk-one"
    ) as server:
        yield server


def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(TLS / "cert.pem"))


@contextmanager
def private(server: RunningServer) -> Iterator[ssl.SSLSocket]:
    plain = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    with trusting().wrap_socket(plain, server_hostname="localhost") as sock:
        yield sock


KEY = "Authorization: Bearer sk-one\r\n"


def test_answers_are_encrypted(secure: RunningServer) -> None:
    assert secure.url == f"https://127.0.0.1:{secure.port}"
    with private(secure) as sock:
        assert sock.version() in ("TLSv1.2", "TLSv1.3")
        for i in range(3):
            sock.sendall(sockets.request("POST", "/echo", {"ids": [i], "n_tokens": 2}, headers=KEY))
            assert orjson.loads(sockets.read_reply(sock)[2])["ids"] == [i, i]


def test_streams_pass_at_once(secure: RunningServer) -> None:
    body = {"ids": [1, 2], "n_tokens": 4000, "stream": True}
    with private(secure) as sock:
        sock.sendall(sockets.request("POST", "/echo", body, headers=KEY))
        status, _, data = sockets.read_head(sock)
        first = data or sock.recv(1 << 16)
        assert status == 200 and b"data: 1" in first and first.count(b"data: ") < 3000
    with private(secure) as sock:
        sock.sendall(sockets.request("POST", "/echo", {**body, "n_tokens": 20}, headers=KEY))
        status, _, data = sockets.read_head(sock)
        while more := sock.recv(1 << 16):
            data += more
    assert data.endswith(b"0\r\n\r\n") and data.count(b"data: ") == 20


def test_who_sends_a_body_without_a_key_can_read_the_refusal(secure: RunningServer) -> None:
    body = b"x" * (8 << 20)
    for _ in range(3):
        with private(secure) as sock:
            sock.sendall(f"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            assert sockets.read_reply(sock)[0] == 401


def test_a_client_that_leaves_is_noticed(secure: RunningServer) -> None:
    def live() -> bool:
        with private(secure) as sock:
            sock.sendall(sockets.request("GET", "/metrics", headers=KEY))
            return not idle(sockets.read_reply(sock)[2])

    with private(secure) as sock:
        sock.sendall(sockets.request("POST", "/echo", {"ids": [1], "n_tokens": 4000}, headers=KEY))
        until(live)
    until(lambda: not live())


def test_what_is_no_tls_gets_nothing(secure: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", secure.port), timeout=60) as sock:
        sock.sendall(sockets.request("GET", "/health"))
        data = b""
        while more := sock.recv(1 << 16):
            data += more
    assert b"HTTP" not in data and b"Ok" not in data


def test_the_end_of_tls_is_replaced_when_it_dies(secure: RunningServer) -> None:
    victim = secure.children()[TERMINATOR]
    os.kill(victim, signal.SIGKILL)
    until(lambda: secure.children().get(TERMINATOR) not in (None, victim))
    with private(secure) as sock:
        sock.sendall(sockets.request("GET", "/health"))
        assert sockets.read_reply(sock)[0] == 200


@pytest.mark.parametrize(
    ("certificate", "key", "message"),
    [
        ("nowhere.pem", "key.pem", "--ssl_certfile .*nowhere.pem: No such file"),
        ("cert.pem", "nowhere.pem", "--ssl_keyfile .*nowhere.pem: No such file"),
        ("key.pem", "cert.pem", "do not work together"),
    ],
)
def test_a_certificate_that_cannot_be_used(certificate: str, key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        server_context(Access(ssl=True, ssl_certfile=str(TLS / certificate), ssl_keyfile=str(TLS / key)))


def test_it_ends_the_start(model: Path) -> None:
    with (
        pytest.raises(ServerFailed, match=r"ConfigError: --ssl_certfile nowhere: No such file"),
        fresh(model, ssl=True, ssl_certfile="nowhere", ssl_keyfile="nowhere"),
    ):
        pass


# --- figures ---------------------------------------------------------------------------------------------------------


@dataclass
class Gateway:
    """A Pushgateway that keeps what it gets; `status` is what it answers."""

    status: int = 200
    got: list[tuple[str, str, str | None, str]] = field(default_factory=list)
    address: str = ""


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    found = Gateway()

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            found.got.append(("PUT", self.path, self.headers["Authorization"], body))
            self.send_response(found.status)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Silence."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        found.address = f"127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield found
        server.shutdown()
        thread.join()


def test_a_server_pushes_its_figures(model: Path, gateway: Gateway) -> None:
    labels: dict[str, Any] = {"job_name": "mine", "grouping_key": ["instance=node1", "zone=a/b"]}
    with fresh(model, metric_gateway=gateway.address, push_interval=1, **labels) as server:
        sockets.call(server.port, "POST", "/echo", {"ids": [1], "n_tokens": 2})
        until(lambda: any("llmcore_request_count_total 1.0" in body for *_, body in gateway.got))
        assert server.stop() == 0
    _, path, login, body = gateway.got[-1]
    assert path == "/metrics/job/mine/instance/node1/zone@base64/YS9i" and login is None
    assert "# TYPE llmcore_request_count_total counter" in body
    assert "llmcore_request_first_token_duration_bucket{" in body


PAGE = ("text/plain", b"# HELP x_total Of it.\n# TYPE x_total counter\nx_total 3.0\n")


def test_a_gateway_may_ask_for_a_login(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USERNAME", "user")
    monkeypatch.setenv("PASSWORD", "secret")
    pusher = Pusher(Push(metric_gateway=gateway.address, enable_monitor_auth=True, push_interval=60))
    pusher.offer(PAGE)
    pusher.close()
    [(_, path, login, body)] = gateway.got
    assert path == "/metrics/job/llmcore" and body.encode() == PAGE[1]
    assert login == "Basic " + base64.b64encode(b"user:secret").decode()


def test_a_login_that_is_not_there_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PASSWORD", raising=False)
    with pytest.raises(ConfigError, match="--enable_monitor_auth needs the variables USERNAME and PASSWORD"):
        Pusher(Push(metric_gateway="127.0.0.1:9", enable_monitor_auth=True))


def test_a_gateway_that_fails_is_named_once(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    gateway.status = 500
    pusher = Pusher(Push(metric_gateway=gateway.address, push_interval=60))
    pusher.offer(PAGE)
    pusher._push()
    pusher._push()
    assert caplog.text.count("figures cannot be pushed to") == 1
    gateway.status = 200
    with caplog.at_level("INFO"):
        pusher.close()
    assert "figures are pushed to" in caplog.text
