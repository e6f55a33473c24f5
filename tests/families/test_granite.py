"""GraniteForCausalLM against transformers: four constants, each alone and all together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llmcore.api.errors import ConfigError
from llmcore.weights.source import read_model
from llmcore_devtools.family import SMALL, assert_family_matches_transformers
from llmcore_devtools.loaded_model import registry_for_tests

FILE = Path(__file__).parents[2] / "contrib_models" / "granite.py"
ARCHITECTURE = "GraniteForCausalLM"
ALL = {
    "embedding_multiplier": 2.5,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
    "logits_scaling": 3.0,
}

CASES: dict[str, dict[str, Any]] = {
    "none": {},
    **{name: {name: value} for name, value in ALL.items()},
    "all, tied": {**ALL, "tie_word_embeddings": True},
    "all, biases, one KV head": {
        **ALL,
        "attention_bias": True,
        "mlp_bias": True,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "hidden_size": 40,
    },
    "all, heads wider than hidden": {**ALL, "head_dim": 16, "num_key_value_heads": None},
}


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES)
def test_granite(overrides: dict[str, Any]) -> None:
    assert_family_matches_transformers(ARCHITECTURE, prompts=(1, 14, 61), **overrides)


def test_the_file_alone_is_a_plugin() -> None:
    registry = registry_for_tests([str(FILE)])
    assert_family_matches_transformers(ARCHITECTURE, registry=registry, prompts=(12,), new=3, **ALL)


def read(**fields: Any) -> Any:
    return read_model(registry_for_tests(), {**SMALL, "architectures": [ARCHITECTURE], **fields})[1]


def test_what_a_config_leaves_out() -> None:
    config = read(max_position_embeddings=None)
    assert (config.max_position, config.eps, config.tied) == (2048, 1e-6, False)
    assert (config.embedding_factor, config.score_factor, config.residual_factor, config.logits_divisor) == (1,) * 4


def test_another_activation_is_refused() -> None:
    with pytest.raises(ConfigError, match="hidden_act 'gelu' is not known"):
        read(hidden_act="gelu")
