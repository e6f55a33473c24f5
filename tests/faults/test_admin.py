"""The admin listener: it answers whatever streams and workers do, to nobody it should not, and tells no secret."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeHouse
from harness import KEY, PATIENCE, SECRET, House, allowed, until
from llmcore.config import Config
from llmcore_devtools import sockets
from llmcore_devtools.server import FAKE_ENGINE, RunningServer, serving
from llmcore_devtools.tokenizer import write_tokenizer
from llmcore_server.http.admin.board import Board
from llmcore_server.http.admin.process import OPEN_PATHS, routes

SLEEPER = str(Path(__file__).parent / "sleeper.py")
ECHO = str(Path(__file__).parents[1] / "server" / "supervisor" / "echo.py")
ADMIN = "llmcore_server.http.admin.process"
PASSWORD = "pw-4e1f-of-the-gateway"
PATHS = {"/", "/live", "/ready", "/metrics", "/server_info", "/figures", "/grafana.json", "/dashboard"}
STREAMS = 500


@pytest.fixture(scope="module")
def module_house(make_house: MakeHouse) -> Iterator[House]:
    """With keys, JSON logs, and a gateway whose address holds a password."""
    gateway = f"http://user:{PASSWORD}@127.0.0.1:9/"
    with make_house(keys=True, log_format="json", ready_timeout=1, metric_gateway=gateway) as house:
        house.unlogged.append(PASSWORD)
        yield house


def ask(server: RunningServer, path: str, headers: str = "", method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    """A request to the admin listener; what a HEAD is answered with has no body."""
    with sockets.connect(server.admin_port) as sock:
        sock.sendall(sockets.request(method, path, headers=headers))
        return (sockets.read_head if method == "HEAD" else sockets.read_reply)(sock)


def with_key(house: House, path: str) -> Any:
    status, _, body = ask(house.server, path, house.headers())
    assert status == 200, body
    return json.loads(body)


def metric(page: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", page, re.M)
    return float(found[1]) if found else 0.0


def figures(server: RunningServer, headers: str = "") -> str:
    return ask(server, "/metrics", headers)[2].decode()


def lines(house: House) -> list[dict[str, Any]]:
    return [json.loads(line) for line in house.server.log.read_text().splitlines()]


# --- who may ask ---------------------------------------------------------------------------------------------------


def test_every_route_is_known_and_wants_a_key_unless_it_is_listed(house: House) -> None:
    assert {route.path for route in routes(Config(), Board(1, lambda: None))} == PATHS
    assert {"/", "/live", "/ready", "/dashboard"} == OPEN_PATHS
    for path in sorted(PATHS | {"/nowhere", "/server_info/", "//server_info", "/live/../server_info", "/Live"}):
        for method in ("GET", "HEAD", "POST"):
            status, headers, _ = ask(house.server, path, method=method)
            if path not in OPEN_PATHS:
                assert (status, headers["www-authenticate"]) == (401, "Bearer"), (method, path)
            else:
                assert status == {"POST": 405}.get(method, 302 if path == "/" else 200), (method, path)
            if path in PATHS:
                assert ask(house.server, path, house.headers())[0] in (200, 302)
        assert ask(house.server, path, "Authorization: Bearer wrong\r\n")[0] == (
            401 if path not in OPEN_PATHS else 302 if path == "/" else 200
        )


@pytest.mark.parametrize(
    "headers",
    [
        "Origin: http://evil.test\r\n",
        "Origin: null\r\n",
        "Origin: http://localhost.evil.test\r\n",
        "Origin: http://localhost:1\r\n",
    ],
)
def test_web_pages_of_other_origins_are_refused(house: House, headers: str) -> None:
    for path in sorted(PATHS):
        status, answer, _ = ask(house.server, path, headers + house.headers())
        assert status == 403 and "access-control-allow-origin" not in answer
    assert ask(house.server, "/live", "Origin: http://localhost\r\n")[0] == 200


@pytest.mark.parametrize("host", ["evil.test", "evil.test:8001", "127.0.0.1.evil.test", "localhost.evil.test"])
def test_a_name_that_was_made_to_point_here_is_refused(house: House, host: str) -> None:
    for path in ("/live", "/server_info", "/dashboard"):
        raw = f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{house.headers()}\r\n".encode()
        with sockets.connect(house.server.admin_port) as sock:
            sock.sendall(raw)
            assert sockets.read_reply(sock)[0] == 403


def test_the_page_loads_nothing_and_may_not_be_framed(house: House) -> None:
    _, headers, body = ask(house.server, "/dashboard")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    urls = set(re.findall(rb"https?://[^\"'\s]+", body))
    assert urls == {b"http://www.w3.org/2000/svg"}, "a name of XML, which is never fetched"
    assert b" src=" not in body and b"@import" not in body


# --- no secret anywhere (row 7 of the advisories) --------------------------------------------------------------------


def test_no_secret_is_in_any_answer_log_or_command_line(house: House) -> None:
    secrets = [KEY, "sk-another-0c1d", PASSWORD, SECRET]
    house.post("/v1/completions", {"prompt": SECRET, "max_tokens": 2})
    house.post("/v1/completions", {"prompt": SECRET, "max_tokens": -2})
    texts = {path: ask(house.server, path, house.headers())[2].decode() for path in sorted(PATHS)}
    texts["401"] = ask(house.server, "/server_info", f"Authorization: Bearer {KEY}x\r\n")[2].decode()
    texts["log"] = house.server.log.read_text()
    for name, pid in house.processes().items():
        texts[name] = Path(f"/proc/{pid}/cmdline").read_text() + Path(f"/proc/{pid}/environ").read_text()
    for where, text in texts.items():
        assert not [secret for secret in secrets if secret in text], where
    settings = with_key(house, "/server_info")["settings"]
    assert settings["api_keys"] == "(hidden)"
    assert settings["metric_gateway"] == "http://(hidden)@127.0.0.1:9/"


def test_server_info_says_what_runs(house: House) -> None:
    until(lambda: with_key(house, "/server_info")["ready"], "ready")
    info = with_key(house, "/server_info")
    assert info["model"]["architecture"] == "LlmcoreFake" and info["model"]["max_total_len"] > 0
    assert info["url"] == house.server.url and info["uptime_seconds"] >= 0
    assert info["load"]["kv_live"] + info["load"]["kv_cached"] + info["load"]["kv_free"] == info["load"]["kv_total"]
    assert {one["name"].partition("-")[0] for one in info["processes"]} == {"engine", "worker", "admin"}
    assert all(one["version"] for one in info["plugins"]) and "kernels" in info["summary"]


# --- ready means that a step was done --------------------------------------------------------------------------------


def test_an_idle_engine_does_a_step_when_it_is_asked(house: House) -> None:
    steps: list[int] = []

    def stepped() -> bool:
        """Whether the newest step is newer than the question: one before it may have been heard of late."""
        time.sleep(1.2)  # longer than ready_timeout
        steps.append(with_key(house, "/figures")["now"]["load"]["steps"])
        asked = time.monotonic()
        status, _, body = ask(house.server, "/ready")
        assert (status, json.loads(body)["status"]) == (200, "ok")
        return bool(json.loads(body)["last_step_seconds"] < time.monotonic() - asked)

    until(stepped, "a step for who asks")
    assert with_key(house, "/figures")["now"]["load"]["steps"] == steps[-1] + 1


def test_an_engine_that_cannot_step_is_not_ready_and_is_again(house: House) -> None:
    engine = house.server.children()["llmcore_server.engine.process"]
    os.kill(engine, signal.SIGSTOP)
    try:

        def is_late() -> bool:
            status, _, body = ask(house.server, "/ready")
            return status == 503 and "step" in json.loads(body)["reason"]

        until(is_late, "its last step is too long ago")
        assert ask(house.server, "/live")[0] == 200
    finally:
        os.kill(engine, signal.SIGCONT)
    until(lambda: ask(house.server, "/ready")[0] == 200, "ready again")


# --- never starved ---------------------------------------------------------------------------------------------------


@contextmanager
def drained(socks: list[socket.socket]) -> Iterator[None]:
    """Somebody reads all of them while the block runs."""
    stop = threading.Event()

    def read() -> None:
        with selectors.DefaultSelector() as selector:
            for sock in socks:
                selector.register(sock, selectors.EVENT_READ)
            while not stop.is_set():
                for key, _ in selector.select(0.1):
                    if not key.fileobj.recv(1 << 16):  # type: ignore[union-attr]
                        selector.unregister(key.fileobj)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def is_silent(house: House) -> bool:
    """Whether nothing is answered within half a second."""
    try:
        with sockets.connect(house.port, timeout=0.5) as sock:
            sock.sendall(sockets.request("GET", "/liveness"))
            sockets.read_head(sock)
    except TimeoutError:
        return True
    return False


@pytest.mark.slow
def test_it_answers_within_100_ms_while_500_streams_run_and_every_thread_is_busy(make_house: MakeHouse) -> None:
    limits = {"running_max_req_size": STREAMS, "max_total_token_num": 600_000}
    with make_house(fake={"step_delay": 0.1}, plugins=(f"{SLEEPER}",), settled=False, **limits) as house:
        body = {"prompt": [1, 2, 3], "max_tokens": 1000, "temperature": 0, "stream": True}
        socks = [socket.create_connection(("127.0.0.1", house.port), timeout=PATIENCE) for _ in range(STREAMS)]
        for sock in socks:
            sock.sendall(house.request("/v1/completions", body))
        with drained(socks):
            until(lambda: house.figures()["batch_current_size"] == STREAMS, "500 streams")
            idle = [socket.create_connection(("127.0.0.1", house.port), timeout=PATIENCE) for _ in range(40)]
            for sock in idle:
                sock.sendall(sockets.request("GET", "/sleep?seconds=4"))
            until(lambda: is_silent(house), "no thread of the worker has time")
            times = []
            for path in ("/live", "/ready") * 15:
                start = time.monotonic()
                assert ask(house.server, path)[0] == 200
                times.append(time.monotonic() - start)
            print(f"worst of {len(times)}: {max(times) * 1000:.1f} ms")
            assert sorted(times)[-3] < allowed(0.1), sorted(times)[-5:]
        for sock in (*socks, *idle):
            sock.close()
        until(lambda: house.figures()["batch_current_size"] == 0, "all of them are aborted")


# --- what is counted, and what is logged -----------------------------------------------------------------------------


def test_a_request_has_one_line_with_its_figures_and_never_its_text(house: House) -> None:
    status, _, _ = house.post(
        "/v1/completions", {"prompt": SECRET, "max_tokens": 3}, headers={"X-Request-Id": "line-of-mine"}
    )
    assert status == 200
    until(lambda: [line for line in lines(house) if line.get("request") == "line-of-mine"], "the line")
    [line] = [line for line in lines(house) if line.get("request") == "line-of-mine"]
    assert (line["logger"], line["level"], line["process"]) == ("llmcore.request", "INFO", "worker-0")
    assert (line["finish"], line["cause"], line["output_tokens"]) == ("length", "", 3)
    assert line["prompt_tokens"] > 0 and 0 < line["first_token_seconds"] <= line["duration_seconds"]
    assert re.fullmatch("[0-9a-f]{8}", line["key"]) and line["model"] == "fake"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])


def test_why_requests_end_and_what_is_refused_is_counted(house: House) -> None:
    headers = house.headers()
    left = 'llmcore_request_ended_total{cause="client",finish="abort"}'
    refused = 'llmcore_error_answers_total{code="not_found",status="404"}'
    before = figures(house.server, headers)
    with sockets.connect(house.port) as sock:
        body = {"prompt": [5, 6], "max_tokens": 900, "stream": True}
        sock.sendall(house.request("/v1/completions", body, headers={"X-Request-Id": "one-who-leaves"}))
        sockets.read_until(sock, b"data:", 5)
    assert house.get("/nowhere")[0] == 404
    until(lambda: metric(figures(house.server, headers), left) > metric(before, left), "the abort")
    until(lambda: metric(figures(house.server, headers), refused) > metric(before, refused), "the 404")
    after = figures(house.server, headers)
    gaps = "llmcore_inter_token_duration_count"
    assert metric(after, gaps) > metric(before, gaps)
    [line] = [line for line in lines(house) if line.get("request") == "one-who-leaves"]
    assert (line["finish"], line["cause"]) == ("abort", "client")


def test_figures_of_the_dashboard_move(house: House) -> None:
    def newest() -> dict[str, Any]:
        house.post("/v1/completions", {"prompt": [9] * 40, "max_tokens": 30, "stream": False})
        samples = with_key(house, "/figures")["samples"]
        return samples[-1] if samples else {}

    until(lambda: newest().get("output_rate", 0) > 0 and newest()["between"][2], "a sample with latencies")
    sample = newest()
    assert 0 < sample["between"][0] <= sample["between"][1] <= sample["between"][2]
    assert sample["first_token"][2] > 0 and sample["hit"] is not None
    assert with_key(house, f"/figures?since={sample['time'] + 60}")["samples"] == []
    for wrong in ("x", "nan", "-inf", "1_0"):
        assert ask(house.server, f"/figures?since={wrong}", house.headers())[0] == 400


# --- deaths ----------------------------------------------------------------------------------------------------------


def test_deaths_are_seen_counted_and_mended(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path)
    settings: dict[str, Any] = {"health_monitor": True, "plugins": (ECHO,), "restart_pause": 2.0}
    with serving(model, engine_module=FAKE_ENGINE, **settings) as server:
        until(lambda: ask(server, "/ready")[0] == 200, "ready")
        children = server.children()
        os.kill(children["llmcore_server.http.worker"], signal.SIGKILL)
        until(lambda: metric(figures(server), "llmcore_worker_restarts_total") == 1, "a worker was replaced")
        os.kill(children[FAKE_ENGINE], signal.SIGKILL)
        until(lambda: ask(server, "/ready")[0] == 503, "not ready")
        assert ask(server, "/live")[0] == 200
        until(lambda: metric(figures(server), "llmcore_engine_restarts_total") == 1, "the engine was replaced")
        until(lambda: ask(server, "/ready")[0] == 200, "ready again")
        os.kill(children[ADMIN], signal.SIGKILL)
        until(lambda: server.children().get(ADMIN, children[ADMIN]) != children[ADMIN], "another admin listener")
        until(lambda: ask(server, "/ready")[0] == 200, "it knows")
        assert sockets.call(server.port, "POST", "/echo", {"ids": [1]})[0] == 200
        assert server.stop() == 0


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path)
    with serving(model, engine_module=FAKE_ENGINE, plugins=(ECHO,), disable_admin=True) as server:
        assert server.admin == "" and ADMIN not in server.children()
