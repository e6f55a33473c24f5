"""What is too long is refused before time and memory are spent on it, also where it would only be cut or counted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import orjson
import pytest
from llmcore.api.errors import RequestError
from llmcore.config import Config
from llmcore.text.tokenizer import FastTokenizer
from llmcore_devtools.dialect import Side
from llmcore_server.http import intake
from llmcore_server.http.intake import CHARACTERS_PER_TOKEN, LEAST_CHARACTERS
from llmcore_tgi.routes import routes as tgi_routes

MakeSide = Callable[..., Side]

LIMIT = 1 << 15
FACTS: dict[str, Any] = {"max_input_len": LIMIT, "max_total_len": LIMIT + 56, "embedding_size": 3, "scores": 0}
MOST = CHARACTERS_PER_TOKEN * LIMIT
LONG = "x" * (MOST + 1)

OPENAI: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": LONG}, "prompt"),
    ("/v1/completions", {"prompt": ["x", LONG]}, "prompt"),
    ("/v1/completions", {"prompt": LONG, "truncate_prompt_tokens": 5}, "prompt"),
    ("/v1/completions", {"prompt": [1] * (MOST + 1), "truncate_prompt_tokens": 5}, "prompt"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": LONG}], "truncate_prompt_tokens": -1},
        "messages",
    ),
    ("/v1/embeddings", {"input": ["x", LONG], "truncate_prompt_tokens": 5}, "input"),
    ("/v1/rerank", {"query": "x", "documents": ["x", LONG], "truncate_prompt_tokens": 5}, "documents[1]"),
    ("/tokenize", {"prompt": LONG}, "prompt"),
    ("/detokenize", {"tokens": [1] * (MOST + 1)}, "tokens"),
    ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
]
LIGHTLLM: list[tuple[str, dict[str, Any], str]] = [
    ("/generate", {"inputs": LONG, "parameters": {}}, "inputs"),
    ("/tokens", {"text": LONG}, "text"),
]


def untokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long texts are not tokenized from now on."""
    encode = FastTokenizer.encode

    def checked(self: FastTokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert len(text) < 1000
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(FastTokenizer, "encode", checked)


def refused(side: Side, path: str, body: dict[str, Any], param: str) -> None:
    result = side.post(path, **body)
    assert result.status_code == 400, result.text
    error = result.json["error"]
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert param in error["message"] and f"at most {MOST} are read" in error["message"]
    assert side.bridge.submitted == []


@pytest.mark.parametrize("mode", [None, "head", "center"])
def test_long_texts_are_refused_unread(
    openai: MakeSide, lightllm: MakeSide, monkeypatch: pytest.MonkeyPatch, mode: str | None
) -> None:
    untokenized(monkeypatch)
    facts = {**FACTS, "config": Config(plugin_options={"long_truncation_mode": mode})}
    for make, cases in ((openai, OPENAI), (lightllm, LIGHTLLM)):
        for path, body, param in cases:
            refused(make(facts=facts), path, body, param)


@pytest.mark.parametrize("parameters", [{}, {"truncate": 3}])
def test_tgi(tokenizer: FastTokenizer, monkeypatch: pytest.MonkeyPatch, parameters: dict[str, Any]) -> None:
    untokenized(monkeypatch)
    facts = {**FACTS, "config": Config(plugin_options={"use_tgi_api": True})}
    side = Side.of(tgi_routes, tokenizer, facts=facts)
    result = side.post("/generate", inputs=LONG, parameters=parameters)
    assert result.status_code == 400
    assert f"inputs has {MOST + 1} characters, and at most {MOST} are read" in result.json["error"]
    assert side.bridge.submitted == []


def test_what_is_read_is_cut_as_the_whole(openai: MakeSide, lightllm: MakeSide, tokenizer: FastTokenizer) -> None:
    """The longest text that is taken, and of a short context: its last tokens are those of the whole."""
    for facts, most in ((FACTS, MOST), ({"max_input_len": 9, "max_total_len": 20}, LEAST_CHARACTERS)):
        text = ("many words " * (most // 10))[:most]
        whole = tokenizer.encode(text)
        side = openai("ok", facts=facts)
        side.ok("/v1/completions", prompt=text, truncate_prompt_tokens=7, max_tokens=2)
        assert np.frombuffer(side.bridge.submitted[0].prompt, "<i4").tolist() == whole[-7:]
        assert lightllm(facts=facts).ok("/tokens", text=text) == {"ntokens": len(whole)}
        assert openai(facts=facts).ok("/tokenize", prompt=text)["count"] == len(whole)
        assert openai(facts=facts).post("/tokenize", prompt=text + "x").status_code == 400


class Unread(list[int]):
    """Ids of which nobody may look at more than the number."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("the ids are walked")


@pytest.mark.parametrize("size", [LIMIT + 1, MOST + 1])
def test_ids_are_counted_before_they_are_looked_at(openai: MakeSide, size: int) -> None:
    ids = Unread([-1] * size)
    with pytest.raises(AssertionError):
        intake.check_ids(openai(facts=FACTS).front, ids, param="prompt")
    with pytest.raises(RequestError, match="maximum context length") as caught:
        intake.prompt_ids(openai(facts=FACTS).front, ids, param="prompt")
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logit_bias", "prompt"])
def test_millions_of_numbers_take_little_time(openai: MakeSide, name: str) -> None:
    """Most of it is JSON's own; 8,000,000 ids took four times as long when each was looked at."""
    n = 2_000_000
    value: Sequence[int] | dict[str, int] = [1] * n
    if name == "logit_bias":
        value = dict.fromkeys(map(str, range(n)), 1)
    side = openai()
    body = {"prompt": "x", name: value}
    data = orjson.dumps(body)
    start = time.thread_time()
    json.loads(orjson.dumps([1] * n))
    known = time.thread_time() - start
    start = time.thread_time()
    result = side.client.simulate_post("/v1/completions", body=data)
    assert time.thread_time() - start < 10 * known
    assert (result.status_code, result.json["error"]["param"]) == (400, name)


def test_ids_that_are_kept_have_to_be_known(openai: MakeSide) -> None:
    side = openai("ok")
    side.ok("/v1/completions", prompt=[9999, 1, 2], truncate_prompt_tokens=2)
    assert np.frombuffer(side.bridge.submitted[0].prompt, "<i4").tolist() == [1, 2]
    for ids in ([275, 1], [1, 275], [1, 275, 1]):
        result = openai().post("/v1/completions", prompt=ids)
        assert result.json["error"]["message"].startswith("prompt: token id 275 is not in the vocabulary")
