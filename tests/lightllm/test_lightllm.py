from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from llmcore.api import ConfigError, LengthDecay
from llmcore.text.tokenizer import FastTokenizer
from llmcore_devtools.dialect import FakeBridge, FakeFront, Side, dialect_client, fake_front
from llmcore_devtools.tokenizer import EOS
from llmcore_lightllm.routes import routes

MakeSide = Callable[..., Side]


def test_a_whole_answer(lightllm: MakeSide) -> None:
    answer = lightllm("Hello<|im_end|>").ok("/generate", inputs="say", parameters={})
    assert answer == {
        "generated_text": ["Hello"],
        "count_output_tokens": 6,
        "finish_reason": "stop",
        "prompt_tokens": 3,
    }
    assert list(answer) == ["generated_text", "count_output_tokens", "finish_reason", "prompt_tokens"]


def test_several_answers_are_lists(lightllm: MakeSide) -> None:
    for parameters in ({"n": 2, "best_of": 2}, {"best_of": 2}, {"n": 2}):
        answer = lightllm("ab").ok("/generate", inputs="say", parameters={**parameters, "return_details": True})
        assert answer["generated_text"] == ["ab", "ab"]
        assert answer["count_output_tokens"] == [2, 2]
        assert answer["finish_reason"] == ["length", "length"]
        assert answer["prompt_tokens"] == 3
        assert [[token["text"] for token in tokens] for tokens in answer["tokens"]] == [["a", "b"]] * 2


def test_details(lightllm: MakeSide) -> None:
    answer = lightllm("a😀<|im_end|>").ok("/generate", inputs="say", parameters={"return_details": True})
    tokens = answer["tokens"]
    assert [token["text"] for token in tokens] == ["a", "", "😀", ""]
    assert tokens[-1] == {
        "id": EOS,
        "logprob": -0.5,
        "cumlogprob": -(0.125 + 0.25 + 0.375 + 0.5) / 4,
        "special": True,
        "count_output_tokens": 4,
        "prompt_tokens": 3,
        "mtp_accepted_token_num": 0,
        "text": "",
    }


def test_a_stream(lightllm: MakeSide, tokenizer: FastTokenizer) -> None:
    side = lightllm("a😀<|im_end|>")
    events = side.events("/generate_stream", "data:", inputs="say", parameters={})
    assert "data: " not in side.front.transports[0].sent.decode()
    assert events[0] == {
        "token": {
            "id": 64,
            "text": "a",
            "logprob": -0.125,
            "special": False,
            "count_output_tokens": 1,
            "prompt_tokens": 3,
        },
        "generated_text": None,
        "finished": False,
        "finish_reason": None,
        "details": None,
    }
    assert list(events[0]) == ["token", "generated_text", "finished", "finish_reason", "details"]
    assert [event["token"]["text"] for event in events] == ["a", "", "😀", ""]
    assert [event["finished"] for event in events] == [False, False, False, True]
    assert events[-1]["finish_reason"] == "stop"
    assert events[-1]["token"]["special"] is True


@pytest.mark.parametrize("group", [1, 4])
def test_the_stop_text_stays(lightllm: MakeSide, group: int) -> None:
    side = lightllm("abc stop it all", group=group)
    parameters = {"stop_sequences": "stop", "max_new_tokens": 50}
    answer = side.ok("/generate", inputs="say", parameters=parameters)
    assert (answer["generated_text"], answer["finish_reason"]) == (["abc stop"], "stop")
    assert answer["count_output_tokens"] == 5
    events = side.events("/generate_stream", "data:", inputs="say", parameters=parameters)
    assert "".join(event["token"]["text"] for event in events) == "abc stop"
    assert [event["finished"] for event in events] == [False] * 4 + [True]
    assert [choice[1:] for choice in side.bridge.finished] == [(0, 5), (0, 5)]


def test_stop_sequences_of_ids(lightllm: MakeSide) -> None:
    side = lightllm("abcdef")
    answer = side.ok("/generate", inputs="say", parameters={"stop_sequences": ["nothing", [66, 67]]})
    assert (answer["generated_text"], answer["count_output_tokens"]) == (["abcd"], 4)


def test_the_root_goes_both_ways(lightllm: MakeSide) -> None:
    side = lightllm("ab")
    assert side.ok("/", inputs="say", parameters={})["generated_text"] == ["ab"]
    assert side.ok("/", inputs="say", parameters={}, stream=False)["generated_text"] == ["ab"]
    assert len(side.events("/", "data:", inputs="say", parameters={}, stream=True)) == 2


