"""CohereForCausalLM against transformers in f32: rope of neighbours, norms of heads, scaled logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llmcore.api.errors import ConfigError
from llmcore.api.specs import ModelSpec
from llmcore.registry.loader import load
from llmcore_devtools.family import assert_family_matches_transformers, small_model
from llmcore_devtools.loaded_model import LoadedModel, registry_for_tests

FILE = Path(__file__).parents[2] / "contrib_models" / "cohere.py"

CASES: dict[str, dict[str, Any]] = {
    "tied": {},
    "another scale, not tied": {"logit_scale": 0.8333, "tie_word_embeddings": False},
    "biases": {"attention_bias": True, "layer_norm_eps": 1e-3},
    "norms of heads": {"use_qk_norm": True},
    "norms of heads, biases, one KV head": {
        "use_qk_norm": True,
        "attention_bias": True,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "hidden_size": 60,
        "head_dim": 12,
    },
    "every head its own, one layer": {"num_key_value_heads": None, "num_hidden_layers": 1},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 8e6}},
}


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES)
def test_cohere(overrides: dict[str, Any]) -> None:
    assert_family_matches_transformers("CohereForCausalLM", prompts=(1, 14, 61), **overrides)


def test_the_file_alone_is_a_plugin() -> None:
    registry = registry_for_tests([str(FILE)])
    assert "contrib-models" not in {info.name for info in registry.plugins}
    assert_family_matches_transformers("CohereForCausalLM", registry=registry, prompts=(12,))


def test_dummy_weights_give_finite_logits(tmp_path: Path) -> None:
    small_model("CohereForCausalLM", use_qk_norm=True).save_pretrained(tmp_path)
    assert LoadedModel(tmp_path, dummy=True).all_logits([3, 1, 4]).isfinite().all()


def test_what_configs_leave_out(tmp_path: Path) -> None:
    small_model("CohereForCausalLM").save_pretrained(tmp_path)
    hf = json.loads((tmp_path / "config.json").read_text())
    read = load(registry_for_tests().find(ModelSpec, "cohere").read_config)
    old = {name: value for name, value in hf.items() if name not in ("rope_parameters", "tie_word_embeddings")}
    assert read(old).tied and read(old).rope.theta == 500000.0
    assert read({**old, "rope_theta": 4e6, "model_max_length": 131072}).max_position == 131072
    with pytest.raises(ConfigError, match="hidden_act 'gelu'"):
        read({**hf, "hidden_act": "gelu"})
