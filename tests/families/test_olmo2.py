"""Olmo2ForCausalLM against transformers: norms behind the sublayers, and over all heads of q and of k."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llmcore.api.errors import ConfigError
from llmcore.weights.source import read_model
from llmcore_devtools.family import SMALL, assert_family_matches_transformers
from llmcore_devtools.loaded_model import registry_for_tests

FILE = Path(__file__).parents[2] / "contrib_models" / "olmo2.py"
ARCHITECTURE = "Olmo2ForCausalLM"

CASES: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "every head its own, tied": {"num_key_value_heads": None, "tie_word_embeddings": True},
    "one KV head, biases": {
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "hidden_size": 40,
        "attention_bias": True,
    },
    "heads wider than hidden, theta": {
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "large eps": {"rms_norm_eps": 0.3, "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}},
}


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES)
def test_olmo2(overrides: dict[str, Any]) -> None:
    assert_family_matches_transformers(ARCHITECTURE, prompts=(1, 14, 61), **overrides)


def test_the_file_alone_is_a_plugin() -> None:
    registry = registry_for_tests([str(FILE)])
    assert_family_matches_transformers(ARCHITECTURE, registry=registry, prompts=(12,), new=3)


def read(**fields: Any) -> Any:
    return read_model(registry_for_tests(), {**SMALL, "architectures": [ARCHITECTURE], **fields})


def test_what_a_config_leaves_out() -> None:
    _, config = read(max_position_embeddings=None)
    assert (config.max_position, config.eps, config.tied, config.attention_bias) == (2048, 1e-5, False, False)


def test_another_activation_is_refused() -> None:
    with pytest.raises(ConfigError, match="hidden_act 'gelu' is not known"):
        read(hidden_act="gelu")
