"""How a chat is answered: whole, streamed, with probabilities, with an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from llmcore.api.errors import RequestError
from llmcore.text.tokenizer import FastTokenizer
from llmcore_devtools.dialect import Side
from llmcore_devtools.tokenizer import EOS

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


def test_a_whole_answer(openai: Callable[..., Side], tokenizer: FastTokenizer) -> None:
    side = openai("Hello<|im_end|>more")
    answer = side.ok(CHAT, messages=USER)
    prompt = len(tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"))
    assert answer.pop("id").startswith("chatcmpl-")
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "object": "chat.completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": 6,
            "total_tokens": prompt + 6,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_a_stream(openai: Callable[..., Side]) -> None:
    *chunks, done = openai("Hi 😀<|im_end|>").events(CHAT, messages=USER, stream=True)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [
        {"role": "assistant", "content": ""},
        *({"content": text} for text in ("H", "i", " ", "😀")),
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["stop"]


def test_usage_in_a_stream(openai: Callable[..., Side]) -> None:
    options = {"include_usage": True}
    *chunks, last, done = openai("ab").events(CHAT, messages=USER, stream=True, stream_options=options)
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 2)


def test_usage_all_along_a_stream(openai: Callable[..., Side]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _ = openai("ab").events(CHAT, messages=USER, stream=True, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 1, 2, 2, 2]


def test_several_choices(openai: Callable[..., Side]) -> None:
    side = openai("ab")
    answer = side.ok(CHAT, messages=USER, n=3)
    assert [(c["index"], c["message"]["content"]) for c in answer["choices"]] == [(0, "ab"), (1, "ab"), (2, "ab")]
    assert answer["usage"]["completion_tokens"] == 6
    assert len(side.bridge.submitted) == 1
    chunks = side.events(CHAT, messages=USER, n=2, stream=True)[:-1]
    for index in (0, 1):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "ab"
        assert mine[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_text_is_trimmed(openai: Callable[..., Side], stream: bool, group: int) -> None:
    side = openai("abc stop it all", group=group)
    body: dict[str, Any] = {"messages": USER, "stop": ["top i"], "stream": stream}
    if stream:
        choices = [chunk["choices"][0] for chunk in side.events(CHAT, **body)[:-1]]
        text, reason = "".join(c["delta"].get("content", "") for c in choices), choices[-1]["finish_reason"]
    else:
        choice = side.ok(CHAT, **body)["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert (text, reason) == ("abc s", "stop")
    [submit] = side.bridge.submitted
    assert side.bridge.finished == [(submit.id, 0, 7)]


def test_the_stop_text_can_be_kept(openai: Callable[..., Side]) -> None:
    answer = openai("abcd").ok(CHAT, messages=USER, stop="bc", include_stop_str_in_output=True)
    assert answer["choices"][0]["message"]["content"] == "abc"


def test_a_special_token_as_stop_text_is_a_stop_id(openai: Callable[..., Side]) -> None:
    side = openai("ab<|endoftext|>cd")
    answer = side.ok(CHAT, messages=USER, stop="<|endoftext|>")
    assert answer["choices"][0]["message"]["content"] == "ab"
    assert side.bridge.submitted[0].stop_ids == (EOS, EOS + 1)


def test_logprobs(openai: Callable[..., Side]) -> None:
    answer = openai("a😀<|im_end|>").ok(CHAT, messages=USER, logprobs=True, top_logprobs=2)
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "\\xf0\\x9f", "\\x98\\x80"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "a😀"
    assert [entry["logprob"] for entry in content] == [-0.125, -0.25, -0.375]
    assert [[best["logprob"] for best in entry["top_logprobs"]] for entry in content] == [[-1.0, -2.0]] * 3


def test_no_best_tokens_need_no_logprobs(openai: Callable[..., Side]) -> None:
    answer = openai("a<|im_end|>").ok(CHAT, messages=USER, logprobs=False, top_logprobs=0)
    assert answer["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("group", [1, 3])
def test_token_ids(openai: Callable[..., Side], tokenizer: FastTokenizer, group: int) -> None:
    side = openai("a😀b stop it, and more", group=group)
    body: dict[str, Any] = {"messages": USER, "stop": "op i", "return_token_ids": True, "n": 2}
    whole = side.ok(CHAT, **body)
    ids = tokenizer.encode("a😀b stop i", add_special_tokens=False)
    assert [choice["token_ids"] for choice in whole["choices"]] == [ids, ids]
    assert whole["prompt_token_ids"] == list(memoryview(side.bridge.submitted[0].prompt).cast("i"))
    assert "token_ids" not in side.ok(CHAT, messages=USER)["choices"][0]
    chunks = side.events(CHAT, stream=True, **body)[:-1]
    for index in (0, 1):
        mine = [c["choices"][0]["token_ids"] for c in chunks if c["choices"][0]["index"] == index]
        assert [token for part in mine for token in part] == ids
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [
        whole["prompt_token_ids"]
    ]


@pytest.mark.parametrize("group", [1, 2, 5])
def test_logprobs_of_a_stream_are_those_of_the_whole(openai: Callable[..., Side], group: int) -> None:
    body: dict[str, Any] = {"messages": USER, "logprobs": True, "stop": "stop it"}
    answer = "a😀 stop, a stop it"
    whole = openai(answer, group=group).ok(CHAT, **body)["choices"][0]
    chunks = openai(answer, group=group).events(CHAT, stream=True, **body)[:-1]
    entries = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [token for entry in entries if entry for token in entry["content"]] == whole["logprobs"]["content"]
    tokens = whole["logprobs"]["content"]
    assert (
        bytes(byte for entry in tokens for byte in entry["bytes"]).decode()
        == whole["message"]["content"]
        == "a😀 stop, a "
    )


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_token_is_a_status(openai: Callable[..., Side], stream: bool) -> None:
    side = openai("abc", error=("engine_failed", "The engine has stopped."))
    result = side.post(CHAT, messages=USER, stream=stream)
    assert result.status_code == 503
    assert result.headers["retry-after"] == "1"
    assert result.json["error"] == {
        "message": "The engine has stopped.",
        "type": "server_error",
        "param": None,
        "code": "engine_failed",
    }


def test_an_error_in_a_stream_is_its_last_event(openai: Callable[..., Side]) -> None:
    side = openai("abc", error=("internal_error", "It broke."), error_after=1)
    *_, text, error = side.events(CHAT, messages=USER, stream=True)
    assert text["choices"][0]["delta"] == {"content": "a"}
    assert error["error"]["message"] == "It broke."
    assert side.front.records[0].finish == "error"


def test_a_refusal_of_the_bridge_is_the_answer(openai: Callable[..., Side]) -> None:
    side = openai(refuse=RequestError("Too much.", code="server_overloaded", status=503))
    result = side.post(CHAT, messages=USER, stream=True)
    assert (result.status_code, result.json["error"]["code"]) == (503, "server_overloaded")
    assert [record.finish for record in side.front.records] == ["error"]


def test_a_client_that_leaves(openai: Callable[..., Side]) -> None:
    side = openai("abc", wait=True)
    side.post(CHAT, messages=USER, stream=True)
    side.bridge.step()
    side.front.replies[0].abandon()
    assert side.bridge.aborted == [side.bridge.submitted[0].id]
    sent = side.front.transports[0].sent
    side.bridge.step()
    assert side.front.transports[0].sent == sent
    [record] = side.front.records
    assert (record.finish, record.output_tokens) == ("abort", 1)


def test_one_record_per_request(openai: Callable[..., Side]) -> None:
    side = openai("ab<|im_end|>")
    side.ok(CHAT, messages=USER, n=2, max_tokens=9)
    [record] = side.front.records
    assert (record.dialect, record.finish, record.output_tokens) == ("openai", "stop", 6)
    assert (record.max_new_tokens, record.cached_tokens) == (9, 0)
    assert record.first_token is not None and record.first_token <= record.duration


def test_models(openai: Callable[..., Side]) -> None:
    client = openai().client
    listed = client.simulate_get("/v1/models").json
    assert listed["object"] == "list"
    [model] = listed["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("fake", "model", 256)
    assert client.simulate_get("/v1/models/fake").json == model
    missing = client.simulate_get("/v1/models/some/other")
    assert (missing.status_code, missing.json["error"]["code"]) == (404, "model_not_found")


def test_the_model_is_checked_if_named(openai: Callable[..., Side]) -> None:
    side = openai("ab")
    side.ok(CHAT, messages=USER, model="fake")
    result = side.post(CHAT, messages=USER, model="gpt-4")
    assert (result.status_code, result.json["error"]["code"]) == (404, "model_not_found")


def test_context_length(openai: Callable[..., Side]) -> None:
    side: Side = openai("ab", facts={"max_total_len": 100, "max_input_len": 60})
    result = side.post(CHAT, messages=USER, max_tokens=99)
    assert result.status_code == 400
    error = result.json["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert error["message"].startswith("This model's maximum context length is 100 tokens. However, you requested ")
    for length in (70, 10_000):
        error = side.post(CHAT, messages=[{"role": "user", "content": "x" * length}]).json["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


def test_prompt_logprobs_stand_beside_the_choices(openai: Callable[..., Side]) -> None:
    side = openai("a")
    answer = side.ok(CHAT, messages=USER, prompt_logprobs=2, n=2)
    ids = np.frombuffer(side.bridge.submitted[0].prompt, "<i4").tolist()
    none, *places = answer["prompt_logprobs"]
    assert none is None and [next(iter(place)) for place in places] == [str(token) for token in ids[1:]]
    assert places[0][str(ids[1])] == {
        "logprob": -0.5,
        "rank": 1,
        "decoded_token": side.front.tokenizer.decode(ids[1:2]),
    }
    assert all("prompt_logprobs" not in choice for choice in answer["choices"])
    result = side.post(CHAT, messages=USER, prompt_logprobs=0, stream=True)
    assert (result.status_code, result.json["error"]["param"]) == (400, "prompt_logprobs")
