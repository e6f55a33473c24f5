"""StableLmForCausalLM against transformers in f32: partial rope, biases, norms of heads, parallel MLP."""

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

FILE = Path(__file__).parents[2] / "contrib_models" / "stablelm.py"

CASES: dict[str, dict[str, Any]] = {
    "a quarter of a head turns": {},
    "half of a head turns": {"partial_rotary_factor": 0.5, "use_qkv_bias": True},
    "all of a head turns": {"partial_rotary_factor": 1.0, "tie_word_embeddings": True, "layer_norm_eps": 1e-3},
    "parallel": {"use_parallel_residual": True, "num_key_value_heads": 9},
    "norms of heads": {"qk_layernorm": True, "use_qkv_bias": True},
    "norms of heads, parallel": {"qk_layernorm": True, "use_parallel_residual": True},
    "one layer, parallel": {"use_parallel_residual": True, "num_hidden_layers": 1},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}},
}


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES)
def test_stablelm(overrides: dict[str, Any]) -> None:
    assert_family_matches_transformers("StableLmForCausalLM", prompts=(1, 14, 61), **overrides)


def test_the_file_alone_is_a_plugin() -> None:
    registry = registry_for_tests([str(FILE)])
    assert "contrib-models" not in {info.name for info in registry.plugins}
    assert_family_matches_transformers("StableLmForCausalLM", registry=registry, prompts=(12,), qk_layernorm=True)


def test_dummy_weights_give_finite_logits(tmp_path: Path) -> None:
    small_model("StableLmForCausalLM", qk_layernorm=True, use_parallel_residual=True).save_pretrained(tmp_path)
    assert LoadedModel(tmp_path, dummy=True).all_logits([3, 1, 4]).isfinite().all()


def test_old_configs_say_the_share_that_turns_beside_the_other_fields(tmp_path: Path) -> None:
    small_model("StableLmForCausalLM").save_pretrained(tmp_path)
    hf = json.loads((tmp_path / "config.json").read_text())
    hf.pop("rope_parameters")
    read = load(registry_for_tests().find(ModelSpec, "stablelm").read_config)
    assert read(hf).rope.rotated == 2
    assert read({**hf, "partial_rotary_factor": 0.5, "rope_theta": 5e5}).rope.rotated == 4
    with pytest.raises(ConfigError, match="hidden_act 'gelu'"):
        read({**hf, "hidden_act": "gelu"})
