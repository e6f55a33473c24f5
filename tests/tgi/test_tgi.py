"""text-generation-inference's dialect, on a scripted bridge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from llmcore.api.errors import RequestError
from llmcore.config import Config
from llmcore.text.tokenizer import FastTokenizer
from llmcore_devtools.dialect import FakeBridge, Side, dialect_client, fake_front
from llmcore_devtools.tokenizer import EOS
from llmcore_lightllm.routes import routes as lightllm_routes
from llmcore_tgi.requests import REFUSED, GenerateRequest, Parameters
from llmcore_tgi.routes import routes

from tests.dialects.test_bad_input import cases, put, refused

MakeTGI = Callable[..., Side]


@pytest.fixture
def tgi(tokenizer: FastTokenizer) -> MakeTGI:
    def make(answer: str | list[int] | None = None, facts: dict[str, Any] | None = None, **bridge: Any) -> Side:
        side = Side.of(lambda front: [], tokenizer, answer, facts, **bridge)
        side.front = replace(side.front, config=replace(side.front.config, plugin_options={"use_tgi_api": True}))
        side.client = dialect_client(routes, side.front)
        return side

    return make


def test_a_whole_answer(tgi: MakeTGI) -> None:
    side = tgi("Hello<|im_end|>")
    assert side.ok("/generate", inputs="say") == {"generated_text": "Hello"}
    assert side.ok("/generate", inputs="say", parameters={}) == {"generated_text": "Hello"}
    assert side.ok("/generate", inputs="say", parameters={"return_full_text": True})["generated_text"] == "sayHello"
    assert [submit.sampling.logprobs for submit in side.bridge.submitted] == [None] * 3
    result = side.post("/generate", inputs="say")
    assert (result.headers["x-prompt-tokens"], result.headers["x-generated-tokens"]) == ("3", "6")


def test_details(tgi: MakeTGI) -> None:
    answer = tgi("a😀<|im_end|>").ok("/generate", inputs="say", parameters={"details": True})
    details = answer["details"]
    assert list(details) == ["finish_reason", "generated_tokens", "seed", "prefill", "tokens"]
    assert (details["finish_reason"], details["generated_tokens"]) == ("eos_token", 4)
    assert (details["seed"], details["prefill"]) == (None, [])
    assert details["tokens"][0] == {"id": 64, "text": "a", "logprob": -0.125, "special": False}
    assert [token["text"] for token in details["tokens"]] == ["a", "", "😀", "<|im_end|>"]
    assert details["tokens"][-1]["special"] and answer["generated_text"] == "a😀"


def test_why_an_answer_ended(tgi: MakeTGI) -> None:
    for answer, parameters, reason, text in (
        ("abc<|im_end|>", {}, "eos_token", "abc"),
        ("abc stop it", {"stop": ["stop"]}, "stop_sequence", "abc stop"),
        ("abc<|endoftext|>", {"stop": ["<|endoftext|>"]}, "stop_sequence", "abc"),
        ("abc def", {"max_new_tokens": 2}, "length", "ab"),
    ):
        for group in (1, 5):
            found = tgi(answer, group=group).ok("/generate", inputs="x", parameters={"details": True, **parameters})
            assert (found["details"]["finish_reason"], found["generated_text"]) == (reason, text)
            events = tgi(answer, group=group).events(
                "/generate_stream", "data:", inputs="x", parameters={"details": True, **parameters}
            )
            assert (events[-1]["details"]["finish_reason"], events[-1]["generated_text"]) == (reason, text)


def test_the_prompts_tokens(tgi: MakeTGI) -> None:
    side = tgi("ab")
    prefill = side.ok("/generate", inputs="abc", parameters={"decoder_input_details": True})["details"]["prefill"]
    assert prefill == [
        {"id": 64, "text": "a", "logprob": None},
        {"id": 65, "text": "b", "logprob": -0.5},
        {"id": 66, "text": "c", "logprob": -0.75},
    ]
    assert side.bridge.submitted[0].prompt_logprobs


def test_the_best_tokens_beside_each(tgi: MakeTGI) -> None:
    parameters = {"details": True, "top_n_tokens": 2}
    side = tgi("ab")
    top = side.ok("/generate", inputs="x", parameters=parameters)["details"]["top_tokens"]
    assert [[token["id"] for token in tokens] for tokens in top] == [[63, 62], [64, 63]]
    assert top[1][0] == {"id": 64, "text": "a", "logprob": -1.0, "special": False}
    events = side.events("/generate_stream", "data:", inputs="x", parameters=parameters)
    assert [[token["id"] for token in event["top_tokens"]] for event in events] == [[63, 62], [64, 63]]


def test_the_best_of_several(tgi: MakeTGI) -> None:
    side = tgi()
    side.bridge.answer = lambda prompt, choice: [64 + choice] * (3 - choice)
    answer = side.ok("/generate", inputs="x", parameters={"best_of": 3, "do_sample": True, "details": True})
    # the fake's log-probabilities fall along an answer, so that the shortest is best on average
    assert answer["generated_text"] == "c"
    details = answer["details"]
    assert details["generated_tokens"] == 1 and details["seed"] == side.bridge.submitted[0].sampling.seed
    assert [other["generated_text"] for other in details["best_of_sequences"]] == ["aaa", "bb"]
    assert details["best_of_sequences"][0]["generated_tokens"] == 3
    plain = side.ok("/generate", inputs="x", parameters={"best_of": 3, "do_sample": True})
    assert plain == {"generated_text": "c"}


def test_a_stream(tgi: MakeTGI) -> None:
    side = tgi("a😀<|im_end|>")
    events = side.events("/generate_stream", "data:", inputs="say", parameters={"return_full_text": True})
    assert events[0] == {
        "index": 1,
        "token": {"id": 64, "text": "a", "logprob": -0.125, "special": False},
        "generated_text": None,
        "details": None,
    }
    assert [event["token"]["text"] for event in events] == ["a", "", "😀", "<|im_end|>"]
    assert [event["index"] for event in events] == [1, 2, 3, 4]
    assert [event["generated_text"] for event in events] == [None] * 3 + ["saya😀"]
    assert events[-1]["details"] is None
    events = side.events("/generate_stream", "data:", inputs="say", parameters={"details": True, "seed": 5})
    expected = {"finish_reason": "eos_token", "generated_tokens": 4, "seed": None, "input_length": 3}
    assert events[-1]["details"] == expected


def test_the_root_goes_both_ways(tgi: MakeTGI) -> None:
    side = tgi("ab")
    assert side.ok("/", inputs="say") == [{"generated_text": "ab"}]
    assert side.ok("/", inputs="say", stream=False) == [{"generated_text": "ab"}]
    assert len(side.events("/", "data:", inputs="say", stream=True)) == 2


@pytest.mark.parametrize(
    ("parameters", "sampling"),
    [
        ({}, {"temperature": 0.0}),
        ({"temperature": 1.0}, {"temperature": 0.0}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"temperature": 0.5, "seed": 4}, {"temperature": 0.5, "seed": 4}),
        ({"best_of": 2, "do_sample": True, "seed": -1}, {"temperature": 1.0}),
        ({"top_k": 3}, {"temperature": 1.0, "top_k": 3}),
        ({"top_p": 0.5}, {"temperature": 1.0, "top_p": 0.5}),
        ({"top_p": 0}, {"greedy": True}),
        ({"typical_p": 1.0}, {"temperature": 0.0, "typical_p": 1.0}),
        ({"typical_p": None}, {"temperature": 0.0, "typical_p": 1.0}),
        ({"typical_p": 0.95}, {"temperature": 1.0, "typical_p": 0.95}),
        ({"repetition_penalty": 1.5, "frequency_penalty": -0.5}, {"repetition_penalty": 1.5, "temperature": 0.0}),
        ({"frequency_penalty": -0.5}, {"frequency_penalty": -0.5, "penalize_prompt": True}),
    ],
)
def test_how_a_request_becomes_a_submit(tgi: MakeTGI, parameters: dict[str, Any], sampling: dict[str, Any]) -> None:
    side = tgi("ab")
    side.ok("/generate", inputs="say", parameters=parameters)
    (submit,) = side.bridge.submitted
    assert {name: getattr(submit.sampling, name) for name in sampling} == sampling
    assert (submit.max_new_tokens, submit.stop_ids) == (253, (EOS,))


def test_truncation_keeps_the_end(tgi: MakeTGI) -> None:
    side = tgi("ab", facts={"max_total_len": 20, "max_input_len": 10})
    side.ok("/generate", inputs="x" * 50 + "yz", parameters={"truncate": 3, "max_new_tokens": 2})
    assert len(side.bridge.submitted[0].prompt) == 3 * 4
    assert list(memoryview(side.bridge.submitted[0].prompt).cast("i")) == side.front.tokenizer.encode("xyz")
    for cut, kept in (("left", "xyz"), ("right", "abx")):
        side.ok("/generate", inputs="ab" + "x" * 9 + "yz", parameters={"truncate": 3, "truncation_side": cut})
        assert list(memoryview(side.bridge.submitted[-1].prompt).cast("i")) == side.front.tokenizer.encode(kept)
    failed = side.post("/generate", inputs="x", parameters={"truncate": 11})
    assert failed.json["error"].startswith("parameters.truncate")


def check(side: Side, body: dict[str, Any], path: str, url: str = "/generate") -> None:
    result = side.post(url, **body)
    assert result.status_code == 400, (body, result.text)
    assert list(result.json) == ["error", "error_type"]
    assert result.json["error_type"] == "validation"
    assert path in result.json["error"] or "context length" in result.json["error"], (path, result.text)
    assert side.bridge.submitted == []


def test_every_field_with_wrong_values(tgi: MakeTGI) -> None:
    table = [
        *(case for case in cases(GenerateRequest) if case[0] != "parameters"),
        *cases(Parameters, "parameters."),
        *refused(REFUSED, "parameters."),
        ("parameters", 3),
        ("parameters.stop", ["a"] * 33),
        ("parameters.watermark", True),
        ("inputs", ["a"]),
    ]
    assert len(table) > 80
    side = tgi()
    for path, value in table:
        check(side, put({"inputs": "hi", "parameters": {}}, path, value), path)
        check(side, put({"inputs": "hi", "parameters": {}}, path, value), path, "/")


@pytest.mark.parametrize(
    ("parameters", "url", "field"),
    [
        ({"best_of": 2}, "/generate", "best_of"),
        ({"best_of": 2, "do_sample": True, "seed": 1}, "/generate", "best_of"),
        ({"best_of": 2, "do_sample": True}, "/generate_stream", "best_of"),
        ({"decoder_input_details": True}, "/generate_stream", "decoder_input_details"),
        ({"max_new_tokens": 1000}, "/generate", "max_new_tokens"),
    ],
)
def test_what_does_not_go_together(tgi: MakeTGI, parameters: dict[str, Any], url: str, field: str) -> None:
    check(tgi(), {"inputs": "hi", "parameters": parameters}, field, url)


def test_nulls_and_unknown_fields_are_no_errors(tgi: MakeTGI) -> None:
    names = [*Parameters.__struct_fields__]
    tgi("ab").ok("/generate", inputs="hi", parameters={**dict.fromkeys(names), "never_heard_of": 1}, stream=None)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (("internal_error", "It broke."), 500, "generation"),
        (("engine_failed", "The engine has stopped."), 503, "generation"),
        (("server_overloaded", "Too much."), 503, "overloaded"),
    ],
)
def test_errors_of_the_engine(tgi: MakeTGI, error: tuple[str, str], status: int, kind: str) -> None:
    for url in ("/generate", "/generate_stream"):
        result = tgi("abc", error=error).post(url, inputs="x")
        assert (result.status_code, result.json) == (status, {"error": error[1], "error_type": kind})
    events = tgi("abc", error=error, error_after=2).events("/generate_stream", "data:", inputs="x")
    assert [event["index"] for event in events[:2]] == [1, 2]
    assert events[2] == {"error": error[1], "error_type": kind}


def test_a_bridge_that_refuses(tgi: MakeTGI) -> None:
    side = tgi(refuse=RequestError("Full.", code="rate_limit_exceeded", status=429))
    result = side.post("/generate", inputs="x")
    assert (result.status_code, result.json) == (429, {"error": "Full.", "error_type": "overloaded"})


def test_info(tgi: MakeTGI) -> None:
    info = tgi(facts={"max_total_len": 20, "max_input_len": 10}).client.simulate_get("/info").json
    assert (info["model_id"], info["max_input_tokens"], info["max_total_tokens"]) == ("fake", 10, 20)
    assert info["max_best_of"] == 8 and info["version"]


def test_the_flag_decides_who_has_the_paths(tgi: MakeTGI, tokenizer: FastTokenizer) -> None:
    front = fake_front(FakeBridge(), tokenizer)
    assert list(routes(front)) == []
    native = {route.path for route in lightllm_routes(front)}
    mine = {route.path for route in routes(tgi().front)}
    left = {route.path for route in lightllm_routes(tgi().front)}
    assert mine == {"/generate", "/generate_stream", "/", "/info"}
    assert native - left == {"/generate", "/generate_stream", "/"} and not mine & left
    assert Config().plugin_options == {}
