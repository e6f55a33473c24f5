"""The same processes with the real engine, on the fake model."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson
import pytest
from llmcore_devtools import sockets
from llmcore_devtools.fake_files import write_fake_model
from llmcore_devtools.server import ENGINE_MODULE, RunningServer, serving


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_model(tmp_path_factory.mktemp("models") / "fake", step_delay=0.002)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RunningServer]:
    with serving(model, httpserver_workers=2, max_total_token_num=4000) as server:
        yield server


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "did not happen"
        time.sleep(0.05)


def metric(server: RunningServer, name: str) -> float:
    page = sockets.call(server.port, "GET", "/metrics")[2].decode()
    return float(re.search(rf"^{name} (\S+)$", page, re.M)[1])  # type: ignore[index]


def idle(server: RunningServer) -> bool:
    """Whether nobody holds KV and none is lost; of one page, as another worker's may be older."""
    page = sockets.call(server.port, "GET", "/metrics")[2].decode()
    live, free, cached, total = (
        float(re.search(rf"^llmcore_kv_{name} (\S+)$", page, re.M)[1])  # type: ignore[index]
        for name in ("live", "free", "cached", "total")
    )
    assert live + free + cached == total
    return live == 0


def generate(server: RunningServer, prompt: str) -> str:
    body = {"inputs": prompt, "parameters": {"max_new_tokens": 30, "ignore_eos": True}}
    status, _, answer = sockets.call(server.port, "POST", "/generate", body)
    assert status == 200, answer
    return str(orjson.loads(answer)["generated_text"][0])


def test_answers_are_the_same_alone_and_in_a_crowd(server: RunningServer) -> None:
    prompts = [f"prompt {i}" for i in range(24)]
    alone = [generate(server, prompt) for prompt in prompts]
    with ThreadPoolExecutor(24) as pool:
        assert list(pool.map(lambda prompt: generate(server, prompt), prompts)) == alone


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_a_client_that_leaves_gives_its_slots_back(server: RunningServer, path: str) -> None:
    aborts = metric(server, "llmcore_aborts_total")
    body = {"inputs": "a long story", "parameters": {"max_new_tokens": 3000, "ignore_eos": True}}
    with sockets.connect(server.port) as sock:
        sock.sendall(sockets.request("POST", path, body))
        until(lambda: metric(server, "llmcore_kv_live") > 0)
    until(lambda: metric(server, "llmcore_aborts_total") > aborts)
    until(lambda: idle(server))
    assert generate(server, "prompt 0")


def test_the_engine_lets_neighbours_have_a_core(server: RunningServer) -> None:
    variables = Path(f"/proc/{server.children()[ENGINE_MODULE]}/environ").read_bytes().split(b"\0")
    assert b"GOMP_SPINCOUNT=10000" in variables
