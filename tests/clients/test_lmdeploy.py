"""LMDeploy's own client and registration with `llmcore route`, and llmcore's servers with LMDeploy's own proxy."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from llmcore_devtools.server import FAKE_ENGINE, RunningServer, serving
from llmcore_devtools.tokenizer import write_tokenizer
from routed import Routed, routed

from . import lmdeploy_parts

PATIENCE = 240.0
"""Seconds for a start that imports torch, on a machine that does much else."""
STOP = {"stop": ["<END>"]}
SAID = "A word, and another."


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextmanager
def their_proxy(port: int) -> Iterator[None]:
    """LMDeploy's proxy."""
    process = subprocess.Popen([sys.executable, lmdeploy_parts.__file__, str(port)])
    try:
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE)


@pytest.fixture(scope="module")
def echo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tokenizer(tmp_path_factory.mktemp("models") / "echo")
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}<END>")
    return folder


@pytest.fixture(scope="module")
def route(echo_server: RunningServer) -> Iterator[Routed]:
    """A router with one server, which registered as LMDeploy's servers do."""
    register = lmdeploy_parts.part("lmdeploy.serve.openai.api_server").register_to_proxy
    with routed() as router:
        register(
            SimpleNamespace(
                proxy_url=router.router.url,
                api_server_url=echo_server.url,
                async_engine=SimpleNamespace(engine=SimpleNamespace(), model_name="echo"),
                engine_config=SimpleNamespace(role=SimpleNamespace(value=1)),
            )
        )
        assert router.get("/nodes/status")[1][echo_server.url]["models"] == ["echo"]
        yield router


@pytest.fixture(scope="module")
def client(route: Routed) -> Any:
    return lmdeploy_parts.part("lmdeploy.serve.openai.api_client").APIClient(route.router.url)


def test_models(client: Any) -> None:
    assert client.available_models == ["echo"]


def test_a_chat_and_its_stream(client: Any) -> None:
    (whole,) = client.chat_completions_v1("echo", [{"role": "user", "content": SAID}], **STOP)
    assert whole["choices"][0]["message"]["content"] == SAID and whole["usage"]["completion_tokens"]
    parts = list(client.chat_completions_v1("echo", [{"role": "user", "content": SAID}], stream=True, **STOP))
    assert len(parts) > 3
    assert "".join(part["choices"][0]["delta"].get("content") or "" for part in parts) == SAID
    assert parts[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_completion_and_its_stream(client: Any) -> None:
    (whole,) = client.completions_v1("echo", SAID, max_tokens=8)
    parts = list(client.completions_v1("echo", SAID, max_tokens=8, stream=True))
    text = whole["choices"][0]["text"]
    assert text and "".join(part["choices"][0]["text"] for part in parts) == text


def test_an_error_is_one(client: Any) -> None:
    (answer,) = client.chat_completions_v1("other", [{"role": "user", "content": SAID}])
    assert answer["error"]["code"] == "model_not_found"


def test_our_server_at_their_proxy(echo_model: Path) -> None:
    """It registers, answers through the proxy, comes back to a proxy that starts again, and deregisters."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    body = {"model": "echo", "messages": [{"role": "user", "content": SAID}], **STOP}

    def nodes() -> dict[str, Any]:
        """None while the proxy starts."""
        try:
            found: dict[str, Any] = requests.get(f"{url}/nodes/status", timeout=PATIENCE).json()
        except requests.ConnectionError:
            return {}
        return found

    url = f"http://127.0.0.1:{port}"
    with serving(echo_model, engine_module=FAKE_ENGINE, proxy_url=url, model_name=("echo",)) as server:
        with their_proxy(port):
            until(nodes)
            assert nodes()[server.url]["models"] == ["echo"]
            answer = requests.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE).json()
            assert answer["choices"][0]["message"]["content"] == SAID
        with their_proxy(port):
            until(nodes)
            assert list(nodes()) == [server.url]
            assert server.stop() == 0
            assert nodes() == {}