def test_how_a_request_becomes_a_submit(lightllm: MakeSide) -> None:
    side = lightllm(facts={"generation": {"temperature": 0.6, "top_k": 50}})
    side.ok("/generate", inputs="say", parameters={})
    submit = side.bridge.submitted[0]
    assert (submit.max_new_tokens, submit.min_new_tokens, submit.stop_ids, submit.n) == (16, 0, (EOS,), 1)
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_k, sampling.logprobs) == (0.0, 0, None)
    assert (sampling.repetition_over_prompt, sampling.penalize_prompt) == (False, False)
    parameters = {
        "do_sample": True,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "typical_p": 0.8,
        "max_new_tokens": 9,
        "min_new_tokens": 4,
        "ignore_eos": True,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "input_penalty": True,
        "seed": 3,
        "return_details": True,
    }
    side.ok("/generate", inputs=[64, 65], parameters=parameters)
    submit = side.bridge.submitted[1]
    assert (submit.max_new_tokens, submit.min_new_tokens, submit.stop_ids) == (9, 3, ())
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 7, 3)
    assert sampling.typical_p == 0.8
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.2, 0.1, 0.2)
    assert (sampling.repetition_over_prompt, sampling.penalize_prompt, sampling.logprobs) == (True, True, 0)


@pytest.mark.parametrize("more", [{"temperature": 0}, {"temperature": 1e-6}, {"top_p": 0}])
def test_what_leaves_nothing_to_draw_reaches_the_engine_which_knows_it_as_greedy(
    lightllm: MakeSide, more: dict[str, float]
) -> None:
    side = lightllm("ab")
    side.ok("/generate", inputs="say", parameters={"do_sample": True, **more})
    sampling = side.bridge.submitted[0].sampling
    assert sampling.greedy and {name: getattr(sampling, name) for name in more} == more


def test_the_end_token_may_be_the_last_of_the_least(lightllm: MakeSide) -> None:
    for least, text in ((1, ""), (2, "a"), (3, "a"), (4, "ab")):
        side = lightllm(
            [EOS, 64, EOS, 65, EOS] if least == 1 else [64, EOS, 65, EOS] if least != 3 else [64, EOS, EOS]
        )
        answer = side.ok("/generate", inputs="say", parameters={"min_new_tokens": least})
        assert (answer["generated_text"], answer["finish_reason"]) == ([text], "stop")


def test_special_tokens_are_shown_on_request(lightllm: MakeSide) -> None:
    side = lightllm("a<|endoftext|>b<|im_end|>")
    for parameters, text in (
        ({}, "ab"),
        ({"skip_special_tokens": False}, "a <|endoftext|> b"),
        ({"skip_special_tokens": False, "print_eos_token": True}, "a <|endoftext|> b <|im_end|>"),
        ({"skip_special_tokens": False, "add_spaces_between_special_tokens": False}, "a<|endoftext|>b"),
        ({"print_eos_token": True}, "ab"),
    ):
        assert side.ok("/generate", inputs="say", parameters=parameters)["generated_text"] == [text]


@pytest.mark.parametrize("answer", ["<|endoftext|><|endoftext|>a😀b", "a<|endoftext|>", "a b <|endoftext|> c"])
def test_spaces_beside_special_tokens(lightllm: MakeSide, answer: str) -> None:
    parameters = {"skip_special_tokens": False}
    expected = " ".join(part for part in re.split(r"(<\|endoftext\|>)", answer) if part)
    assert lightllm(answer).ok("/generate", inputs="say", parameters=parameters)["generated_text"] == [expected]


def test_allowed_tokens_and_a_decay_reach_the_engine(lightllm: MakeSide) -> None:
    side = lightllm("ab")
    parameters: dict[str, Any] = {"allowed_token_ids": [64, 65], "exponential_decay_length_penalty": [5, 1.25]}
    side.ok("/generate", inputs="say", parameters=parameters)
    side.ok("/generate", inputs="say", parameters={**parameters, "ignore_eos": True})
    side.ok("/generate", inputs="say", parameters={"exponential_decay_length_penalty": [5, 1.0]})
    first, second, third = (submit.sampling for submit in side.bridge.submitted)
    assert first.allowed_ids == second.allowed_ids == (64, 65)
    assert first.length_decay == second.length_decay == LengthDecay(5, 1.25, (EOS,))
    assert (third.allowed_ids, third.length_decay) == ((), None)
    # [1, 1.0] is LightLLM's default
    side.ok("/generate", inputs="say", parameters={"exponential_decay_length_penalty": [1, 1.0]})


def with_options(tokenizer: FastTokenizer, bridge: FakeBridge, **options: Any) -> tuple[Any, FakeFront]:
    front = fake_front(bridge, tokenizer, scores=options.pop("scores", 0))
    front = replace(front, config=replace(front.config, plugin_options=options))
    return dialect_client(routes, front), front


