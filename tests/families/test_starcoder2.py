"""Starcoder2ForCausalLM against transformers in f32, with and without biases, a window and a tied head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llmcore.api.errors import ConfigError
from llmcore.api.specs import ModelSpec
from llmcore.registry.loader import load
from llmcore_devtools.family import assert_family_matches_transformers
from llmcore_devtools.loaded_model import registry_for_tests

FILE = Path(__file__).parents[2] / "contrib_models" / "starcoder2.py"

CASES: dict[str, dict[str, Any]] = {
    "tied, no window": {"sliding_window": None},
    "window, not tied": {"sliding_window": 7, "tie_word_embeddings": False},
    "window longer than the prompts": {"sliding_window": 200},
    "no biases": {"use_bias": False, "norm_epsilon": 1e-3},
    "one KV head": {"num_attention_heads": 5, "num_key_value_heads": 1, "hidden_size": 40, "sliding_window": 16},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 999999.44}},
}


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES)
def test_starcoder2(overrides: dict[str, Any]) -> None:
    assert_family_matches_transformers("Starcoder2ForCausalLM", prompts=(1, 7, 8, 61), **overrides)


def test_the_file_alone_is_a_plugin() -> None:
    registry = registry_for_tests([str(FILE)])
    assert "contrib-models" not in {info.name for info in registry.plugins}
    assert_family_matches_transformers("Starcoder2ForCausalLM", registry=registry, prompts=(12,), sliding_window=6)


def test_another_activation_is_refused() -> None:
    spec = registry_for_tests().find(ModelSpec, "starcoder2")
    with pytest.raises(ConfigError, match="hidden_act 'relu'"):
        load(spec.read_config)({"hidden_act": "relu"})
