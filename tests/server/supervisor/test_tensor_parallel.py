"""`--tp 2` on the CPU: a model that is cut over two processes answers as it does in one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llmcore.api.errors import ConfigError
from llmcore.engine.llm import LLM
from llmcore_devtools import sockets
from llmcore_devtools.family import small_model
from llmcore_devtools.server import ServerFailed, serving
from llmcore_devtools.tokenizer import write_tokenizer

SETTINGS = {"device": "cpu", "data_type": "f32", "max_total_token_num": 2000, "max_req_total_len": 200}
PROMPTS = ([5, 6, 7], list(range(10, 90)), [9] * 30)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    small_model(
        "LlamaForCausalLM", num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256
    ).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def bodies() -> list[dict[str, Any]]:
    rest = {"max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
    return [
        *({"prompt": prompt, "temperature": 0, "logprobs": 2, **rest} for prompt in PROMPTS),
        *({"prompt": prompt, "temperature": 0, **rest} for prompt in PROMPTS),
        {"prompt": PROMPTS[0], "temperature": 0.9, "seed": 7, "n": 3, **rest},
        {"prompt": PROMPTS[1], "temperature": 0.9, "top_p": 0.8, "seed": 3, "frequency_penalty": 0.7, **rest},
        {"prompt": PROMPTS[0], "temperature": 0, "logit_bias": {"11": 100}, **rest},
    ]


def answers(port: int) -> tuple[list[list[str]], list[float]]:
    """The texts, and the log-probabilities that were asked for."""
    found, logprobs = [], []
    for body in bodies():
        status, _, answer = sockets.call(port, "POST", "/v1/completions", body)
        assert status == 200, answer
        choices = json.loads(answer)["choices"]
        found.append([choice["text"] for choice in choices])
        logprobs += [value for c in choices if c.get("logprobs") for value in c["logprobs"]["token_logprobs"]]
    return found, logprobs


def test_two_ranks_answer_as_one(model: Path) -> None:
    with serving(model, **SETTINGS) as server:
        texts, logprobs = answers(server.port)
    assert len(logprobs) == 24 * len(PROMPTS)
    with serving(model, tp=2, **SETTINGS) as server:
        for _ in ("first", "with hits of the prefix cache"):
            assert answers(server.port) == (texts, pytest.approx(logprobs, abs=1e-4))


def test_ranks_that_do_not_fit_the_model_are_named(model: Path) -> None:
    with (
        pytest.raises(ServerFailed, match=r"cannot be cut over 3 ranks .*--tp can be 1, 2, 4"),
        serving(model, tp=3, **SETTINGS),
    ):
        pass


def test_a_program_has_no_ranks(model: Path) -> None:
    with pytest.raises(ConfigError, match="--tp 2 needs processes that `llmcore serve` starts"):
        LLM(str(model), tp=2, **SETTINGS)
