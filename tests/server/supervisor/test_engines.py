"""A server with two engines: both serve, requests of a dead one move on, and the server ends with the last."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from llmcore_devtools import sockets
from llmcore_devtools.fake_files import write_tokenizer
from llmcore_devtools.server import FAKE_ENGINE, RunningServer, ServerFailed, serving

ECHO = str(Path(__file__).parent / "echo.py")


def ask(server: RunningServer, ids: list[int]) -> tuple[int, bytes]:
    status, _, body = sockets.call(server.port, "POST", "/echo", {"ids": ids, "n_tokens": len(ids)})
    return status, body


def asked(server: RunningServer, ids: list[int]) -> int:
    """The worker that has answered."""
    return int(orjson.loads(sockets.call(server.port, "POST", "/echo", {"ids": ids, "n_tokens": 1})[2])["pid"])


def tokens_of(server: RunningServer) -> dict[str, int]:
    """The prompt tokens that each engine has got, by the admin listener."""
    return {one["name"]: one["load"]["prompt_tokens"] for one in info(server, server.admin_port)["engines"]}


def info(server: RunningServer, port: int | None = None) -> Any:
    return orjson.loads(sockets.call(port or server.port, "GET", "/server_info")[2])


def names(server: RunningServer) -> dict[str, int]:
    return {process["name"]: process["pid"] for process in info(server)["processes"] if process["alive"]}


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "did not happen"
        time.sleep(0.02)


def busy(server: RunningServer) -> list[str]:
    """The engines at which requests run, by the admin listener."""
    return [one["name"] for one in info(server, server.admin_port)["engines"] if one["load"]["running"]]


def test_streams_move_on_and_the_server_ends_with_its_last_engine(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path / "model")
    options = {"plugin_options": {"fake_step_seconds": 0.02}}
    with serving(model, engine_module=FAKE_ENGINE, dp=2, plugins=(ECHO,), **options) as server:
        assert {"engine-0", "engine-1"} < set(names(server))
        for n in range(1, 7):
            status, body = ask(server, list(range(n)))
            assert (status, orjson.loads(body)["ids"]) == (200, list(range(n)))
        ids = list(range(150))
        with sockets.connect(server.port) as stream:
            stream.sendall(sockets.request("POST", "/echo", {"ids": ids, "n_tokens": 150, "stream": True}))
            until(lambda: len(busy(server)) == 1)
            (first,) = busy(server)
            os.kill(names(server)[first], signal.SIGKILL)
            answer = sockets.read_until(stream, b"data: 149\n\n")
        assert [int(token) for token in re.findall(rb"data: (\d+)\n", answer)] == ids
        assert f"{first} was ended by SIGKILL" in server.log.read_text()
        assert sockets.call(server.admin_port, "GET", "/ready")[0] == 200
        assert sockets.call(server.port, "GET", "/readiness")[0] == 200
        assert {one["name"]: one["serves"] for one in info(server)["engines"]}[first] is False
        page = sockets.call(server.admin_port, "GET", "/metrics")[2].decode()
        (other,) = {"engine-0", "engine-1"} - {first}
        assert f'llmcore_engine_up{{engine="{first}"}} 0.0' in page
        assert f'llmcore_engine_up{{engine="{other}"}} 1.0' in page
        os.kill(names(server)[other], signal.SIGKILL)
        assert server.process.wait(60) == 1
        assert f"{other} was ended by SIGKILL" in server.log.read_text()


def test_a_worker_finds_the_prefix_that_another_one_has_sent(tmp_path: Path) -> None:
    """The first engine holds KV of an open stream. A worker that knew no more would send its prompts to the other."""
    model = write_tokenizer(tmp_path / "model")
    options = {"httpserver_workers": 2, "plugin_options": {"fake_step_seconds": 0.02}}
    with serving(model, engine_module=FAKE_ENGINE, dp=2, plugins=(ECHO,), **options) as server:
        ids = list(range(200))
        with sockets.connect(server.port) as stream:
            stream.sendall(sockets.request("POST", "/echo", {"ids": ids, "n_tokens": 20_000, "stream": True}))
            until(lambda: len(busy(server)) == 1)
            (first,) = busy(server)
            answered: list[int] = []
            until(lambda: answered.append(asked(server, ids)) or len(set(answered)) == 2)
            until(lambda: sum(tokens_of(server).values()) == (1 + len(answered)) * len(ids))
            assert tokens_of(server)[first] == (1 + len(answered)) * len(ids)


def test_one_of_two_engines_is_replaced(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path / "model")
    options = {"health_monitor": True, "restart_pause": 0.1, "routing_strategy": "round_robin"}
    with serving(model, engine_module=FAKE_ENGINE, dp=2, plugins=(ECHO,), **options) as server:
        before = names(server)
        os.kill(before["engine-1"], signal.SIGKILL)
        until(lambda: "another engine serves" in server.log.read_text())
        assert [ask(server, [7, 8, 9])[0] for _ in range(6)] == [200] * 6
        after = names(server)
        assert after["engine-0"] == before["engine-0"] and after["engine-1"] != before["engine-1"]
        assert after["worker-0"] == before["worker-0"], "workers that other engines need stay"
        until(lambda: all(one["load"]["output_tokens"] for one in info(server)["engines"]))


def test_a_balancer_that_does_not_exist_is_named(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path / "model")
    with (
        pytest.raises(ServerFailed, match="no_such"),
        serving(model, engine_module=FAKE_ENGINE, dp=2, routing_strategy="no_such"),
    ):
        pass
