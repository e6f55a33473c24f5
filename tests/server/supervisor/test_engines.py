"""A server with two engines: both serve, and the end of one is the end of the server unless it is replaced."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import orjson
from llmcore_devtools import sockets
from llmcore_devtools.fake_files import write_tokenizer
from llmcore_devtools.server import FAKE_ENGINE, RunningServer, serving

ECHO = str(Path(__file__).parent / "echo.py")


def ask(server: RunningServer, ids: list[int]) -> tuple[int, bytes]:
    status, _, body = sockets.call(server.port, "POST", "/echo", {"ids": ids, "n_tokens": len(ids)})
    return status, body


def names(server: RunningServer) -> dict[str, int]:
    info = orjson.loads(sockets.call(server.port, "GET", "/server_info")[2])
    return {process["name"]: process["pid"] for process in info["processes"] if process["alive"]}


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "did not happen"
        time.sleep(0.05)


def test_both_engines_answer_and_the_server_ends_with_one(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path / "model")
    with serving(model, engine_module=FAKE_ENGINE, engines=2, plugins=(ECHO,)) as server:
        assert {"engine-0", "engine-1"} < set(names(server))
        for n in range(1, 7):
            status, body = ask(server, list(range(n)))
            assert (status, orjson.loads(body)["ids"]) == (200, list(range(n)))
        os.kill(names(server)["engine-1"], signal.SIGKILL)
        assert server.process.wait(60) == 1
        assert "the engine was ended by SIGKILL" in server.log.read_text()


def test_one_of_two_engines_is_replaced(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path / "model")
    options = {"health_monitor": True, "restart_pause": 0.1}
    with serving(model, engine_module=FAKE_ENGINE, engines=2, plugins=(ECHO,), **options) as server:
        before = names(server)
        os.kill(before["engine-1"], signal.SIGKILL)
        until(lambda: "another engine serves" in server.log.read_text())
        until(lambda: sockets.call(server.port, "GET", "/readiness")[0] == 200)
        assert [ask(server, [7, 8, 9])[0] for _ in range(4)] == [200] * 4
        after = names(server)
        assert after["engine-0"] == before["engine-0"] and after["engine-1"] != before["engine-1"]
