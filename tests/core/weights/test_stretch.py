"""`--rope_scaling_factor` against transformers' dynamic NTK scaling, and where it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llmcore.api.errors import ConfigError
from llmcore.config import make_config
from llmcore.engine.llm import LLM
from llmcore.weights.source import read_model_as_set, stretched
from llmcore_devtools.loaded_model import registry_for_tests
from llmcore_devtools.tokenizer import write_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 24,
    "bos_token_id": 1,
    "eos_token_id": 63,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("plain")
    LlamaForCausalLM(LlamaConfig(**SMALL, initializer_range=0.4)).save_pretrained(path)
    write_tokenizer(path)
    return path


def read(hf: dict[str, Any], **settings: Any) -> Any:
    return read_model_as_set(registry_for_tests(), hf, make_config(**settings))[1]


HF = {"architectures": ["LlamaForCausalLM"], **SMALL, "rms_norm_eps": 1e-6}


def test_answers_are_those_of_a_model_that_says_so_itself(model: Path) -> None:
    torch.manual_seed(1)
    prompt = torch.randint(2, 60, (40,)).tolist()
    oracle = LlamaForCausalLM.from_pretrained(model, rope_parameters=DYNAMIC, dtype=torch.float32)
    with torch.inference_mode():
        wanted = int(oracle(torch.tensor([prompt])).logits[0, -1].argmax())
        plain = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
        assert int(plain(torch.tensor([prompt])).logits[0, -1].argmax()) != wanted
    settings: dict[str, Any] = {
        "data_type": "fp32",
        "device": "cpu",
        "max_total_token_num": 200,
    }
    with LLM(model, rope_scaling_factor=2.0, **settings) as llm:
        assert llm.facts.max_total_len == 48
        [answer] = llm.generate([prompt], max_new_tokens=1, temperature=0.0, ignore_eos=True)
    assert list(answer.token_ids) == [wanted]


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        ({}, 24),
        ({"rope_scaling_factor": 2}, 48),
        ({"rope_scaling_factor": 1}, 24),
        ({"rope_scaling_factor": 1, "max_req_total_len": 100}, 100),
        ({"rope_scaling_factor": 0.5}, 24),
    ],
)
def test_how_long_requests_may_be(settings: dict[str, Any], longest: int) -> None:
    config = read(HF, **settings)
    assert config.max_position == longest
    assert config.fixed_angles_up_to == (24 if settings else None)


def test_the_base_and_the_share_of_a_head_are_kept() -> None:
    present = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    scaling = stretched({"rope_parameters": present}, 4)["rope_scaling"]
    assert scaling == {**present, "rope_type": "dynamic", "factor": 4}
    assert stretched({"text_config": {}}, 4)["text_config"]["rope_scaling"]["factor"] == 4


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "a rope scaling of its own, yarn"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "several kinds"),
    ],
)
def test_a_scaling_that_is_there_already(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"--rope_scaling_factor 2: .*{message}"):
        read({**HF, **more}, rope_scaling_factor=2)


def test_a_family_without_such_positions() -> None:
    hf = {"architectures": ["LlmcoreFake"], "vocab_size": 9, "max_position_embeddings": 40, "eos_token_id": 1}
    with pytest.raises(ConfigError, match="cannot be stretched"):
        read(hf, rope_scaling_factor=2)
