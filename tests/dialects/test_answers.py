"""Real answers are what the OpenAPI document says of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import orjson
import pytest
from llmcore.text.tokenizer import FastTokenizer
from llmcore_devtools.dialect import Side, dialect_client
from llmcore_lightllm.routes import routes as lightllm_routes
from llmcore_openai.routes import routes as openai_routes
from llmcore_server.http.errors import ErrorAnswer
from llmcore_server.http.front import Route
from llmcore_server.status.routes import make as status_routes
from llmcore_tgi.routes import routes as tgi_routes

MakeSide = Callable[..., Side]
USER = [{"role": "user", "content": "hi"}]
FACTS: dict[str, Any] = {"fingerprint": "abc", "embedding_size": 3}


def fits(kind: Any, value: Any) -> None:
    """`value` has the members of `kind` and no others, all of their types."""
    assert orjson.loads(msgspec.json.encode(msgspec.convert(value, kind))) == value


def routes_of(side: Side, make: Callable[..., Any]) -> dict[str, Route]:
    return {route.path: route for route in make(side.front)}


def check(side: Side, make: Callable[..., Any], path: str, **body: Any) -> None:
    """The whole answer, and the streamed one where there is one."""
    route = routes_of(side, make)[path]
    if route.answer is not None:
        fits(route.answer, side.ok(path, **body))
    if route.event is not None:
        if route.answer is not None:
            body["stream"] = True
        for text in side.post(path, **body).text.split("\n\n")[:-1]:
            data = text.removeprefix("data:").strip()
            if data != "[DONE]":
                fits(route.event, orjson.loads(data))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": USER}),
        (
            "/v1/chat/completions",
            {"messages": USER, "logprobs": True, "top_logprobs": 2, "n": 2, "return_token_ids": True},
        ),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/completions", {"prompt": ["hi", "you"], "logprobs": 2, "echo": True, "return_token_ids": True}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/v1/embeddings", {"input": ["hi", "you"], "encoding_format": "base64"}),
        ("/v1/score", {"text_1": "hi", "text_2": ["you", "me"]}),
        ("/v1/rerank", {"query": "hi", "documents": ["you", "me"]}),
        ("/v1/rerank", {"query": "hi", "documents": ["you", "me"], "return_documents": False}),
        ("/tokenize", {"prompt": "hi"}),
        ("/tokenize", {"prompt": "hi", "return_token_strs": True}),
        ("/detokenize", {"tokens": [64]}),
    ],
)
def test_openai(openai: MakeSide, path: str, body: dict[str, Any]) -> None:
    check(openai("a\u00e9<|im_end|>", facts=FACTS), openai_routes, path, **body)


def test_members_that_only_some_answers_have(openai: MakeSide) -> None:
    side = openai("ab", facts=FACTS)
    for path, body in (("/v1/chat/completions", {"messages": USER}), ("/v1/completions", {"prompt": "hi"})):
        fits(routes_of(side, openai_routes)[path].answer, side.ok(path, prompt_logprobs=1, **body))
        options = {"include_usage": True, "continuous_usage_stats": True}
        for event in side.events(path, stream=True, stream_options=options, **body)[:-1]:
            fits(routes_of(side, openai_routes)[path].event, event)


def test_models(openai: MakeSide) -> None:
    side = openai("a")
    known = routes_of(side, openai_routes)
    listed = side.client.simulate_get("/v1/models").json
    fits(known["/v1/models"].answer, listed)
    fits(
        known["/v1/models/{model:path}"].answer, side.client.simulate_get(f"/v1/models/{listed['data'][0]['id']}").json
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"inputs": "hi", "parameters": {}}),
        ("/generate", {"inputs": "hi", "parameters": {"return_details": True, "n": 2}}),
        ("/generate", {"inputs": "hi", "parameters": {"return_details": True}}),
        ("/generate_stream", {"inputs": "hi", "parameters": {}}),
        ("/", {"inputs": "hi", "parameters": {}}),
        ("/tokens", {"text": "hi"}),
        ("/token_load", None),
        ("/get_model_name", None),
    ],
)
def test_lightllm(lightllm: MakeSide, path: str, body: dict[str, Any] | None) -> None:
    side = lightllm("a\u00e9<|im_end|>")
    if body is None:
        fits(routes_of(side, lightllm_routes)[path].answer, side.client.simulate_get(path).json)
    else:
        check(side, lightllm_routes, path, **body)


def test_lightllm_scores_and_prompts(lightllm: MakeSide) -> None:
    for scores in ((0.5,), (0.5, 0.25)):
        check(lightllm("a", facts={"scores": len(scores)}, scores=scores), lightllm_routes, "/get_score", chat="hi")
    side = lightllm("ab")
    side.front = replace(
        side.front, config=replace(side.front.config, plugin_options={"return_all_prompt_logprobs": True})
    )
    side.client = dialect_client(lightllm_routes, side.front)
    fits(routes_of(side, lightllm_routes)["/generate"].answer, side.ok("/generate", inputs="hey", parameters={}))


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        ("/generate", {}),
        ("/generate", {"details": True, "decoder_input_details": True, "top_n_tokens": 2}),
        ("/generate", {"details": True, "best_of": 2, "do_sample": True}),
        ("/generate_stream", {"details": True, "top_n_tokens": 2}),
        ("/generate_stream", {}),
        ("/", {"details": True}),
    ],
)
def test_tgi(tokenizer: FastTokenizer, path: str, parameters: dict[str, Any]) -> None:
    side = Side.of(lambda front: [], tokenizer, "a\u00e9<|im_end|>")
    side.front = replace(side.front, config=replace(side.front.config, plugin_options={"use_tgi_api": True}))
    side.client = dialect_client(tgi_routes, side.front)
    check(side, tgi_routes, path, inputs="hi", parameters=parameters)
    fits(routes_of(side, tgi_routes)["/info"].answer, side.client.simulate_get("/info").json)


def test_status_and_errors(openai: MakeSide, lightllm: MakeSide, tokenizer: FastTokenizer) -> None:
    side = openai("a")
    client = dialect_client(status_routes, side.front)
    for path, route in routes_of(side, status_routes).items():
        if route.answer is not None:
            fits(route.answer, client.simulate_get(path).json)
    fits(ErrorAnswer, side.post("/v1/completions", prompt=1).json)
    other = lightllm("a")
    fits(routes_of(other, lightllm_routes)["/generate"].failure, other.post("/generate", inputs="").json)
    side.front = replace(side.front, config=replace(side.front.config, plugin_options={"use_tgi_api": True}))
    side.client = dialect_client(tgi_routes, side.front)
    fits(routes_of(side, tgi_routes)["/generate"].failure, side.post("/generate", inputs="").json)
