"""Every field of every request, with wrong types and values out of range: 400, and `param` names the field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from bad_input import CHAT, COMPLETION, NATIVE, cases, put, refused
from llmcore_devtools.dialect import Side
from llmcore_devtools.tokenizer import EOS
from llmcore_lightllm.requests import REFUSED as LIGHTLLM_REFUSED
from llmcore_lightllm.requests import GenerateRequest, Parameters, ScoreRequest, TokensRequest
from llmcore_openai.embeddings import CompareRequest, EmbeddingRequest, RerankRequest
from llmcore_openai.models import DetokenizeRequest, TokenizeRequest
from llmcore_openai.requests import REFUSED, ChatRequest, CompletionRequest, Message, StreamOptions

MakeSide = Callable[..., Side]


def check(side: Side, url: str, body: dict[str, Any], param: str) -> None:
    result = side.post(url, **body)
    assert result.status_code == 400, result.text
    assert result.json["error"]["param"].split("[")[0] == param, result.text
    assert result.json["error"]["type"] == "invalid_request_error"
    assert param in result.json["error"]["message"] or "context length" in result.json["error"]["message"]
    assert side.bridge.submitted == []


OPENAI = [
    *(("/v1/chat/completions", CHAT, *case) for case in cases(ChatRequest)),
    *(("/v1/chat/completions", CHAT, *case) for case in cases(StreamOptions, "stream_options.")),
    *(("/v1/chat/completions", CHAT, *case) for case in refused(REFUSED[ChatRequest])),
    *(("/v1/completions", COMPLETION, *case) for case in cases(CompletionRequest)),
    *(("/v1/completions", COMPLETION, *case) for case in refused(REFUSED[CompletionRequest])),
    *(("/tokenize", COMPLETION, *case) for case in cases(TokenizeRequest)),
    *(("/detokenize", {"tokens": [1]}, *case) for case in cases(DetokenizeRequest)),
    *(("/v1/embeddings", {"input": "x"}, *case) for case in cases(EmbeddingRequest)),
    *(("/v1/score", {"text_1": "x", "text_2": "x"}, *case) for case in cases(CompareRequest)),
    *(("/v1/rerank", {"query": "x", "documents": ["x"]}, *case) for case in cases(RerankRequest)),
]
LIGHTLLM = [
    *(("/generate", NATIVE, *case) for case in cases(GenerateRequest) if case[0] != "stream"),
    *(("/generate_stream", NATIVE, *case) for case in cases(Parameters, "parameters.")),
    *(("/generate", NATIVE, *case) for case in refused(LIGHTLLM_REFUSED, "parameters.")),
    *(("/get_score", {"chat": "x"}, *case) for case in cases(ScoreRequest)),
    *(("/tokens", {"text": "x"}, *case) for case in cases(TokensRequest)),
]


def test_the_openai_table(openai: MakeSide) -> None:
    assert len(OPENAI) > 300
    side = openai(facts={"embedding_size": 3})
    for url, body, path, value in OPENAI:
        check(side, url, put(body, path, value), path)


@pytest.mark.parametrize(
    ("field", "levels", "wrapped"),
    [
        ("tools", 4, lambda deep: [{"type": "function", "function": {"name": "f", "parameters": deep}}]),
        ("logits_processors", 3, lambda deep: [{"name": "nobody", "args": deep}]),
        ("unknown", 1, lambda deep: deep),
    ],
)
def test_who_goes_through_a_deep_body_comes_to_its_end(
    openai: MakeSide, field: str, levels: int, wrapped: Callable[[Any], Any]
) -> None:
    """With one level more it is refused before anybody does."""

    def answer(levels: int) -> tuple[int, Any, str]:
        deep: dict[str, Any] = {}
        for _ in range(levels - 1):
            deep = {"a": deep}
        result = openai().post("/v1/chat/completions", **CHAT, **{field: wrapped(deep)})
        error = result.json.get("error", {"param": None, "message": ""})
        return result.status_code, error["param"], error["message"]

    status, _, message = answer(512 - levels)
    assert status in (200, 400) and "nested" not in message
    message = f"{field}: JSON is nested deeper than 512 levels"
    assert answer(513 - levels) == (400, field, message)


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", **CHAT}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "x", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ("/tokenize", {**CHAT, "chat_template_kwargs": {"tokenize": 1}}, "chat_template_kwargs.tokenize"),
        ("/detokenize", {"tokens": [275]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ["x", 1]}, "input"),
        ("/v1/embeddings", {"input": [[]]}, "input"),
        ("/v1/embeddings", {"input": [275]}, "input"),
        ("/v1/embeddings", {"input": ["x"] * 2049}, "input"),
        ("/v1/embeddings", {"input": "x" * 300}, "input"),
        ("/v1/embeddings", {"input": "x", "dimensions": 4}, "dimensions"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "x", "pooling": "cls"}, "pooling"),
        ("/v1/embeddings", {"input": "x", "lora_path": "y"}, "lora_path"),
        ("/v1/score", {"text_1": ["x", "y"], "text_2": "z"}, "text_1"),
        ("/v1/score", {"text_1": "x", "text_2": ""}, "text_2"),
        ("/v1/rerank", {"query": "x", "documents": ["y", ""]}, "documents[1]"),
        ("/v1/rerank", {"query": "x", "documents": ["y"], "rank_fields": ["a"]}, "rank_fields"),
    ],
)
def test_odd_texts(openai: MakeSide, url: str, body: dict[str, Any], param: str) -> None:
    check_exact(openai(facts={"embedding_size": 3}), url, body, param)


def test_the_lightllm_table(lightllm: MakeSide) -> None:
    assert len(LIGHTLLM) > 100
    side = lightllm(facts={"scores": 1})
    for url, body, path, value in LIGHTLLM:
        check(side, url, put(body, path, value), path)


def test_messages(openai: MakeSide) -> None:
    side = openai()
    for path, value in cases(Message):
        result = side.post("/v1/chat/completions", messages=[put({"role": "user", "content": "x"}, path, value)])
        assert result.status_code == 400, result.text
        assert result.json["error"]["param"].startswith(f"messages[0].{path}"), result.text


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0]"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[0].tool_calls[0].function.name"),
    ],
)
def test_odd_messages(openai: MakeSide, message: dict[str, Any], param: str) -> None:
    check_exact(openai(), "/v1/chat/completions", {"messages": [message]}, param)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "min_tokens": 1, "echo": True}, "min_tokens"),
        ({"suffix": "x"}, "suffix"),
        ({"suffix": "x", "prompt": [1]}, "suffix"),
        ({"echo": True, "truncate_prompt_tokens": 1}, "echo"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 201}, "truncate_prompt_tokens"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"prompt": "x" * 7000, "prompt_logprobs": 20}, "prompt"),
        ({"num_beams": 2, "best_of": 3}, "best_of"),
        ({"num_beams": 2, "logprobs": 1, "guided_regex": "a"}, "guided_regex"),
        ({"prompt": ["a"] * 200, "n": 6}, "prompt"),
        ({"allowed_token_ids": [275]}, "allowed_token_ids"),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": [1], "num_beams": 2}, "allowed_token_ids"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"275": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"١": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"stop_token_ids": [275]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a"] * 33}, "stop"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": [275]}, "prompt"),
        ({"prompt": [2**31]}, "prompt[0]"),
        ({"prompt": [2**64]}, "prompt[0]"),
        ({"prompt": [1.0]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": "x" * 30_000_000}, "prompt"),
        ({"max_tokens": 2**31 - 1}, "max_tokens"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
        ({"thinking_token_budget": 0}, "thinking_token_budget"),
        ({"lora_path": "x"}, "lora_path"),
        ({"top_logprobs": 2, "logprobs": 2}, "top_logprobs"),
    ],
)
def test_odd_completions(openai: MakeSide, more: dict[str, Any], param: str) -> None:
    check_exact(openai(), "/v1/completions", {**COMPLETION, **more}, param)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"verbosity": "mute"}, "verbosity"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        (
            {"continue_final_message": True, "messages": [{"role": "assistant", "content": ""}]},
            "continue_final_message",
        ),
        ({"messages": [{"role": "user", "content": "x", "prefix": True}]}, "messages[0].prefix"),
        (
            {"messages": [{"role": "assistant", "content": "x", "prefix": True}, *CHAT["messages"]]},
            "messages[0].prefix",
        ),
        ({"messages": [{"role": "assistant", "content": "", "prefix": True}]}, "messages[0].prefix"),
        (
            {"messages": [{"role": "assistant", "content": "x", "prefix": True}], "add_generation_prompt": True},
            "messages[0].prefix",
        ),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs.tokenize"),
        *(
            ({"chat_template_kwargs": {name: 1}}, f"chat_template_kwargs.{name}")
            for name in (
                *("chat_template", "messages", "tools", "self", "loop", "super", "caller", "true", "None"),
                *("range", "dict", "namespace", "cycler", "joiner", "raise_exception", "strftime_now"),
                *("two words", "", "1st", "a-b"),
            )
        ),
    ],
)
def test_odd_chats(openai: MakeSide, more: dict[str, Any], param: str) -> None:
    check_exact(openai(), "/v1/chat/completions", {**CHAT, **more}, param)


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"top_k": 0}, "parameters.top_k"),
        ({"n": 2, "best_of": 1}, "parameters.best_of"),
        ({"n": 1, "best_of": 2}, "parameters.best_of"),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, "parameters.min_new_tokens"),
        ({"stop_sequences": [[]]}, "parameters.stop_sequences[0]"),
        ({"stop_sequences": [[-1]]}, "parameters.stop_sequences[0][0]"),
        ({"exponential_decay_length_penalty": [-1, 1.2]}, "parameters.exponential_decay_length_penalty[0]"),
        ({"exponential_decay_length_penalty": [1, 0.5]}, "parameters.exponential_decay_length_penalty[1]"),
        ({"allowed_token_ids": [1 << 20]}, "parameters.allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "parameters.allowed_token_ids[0]"),
        ({"allowed_token_ids": [EOS], "min_new_tokens": 2}, "parameters.allowed_token_ids"),
    ],
)
def test_odd_parameters(lightllm: MakeSide, parameters: dict[str, Any], param: str) -> None:
    check_exact(lightllm(), "/generate", {"inputs": "hi", "parameters": parameters}, param)


def test_a_native_stream_has_one_answer(lightllm: MakeSide) -> None:
    for field in ("n", "best_of"):
        body = {"inputs": "hi", "parameters": {field: 2}}
        check_exact(lightllm(), "/generate_stream", body, f"parameters.{field}")


ROLES = "assistant, developer, function, system, tool, user"
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("url", "body", "message"),
    [
        (
            "/v1/completions",
            {**COMPLETION, "early_stopping": "x"},
            "early_stopping: 'x' is none of false, true, never",
        ),
        ("/v1/embeddings", {"input": "x", "pooling": "max"}, "pooling: 'max' is none of last, mean"),
        (
            "/v1/completions",
            {**COMPLETION, "response_format": {"type": "xml"}},
            "response_format.type: 'xml' is none of json, json_object, json_schema, regex, regex_schema, text",
        ),
        (
            "/v1/chat/completions",
            {"messages": [*CHAT["messages"], {"role": "model", "content": "x"}]},
            f"messages[1].role: 'model' is none of {ROLES}",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "a - at `$.b`", "content": "x"}]},
            f"messages[0].role: 'a - at $.b' is none of {ROLES}",
        ),
        (
            "/v1/chat/completions",
            {**CHAT, "tools": [TOOL], "tool_choice": {"type": "any"}},
            "tool_choice.type: 'any' is none of allowed_tools, function",
        ),
        (
            "/v1/chat/completions",
            {
                **CHAT,
                "tools": [TOOL],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": [TOOL]}},
            },
            "tool_choice.allowed_tools.mode: 'x' is none of auto, required",
        ),
    ],
)
def test_what_a_field_may_be_is_listed(openai: MakeSide, url: str, body: dict[str, Any], message: str) -> None:
    error = openai().post(url, **body).json["error"]
    assert (error["message"], error["param"]) == (message, message.partition(": ")[0])


def test_what_a_native_field_may_be_is_listed(lightllm: MakeSide) -> None:
    body = {"inputs": "hi", "parameters": {"early_stopping": "x" * 500}}
    message = lightllm().post("/generate", **body).json["message"]
    assert message == f"parameters.early_stopping: '{'x' * 99} is none of false, true, never"


def test_images_are_refused(lightllm: MakeSide) -> None:
    body = {**NATIVE, "multimodal_params": {"images": [{"type": "url", "data": "x"}]}}
    check_exact(lightllm(), "/generate", body, "multimodal_params.images")
    lightllm("ab").ok("/generate", **{**NATIVE, "multimodal_params": {"images": []}})


def check_exact(side: Side, url: str, body: dict[str, Any], param: str) -> None:
    result = side.post(url, **body)
    assert (result.status_code, result.json["error"]["param"]) == (400, param), result.text
    assert side.bridge.submitted == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"null", None),
        (b"[]", None),
        (b'"x"', None),
        (b'{"prompt": "x"', None),
        (b'\xef\xbb\xbf{"prompt": "x"}', None),
        (b'{"prompt": "\xff"}', None),
        (b'{"prompt": "x", "temperature": NaN}', "temperature"),
        (b'{"prompt": "x", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "x", "logit_bias": {"1": -Infinity}}', "logit_bias.1"),
        (b'{"prompt": "\\ud800"}', "prompt"),
        (b'{"prompt": ["a", "\\udfff"]}', "prompt[1]"),
        (b'{"prompt": "x", "stop": "\\ud800"}', "stop"),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "seed"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "prompt"),
        (b'{"unknown": {"a": ' + b"[" * 100_000, "unknown"),
    ],
)
def test_what_is_no_json(openai: MakeSide, body: bytes, param: str | None) -> None:
    client = openai().client
    result = client.simulate_post("/v1/completions", body=body, headers={"content-type": "application/json"})
    assert result.status_code == 400
    assert result.json["error"]["param"] == param


def test_other_media_are_refused(openai: MakeSide) -> None:
    client = openai("ab").client
    for headers in ({"content-type": "text/plain"}, {"content-type": "application/json", "content-encoding": "gzip"}):
        result = client.simulate_post("/v1/completions", body=b'{"prompt": "x"}', headers=headers)
        assert (result.status_code, result.json["error"]["code"]) == (415, "unsupported_media_type")
    assert client.simulate_post("/v1/completions", body=b'{"prompt": "x"}').status_code == 200


def test_unknown_fields_and_nulls_are_no_errors(openai: MakeSide, lightllm: MakeSide) -> None:
    names = {field.name for field in msgspec.structs.fields(ChatRequest)} - {"messages"}
    openai("ab").ok("/v1/chat/completions", **CHAT, **dict.fromkeys(names), never_heard_of={"x": 1})
    names = {field.name for field in msgspec.structs.fields(Parameters)}
    lightllm("ab").ok("/generate", inputs="hi", parameters={**dict.fromkeys(names), "never_heard_of": 1})


def test_values_that_change_nothing_are_accepted(openai: MakeSide) -> None:
    for field, values in REFUSED[ChatRequest].items():
        for value in values:
            openai("ab").ok("/v1/chat/completions", **CHAT, **{field: value})
