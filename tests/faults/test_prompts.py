"""Rows 22 to 29: models, messages, prompts, and how many tokens are asked for."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from bad_input import CHAT, COMPLETION
from conftest import MakeHouse
from harness import House

CONTEXT = 1100
PATHS = ("/v1/completions", "/generate")


@pytest.fixture(scope="module")
def module_house(make_house: MakeHouse) -> Iterator[House]:
    with make_house(max_req_total_len=CONTEXT) as house:
        yield house


def refusal(house: House, path: str, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
    got, _, answer = house.post(path, body)
    assert got == status, answer[:500]
    found: dict[str, Any] = json.loads(answer)["error"]
    return found


@pytest.mark.parametrize("name", ["nobody", "../../etc/passwd", "/etc/passwd", "fake/../fake", "fake:lora", "FAKE"])
def test_row_22_unknown_models(house: House, name: str) -> None:
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        error = refusal(house, path, {**body, "model": name}, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    status, _, _ = house.get(f"/v1/models/{name.replace('..', '%2e%2e')}")
    assert status == 404


def test_row_22_a_name_of_ten_kilobytes(house: House) -> None:
    assert refusal(house, "/v1/completions", {**COMPLETION, "model": "x" * 10_240})["param"] == "model"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "x", "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([None], "messages[0]"),
        ([{"role": "user", "content": "x"}] * 10_000, "messages"),
    ],
)
def test_row_23_messages(house: House, messages: list[Any], param: str) -> None:
    assert refusal(house, "/v1/chat/completions", {"messages": messages, "max_tokens": 1})["param"] == param


@pytest.mark.parametrize(
    ("length", "n_tokens", "status"),
    [
        (CONTEXT - 1, 1, 200),
        (CONTEXT, 1, 400),
        (CONTEXT + 1, 1, 400),
        (CONTEXT + 1, None, 400),
        (CONTEXT - 20, 20, 200),
        (CONTEXT - 20, 21, 400),
        (20, 2**31 - 1, 400),
    ],
)
def test_row_24_the_edge_of_the_context(house: House, length: int, n_tokens: int | None, status: int) -> None:
    prompt = "x" * length
    openai = {} if n_tokens is None else {"max_tokens": n_tokens}
    native = {} if n_tokens is None else {"max_new_tokens": n_tokens}
    for path, body in (
        ("/v1/completions", {"prompt": prompt, "temperature": 0, **openai}),
        ("/generate", {"inputs": prompt, "parameters": native}),
    ):
        got, _, answer = house.post(path, body)
        assert got == status, answer
        if status == 400:
            assert json.loads(answer)["error"]["code"] == "context_length_exceeded"


def test_row_24_small_prompts(house: House) -> None:
    for prompt in (" ", "   \n", "<|im_start|><|im_end|>", "x", [5]):
        status, _, answer = house.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
        assert status == 200, answer
    for prompt in ("", [], [[]]):
        assert refusal(house, "/v1/completions", {"prompt": prompt})["param"] == "prompt"


def test_row_25_a_prompt_of_thirty_megabytes(house: House) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "x " * 15_000_000}),
        ("/generate", {"inputs": "x " * 15_000_000, "parameters": {}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 15_000_000}]}),
    ):
        request = house.request(path, body)
        # Making the body takes this process's time, which the neighbour's thread needs.
        with house.neighbour():
            began = time.monotonic()
            status, _, answer = house.send(request)
            assert time.monotonic() - began < 20.0
        assert (status, json.loads(answer)["error"]["code"]) == (400, "context_length_exceeded")


MANY: dict[str, tuple[str, dict[str, Any], str]] = {
    "texts": ("/v1/completions", {"prompt": ["a"] * 100_000}, "prompt"),
    "ids": ("/v1/completions", {"prompt": [[1]] * 100_000}, "prompt"),
    "empty": ("/v1/completions", {"prompt": [[]] * 100_000}, "prompt"),
    "mixed": ("/v1/completions", {"prompt": ["a", [1], 2] * 33_334}, "prompt"),
    "nested": ("/v1/completions", {"prompt": [[["a"]], {"a": [1, "["]}] * 33_334}, "prompt"),
    "few, mixed": ("/v1/completions", {"prompt": ["a", [1], 2]}, "prompt"),
    "few, nested": ("/v1/completions", {"prompt": [[["a"]], {"a": 1}]}, "prompt"),
    "native": ("/generate", {"inputs": [[1]] * 100_000, "parameters": {}}, "inputs"),
    "messages": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 66_000}, "messages"),
    "tokenize": ("/tokenize", {"prompt": ["a"] * 100_000}, "prompt"),
    "tokenize ids": ("/tokenize", {"prompt": [[1]] * 100_000}, "prompt"),
    "embeddings": ("/v1/embeddings", {"input": ["a"] * 100_000}, "input"),
    "embeddings of ids": ("/v1/embeddings", {"input": [[1]] * 100_000}, "input"),
    "score": ("/v1/score", {"text_1": "a", "text_2": ["a"] * 100_000}, "text_2"),
    "score of lists": ("/v1/score", {"text_1": "a", "text_2": [["a"]] * 100_000}, "text_2"),
    "rerank": ("/v1/rerank", {"query": "a", "documents": ["a"] * 100_000}, "documents"),
    "rerank objects": ("/v1/rerank", {"query": "a", "documents": [{"text": "a"}] * 100_000}, "documents"),
}


def reading_lists() -> float:
    """Seconds of processor time that it takes here to read a list of 100,000 lists."""
    text, took = json.dumps([[1]] * 100_000), []
    for _ in range(5):
        began = time.thread_time()
        json.loads(text)
        took.append(time.thread_time() - began)
    return min(took)


@pytest.mark.parametrize("kind", MANY)
def test_row_26_lists_of_prompts(house: House, kind: str) -> None:
    path, body, param = MANY[kind]
    request = house.request(path, body)
    before, took = house.resident(), []
    for _ in range(5):
        began = house.worker_cpu()
        status, _, answer = house.send(request)
        took.append(house.worker_cpu() - began)
        assert (status, json.loads(answer)["error"]["param"].split("[")[0]) == (400, param), answer
    assert min(took) < 4 * reading_lists(), took
    assert house.resident() - before < 30 << 20


@pytest.mark.parametrize("token", [-1, 100_000, 2**31, 2**64, 1.5, True, None, "x"])
def test_row_27_token_ids(house: House, token: Any) -> None:
    with house.neighbour():
        for path, body in (
            ("/v1/completions", {"prompt": [token]}),
            ("/v1/completions", {"prompt": [[1, token]]}),
            ("/v1/completions", {"prompt": [1, 2, token, 3]}),
            ("/generate", {"inputs": [1, token], "parameters": {}}),
        ):
            if isinstance(token, str) and path == "/v1/completions" and body["prompt"] == ["x"]:
                continue  # a list of one text
            error = refusal(house, path, body)
            assert error["param"].split("[")[0] in ("prompt", "inputs"), error


@pytest.mark.parametrize(
    ("more", "param"),
    [
        *(({"n": n}, "n") for n in (0, -1, 129, 10**9)),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"prompt": ["a"] * 20, "n": 128}, "n"),
        ({"best_of": 2, "stream": True}, "best_of"),
    ],
)
def test_row_28_how_many_answers(house: House, more: dict[str, Any], param: str) -> None:
    error = refusal(house, "/v1/completions", {**COMPLETION, **more})
    assert error["param"] in (param, "prompt"), error


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": 2**63}, "max_tokens"),
        ({"max_tokens": CONTEXT}, "max_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"max_tokens": 0, "min_tokens": 1, "echo": True}, "min_tokens"),
    ],
)
def test_row_29_how_many_tokens(house: House, more: dict[str, Any], param: str) -> None:
    assert refusal(house, "/v1/completions", {**COMPLETION, **more})["param"] == param


def test_row_29_none_beside_an_echo(house: House) -> None:
    status, _, answer = house.post("/v1/completions", {"prompt": "hi", "max_tokens": 0, "echo": True})
    assert (status, json.loads(answer)["choices"][0]["text"]) == (200, "hi")
