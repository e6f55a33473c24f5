"""partial_rotary_factor in every family: it counts where the code in transformers reads it, and only there."""

from __future__ import annotations

from typing import Any

import pytest
from llmcore.api.errors import ConfigError
from llmcore.api.specs import ModelSpec
from llmcore.weights.source import read_model
from llmcore_devtools.family import SMALL, SMALL_LATENT, assert_family_matches_transformers
from llmcore_devtools.loaded_model import registry_for_tests

READERS = ("GlmForCausalLM", "Glm4ForCausalLM", "Phi3ForCausalLM", "StableLmForCausalLM")
OTHERS = tuple(
    f"{name}ForCausalLM"
    for name in (
        *("Cohere", "Cohere2", "DeepseekV2", "DeepseekV3", "Gemma2", "Gemma3", "Granite", "Llama", "Mistral"),
        *("Mixtral", "Olmo2", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "SmolLM3", "Starcoder2"),
    )
)
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_local_experts": 4}
SCALED: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 32},
    "llama3": {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"factor": 2.0, "short_factor": [1.0] * 2, "long_factor": [1.0] * 2},
}


def rope(architecture: str, kind: str, share: float, **numbers: Any) -> dict[str, Any]:
    """As the family's configs say it: Gemma 3 has a rope for each type of layer."""
    found = {"rope_type": kind, "rope_theta": 10000.0, "partial_rotary_factor": share, **numbers}
    if architecture == "Gemma3ForCausalLM":
        return {"full_attention": found, "sliding_attention": {**found, "rope_theta": 1000.0}}
    return found


@pytest.mark.parametrize("architecture", [*READERS, *OTHERS])
def test_half_of_a_head_turns_only_where_transformers_turns_half(architecture: str) -> None:
    more = {"num_hidden_layers": 2, **(SPARSE if "Moe" in architecture or "Mixtral" in architecture else {})}
    assert_family_matches_transformers(
        architecture, prompts=(13,), new=2, rope_parameters=rope(architecture, "default", 0.5), **more
    )


def read(architecture: str, **fields: Any) -> Any:
    hf = {**SMALL, **(SMALL_LATENT if "Deepseek" in architecture else {}), **SPARSE, "architectures": [architecture]}
    return read_model(registry_for_tests(), {**hf, "num_key_value_heads": 9, "head_dim": 8, **fields})[1]


def test_every_family_is_here() -> None:
    known = {name for spec, _ in registry_for_tests().specs(ModelSpec) for name in spec.architectures}
    assert {name for name in known if name.endswith("ForCausalLM")} == {*READERS, *OTHERS}


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("architecture", OTHERS)
def test_a_scaled_rope_and_a_factor_that_the_family_does_not_read(architecture: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"partial_rotary_factor is 0\.5 and the rope type is '{kind}'"):
        read(architecture, rope_parameters=rope(architecture, kind, 0.5, **SCALED[kind]))
    read(architecture, rope_parameters=rope(architecture, kind, 1.0, **SCALED[kind]))


@pytest.mark.parametrize("where", ["beside", "in rope_scaling"])
def test_a_factor_in_an_older_file(where: str) -> None:
    scaling = {"type": "linear", "factor": 2.0}
    old = (
        {"rope_scaling": scaling, "partial_rotary_factor": 0.25}
        if where == "beside"
        else {"rope_scaling": {**scaling, "partial_rotary_factor": 0.25}}
    )
    with pytest.raises(ConfigError, match=r"remove partial_rotary_factor from the model's config"):
        read("LlamaForCausalLM", **old)
    assert read("StableLmForCausalLM", **old).rope.rotated == 2
    assert read("LlamaForCausalLM", partial_rotary_factor=0.25).rope.rotated == 8


@pytest.mark.parametrize("factor", [0, -0.5, 1.5])
def test_a_factor_that_cannot_be(factor: float) -> None:
    with pytest.raises(ConfigError, match=r"partial_rotary_factor is .* it has to be in \(0, 1\]"):
        read("Phi3ForCausalLM", partial_rotary_factor=factor)
