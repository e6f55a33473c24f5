"""How many connections the end of TLS takes, and that nobody beyond that waits in silence."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import orjson
import pytest
from llmcore.api.errors import ConfigError
from llmcore.config import Config
from llmcore_devtools import sockets
from llmcore_devtools.server import FAKE_ENGINE, RunningServer, serving
from llmcore_devtools.tokenizer import write_tokenizer
from llmcore_server.http import tls
from llmcore_server.http.access import announced

TLS = Path(__file__).parents[2] / "data" / "tls"

secure = partial(
    serving, engine_module=FAKE_ENGINE, ssl=True, ssl_certfile=str(TLS / "cert.pem"), ssl_keyfile=str(TLS / "key.pem")
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


def connect(port: int, stack: ExitStack) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(TLS / "cert.pem")
    bare = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
    return stack.enter_context(context.wrap_socket(bare, server_hostname="localhost"))


@pytest.mark.parametrize(("option", "status"), [("max_connections", 503), ("max_connections_per_address", 429)])
def test_one_too_many_is_told_so(model: Path, option: str, status: int) -> None:  # row 13
    with secure(model, **{option: 3}) as server, ExitStack() as stack:
        for _ in range(3):
            sock = connect(server.port, stack)
            sock.sendall(sockets.request("GET", "/liveness"))
            assert sockets.read_reply(sock)[0] == 200
        last = connect(server.port, stack)
        last.sendall(sockets.request("GET", "/liveness"))
        found, headers, body = sockets.read_reply(last)
        assert (found, headers["retry-after"], headers["connection"]) == (status, "1", "close")
        assert orjson.loads(body)["error"]["code"] == "server_overloaded"
        assert last.recv(10) == b""
        counted = f'llmcore_error_answers_total{{code="server_overloaded",status="{status}"}} 1.0'
        until(lambda: counted in metrics(server))


def metrics(server: RunningServer) -> str:
    """The page, from the admin listener: nobody else gets in."""
    return sockets.call(server.admin_port, "GET", "/metrics")[2].decode()


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.02)


def test_it_answers_itself_where_it_may_take_no_more() -> None:
    async def ask() -> bytes:
        server = await asyncio.start_server(tls.Terminator("nowhere", most=0, per_address=0).serve, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"POST /v1/completions HTTP/1.1\r\n" + b"x" * 1_000_000)
        answer = await reader.readuntil(b"}}")
        writer.close()
        server.close()
        return answer

    answer = asyncio.run(asyncio.wait_for(ask(), 60))
    assert answer.startswith(b"HTTP/1.1 503 ") and b"\r\nConnection: close\r\n" in answer


def test_workers_learn_whom_it_carries(tmp_path: Path) -> None:
    carried: list[str] = []

    async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        carried.append(announced(writer.get_extra_info("peername")))
        writer.write(await reader.read(9))
        writer.close()

    async def ask() -> list[bytes]:
        path = str(tmp_path / "http")
        workers = await asyncio.start_unix_server(worker, path)
        terminator = tls.Terminator(path, most=9, per_address=0)
        server = await asyncio.start_server(terminator.serve, "127.0.0.1", 0)
        answers = []
        for host in ("127.0.0.1", "127.0.0.2"):
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), local_addr=(host, 0))
            writer.write(b"hello")
            answers.append(await reader.read())
            writer.close()
        server.close()
        workers.close()
        return answers

    assert asyncio.run(asyncio.wait_for(ask(), 60)) == [b"hello"] * 2
    assert carried == ["127.0.0.1", "127.0.0.2"]


def test_it_takes_what_all_workers_answer_if_it_may_have_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = (1024, 20_000)
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: None)
    one, two, many = (Config(plugin_options={"httpserver_workers": n}) for n in (1, 2, 64))
    assert tls.most_connections(one) == 4096 + 512
    assert tls.most_connections(two) == 2 * (4096 + 512)
    assert tls.most_connections(many) == (20_000 - 640) // 2
    limits = (1024, 4096)
    with pytest.raises(ConfigError, match="ulimit -Hn"):
        tls.most_connections(one)


def test_a_server_that_nobody_can_reach_any_more_ends(model: Path) -> None:
    """With its directory somebody deleted the socket between the end of TLS and the workers."""
    with secure(model) as server:
        files = (Path(os.readlink(file)) for file in Path(f"/proc/{server.process.pid}/fd").iterdir())
        shutil.rmtree(next(file.parent for file in files if file.name == "lock"))
        assert server.process.wait(30) == 1
        assert "ServerError: nobody can connect, and no process can be started" in server.log.read_text()
