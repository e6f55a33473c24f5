"""Glm4ForCausalLM and GlmForCausalLM against transformers in f32: rope of neighbours over part of a head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llmcore.api.errors import ConfigError
from llmcore.weights.source import read_model
from llmcore_devtools.family import SMALL, assert_family_matches_transformers
from llmcore_devtools.loaded_model import registry_for_tests

FILE = Path(__file__).parents[2] / "contrib_models" / "glm4.py"


def partial(share: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}}


CASES: dict[str, dict[str, Any]] = {
    "half a head turns, biases": {},
    "no biases, tied": {"attention_bias": False, "tie_word_embeddings": True, "rms_norm_eps": 1e-2},
    "three quarters of a head turn, one KV head": {
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 16,
        **partial(0.75),
    },
    "whole heads turn": partial(1.0),
}


@pytest.mark.parametrize("architecture", ["Glm4ForCausalLM", "GlmForCausalLM"])
@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES)
def test_glm(architecture: str, overrides: dict[str, Any]) -> None:
    assert_family_matches_transformers(architecture, prompts=(1, 14, 50), **overrides)


def test_the_file_alone_is_a_plugin() -> None:
    registry = registry_for_tests([str(FILE)])
    assert_family_matches_transformers("Glm4ForCausalLM", registry=registry, prompts=(12,), new=3)


def read(**fields: Any) -> Any:
    return read_model(registry_for_tests(), {**SMALL, "architectures": ["Glm4ForCausalLM"], **fields})[1]


def test_what_a_file_leaves_out() -> None:
    config = read(head_dim=None, max_position_embeddings=None)
    assert (config.head_size, config.rope.rotated, config.max_position) == (128, 64, 131072)
    assert (config.eos_ids, config.bias, config.eps) == ((151329, 151336, 151338), True, 1.5625e-7)
    assert read(eos_token_id=7).eos_ids == (7,)


def test_another_activation_is_refused() -> None:
    with pytest.raises(ConfigError, match="Glm4ForCausalLM with hidden_act 'gelu' is not known"):
        read(hidden_act="gelu")
