"""The conversation loop, and the client of OpenAI-compatible servers against a real socket."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from llmcore.api.errors import ConfigError, LlmcoreError
from llmcore.cli import main
from llmcore_server.chat_command import converse, from_model
from llmcore_server.openai_client import Message, Server


class Echo:
    """Answers with the last message, piece by piece; remembers what it was asked. "fail" is an error."""

    def __init__(self) -> None:
        self.asked: list[list[Message]] = []

    def __call__(self, messages: Sequence[Message]) -> Iterator[str]:
        self.asked.append([dict(message) for message in messages])
        if messages[-1]["content"] == "fail":
            raise LlmcoreError("no luck")
        yield from messages[-1]["content"].upper()


def talk(*lines: str, system: str | None = None) -> Echo:
    """A whole conversation."""
    echo = Echo()
    converse(echo, system, iter([f"{line}\n" for line in lines]))
    return echo


def test_the_conversation_is_remembered(capsys: pytest.CaptureFixture[str]) -> None:
    echo = talk("hello", "again", "/exit", "never")
    assert echo.asked[1] == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "HELLO"},
        {"role": "user", "content": "again"},
    ]
    assert len(echo.asked) == 2
    assert "HELLO\n" in capsys.readouterr().out


def test_reset_forgets_and_keeps_the_system_message() -> None:
    echo = talk("a", "/reset", "b", "/system be brief", "c", "/system", "d", system="be kind")
    systems = [[m["content"] for m in asked if m["role"] == "system"] for asked in echo.asked]
    assert systems == [["be kind"], ["be kind"], ["be brief"], []]
    assert all(asked[-1]["role"] == "user" and len(asked) <= 2 for asked in echo.asked)


def test_a_failed_question_is_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    echo = talk("fail", "b", "", "/what")
    assert echo.asked[1] == [{"role": "user", "content": "b"}]
    captured = capsys.readouterr()
    assert "error: no luck" in captured.err
    assert "/exit ends" in captured.out


class Handler(BaseHTTPRequestHandler):
    """One model; streams the words of the last message; refuses temperature 9."""

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "only"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body.get("temperature") == 9:
            self._send(400, json.dumps({"error": {"message": "temperature is too high"}}).encode())
            return
        chunks: list[Any] = [{"choices": [{"delta": {"role": "assistant"}}]}]
        for word in body["messages"][-1]["content"].split():
            chunks.append({"choices": [{"delta": {"content": word}}]})
        if body["messages"][-1]["content"] == "break":
            chunks.append({"error": {"message": "the engine has stopped"}})
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        self._send(200, ("".join(lines) + ": comment\n\ndata: [DONE]\n\n").encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("suffix", ["", "/", "/v1"])
def test_a_server_answers_in_pieces(url: str, suffix: str) -> None:
    server = Server(url + suffix, None)
    assert server.model == "only"
    assert list(server.reply([{"role": "user", "content": "one two"}], {})) == ["one", "two"]


def test_a_servers_errors_are_its_words(url: str) -> None:
    server = Server(url, "only")
    with pytest.raises(LlmcoreError, match="400 temperature is too high"):
        list(server.reply([{"role": "user", "content": "x"}], {"temperature": 9}))
    with pytest.raises(LlmcoreError, match="the engine has stopped"):
        list(server.reply([{"role": "user", "content": "break"}], {}))


def test_settings_mean_nothing_to_a_server(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["chat", "--url", url, "--data_type", "fp32"])
    assert end.value.code == 2
    assert "--data_type has no effect on a server" in capsys.readouterr().err


def test_nobody_to_talk_to(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["chat"])
    assert end.value.code == 2
    assert "give --model_dir PATH, or --url" in capsys.readouterr().err


def test_nobody_there() -> None:
    with pytest.raises(LlmcoreError, match="does not answer"):
        Server("http://127.0.0.1:9", None)
    with pytest.raises(ConfigError, match="write http"):
        Server("localhost", None)


@pytest.mark.parametrize(
    ("generation", "sampling"),
    [
        ({}, {}),
        ({"do_sample": True, "temperature": 0.7, "top_k": 50, "eos_token_id": 2}, {"temperature": 0.7, "top_k": 50}),
        ({"top_p": None}, {}),
    ],
)
def test_a_chat_draws_as_the_model_wants(generation: dict[str, Any], sampling: dict[str, Any]) -> None:
    assert from_model(generation) == sampling
