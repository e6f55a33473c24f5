"""Phi3ForCausalLM against transformers: stacked checkpoints, windows, heads that turn in part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llmcore.errors import ConfigError
from llmcore.testing.family import SMALL, assert_family_matches_transformers, registry_for_tests
from llmcore.weights.source import read_model

FILE = Path(__file__).parents[2] / "contrib_models" / "phi3.py"
ARCHITECTURE = "Phi3ForCausalLM"


def partial(share: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}}


CASES: dict[str, dict[str, Any]] = {
    "every head its own": {"num_key_value_heads": None},
    "window": {"sliding_window": 8},
    "window longer than any prompt": {"sliding_window": 200},
    "three quarters of a head turn, tied": {"tie_word_embeddings": True, "num_attention_heads": 6, **partial(0.75)},
    "half a head turns, one KV head, window": {
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "hidden_size": 60,
        "head_dim": 12,
        "sliding_window": 13,
        **partial(0.5),
    },
}


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES)
def test_phi3(overrides: dict[str, Any]) -> None:
    assert_family_matches_transformers(ARCHITECTURE, prompts=(1, 8, 30, 61), **overrides)


def test_the_file_alone_is_a_plugin() -> None:
    registry = registry_for_tests([str(FILE)])
    assert_family_matches_transformers(ARCHITECTURE, registry=registry, prompts=(12,), new=3, sliding_window=6)


def read(**fields: Any) -> Any:
    return read_model(registry_for_tests(), {**SMALL, "architectures": [ARCHITECTURE], **fields})[1]


def test_what_a_config_leaves_out() -> None:
    config = read(max_position_embeddings=None, partial_rotary_factor=0.75)
    assert (config.max_position, config.eps, config.window, config.rope.rotated) == (4096, 1e-5, None, 6)
    assert config.kv_groups[0].reach == "all"
    assert read(sliding_window=2047).kv_groups[0].reach == "window:2047"


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_longrope_is_refused_under_all_its_names(name: str) -> None:
    with pytest.raises(ConfigError, match="rope type 'longrope' is not known; known: default"):
        read(rope_scaling={"type": name, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4})


def test_another_activation_is_refused() -> None:
    with pytest.raises(ConfigError, match="hidden_act 'gelu' is not known"):
        read(hidden_act="gelu")
