"""Qwen2ForCausalLM and Qwen3ForCausalLM against transformers in f32, and what their configs mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import transformers
from llmcore.api import ConfigError, ModelConfig
from llmcore.registry.loader import load
from llmcore_devtools.family import SMALL, assert_family_matches_transformers
from llmcore_devtools.loaded_model import registry_for_tests

QWEN2, QWEN3 = "Qwen2ForCausalLM", "Qwen3ForCausalLM"


def heads(heads: int, kv_heads: int, size: int, hidden: int) -> dict[str, Any]:
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": size, "hidden_size": hidden}


def windowed(window: int, *layers: int, of: int) -> dict[str, Any]:
    """`layers` of `of` layers have the window."""
    kinds = ["sliding_attention" if index in layers else "full_attention" for index in range(of)]
    return {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds, "num_hidden_layers": of}


def rope(kind: str, **numbers: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000000.0, **numbers}}


YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=8)
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
ALL_LAYERS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
LAST_LAYERS = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}

CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "2: seven heads on one, tied": (QWEN2, heads(7, 1, 8, 56) | {"tie_word_embeddings": True}),
    "2: groups of 7, yarn": (QWEN2, heads(14, 2, 6, 84) | YARN),
    "2: every head its own, dynamic": (QWEN2, heads(4, 4, 8, 32) | rope("dynamic", factor=2.0)),
    "2: a window that is not used": (QWEN2, {"sliding_window": 4, "max_window_layers": 0}),
    "2: a window on all layers": (QWEN2, heads(6, 2, 10, 60) | ALL_LAYERS),
    "2: a window on the last two": (QWEN2, heads(7, 1, 8, 56) | LAST_LAYERS | LLAMA3),
    "2: a window here and there, tied": (
        QWEN2,
        heads(3, 3, 14, 42) | windowed(3, 0, 2, of=4) | {"tie_word_embeddings": True} | rope("dynamic", factor=3.0),
    ),
    "3: groups of 3, tied": (QWEN3, {"tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    "3: narrower than its heads": (QWEN3, heads(7, 1, 32, 24) | LLAMA3),
    "3: wider than its heads": (QWEN3, heads(5, 5, 4, 52) | YARN | {"tie_word_embeddings": True}),
    "3: biases": (QWEN3, heads(14, 2, 12, 72) | {"attention_bias": True} | rope("linear", factor=2.5)),
    "3: a window on the last two": (QWEN3, heads(7, 1, 12, 40) | LAST_LAYERS | rope("dynamic", factor=2.0)),
    "3: a window on one layer, biases": (QWEN3, heads(6, 2, 6, 50) | windowed(2, 1, of=3) | {"attention_bias": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_qwen(name: str) -> None:
    # the longest prompt passes what the small configs were "trained" for, and all but the first pass the windows
    architecture, overrides = CASES[name]
    assert_family_matches_transformers(architecture, prompts=(1, 14, 71), seed=len(name), **overrides)


def config_of(architecture: str, hf: Mapping[str, Any]) -> ModelConfig:
    """What the family reads."""
    config: ModelConfig = load(registry_for_tests(["qwen"]).model_for([architecture]).read_config)(hf)
    return config


@pytest.mark.parametrize("architecture", [QWEN2, QWEN3])
@pytest.mark.parametrize("overrides", [{}, ALL_LAYERS, LAST_LAYERS, windowed(7, 0, 3, of=4)])
def test_kv_groups_are_the_layers_that_transformers_windows(architecture: str, overrides: dict[str, Any]) -> None:
    theirs = getattr(transformers, architecture).config_class(**{**SMALL, **overrides})
    given = {**SMALL, **overrides}
    expected: dict[tuple[str, str], tuple[int, ...]] = {}
    for index, kind in enumerate(theirs.layer_types):
        key = ("full", "all") if kind == "full_attention" else ("window", f"window:{theirs.sliding_window}")
        expected[key] = (*expected.get(key, ()), index)
    for hf in (given, theirs.to_dict()):
        groups = config_of(architecture, hf).kv_groups
        assert {(group.name, group.reach): group.layers for group in groups} == expected


@pytest.mark.parametrize("architecture", [QWEN2, QWEN3])
def test_what_config_json_leaves_out(architecture: str) -> None:
    """Is what transformers takes."""
    config_class = getattr(transformers, architecture).config_class
    needed = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
    short = {name: SMALL[name] for name in needed} | {"hidden_size": 256, "num_attention_heads": 64}
    # no rope_parameters in either: transformers writes the default ones out
    long = config_of(architecture, {**config_class(**short).to_dict(), "rope_parameters": None})
    assert config_of(architecture, short) == long
    assert (long.max_position, long.eos_ids) == (32768, ())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"layer_types": ["full_attention"]}, "is for 1 layers"),
        ({"layer_types": ["chunked_attention"] * 3}, "chunked_attention is not known"),
        ({"layer_types": ["sliding_attention"] * 3}, "give no window"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0"),
        ({"rope_scaling": {"type": "mrope"}}, "rope type 'mrope'"),
    ],
)
def test_what_is_not_known_is_refused(wrong: dict[str, Any], said: str) -> None:
    for architecture in (QWEN2, QWEN3):
        with pytest.raises(ConfigError, match=said):
            config_of(architecture, {**SMALL, **wrong})