def test_prompts_have_log_probabilities_where_the_operator_wants_them(tokenizer: FastTokenizer) -> None:
    bridge = FakeBridge()
    client, _ = with_options(tokenizer, bridge, return_all_prompt_logprobs=True)
    body: dict[str, Any] = {"inputs": [64, 65, 66], "parameters": {"return_details": True, "n": 2}}
    answer = client.simulate_post("/generate", json=body).json
    assert list(answer)[-3:] == ["tokens", "prompt_token_ids", "prompt_logprobs"]
    assert answer["prompt_token_ids"] == [64, 65, 66]
    assert answer["prompt_logprobs"] == [[64, {"65": -0.5}], [65, {"66": -0.75}]]
    client.simulate_post("/generate_stream", json={"inputs": "a", "parameters": {}})
    assert [submit.prompt_logprobs for submit in bridge.submitted] == [True, False]
    plain, _ = with_options(tokenizer, bridge)
    assert "prompt_token_ids" not in plain.simulate_post("/generate", json=body).json


def test_scores(tokenizer: FastTokenizer) -> None:
    bridge = FakeBridge(scores=(1.5,))
    client, front = with_options(tokenizer, bridge, use_reward_model=True, scores=1)
    answer = client.simulate_post("/get_score", json={"chat": "a conversation", "multimodal_params": {}})
    assert answer.json == {
        "score": 1.5,
        "prompt_tokens": len(tokenizer.encode("a conversation")),
        "finish_reason": "length",
    }
    assert list(answer.json) == ["score", "prompt_tokens", "finish_reason"]
    assert bridge.submitted[0].score and bridge.submitted[0].max_new_tokens == 1
    assert front.records[0].finish == "stop"
    bridge.scores = (1.0, -2.0)
    assert client.simulate_post("/get_score", json={"chat": [64, 65]}).json["score"] == [1.0, -2.0]
    for body, param in (({}, "chat"), ({"chat": 3}, "chat"), ({"chat": ""}, "chat"), ({"chat": "x" * 999}, "chat")):
        failed = client.simulate_post("/get_score", json=body)
        assert (failed.status_code, failed.json["error"]["param"]) == (400, param)


def test_scores_need_a_model_that_has_them(tokenizer: FastTokenizer) -> None:
    bridge = FakeBridge()
    client, _ = with_options(tokenizer, bridge)
    failed = client.simulate_post("/get_score", json={"chat": "x"})
    assert (failed.status_code, failed.json["error"]["code"]) == (400, "unsupported_parameter")
    with pytest.raises(ConfigError, match="--use_reward_model"):
        with_options(tokenizer, bridge, use_reward_model=True)


def test_an_error_has_a_message_and_the_object(lightllm: MakeSide) -> None:
    side = lightllm("ab")
    result = side.post("/generate", inputs="say")
    assert result.status_code == 400
    assert result.json["message"] == "parameters: this field is required"
    assert result.json["error"]["param"] == "parameters"


def test_an_error_in_a_stream_is_its_last_event(lightllm: MakeSide) -> None:
    side = lightllm("abc", error=("internal_error", "It broke."), error_after=2)
    events = side.events("/generate_stream", "data:", inputs="say", parameters={})
    assert [event["token"]["text"] for event in events[:2]] == ["a", "b"]
    assert events[2]["message"] == "It broke."


def test_an_error_before_a_stream_is_a_status(lightllm: MakeSide) -> None:
    side = lightllm("abc", error=("engine_failed", "The engine has stopped."))
    for path in ("/generate", "/generate_stream"):
        result = side.post(path, inputs="say", parameters={})
        assert (result.status_code, result.json["message"]) == (503, "The engine has stopped.")


def test_context_length(lightllm: MakeSide) -> None:
    side = lightllm("ab", facts={"max_total_len": 20, "max_input_len": 10})
    for body, param in (
        ({"inputs": "x" * 11, "parameters": {}}, "inputs"),
        ({"inputs": "x" * 10, "parameters": {}}, "parameters.max_new_tokens"),
        ({"inputs": "x" * 10, "parameters": {"max_new_tokens": 11}}, "parameters.max_new_tokens"),
    ):
        error = side.post("/generate", **body).json["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    side.ok("/generate", inputs="x" * 10, parameters={"max_new_tokens": 10})


def test_tokens(lightllm: MakeSide) -> None:
    side = lightllm()
    assert side.ok("/tokens", text="the stop") == {"ntokens": 3}
    body: dict[str, Any] = {"text": "abc", "parameters": {"add_special_tokens": False}}
    assert side.client.simulate_get("/tokens", json=body).json == {"ntokens": 3}
    assert side.post("/tokens", parameters={}).json["error"]["param"] == "text"


def test_token_load_and_name(lightllm: MakeSide) -> None:
    client = lightllm().client
    load = {"current_load": 0.25, "logical_max_load": 0.5, "dynamic_max_load": 0.5}
    assert client.simulate_get("/token_load").json == load
    assert client.simulate_post("/token_load").status_code == 405
    for call in (client.simulate_get, client.simulate_post):
        assert call("/get_model_name").json == {"model_name": "fake"}


def test_the_name_nobody_gave(tokenizer: FastTokenizer) -> None:
    client = dialect_client(routes, fake_front(FakeBridge(), tokenizer, model_name=None))
    assert client.simulate_get("/get_model_name").json == {"model_name": "default_model_name"}
