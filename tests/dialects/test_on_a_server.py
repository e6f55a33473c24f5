"""The dialects over a real socket: the openai client and bare bytes, against a server whose engine echoes prompts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from llmcore_devtools.server import FAKE_ENGINE, RunningServer, serving
from llmcore_devtools.sockets import call, connect, read_head, request, unchunk
from llmcore_devtools.tokenizer import write_tokenizer

USER: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = write_tokenizer(tmp_path_factory.mktemp("models") / "echo")
    with serving(model, engine_module=FAKE_ENGINE) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def load(server: RunningServer) -> float:
    return float(json.loads(call(server.port, "GET", "/token_load")[2])["current_load"])


def wait_until_idle(server: RunningServer, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while load(server) and time.monotonic() < deadline:
        time.sleep(0.05)
    # `taken` says how old the figures are
    assert load(server) == 0, call(server.port, "GET", "/server_info")[2]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["echo"]
    assert client.models.retrieve("echo").object == "model"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("some/other")
    assert caught.value.code == "model_not_found"


def test_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="echo", messages=USER, max_tokens=7)
    assert answer.choices[0].message.content == "user\nhe"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 7
    assert answer._request_id


def test_a_streamed_chat_is_the_same(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="echo", messages=USER, max_tokens=7, n=2, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    for index in (0, 1):
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert "".join(choice.delta.content or "" for choice in mine) == "user\nhe"
        assert mine[-1].finish_reason == "length"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 14


def test_a_text_stop_frees_the_request(client: openai.OpenAI, server: RunningServer) -> None:
    answer = client.chat.completions.create(model="echo", messages=USER, stop=["ello"])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("user\nh", "stop")
    wait_until_idle(server)


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="echo", prompt=["ab", "cd"], max_tokens=4)
    assert [choice.text for choice in answer.choices] == ["abab", "cdcd"]
    stream = client.completions.create(model="echo", prompt="😀", max_tokens=4, stream=True)
    *pieces, last = [piece.choices[0].text for piece in stream]
    assert "".join(pieces) == "😀😀" and last == "", "who is slow gets both in one"


def test_errors_reach_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="echo", messages=USER, temperature=9)
    assert (caught.value.param, caught.value.code) == ("temperature", "invalid_value")
    assert caught.value.request_id
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="echo", prompt="x" * 5000)
    assert caught.value.code == "context_length_exceeded"


def test_native_bytes(server: RunningServer) -> None:
    body = {"inputs": "ab", "parameters": {"max_new_tokens": 3}}
    status, _, data = call(server.port, "POST", "/generate", body)
    assert (status, json.loads(data)["generated_text"]) == (200, ["aba"])
    status, headers, data = call(server.port, "POST", "/generate_stream", body)
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert headers["x-request-id"]
    events = data.split(b"\n\n")
    assert events.pop() == b""
    assert all(event.startswith(b'data:{"token":') for event in events)
    assert [json.loads(event[5:])["token"]["text"] for event in events] == ["a", "b", "a"]
    assert [json.loads(event[5:])["finish_reason"] for event in events] == [None, None, "length"]


def test_native_requests_without_a_body_error(server: RunningServer) -> None:
    status, _, data = call(server.port, "POST", "/generate", {"inputs": "ab"})
    assert (status, json.loads(data)["message"]) == (400, "parameters: this field is required")


def test_a_client_that_leaves_frees_its_slots(server: RunningServer) -> None:
    body = {"prompt": "x" * 50, "max_tokens": 3000, "stream": True}
    with connect(server.port) as sock:
        sock.sendall(request("POST", "/v1/completions", body))
        status, _, rest = read_head(sock)
        assert status == 200
        while b"data:" not in rest:
            rest += sock.recv(65536)
    wait_until_idle(server)


def test_a_stream_ends_with_done_and_a_last_chunk(server: RunningServer) -> None:
    body = {"prompt": "ab", "max_tokens": 2, "stream": True}
    with connect(server.port) as sock:
        sock.sendall(request("POST", "/v1/completions", body))
        _, headers, rest = read_head(sock)
        while not rest.endswith(b"0\r\n\r\n"):
            rest += sock.recv(65536)
    assert headers["cache-control"] == "no-cache"
    assert unchunk(rest).endswith(b"data: [DONE]\n\n")
