from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llmcore.testing.dialect import Side
from llmcore.text.tokenizer import FastTokenizer

PATH = "/v1/completions"


def test_a_whole_answer(openai: Callable[..., Side]) -> None:
    answer = openai("Hello<|im_end|>").ok(PATH, prompt="say")
    assert answer.pop("id").startswith("cmpl-")
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "object": "text_completion",
        "model": "fake",
        "choices": [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 6,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_a_stream(openai: Callable[..., Side]) -> None:
    *chunks, done = openai("ab").events(PATH, prompt="say", stream=True)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([64, 65], ["ab"]),
        ([[64, 65], [66]], ["ab", "c"]),
    ],
)
def test_four_kinds_of_prompt(
    openai: Callable[..., Side], tokenizer: FastTokenizer, prompt: Any, prompts: list[str]
) -> None:
    side = openai()
    answer = side.ok(PATH, prompt=prompt, max_tokens=3)
    sent = [memoryview(submit.prompt).cast("i").tolist() for submit in side.bridge.submitted]
    assert [tokenizer.decode(ids) for ids in sent] == prompts
    echoed = [(text * 3)[:3] for text in prompts]
    assert [choice["text"] for choice in answer["choices"]] == echoed
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_choices_are_in_the_order_of_prompts(openai: Callable[..., Side]) -> None:
    side = openai()
    body: dict[str, Any] = {"prompt": ["a", "b"], "n": 2, "max_tokens": 1}
    answer = side.ok(PATH, **body)
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    chunks = side.events(PATH, stream=True, **body)[:-1]
    texts = {(c["choices"][0]["index"], c["choices"][0]["text"]) for c in chunks}
    assert texts == {(0, "a"), (1, "a"), (2, "b"), (3, "b"), *((i, "") for i in range(4))}


@pytest.mark.parametrize("prompt", ["the", [260]])
def test_echo(openai: Callable[..., Side], prompt: Any) -> None:
    side = openai("ab")
    assert side.ok(PATH, prompt=prompt, echo=True)["choices"][0]["text"] == "theab"
    chunks = side.events(PATH, prompt=prompt, echo=True, stream=True)[:-1]
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["the", "a", "b", ""]


def test_logprobs(openai: Callable[..., Side]) -> None:
    logprobs = openai("ab 😀<|im_end|>").ok(PATH, prompt="x", logprobs=1)["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["a", "b", " ", "bytes:\\xf0\\x9f", "bytes:\\x98\\x80"],
        "token_logprobs": [-0.125, -0.25, -0.375, -0.5, -0.625],
        "top_logprobs": logprobs["top_logprobs"],
        "text_offset": [0, 1, 2, 3, 3],
    }
    assert logprobs["top_logprobs"][0] == {"`": -1.0, "a": -0.125}


def test_echo_with_logprobs_is_refused(openai: Callable[..., Side]) -> None:
    result = openai().post(PATH, prompt="x", echo=True, logprobs=1)
    assert result.status_code == 400
    assert (result.json["error"]["code"], result.json["error"]["param"]) == ("unsupported_parameter", "logprobs")


def test_one_prompt_too_long_refuses_all(openai: Callable[..., Side]) -> None:
    side = openai("ab", facts={"max_input_len": 5})
    result = side.post(PATH, prompt=["a", "b" * 6])
    assert (result.status_code, result.json["error"]["code"]) == (400, "context_length_exceeded")
    assert side.bridge.submitted == []
    side.ok(PATH, prompt=["a", "b" * 5])


def test_the_exact_border(openai: Callable[..., Side]) -> None:
    side = openai("a" * 20, facts={"max_input_len": 9, "max_total_len": 10})
    assert side.ok(PATH, prompt="b" * 9)["usage"]["completion_tokens"] == 1
    assert side.ok(PATH, prompt="b" * 6, max_tokens=4)["usage"]["completion_tokens"] == 4
    assert side.post(PATH, prompt="b" * 6, max_tokens=5).status_code == 400
    assert side.post(PATH, prompt="b" * 10).status_code == 400


def test_many_prompts_are_refused_at_once(openai: Callable[..., Side]) -> None:
    side = openai()
    assert side.post(PATH, prompt=["a"] * 100_000).json["error"]["param"] == "prompt"
    assert side.post(PATH, prompt=["a"] * 200, n=128).json["error"]["param"] == "prompt"
