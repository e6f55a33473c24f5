"""Beam searches in the dialects: who asks for one how, and what goes together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llmcore.api.bridge import BeamSearch
from llmcore.config import Config
from llmcore_devtools.dialect import Side

MakeSide = Callable[..., Side]

BEAM_MODE = {"config": Config(plugin_options={"beam_mode": True})}


@pytest.mark.parametrize(
    ("mode", "parameters", "beams", "n"),
    [
        (False, {"num_beams": 3}, BeamSearch(3), 1),
        (False, {"num_beams": 3, "n": 2}, BeamSearch(3), 2),
        (False, {"num_beams": 3, "n": 2, "best_of": 3}, BeamSearch(3), 2),
        (False, {"num_beams": 3, "n": 2, "best_of": 2}, BeamSearch(3), 2),
        (False, {"num_beams": 2, "length_penalty": 0.5, "early_stopping": True}, BeamSearch(2, 0.5, True), 1),
        (False, {"num_beams": 2, "early_stopping": "never", "do_sample": False}, BeamSearch(2, 1.0, None), 1),
        (False, {"num_beams": 1}, None, 1),
        (False, {"best_of": 2, "n": 2, "length_penalty": 1}, None, 2),
        (True, {"best_of": 4}, BeamSearch(4), 4),
        (True, {"best_of": 4, "n": 1}, BeamSearch(4), 1),
        (True, {"n": 2}, BeamSearch(2), 2),
        (True, {"num_beams": 1, "best_of": 2}, None, 2),
        (True, {"num_beams": 3, "best_of": 3}, BeamSearch(3), 1),
        (True, {}, None, 1),
    ],
)
def test_native(lightllm: MakeSide, mode: bool, parameters: dict[str, Any], beams: BeamSearch | None, n: int) -> None:
    side = lightllm("ab", facts=BEAM_MODE if mode else None)
    answer = side.ok("/generate", inputs="x", parameters=parameters)
    (submit,) = side.bridge.submitted
    assert (submit.beams, submit.n) == (beams, n)
    assert answer["generated_text"] == ["ab"] * n
    assert submit.sampling.temperature == 0


@pytest.mark.parametrize(
    ("body", "beams", "n"),
    [
        ({"use_beam_search": True, "best_of": 4}, BeamSearch(4), 1),
        ({"use_beam_search": True, "best_of": 4, "n": 2, "temperature": 0}, BeamSearch(4), 2),
        ({"use_beam_search": True, "n": 3, "length_penalty": 2}, BeamSearch(3, 2.0), 3),
        ({"num_beams": 2, "early_stopping": True, "top_p": 1}, BeamSearch(2, 1.0, True), 1),
        ({"use_beam_search": True, "num_beams": 5, "n": 2}, BeamSearch(5), 2),
        ({"use_beam_search": False, "num_beams": 1, "length_penalty": 1.0}, None, 1),
    ],
)
def test_openai(openai: MakeSide, body: dict[str, Any], beams: BeamSearch | None, n: int) -> None:
    side = openai("ab", facts={"generation": {"repetition_penalty": 1.3, "temperature": 0.6, "top_k": 9}})
    side.ok("/v1/completions", prompt="x", **body)
    side.ok("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], **body)
    for submit in side.bridge.submitted:
        assert (submit.beams, submit.n) == (beams, n)
        # the model's defaults are for draws
        assert (submit.sampling.repetition_penalty, submit.sampling.top_k) == ((1.3, 9) if beams is None else (1.0, 0))


@pytest.mark.parametrize(
    ("param", "parameters"),
    [
        ("length_penalty", {"length_penalty": 2}),
        ("early_stopping", {"early_stopping": True}),
        ("do_sample", {"num_beams": 2, "do_sample": True}),
        ("repetition_penalty", {"num_beams": 2, "repetition_penalty": 1.2}),
        ("presence_penalty", {"num_beams": 2, "presence_penalty": 0.2}),
        ("allowed_token_ids", {"num_beams": 2, "allowed_token_ids": [1]}),
        ("exponential_decay_length_penalty", {"num_beams": 2, "exponential_decay_length_penalty": [1, 1.5]}),
        ("best_of", {"num_beams": 4, "n": 2, "best_of": 3}),
        ("length_penalty", {"num_beams": 2, "length_penalty": 6}),
        ("early_stopping", {"num_beams": 2, "early_stopping": "soon"}),
        ("num_beams", {"num_beams": 0}),
    ],
)
def test_native_refuses(lightllm: MakeSide, param: str, parameters: dict[str, Any]) -> None:
    side = lightllm("ab")
    result = side.post("/generate", inputs="x", parameters=parameters)
    assert result.status_code == 400
    assert f"parameters.{param}" in result.json["error"]["message"]
    assert not side.bridge.submitted


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("use_beam_search", {"use_beam_search": True}),
        ("length_penalty", {"length_penalty": 2}),
        ("temperature", {"num_beams": 2, "temperature": 0.7}),
        ("top_k", {"num_beams": 2, "top_k": 7}),
        ("logit_bias", {"num_beams": 2, "logit_bias": {"1": 2}}),
        ("bad_words", {"num_beams": 2, "bad_words": ["x"]}),
        ("typical_p", {"num_beams": 2, "typical_p": 0.5}),
        ("best_of", {"num_beams": 4, "best_of": 3}),
        ("best_of", {"best_of": 3, "stream": True}),
    ],
)
def test_openai_refuses(openai: MakeSide, param: str, body: dict[str, Any]) -> None:
    side = openai("ab")
    result = side.post("/v1/completions", prompt="x", **body)
    assert (result.status_code, result.json["error"]["param"]) == (400, param)
    assert not side.bridge.submitted


def test_a_stream_carries_the_best_answer(lightllm: MakeSide) -> None:
    side = lightllm("ab", group=100)
    events = side.events("/generate_stream", "data:", inputs="x", parameters={"num_beams": 3})
    assert [event["token"]["text"] for event in events] == ["a", "b"]
    assert side.post("/generate_stream", inputs="x", parameters={"num_beams": 3, "n": 2}).status_code == 400
