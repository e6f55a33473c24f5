"""--long_truncation_mode: prompts that are too long are cut where the operator asked for it, in every dialect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from llmcore.config import Config
from llmcore.text.tokenizer import FastTokenizer
from llmcore_devtools.dialect import Side
from llmcore_server.http.intake import truncated
from llmcore_tgi.routes import routes as tgi_routes

MakeSide = Callable[..., Side]


@pytest.mark.parametrize(
    ("mode", "most", "kept"),
    [
        ("head", 4, [6, 7, 8, 9]),
        ("center", 4, [0, 1, 8, 9]),
        ("center", 5, [0, 1, 7, 8, 9]),
        ("center", 1, [9]),
        ("head", 10, list(range(10))),
        ("center", 11, list(range(10))),
        ("head", 0, list(range(10))),
        ("center", -3, list(range(10))),
    ],
)
def test_what_is_kept(mode: str, most: int, kept: list[int]) -> None:
    assert list(truncated(list(range(10)), most, mode)) == kept


def facts(mode: str | None, **more: Any) -> dict[str, Any]:
    return {"config": Config(plugin_options={"long_truncation_mode": mode}), "max_total_len": 20, **more}


def prompts(side: Side) -> list[list[int]]:
    return [np.frombuffer(submit.prompt, "<i4").tolist() for submit in side.bridge.submitted]


@pytest.mark.parametrize(
    ("mode", "most", "kept"),
    [
        ("head", {"max_input_len": 19}, list(range(30, 40))),
        ("center", {"max_input_len": 19}, [*range(5), *range(35, 40)]),
        ("head", {"max_input_len": 7}, list(range(33, 40))),
    ],
)
def test_native_and_openai(
    lightllm: MakeSide, openai: MakeSide, tokenizer: FastTokenizer, mode: str, most: dict[str, int], kept: list[int]
) -> None:
    ids = list(range(40))
    bodies: list[tuple[MakeSide, str, dict[str, Any]]] = [
        (lightllm, "/generate", {"inputs": ids, "parameters": {"max_new_tokens": 10}}),
        (openai, "/v1/completions", {"prompt": ids, "max_tokens": 10}),
    ]
    for side, path, body in bodies:
        made = side("ok", facts=facts(mode, **most))
        made.ok(path, **body)
        assert prompts(made) == [kept]
        assert made.bridge.submitted[0].max_new_tokens == 10


def test_chat_and_tgi(openai: MakeSide, tokenizer: FastTokenizer) -> None:
    side = openai("ok", facts=facts("head", max_input_len=19))
    side.ok("/v1/chat/completions", messages=[{"role": "user", "content": "word " * 30}], max_completion_tokens=4)
    config = Config(plugin_options={"long_truncation_mode": "head", "use_tgi_api": True})
    tgi = Side.of(tgi_routes, tokenizer, "ok", facts={"config": config, "max_total_len": 20, "max_input_len": 19})
    tgi.ok("/generate", inputs="abcdefghij" * 4, parameters={"max_new_tokens": 4})
    assert [len(prompt) for prompt in (*prompts(side), *prompts(tgi))] == [16, 16]
    assert prompts(tgi)[0] == tokenizer.encode("abcdefghij" * 4)[-16:]


def test_the_rest_of_the_context_is_the_answer_s(openai: MakeSide) -> None:
    side = openai("ok", facts=facts("head", max_input_len=15))
    side.ok("/v1/completions", prompt=list(range(40)))
    assert prompts(side) == [list(range(25, 40))]
    assert side.bridge.submitted[0].max_new_tokens == 5


@pytest.mark.parametrize(("side", "kept"), [(None, [7, 8, 9]), ("left", [7, 8, 9]), ("right", [0, 1, 2])])
def test_the_side_from_which_a_request_cuts_its_prompt(openai: MakeSide, side: str | None, kept: list[int]) -> None:
    made = openai("ok", facts={"embedding_size": 4})
    asked = {"truncate_prompt_tokens": 3, "truncation_side": side}
    made.ok("/v1/completions", prompt=list(range(10)), **asked)
    made.ok("/v1/completions", prompt=list(range(10)), truncation_side=side)
    assert prompts(made) == [kept, list(range(10))]
    messages = [{"role": "user", "content": "hi"}]
    made.ok("/v1/chat/completions", messages=messages)
    made.ok("/v1/chat/completions", messages=messages, **asked)
    whole, cut = prompts(made)[2:]
    assert cut == (whole[:3] if side == "right" else whole[-3:])


def test_an_answer_that_leaves_no_room_is_refused(lightllm: MakeSide) -> None:
    side = lightllm("ok", facts=facts("head", max_input_len=19))
    result = side.post("/generate", inputs=[1, 2, 3], parameters={"max_new_tokens": 20})
    assert result.status_code == 400
    assert result.json["error"]["code"] == "context_length_exceeded"


def test_without_it_they_are_refused(lightllm: MakeSide) -> None:
    side = lightllm("ok", facts=facts(None, max_input_len=19))
    result = side.post("/generate", inputs=list(range(19)), parameters={"max_new_tokens": 10})
    assert result.status_code == 400
    assert not side.bridge.submitted
