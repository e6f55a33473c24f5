"""LlamaForCausalLM against transformers in f32: logits and greedy tokens, whole, chunked and mixed."""

from __future__ import annotations

import pytest
from llmcore_devtools.family import assert_family_matches_transformers

CASES = {
    "grouped heads, tied": {"tie_word_embeddings": True},
    "one KV head": {"num_attention_heads": 5, "num_key_value_heads": 1, "hidden_size": 40, "head_dim": 8},
    "every head its own": {"num_key_value_heads": None},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "heads wider than hidden": {"head_dim": 16},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 16,
        }
    },
    "yarn with mscale": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "beta_fast": 16,
            "beta_slow": 2,
            "truncate": False,
        }
    },
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "rope_theta": 500000.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
}


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES)
def test_llama(overrides: dict[str, object]) -> None:
    # the longest prompts pass what the small configs were "trained" for
    assert_family_matches_transformers("LlamaForCausalLM", prompts=(1, 14, 61, 90), **overrides)
