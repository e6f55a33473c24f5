"""Streams that are silent for long get comments, and nobody's answer changes by that."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import falcon
import llmcore_server.http.deadlines
import llmcore_server.http.reply
import openai
import pytest
from llmcore_devtools import sockets
from llmcore_devtools.dialect import FakeTransport
from llmcore_devtools.server import FAKE_ENGINE, RunningServer, serving
from llmcore_devtools.tokenizer import write_tokenizer
from llmcore_server.http.deadlines import Deadlines
from llmcore_server.http.reply import COMMENT, KeepAlive, Reply

SLOW = 0.35
"""Seconds of a step."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = write_tokenizer(tmp_path_factory.mktemp("model"))
    options = {"fake_step_seconds": SLOW}
    with serving(folder, engine_module=FAKE_ENGINE, plugin_options=options, sse_keep_alive=0.1) as running:
        yield running


def ask(server: RunningServer, path: str, body: dict[str, Any]) -> str:
    """The body of an answer."""
    with sockets.connect(server.port) as sock:
        sock.sendall(sockets.request("POST", path, body))
        status, _, answer = sockets.read_reply(sock)
    assert status == 200, answer
    return answer.decode()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "abcd", "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}),
        ("/generate_stream", {"inputs": "abcd", "parameters": {"max_new_tokens": 4}}),
    ],
)
def test_silence_is_filled_with_comments(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    streamed = {**body, "stream": True} if path.startswith("/v1") else body
    events = ask(server, path, streamed).split("\n\n")
    comment = COMMENT.decode().strip()
    assert events.count(comment) >= 3  # three silences between four tokens, with room for three comments each
    assert all(event.startswith("data:") for event in events[:-1] if event != comment)
    assert "keep-alive" not in ask(server, path.removesuffix("_stream"), body)


def test_clients_do_not_see_them(server: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
    (model,) = client.models.list().data
    chunks = list(client.completions.create(model=model.id, prompt="abc", max_tokens=3, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abc"


def test_what_goes_wrong_after_a_comment_is_an_event(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"sse_keep_alive": 0.05, "request_timeout": 0.3, "drain_timeout": 0}
    hanging = {"fake_hang_token": 5}
    with serving(write_tokenizer(tmp_path), engine_module=FAKE_ENGINE, plugin_options=hanging, **settings) as running:
        for path, body in (
            ("/v1/completions", {"prompt": [5], "stream": True}),
            ("/generate_stream", {"inputs": [5], "parameters": {}}),
        ):
            *comments, event, rest = ask(running, path, body).split("\n\n")
            assert set(comments) == {COMMENT.decode().strip()} and rest == ""
            assert json.loads(event.removeprefix("data:"))["error"]["code"] == "request_timeout"


def test_only_silence_counts_and_the_end_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    for module in (llmcore_server.http.deadlines, llmcore_server.http.reply, llmcore_server.http.reply):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    deadlines, transport = Deadlines(), FakeTransport(falcon.Response())
    reply = Reply(transport)
    reply.attach()
    kept = KeepAlive(reply, deadlines, 0.05)
    for _ in range(6):
        now += 0.02
        reply.stream(b"data: x\n\n")
        deadlines.expire()
    assert COMMENT not in transport.sent
    now += 0.06
    deadlines.expire()
    deadlines.expire()
    assert transport.sent.count(COMMENT) == 1
    now += 0.06
    kept.end()
    deadlines.expire()
    assert transport.sent.count(COMMENT) == 1
    assert deadlines.patience(9.0) == 9.0
