"""Cohere2ForCausalLM against transformers in f32: windowed layers that turn between full ones that do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llmcore.api.errors import ConfigError
from llmcore.weights.source import read_model
from llmcore_devtools.family import SMALL, assert_family_matches_transformers
from llmcore_devtools.loaded_model import registry_for_tests

FILE = Path(__file__).parents[2] / "contrib_models" / "cohere2.py"
ARCHITECTURE = "Cohere2ForCausalLM"

CASES: dict[str, dict[str, Any]] = {
    "tied, every fourth layer is full": {"num_hidden_layers": 5, "sliding_window": 8},
    "layer types, another scale, not tied": {
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 13,
        "logit_scale": 0.25,
        "tie_word_embeddings": False,
    },
    "biases, one KV head, no full layer": {
        "attention_bias": True,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "hidden_size": 60,
        "head_dim": 12,
        "layer_norm_eps": 1e-3,
        "sliding_window": 200,
    },
}


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES)
def test_cohere2(overrides: dict[str, Any]) -> None:
    assert_family_matches_transformers(ARCHITECTURE, prompts=(1, 14, 50), **overrides)


def test_the_file_alone_is_a_plugin() -> None:
    registry = registry_for_tests([str(FILE)])
    assert_family_matches_transformers(ARCHITECTURE, registry=registry, prompts=(12,), new=3, num_hidden_layers=4)


def read(**fields: Any) -> Any:
    return read_model(registry_for_tests(), {**SMALL, "architectures": [ARCHITECTURE], **fields})[1]


def test_a_file_as_command_r7b_has_it() -> None:
    fields: dict[str, Any] = {"layer_switch": 4, "position_embedding_type": "rope_gptj", "rope_theta": 50000}
    config = read(num_hidden_layers=8, sliding_window=4096, sliding_window_pattern=4, rotary_pct=1.0, **fields)
    groups = {group.name: (group.layers, group.reach) for group in config.kv_groups}
    assert groups == {"full": ((3, 7), "all"), "window": ((0, 1, 2, 4, 5, 6), "window:4096")}
    assert (config.tied, config.rope.theta, config.logit_scale) == (True, 50000.0, 0.0625)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not known"),
        ({"sliding_window": None}, "without a sliding_window is not known"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read(**fields)
