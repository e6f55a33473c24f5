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
GUIDED = ["llama", "openai", "guided"]
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
        {"prompt": PROMPTS[1], "temperature": 0, "logit_bias": {"130": 4, "11": 3}, "logprobs": 3, **rest},
        {"prompt": PROMPTS[1], "temperature": 0, "prompt_logprobs": 3, **rest},
        {"prompt": PROMPTS[2], "num_beams": 4, "n": 3, "max_tokens": 12, "return_token_ids": True},
        {"prompt": PROMPTS[0], "temperature": 0, "guided_regex": "([a-f]{3}[0-9]){5}", **rest, "ignore_eos": False},
        {"prompt": PROMPTS[1], "temperature": 1, "seed": 4, "guided_regex": "[a-m]{30}", **rest, "ignore_eos": False},
        # a thousand draws, of ten requests of a hundred tokens
        *({"prompt": PROMPTS[0], "temperature": 1.0, "seed": seed, **rest, "max_tokens": 100} for seed in range(10)),
    ]


def answers(port: int) -> list[Any]:
    """The choices of every request, with token ids, log-probabilities and reasons."""
    found = []
    for body in bodies():
        status, _, answer = sockets.call(port, "POST", "/v1/completions", body)
        assert status == 200, answer
        found.append(json.loads(answer)["choices"])
    return found


def assert_same(found: Any, wanted: Any, at: str = "") -> None:
    """The same values; floats within 1e-5."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), at
        for key, value in wanted.items():
            assert_same(found[key], value, f"{at}.{key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), at
        for index, value in enumerate(wanted):
            assert_same(found[index], value, f"{at}[{index}]")
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, abs=1e-5), at
    else:
        assert found == wanted, at


def test_two_ranks_answer_as_one(model: Path) -> None:
    with serving(model, plugins=GUIDED, **SETTINGS) as server:
        alone = answers(server.port)
    drawn = [choice["token_ids"] for choices in alone[-10:] for choice in choices]
    assert sum(map(len, drawn)) == 1000
    with serving(model, tp=2, plugins=GUIDED, **SETTINGS) as server:
        assert_same(answers(server.port), alone, "first")
        assert_same(answers(server.port), alone, "with hits of the prefix cache")


def test_ranks_that_do_not_fit_the_model_are_named(model: Path) -> None:
    with (
        pytest.raises(ServerFailed, match=r"cannot be cut over 3 ranks .*--tp can be 1, 2, 4"),
        serving(model, tp=3, **SETTINGS),
    ):
        pass


def test_a_program_has_no_ranks(model: Path) -> None:
    with pytest.raises(ConfigError, match="--tp 2 needs processes that `llmcore serve` starts"):
        LLM(str(model), tp=2, **SETTINGS)
    with pytest.raises(ConfigError, match="--dp 2 needs engines that `llmcore serve` starts"):
        LLM(str(model), dp=2, **SETTINGS)
