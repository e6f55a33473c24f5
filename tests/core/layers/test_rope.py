"""Rope: what configs say, and frequencies and amplitudes equal to transformers'."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from llmcore.api.errors import ConfigError
from llmcore.api.models import KVGroupSpec, ModelConfig
from llmcore.api.specs import DeviceInfo
from llmcore.layers.build import Build
from llmcore.layers.rope import Rope, by_length, read_rope, scaled
from llmcore_devtools import registry_of
from llmcore_devtools.family import SMALL
from transformers import LlamaConfig, Phi3Config, PhimoeConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 512},
    "yarn attention factor": {"factor": 8.0, "original_max_position_embeddings": 512, "attention_factor": 0.7},
    "yarn mscale": {
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "beta_fast": 24,
        "beta_slow": 2,
    },
    "yarn untruncated": {"factor": 4.0, "original_max_position_embeddings": 1024, "truncate": False},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def parameters(case: str) -> dict[str, Any]:
    return {"rope_type": case.split(maxsplit=1)[0], "rope_theta": 500000.0, **KINDS[case]}


@pytest.mark.parametrize("case", KINDS)
def test_frequencies(case: str) -> None:
    config = LlamaConfig(
        **{**SMALL, "head_dim": 64, "max_position_embeddings": 4096}, rope_parameters=parameters(case)
    )
    theirs = LlamaRotaryEmbedding(config)
    frequencies, amplitude = scaled(read_rope(config.to_dict(), 64))
    torch.testing.assert_close(frequencies, theirs.inv_freq, rtol=2e-6, atol=1e-12)
    assert amplitude == pytest.approx(theirs.attention_scaling)


FACTORS = {"short_factor": [1.0 + index / 64 for index in range(24)], "long_factor": [2.0 + i for i in range(24)]}
LONGROPE: dict[str, dict[str, Any]] = {
    "by the lengths": {},
    "by a factor": {"factor": 4.0},
    "less than the original length": {"factor": 0.5},
    "an attention factor": {"attention_factor": 1.3},
    "an amplitude for each": {"short_mscale": 1.1, "long_mscale": 1.25},
}


@pytest.mark.parametrize("more", LONGROPE.values(), ids=LONGROPE)
@pytest.mark.parametrize("length", [128, 129])
def test_longrope(more: dict[str, Any], length: int) -> None:
    """Phi-3.5-MoE's rope in transformers knows amplitudes by length, Phi-3's all else."""
    given = {"rope_type": "longrope", "rope_theta": 500000.0, "partial_rotary_factor": 0.75, **FACTORS, **more}
    sizes = {**SMALL, "hidden_size": 576, "head_dim": 64, "max_position_embeddings": 4096}
    kinds: Any = (PhimoeConfig, PhimoeRotaryEmbedding) if "long_mscale" in more else (Phi3Config, Phi3RotaryEmbedding)
    config = kinds[0](**sizes, original_max_position_embeddings=128, rope_parameters=dict(given))
    theirs = kinds[1](config)
    cos, sin = theirs(torch.zeros(1), torch.arange(length)[None])
    frequencies, amplitude = by_length(read_rope(config.to_dict(), 64), length)
    turns = torch.arange(length).float()[:, None] * frequencies
    torch.testing.assert_close(turns.cos() * amplitude, cos[0, :, :24], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(turns.sin() * amplitude, sin[0, :, :24], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("factors", [[1.0] * 23, [1.0] * 23 + [0.0], 2.0])
def test_longrope_has_a_factor_for_each_pair(factors: object) -> None:
    given = {"rope_type": "longrope", **FACTORS, "long_factor": factors}
    rope = read_rope({"original_max_position_embeddings": 64, "rope_parameters": given}, 48)
    by_length(rope, 64)
    with pytest.raises(ConfigError, match="needs 24 numbers above 0 as long_factor"):
        by_length(rope, 65)


@pytest.mark.parametrize("case", KINDS)
def test_both_places(case: str) -> None:
    new = {"max_position_embeddings": 4096, "rope_parameters": parameters(case)}
    old_scaling = {"type": case.split(maxsplit=1)[0], **KINDS[case]}
    old = {"max_position_embeddings": 4096, "rope_theta": 500000.0, "rope_scaling": old_scaling}
    first, second = read_rope(new, 64), read_rope(old, 64)
    assert (first.kind, first.theta, first.original) == (second.kind, second.theta, second.original)
    assert torch.equal(scaled(first)[0], scaled(second)[0])


def test_nothing_said_is_the_default() -> None:
    rope = read_rope({"max_position_embeddings": 100, "rope_scaling": None}, 32)
    assert (rope.kind, rope.theta, rope.rotated, rope.max_position) == ("default", 10000.0, 32, 100)
    assert rope.fixed_angles_up_to is None


def test_lengths() -> None:
    dynamic = read_rope({"max_position_embeddings": 100, "rope_scaling": {"type": "dynamic", "factor": 4.0}}, 32)
    assert (dynamic.max_position, dynamic.fixed_angles_up_to) == (400, 100)
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 100, "factor": None}
    assert read_rope({"max_position_embeddings": 800, "rope_parameters": yarn}, 32).max_position == 800


@pytest.mark.parametrize(
    ("scaling", "says"),
    [
        ({"rope_type": "spiral"}, "'spiral' is not known"),
        ({"rope_type": "linear"}, "needs factor"),
        ({"rope_type": "linear", "factor": 0}, "with factor 0 is no scaling"),
        ({"rope_type": "dynamic", "factor": -2.0}, "with factor -2.0 is no scaling"),
    ],
)
def test_errors(scaling: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_rope({"rope_parameters": scaling}, 64)


def test_angles_that_depend_on_the_prompt_must_be_declared() -> None:
    dynamic = read_rope({"max_position_embeddings": 100, "rope_scaling": {"type": "dynamic", "factor": 4.0}}, 32)
    config = ModelConfig(
        architecture="Test",
        vocab_size=8,
        hidden_size=32,
        num_layers=1,
        max_position=400,
        dtype="f32",
        kv_groups=(KVGroupSpec(name="all", layers=(0,), kv_heads=1, key_size=32, value_size=32),),
    )
    build = Build(
        registry=registry_of("ops"), config=config, device=DeviceInfo("cpu"), torch_device=torch.device("cpu")
    )
    with pytest.raises(ConfigError, match=r"ModelConfig\(fixed_angles_up_to=rope.fixed_angles_up_to\)"):
        Rope(build, dynamic)
    build.config = replace(config, fixed_angles_up_to=dynamic.fixed_angles_up_to)
    Rope(build, dynamic)
    with pytest.raises(ConfigError, match="rope turns pairs of elements, not 3"):
        Rope(build, read_rope({"partial_rotary_factor": 0.4}, 8))
