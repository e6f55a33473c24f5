"""Rows 30 to 35: how tokens are drawn, what is told of them, where answers stop, what else a request carries."""

from __future__ import annotations

import json
from typing import Any

import pytest
from bad_input import CHAT, COMPLETION
from harness import House, expected

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def refusal(house: House, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    status, _, answer = house.post(path, body)
    assert status == 400, answer[:500]
    found: dict[str, Any] = json.loads(answer)["error"]
    return found


BAD: dict[str, tuple[Any, ...]] = {
    "temperature": (-1, 2.1, 1e308, "NaN", "Infinity"),
    "top_p": (-0.1, 1.1),
    "top_k": (-2, 2**31, 2**40),
    "min_p": (-0.1, 1.1),
    "typical_p": (0, -0.1, 1.1, "NaN"),
    "presence_penalty": (-1e9, 1e9, 2.1),
    "frequency_penalty": (-1e9, 1e9, -2.1),
    "repetition_penalty": (0, -1, 1e-38, 1e9),
    "seed": (-(2**63) - 1, 2**63, 1.5),
    "logprobs": (21, -1),
    "stop": ("", ["a", ""], ["a"] * 33, "x" * 2**20, ["x"] * 10_000),
    "user": ("x" * 2**20,),
    "metadata": ({str(i): i for i in range(65)}, "x" * 2**20),
}


@pytest.mark.parametrize("name", BAD)
def test_rows_30_to_32_and_35_values_out_of_range(house: House, name: str) -> None:
    for value in BAD[name]:
        for stream in (False, True):
            error = refusal(house, {**COMPLETION, "max_tokens": 1, "stream": stream, name: value})
            assert error["param"].startswith(name), error


EXTREMES: tuple[dict[str, Any], ...] = (
    *({"temperature": t} for t in (1e-4, 1e-9, 1e-38, 1e-44, 5e-324)),
    *({"top_k": 1}, {"top_p": 0}, {"top_p": 1e-9}, {"top_p": 5e-324}, {"min_p": 1}),
    *({"temperature": 1e-38, **more} for more in ({"top_p": 0.5}, {"top_k": 3}, {"logprobs": 2})),
)
"""Drawn as if greedy: the best token is all that is left."""


def test_row_30_parameters_at_the_edge_of_their_range(house: House) -> None:
    with house.neighbour():
        for more in EXTREMES:
            body = {"prompt": [8, 8], "max_tokens": 9, "temperature": 1, **more}
            status, _, answer = house.post("/v1/completions", body)
            assert status == 200 and json.loads(answer)["choices"][0]["text"] == expected([8, 8], 9), (more, answer)
        for more in (
            {"temperature": 2, "top_p": 1, "top_k": 2**31 - 1, "min_p": 0},
            *({"typical_p": share, "temperature": 2} for share in (5e-324, 1e-6, 0.95, 1)),
            {"bad_words": [f"{i:03}" for i in range(1000)]},
            {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 0.01},
            {"repetition_penalty": 100, "presence_penalty": 2, "frequency_penalty": -2, "logprobs": 20},
            {"seed": -(2**63)},
            {"seed": 2**63 - 1, "logit_bias": {str(i): (-100, 100)[i % 2] for i in range(200)}},
        ):
            body = {"prompt": [8, 8], "max_tokens": 20, "temperature": 1, **more}
            status, _, answer = house.post("/v1/completions", body)
            assert status == 200, (more, answer)


def test_row_31_log_probabilities_of_a_long_prompt(house: House) -> None:
    """What the engine tells of a prompt is bounded by the context, and given back."""
    for wrong in ({"prompt_logprobs": 21}, {"prompt_logprobs": -1}, {"prompt_logprobs": 1, "stream": True}):
        assert refusal(house, {**COMPLETION, **wrong})["param"] == "prompt_logprobs"
    too_much = {"prompt": [[7] * 4000] * 7, "prompt_logprobs": 20}
    assert refusal(house, too_much)["param"] == "prompt_logprobs"
    body = {"prompt": [7] * 4000, "max_tokens": 1, "echo": True, "logprobs": 14, "prompt_logprobs": 14}
    house.post("/v1/completions", body)
    before = house.resident()
    with house.neighbour():
        for _ in range(3):
            status, _, answer = house.post("/v1/completions", body)
            choice = json.loads(answer)["choices"][0]
            assert (status, len(choice["logprobs"]["tokens"]), len(choice["prompt_logprobs"])) == (200, 4001, 4000)
    assert house.resident() - before < 64 << 20


def test_row_31_log_probabilities_of_answers(house: House) -> None:
    """They take columns until they are sent, and what a request names beyond their bound is refused."""
    message = refusal(house, {**COMPLETION, "max_tokens": 500, "n": 128, "logprobs": 20})["message"]
    assert f"{500 * 128 * 21:,}" in message and f"{1 << 20:,}" in message
    body = {**COMPLETION, "max_tokens": 200, "n": 32, "temperature": 1, "logprobs": 20, "ignore_eos": True}
    house.post("/v1/completions", {**body, "n": 2})
    before = house.resident()
    with house.neighbour():
        status, headers, answer = house.post("/v1/completions", body)
    assert (status, headers["transfer-encoding"]) == (200, "chunked")
    choices = json.loads(answer)["choices"]
    shown = [len(choice["logprobs"]["top_logprobs"]) for choice in choices]
    assert len(shown) == 32 and min(shown) > 190, "a last token that is not a whole character is not shown"
    assert house.resident() - before < 24 << 20, "as objects they would take 60 MB"


def test_row_32_a_stop_across_tokens(house: House) -> None:
    whole = expected([5, 6, 7], 100)
    stop = whole[30:34]
    body = {"prompt": [5, 6, 7], "max_tokens": 100, "temperature": 0, "ignore_eos": True, "stop": ["\x00", stop]}
    choice = json.loads(house.post("/v1/completions", body)[2])["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (whole[: whole.index(stop)], "stop")


def test_row_32_one_choice_of_several_stops_early(house: House) -> None:
    body = {"prompt": [4, 2], "max_tokens": 60, "temperature": 1, "seed": 11, "n": 3, "ignore_eos": True}
    texts = [choice["text"] for choice in json.loads(house.post("/v1/completions", body)[2])["choices"]]
    stop = texts[1][20:24]
    assert stop not in texts[0] + "|" + texts[2]
    choices = json.loads(house.post("/v1/completions", {**body, "stop": stop})[2])["choices"]
    assert [choice["text"] for choice in choices] == [texts[0], texts[1][: texts[1].index(stop)], texts[2]]
    assert [choice["finish_reason"] for choice in choices] == ["length", "stop", "length"]


BIASES: tuple[dict[str, Any], ...] = (
    {str(i): 1 for i in range(100_000)},
    {str(i): 1 for i in range(1025)},
    *({key: 1} for key in ("-1", "100000", "1.5", "x", "", "9" * 40, "\u0661")),
    {"1": 1e9},
    {"1": -101},
    {"1": "1"},
)


def test_row_33_biases(house: House) -> None:
    requests = [house.request("/v1/completions", {**COMPLETION, "logit_bias": bias}) for bias in BIASES]
    with house.neighbour():
        for request in requests:
            status, _, answer = house.send(request)
            assert (status, json.loads(answer)["error"]["param"].split(".")[0]) == (400, "logit_bias"), answer


def test_row_34_ids_beyond_the_vocabulary(house: House) -> None:
    """The scores are as wide as the vocabulary: what would write beside them is refused."""
    with house.neighbour():
        for more in (
            *({"allowed_token_ids": ids} for ids in ([100_000], [1, 2**31 - 1], [-1], [2**31], list(range(2000)))),
            *({"stop_token_ids": ids} for ids in ([100_000], [-1], [2**40])),
            *({"bad_words": words} for words in ([""], ["x", ""], ["x" * 257], ["x" * 200] * 100, ["x"] * 1025, [7])),
        ):
            assert refusal(house, {**COMPLETION, **more})["param"].split("[")[0] in more
        native = {"inputs": "x", "parameters": {"allowed_token_ids": [100_000]}}
        assert refusal(house, native, "/generate")["param"] == "parameters.allowed_token_ids"


def test_row_35_many_tools_and_odd_names(house: House) -> None:
    error = refusal(house, {**CHAT, "tools": [TOOL] * 10_000}, "/v1/chat/completions")
    assert error["param"] == "tools"
    for name in ("", "x" * 257, "a" * 10_000 + "!", 3, None):
        tool = {"type": "function", "function": {"name": name}}
        error = refusal(house, {**CHAT, "tools": [tool]}, "/v1/chat/completions")
        assert error["param"].startswith("tools[0].function"), error
    for name in ("(a+)+$" * 40, "a" * 256, "\u202e", "../../x"):
        tool = {"type": "function", "function": {"name": name}}
        status, _, answer = house.post("/v1/chat/completions", {**CHAT, "tools": [tool], "max_tokens": 4})
        assert status in (200, 400), answer
