"""The processes of a server, over real sockets, with an engine that echoes prompts."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
from llmcore import __version__
from llmcore_devtools import sockets
from llmcore_devtools.server import FAKE_ENGINE, RunningServer, ServerFailed, serving
from llmcore_devtools.tokenizer import write_tokenizer

ECHO = str(Path(__file__).parent / "echo.py")
WORKER = "llmcore_server.http.worker"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RunningServer]:
    with serving(
        model, engine_module=FAKE_ENGINE, plugins=(ECHO,), httpserver_workers=2, log_stats_interval=1
    ) as server:
        yield server


fresh = partial(serving, engine_module=FAKE_ENGINE, plugins=(ECHO,))


def until(condition: Callable[[], object], seconds: float = 30.0) -> float:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "did not happen"
        time.sleep(0.02)
    return time.monotonic() - start


def metric(server: RunningServer, name: str) -> float:
    page = sockets.call(server.port, "GET", "/metrics")[2].decode()
    return float(re.search(rf"^{name} (\S+)$", page, re.M)[1])  # type: ignore[index]


def open_stream(server: RunningServer, n_tokens: int = 4000) -> socket.socket:
    """A stream that has begun, and of which nothing is read: tokens may come with its head."""
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    sock.sendall(sockets.request("POST", "/echo", {"ids": [1, 2], "n_tokens": n_tokens, "stream": True}))
    assert sock.recv(1 << 16, socket.MSG_PEEK).startswith(b"HTTP/1.1 200 ")
    return sock


def read_all(sock: socket.socket) -> bytes:
    data = b""
    while more := sock.recv(1 << 16):
        data += more
    return data


def gone(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


# --- what it serves --------------------------------------------------------------------------------------------------


def test_answers_whole_and_streamed(server: RunningServer) -> None:
    status, _, body = sockets.call(server.port, "POST", "/echo", {"ids": [5, 6, 7], "n_tokens": 4})
    assert (status, orjson.loads(body)["ids"]) == (200, [5, 6, 7, 5])
    _, _, body = sockets.call(server.port, "POST", "/echo", {"ids": [5, 6], "n_tokens": 3, "stream": True})
    assert body == b"data: 5\n\ndata: 6\n\ndata: 5\n\n"


def test_both_workers_serve_one_socket(server: RunningServer) -> None:
    """Each alone, while the other stands still."""
    workers = {pid for name, pid in server.children().items() if name.startswith(WORKER)}
    for victim in workers:
        os.kill(victim, signal.SIGSTOP)
        try:
            until(lambda victim=victim: "\nState:\tT" in Path(f"/proc/{victim}/status").read_text())
            for _ in range(5):
                assert orjson.loads(sockets.call(server.port, "GET", "/echo")[2])["pid"] in workers - {victim}
        finally:
            os.kill(victim, signal.SIGCONT)
    assert len(workers) == 2


def test_two_hundred_streams_at_once(server: RunningServer) -> None:
    socks = [open_stream(server, 20) for _ in range(200)]
    for sock in socks:
        with sock:
            assert read_all(sock).endswith(b"0\r\n\r\n")
    until(lambda: metric(server, "llmcore_kv_live") == 0)


def test_a_connection_is_kept_between_whole_answers(server: RunningServer) -> None:
    with sockets.connect(server.port) as sock:
        for i in range(5):
            sock.sendall(sockets.request("POST", "/echo", {"ids": [i], "n_tokens": 2}))
            assert orjson.loads(sockets.read_reply(sock)[2])["ids"] == [i, i]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_aborted_and_frees_its_slots(server: RunningServer, stream: bool) -> None:
    until(lambda: metric(server, "llmcore_kv_live") == 0)
    aborted = metric(server, "llmcore_aborts_total")
    with sockets.connect(server.port) as sock:
        sock.sendall(sockets.request("POST", "/echo", {"ids": [1], "n_tokens": 4000, "stream": stream}))
        until(lambda: metric(server, "llmcore_kv_live") > 0)
    until(lambda: metric(server, "llmcore_aborts_total") == aborted + 1)
    until(lambda: metric(server, "llmcore_kv_live") == 0)
    assert metric(server, "llmcore_kv_free") == metric(server, "llmcore_kv_total")


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/health", {"message": "Ok"}),
        ("/healthz", {"message": "Ok"}),
        ("/liveness", {"status": "ok"}),
        ("/readiness", {"status": "ok"}),
    ],
)
def test_health_routes(server: RunningServer, method: str, path: str, expected: dict[str, str]) -> None:
    with sockets.connect(server.port) as sock:
        sock.sendall(sockets.request(method, path))
        status, headers, body = (sockets.read_head if method == "HEAD" else sockets.read_reply)(sock)
    assert (status, headers["content-type"]) == (200, "application/json")
    assert body == b"" if method == "HEAD" else orjson.loads(body) == expected


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
def test_ping_is_a_status_without_a_body(server: RunningServer, method: str) -> None:
    with sockets.connect(server.port) as sock:
        sock.sendall(sockets.request(method, "/ping"))
        status, headers, body = sockets.read_reply(sock)
    assert (status, headers["content-length"], body) == (200, "0", b"")


def test_clients_may_ask_what_runs_here(server: RunningServer) -> None:
    assert orjson.loads(sockets.call(server.port, "GET", "/version")[2]) == {"version": __version__}

    def info(port: int) -> dict[str, Any]:
        found: dict[str, Any] = orjson.loads(sockets.call(port, "GET", "/server_info")[2])
        return found

    until(lambda: info(server.port)["processes"] == info(server.admin_port)["processes"] != [])
    mine, theirs = info(server.port), info(server.admin_port)
    assert list(mine) == list(theirs)
    for engine in (*mine["engines"], *theirs["engines"]):
        assert engine.pop("load").keys() == mine["load"].keys()
    for name in set(mine) - {"uptime_seconds", "load", "summary", "settings"}:
        assert mine[name] == theirs[name], name
    assert theirs["summary"].items() <= mine["summary"].items()
    differing = {name for name in mine["settings"] if mine["settings"][name] != theirs["settings"][name]}
    assert differing <= {"tool_call_parser", "reasoning_parser"}, "workers know which were chosen"
    assert mine["url"] == server.url and mine["ready"] and mine["load"].keys() == theirs["load"].keys()
    assert 0 <= theirs["uptime_seconds"] - mine["uptime_seconds"] < 30


def test_metrics_page(server: RunningServer) -> None:
    sockets.call(server.port, "POST", "/echo", {"ids": [1, 2, 3], "n_tokens": 4})
    until(lambda: metric(server, "llmcore_request_success_total") >= 1)
    status, headers, _ = sockets.call(server.port, "GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=")
    assert metric(server, "llmcore_request_generated_tokens_sum") >= 4
    until(lambda: metric(server, "llmcore_batch_current_size") == 0)


def test_errors_are_json_and_say_nothing_of_this_machine(server: RunningServer) -> None:
    for method, path, status, code in (
        ("GET", "/nowhere", 404, "not_found"),
        ("DELETE", "/echo", 405, "method_not_allowed"),
        ("GET", "/crash", 500, "internal_error"),
    ):
        got, headers, body = sockets.call(server.port, method, path)
        assert (got, headers["content-type"]) == (status, "application/json")
        error = orjson.loads(body)["error"]
        assert error["code"] == code
        assert "secret" not in error["message"] and "Traceback" not in error["message"]
        assert headers["x-request-id"]
    assert sockets.call(server.port, "DELETE", "/echo")[1]["allow"] == "GET, HEAD, POST, OPTIONS"


@pytest.mark.parametrize(("given", "echoed"), [("abc-1._", True), ("x" * 65, False), ("a b", False)])
def test_request_ids(server: RunningServer, given: str, echoed: bool) -> None:
    with sockets.connect(server.port) as sock:
        sock.sendall(sockets.request("GET", "/health", headers=f"x-request-id: {given}\r\n"))
        answered = sockets.read_reply(sock)[1]["x-request-id"]
    assert (answered == given) is echoed
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,64}", answered)


def test_a_worker_imports_neither_torch_nor_transformers(server: RunningServer) -> None:
    modules = orjson.loads(sockets.call(server.port, "GET", "/modules")[2])
    assert "llmcore_server.http.worker" in modules or "llmcore_server.http.bridge" in modules
    assert not {"torch", "transformers", "triton"} & set(modules)
    assert not [name for name in modules if name.startswith(("llmcore.engine.", "llmcore_server.engine."))]
    assert "libtorch" not in Path(f"/proc/{server.children()[WORKER]}/maps").read_text()


def test_command_lines_hold_no_settings(server: RunningServer) -> None:
    for name, pid in server.children().items():
        argv = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        assert argv[1:4] == ["-P", "-m", name.partition("#")[0]]
        assert argv[4].isdigit() and argv[5:] == [""]


def test_throughput_is_logged(server: RunningServer) -> None:
    sockets.call(server.port, "POST", "/echo", {"ids": [1], "n_tokens": 5})
    until(lambda: "tok/s out" in server.log.read_text())


# --- how it stops ------------------------------------------------------------------------------------------------


def run_directory(server: RunningServer) -> Path:
    """Where a running server keeps its sockets."""
    files = (Path(os.readlink(file)) for file in Path(f"/proc/{server.process.pid}/fd").iterdir())
    (directory,) = (file.parent for file in files if file.name == "lock")
    return directory


def test_a_terminal_that_closes_lets_requests_finish(model: Path) -> None:
    with fresh(model) as server:
        children = server.children()
        with open_stream(server, 100) as stream:
            server.process.send_signal(signal.SIGHUP)
            data = read_all(stream)
        assert data.endswith(b"0\r\n\r\n") and data.count(b"data: ") == 100
        assert server.process.wait(30) == 0
        assert all(gone(pid) for pid in children.values())


@pytest.mark.parametrize(("zmq_mode", "sockets_there"), [("ipc:///tmp/", True), ("tcp://", False)])
def test_its_private_directory_goes_with_it(model: Path, zmq_mode: str, sockets_there: bool) -> None:
    with fresh(model, zmq_mode=zmq_mode) as server:
        directory = run_directory(server)
        assert directory.parent == (Path("/tmp") if sockets_there else server.temporary)
        assert directory.stat().st_mode & 0o777 == 0o700
        assert (directory / "engine-0").exists() == sockets_there
        assert sockets.call(server.port, "POST", "/echo", {"ids": [1]})[0] == 200
        assert server.stop() == 0
    assert not directory.exists()


# --- how it does not start ---------------------------------------------------------------------------------------


def refusal(model: Path, **options: Any) -> str:
    """What a server that does not start has to say."""
    with pytest.raises(ServerFailed) as failed, fresh(model, **options):
        raise AssertionError("it started")
    return str(failed.value)


def test_a_port_in_use_says_which_and_what_to_do(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = refusal(model, port=port)
    assert re.search(rf"ConfigError: port {port} on 127.0.0.1 is in use.*--port", text)


def test_an_engine_that_cannot_start_gives_its_own_reason(model: Path) -> None:
    text = refusal(model, plugin_options={"fake_fail": "there is no such thing; use another"})
    assert "ConfigError: there is no such thing; use another" in text
    assert "Traceback" not in text


def test_a_directory_without_tokenizer_is_refused(tmp_path: Path) -> None:
    assert "ConfigError: no tokenizer found" in refusal(tmp_path)


def test_two_plugins_that_want_one_path_are_refused(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(Path(ECHO).read_text().replace('name="echo"', 'name="other"'))
    text = refusal(model, plugins=(ECHO, str(other)))
    assert "ConfigError: plugins 'echo' and 'other' both want the route /echo" in text


def test_an_engine_that_dies_without_a_word_is_reported(model: Path) -> None:
    text = refusal(model, engine_module="llmcore.no_such_module")
    assert "StartupError: engine-0 could not start: it ended with exit code 1" in text


def test_sigterm_while_the_engine_loads(model: Path) -> None:
    start = time.monotonic()
    with pytest.raises(ServerFailed), fresh(model, timeout=1.0, plugin_options={"fake_load_seconds": 60}):
        raise AssertionError("it started")
    assert time.monotonic() - start < 12.0
