"""Rows 19, 39, 56, 57 and 58: what fails while a request is served ends that request, and nobody else notices."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from conftest import MakeHouse
from harness import PATIENCE, House, expected, until
from llmcore_devtools import sockets
from llmcore_devtools.faults import HOOK_REQUEST_ID, fault, later

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
ENGINE = "llmcore_server.engine.process"

STATUS = {"tokenize": 500, "forward": 500, "sample": 500, "nan": 500, "illegal": 500, "oom": 503}
"""What comes of a fault that strikes before the first token."""

LAST = ("sample", "nan", "illegal")
"""Those that strike where their token is the prompt's last, which is the template's in a chat."""

LATE = ("forward", "sample", "nan", "illegal", "oom", "detokenize")
"""Faults that strike where a stream has begun."""


@pytest.fixture(scope="module")
def module_house(make_house: MakeHouse) -> Iterator[House]:
    with make_house(httpserver_workers=1) as house:
        yield house


@pytest.fixture
def undisturbed(house: House) -> Iterator[House]:
    """Nobody notices, and no process ends."""
    before = house.processes()
    with house.neighbour():
        yield house
    assert house.processes() == before


def body_for(path: str, prompt: str, *, stream: bool = False, **more: Any) -> dict[str, Any]:
    if path == GENERATE:
        return {"inputs": prompt, "parameters": {"max_new_tokens": 30, **more}}
    asked = {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
    return {**asked, "max_tokens": 30, "temperature": 0, "stream": stream, **more}


def streamed(house: House, path: str, body: dict[str, Any], request_id: str) -> list[Any]:
    """Every event of a stream, up to its end; only the error where it came to the worker with the first token."""
    events: list[Any] = []
    with sockets.connect(house.port) as sock:
        sock.sendall(house.request(path, body, headers={"x-request-id": request_id}))
        status, _, data = sockets.read_reply(sock)
    if status in (500, 503):
        return [json.loads(data)]
    assert status == 200, data
    for event in data.split(b"\n\n"):
        _, found, payload = event.partition(b"data: ")
        if found:
            events.append(payload if payload == b"[DONE]" else json.loads(payload))
    return events


def blamed(house: House, request_id: str) -> list[str]:
    """The lines of the log that say that this request failed."""
    lines = house.server.log.read_text(errors="replace").splitlines()
    return [line for line in lines if re.search(rf"{request_id}\b(?!-)", line) and "ERROR" in line]


def is_blamed_once(house: House, request_id: str) -> None:
    until(lambda: blamed(house, request_id), f"{request_id} is in the log")
    time.sleep(0.05)
    assert len(blamed(house, request_id)) == 1, blamed(house, request_id)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE])
def test_rows_56_57_58_before_the_first_token(undisturbed: House, path: str) -> None:
    house = undisturbed
    for name, expected_status in STATUS.items():
        if path == CHAT and name in LAST:
            continue
        request_id = f"early-{name}{path.replace('/', '-')}"
        answer = house.post(path, body_for(path, f"marrow {fault(name)}"), headers={"x-request-id": request_id})
        status, headers, body = answer
        assert (status, headers["x-request-id"]) == (expected_status, request_id), body
        error = json.loads(body)["error"]
        assert error["type"] == "server_error"
        assert error["code"] == ("server_overloaded" if name == "oom" else "internal_error")
        assert ("retry-after" in headers) == (status == 503)
        assert b"told" not in body, "what a model raises is not for clients"
        is_blamed_once(house, request_id)


def test_rows_56_57_58_in_a_stream(undisturbed: House) -> None:
    house = undisturbed
    for name in LATE:
        request_id = f"late-{name}"
        events = streamed(house, COMPLETIONS, body_for(COMPLETIONS, f"x{later(name)}", stream=True), request_id)
        *begun, last = [event for event in events if event != b"[DONE]"]
        text = "".join(event["choices"][0]["text"] for event in begun)
        assert not begun or len(text) >= 7, "a character per token; who is slow gets several in one event"
        assert last["error"]["type"] == "server_error", last
        is_blamed_once(house, request_id)


def test_rows_56_57_58_where_nothing_is_streamed(undisturbed: House) -> None:
    for name in LATE:
        status, _, body = undisturbed.post(GENERATE, body_for(GENERATE, f"x{later(name)}"))
        assert status == (503 if name == "oom" else 500), body
        assert json.loads(body)["error"]["type"] == "server_error"


def test_row_58_who_is_not_the_cause_is_answered(undisturbed: House) -> None:
    for name in ("forward_once", "oom_once"):
        body = body_for(COMPLETIONS, f"again{fault(name)}")
        (status, _, first), (again, _, second) = (undisturbed.post(COMPLETIONS, body) for _ in range(2))
        assert (status, again) == (200, 200), first
        texts = [json.loads(answer)["choices"][0]["text"] for answer in (first, second)]
        assert texts[0] == texts[1] and len(texts[0]) == 30


def test_row_58_a_crowd_in_a_step_that_finds_no_memory(undisturbed: House) -> None:
    """One is refused, and every one of the others has the answer that it has alone."""
    house = undisturbed
    prompts = [[5, 6, i] for i in range(12)]
    with ExitStack() as stack:
        guilty, *others = (stack.enter_context(sockets.connect(house.port)) for _ in range(13))
        for prompt, sock in zip(prompts, others, strict=True):
            sock.sendall(house.request(COMPLETIONS, {"prompt": prompt, "max_tokens": 60, "temperature": 0}))
        guilty.sendall(house.request(COMPLETIONS, body_for(COMPLETIONS, fault("oom"))))
        assert sockets.read_reply(guilty)[0] == 503
        for prompt, sock in zip(prompts, others, strict=True):
            status, _, body = sockets.read_reply(sock)
            assert (status, json.loads(body)["choices"][0]["text"]) == (200, expected(prompt, 60))


@pytest.mark.parametrize("stream", [False, True])
def test_row_56_a_tool_parser(undisturbed: House, stream: bool) -> None:
    more = {"tools": TOOLS, "stream": stream}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": f"x{later('parser')}"}]
    body = {**body_for(CHAT, "x", **more), "messages": messages, "continue_final_message": True}
    body["add_generation_prompt"] = False
    if stream:
        last = [event for event in streamed(undisturbed, CHAT, body, "tools-1") if event != b"[DONE]"][-1]
        assert last["error"]["type"] == "server_error"
        is_blamed_once(undisturbed, "tools-1")
    else:
        status, _, answer = undisturbed.post(CHAT, body)
        assert (status, json.loads(answer)["error"]["type"]) == (500, "server_error")


def test_row_56_a_hook(undisturbed: House) -> None:
    request_id = f"{HOOK_REQUEST_ID}-1"
    status, _, body = undisturbed.post(COMPLETIONS, body_for(COMPLETIONS, "x"), headers={"x-request-id": request_id})
    assert status == 200, body
    until(lambda: f"failed in on_request_finished of request {request_id}" in undisturbed.server.log.read_text())


GRAMMARS: list[tuple[dict[str, Any], int]] = [
    ({"at": "make"}, 0),
    ({"at": "start"}, 0),
    ({"at": "mask"}, 0),
    ({"at": "mask", "after": 3}, 3),
    ({"at": "accept", "after": 2}, 2),
    ({"at": "finished", "after": 2}, 2),
    ({"at": "mask", "how": "none"}, 0),
    ({"at": "mask", "how": "none", "after": 3}, 3),
]
"""What the logits processor does, and how many tokens come before it."""


def test_rows_39_56_a_grammar_that_raises_or_allows_nothing(undisturbed: House) -> None:
    for args, tokens in GRAMMARS:
        request_id = "grammar-" + "-".join(map(str, args.values()))
        more = {"logits_processors": [{"name": "fault", "args": args}]}
        if tokens:
            events = streamed(undisturbed, COMPLETIONS, body_for(COMPLETIONS, "x", stream=True, **more), request_id)
            *begun, last = [event for event in events if event != b"[DONE]"]
            assert len("".join(event["choices"][0]["text"] for event in begun)) <= tokens
            error = last["error"]
        else:
            headers = {"x-request-id": request_id}
            status, _, body = undisturbed.post(COMPLETIONS, body_for(COMPLETIONS, "x", **more), headers=headers)
            assert status == 500, body
            error = json.loads(body)["error"]
        assert error["type"] == "server_error", error
        is_blamed_once(undisturbed, request_id)


def test_rows_19_34_ids_beyond_the_vocabulary_reach_no_logits(undisturbed: House) -> None:
    for more in (
        {"logit_bias": {"100000": 5}},
        {"logit_bias": {"-1": 5}},
        {"stop_token_ids": [2**31]},
        {"stop_token_ids": [-1]},
        {"allowed_token_ids": [100_000]},
    ):
        status, _, body = undisturbed.post(COMPLETIONS, body_for(COMPLETIONS, "x", **more))
        assert status == 400, (more, body)


def test_failures_are_counted(house: House) -> None:
    before = house.figures()
    for name in ("forward", "nan"):
        assert house.post(COMPLETIONS, body_for(COMPLETIONS, fault(name)))[0] == 500

    def counted(name: str, n: int) -> bool:
        return house.figures()[f"{name}_total"] >= before[f"{name}_total"] + n

    until(lambda: counted("failed_choices", 2) and counted("failed_steps", 2), "they are counted")


def test_row_58_where_the_device_is_lost_every_stream_hears_of_it(make_house: MakeHouse) -> None:
    """It ends the engine, and without `--health_monitor` the server."""
    with make_house(httpserver_workers=2) as house, ExitStack() as stack:
        body = body_for(COMPLETIONS, "x", stream=True, max_tokens=3000)
        streams = [stack.enter_context(sockets.connect(house.port)) for _ in range(6)]
        for sock in streams:
            sock.sendall(house.request(COMPLETIONS, body))
            assert sockets.read_head(sock)[0] == 200
        status, _, answer = house.post(COMPLETIONS, body_for(COMPLETIONS, fault("device")))
        assert (status, json.loads(answer)["error"]["code"]) == (503, "engine_failed")
        for sock in streams:
            data = b""
            while more := sock.recv(1 << 16):
                data += more
            assert b"engine_failed" in data, data[-500:]
        assert house.server.process.wait(PATIENCE) != 0
