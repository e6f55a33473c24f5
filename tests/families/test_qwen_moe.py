"""Qwen2MoeForCausalLM and Qwen3MoeForCausalLM against transformers in f32, and what their configs mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from llmcore.api import ConfigError, DeviceInfo
from llmcore.layers import Build
from llmcore.registry.loader import load
from llmcore_devtools.family import SMALL, assert_family_matches_transformers
from llmcore_devtools.loaded_model import registry_for_tests

QWEN2, QWEN3 = "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"


def experts(count: int, top_k: int, inner: int, **more: Any) -> dict[str, Any]:
    return {"num_experts": count, "num_experts_per_tok": top_k, "moe_intermediate_size": inner, **more}


def heads(heads: int, kv_heads: int, size: int, hidden: int) -> dict[str, Any]:
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": size, "hidden_size": hidden}


EVERY_OTHER = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3, "num_hidden_layers": 4}
SHARED = {"shared_expert_intermediate_size": 50}

CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "2: few of many": (QWEN2, experts(60, 4, 22) | SHARED),
    "2: one expert, tied, no biases": (
        QWEN2,
        experts(1, 1, 34, qkv_bias=False, tie_word_embeddings=True) | {"shared_expert_intermediate_size": 7},
    ),
    "2: weights that sum to one, dense layers": (
        QWEN2,
        experts(7, 3, 9, norm_topk_prob=True, decoder_sparse_step=2, num_hidden_layers=5, mlp_only_layers=[3])
        | SHARED
        | heads(7, 1, 8, 56),
    ),
    "2: a window on every other layer": (QWEN2, experts(5, 5, 12) | SHARED | EVERY_OTHER | heads(4, 4, 10, 40)),
    "3: eight of 64": (QWEN3, experts(64, 8, 10, norm_topk_prob=True)),
    "3: narrower than its heads, biases": (QWEN3, experts(6, 2, 17, attention_bias=True) | heads(6, 2, 16, 30)),
    "3: first and last layer dense, tied": (
        QWEN3,
        experts(9, 1, 40, mlp_only_layers=[0, 3], num_hidden_layers=4, tie_word_embeddings=True),
    ),
    "3: every third layer sparse": (
        QWEN3,
        experts(12, 5, 13, norm_topk_prob=True, decoder_sparse_step=3, num_hidden_layers=6),
    ),
    "3: a window on all layers": (QWEN3, experts(3, 2, 21, use_sliding_window=True, sliding_window=6)),
}


@pytest.mark.parametrize("name", CASES)
def test_qwen_moe(name: str) -> None:
    architecture, overrides = CASES[name]
    assert_family_matches_transformers(architecture, prompts=(1, 12, 33), seed=len(name), new=3, **overrides)


def config_of(architecture: str, hf: Mapping[str, Any]) -> Any:
    """What the family reads."""
    return load(registry_for_tests(["qwen"]).model_for([architecture]).read_config)(hf)


@pytest.mark.parametrize(
    ("fields", "sparse"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"decoder_sparse_step": 2}, [1, 3]),
        ({"mlp_only_layers": [0, 4]}, [1, 2, 3]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [3]),
        ({"num_experts": 0}, []),
        ({"mlp_only_layers": None}, [0, 1, 2, 3, 4]),
    ],
)
@pytest.mark.parametrize("architecture", [QWEN2, QWEN3])
def test_which_layers_are_sparse(architecture: str, fields: dict[str, Any], sparse: list[int]) -> None:
    given = {**SMALL, **experts(4, 2, 8), **SHARED, "num_hidden_layers": 5, **fields}
    config = config_of(architecture, given)
    assert [index for index, kind in enumerate(config.sparse) if kind] == sparse


@pytest.mark.parametrize("architecture", [QWEN2, QWEN3])
def test_what_config_json_leaves_out(architecture: str) -> None:
    """Is what transformers takes."""
    config_class = getattr(transformers, architecture).config_class
    needed = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
    short = {name: SMALL[name] for name in needed} | {"hidden_size": 256, "num_attention_heads": 32}
    long = config_of(architecture, {**config_class(**short).to_dict(), "rope_parameters": None})
    assert config_of(architecture, short) == long
    assert long.route.experts == (60 if architecture == QWEN2 else 128)


@pytest.mark.parametrize("overrides", [{}, EVERY_OTHER, EVERY_OTHER | {"max_window_layers": 2}])
def test_kv_groups_are_the_layers_that_transformers_windows(overrides: dict[str, Any]) -> None:
    given = {**SMALL, **experts(4, 2, 8), **SHARED, **overrides}
    theirs = transformers.Qwen2MoeConfig(**given)
    windowed = tuple(index for index, kind in enumerate(theirs.layer_types) if kind == "sliding_attention")
    for hf in (given, theirs.to_dict()):
        groups = {group.name: group.layers for group in config_of(QWEN2, hf).kv_groups}
        assert groups.get("window", ()) == windowed


@pytest.mark.parametrize(("count", "top_k"), [(4, 5), (4, 0)])
def test_a_choice_that_cannot_be_made_is_refused(count: int, top_k: int) -> None:
    registry, config = registry_for_tests(["qwen"]), config_of(QWEN3, {**SMALL, **experts(count, top_k, 8)})
    build = Build(registry=registry, config=config, device=DeviceInfo("cpu"), torch_device=torch.device("cpu"))
    with pytest.raises(ConfigError, match=f"{top_k} of 4 experts is no choice"):
        load(registry.model_for([QWEN3]).build)(config, build)
