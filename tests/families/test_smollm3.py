"""SmolLM3ForCausalLM against transformers in f32: layers without positions, with and without windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llmcore.api.errors import ConfigError
from llmcore.weights.source import read_model
from llmcore_devtools.family import SMALL, assert_family_matches_transformers
from llmcore_devtools.loaded_model import registry_for_tests

FILE = Path(__file__).parents[2] / "contrib_models" / "smollm3.py"
ARCHITECTURE = "SmolLM3ForCausalLM"

CASES: dict[str, dict[str, Any]] = {
    "every fourth layer has no positions": {"num_hidden_layers": 5},
    "they say which, biases, not tied": {
        "no_rope_layers": [0, 1, 0],
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
    },
    "windows where there are no positions": {
        "no_rope_layer_interval": 2,
        "use_sliding_window": True,
        "sliding_window": 7,
    },
    "windows where layer types say": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "no_rope_layers": [1, 1, 0],
        "use_sliding_window": True,
        "sliding_window": 7,
    },
    "yarn": {
        "no_rope_layers": [0, 1, 1],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5e6,
            "factor": 2.0,
            "original_max_position_embeddings": 32,
        },
    },
    # the layers that turn depend on the prompt's length, the others on nothing
    "dynamic": {
        "no_rope_layers": [0, 1, 1],
        "max_position_embeddings": 24,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 5e6, "factor": 2.0},
    },
}


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES)
def test_smollm3(overrides: dict[str, Any]) -> None:
    assert_family_matches_transformers(ARCHITECTURE, prompts=(1, 14, 50), **overrides)


def test_the_file_alone_is_a_plugin() -> None:
    registry = registry_for_tests([str(FILE)])
    assert_family_matches_transformers(ARCHITECTURE, registry=registry, prompts=(12,), new=3, num_hidden_layers=4)


def read(**fields: Any) -> Any:
    return read_model(registry_for_tests(), {**SMALL, "architectures": [ARCHITECTURE], **fields})[1]


def test_what_a_file_leaves_out() -> None:
    config = read(num_hidden_layers=4, sliding_window=9, use_sliding_window=False, layer_types=["full_attention"] * 4)
    assert (config.turned, config.windows) == ((True, True, True, False), (None,) * 4)
    assert (config.rope.theta, config.tied, [group.name for group in config.kv_groups]) == (2e6, True, ["full"])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not known"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers is for 2 layers, num_hidden_layers is 3"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read(**fields)
