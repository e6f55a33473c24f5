"""Qwen3MoeForCausalLM: Qwen3 whose MLPs are mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmcore.layers import Build, Decoder, GatedMLP, MoE, Rope

from llmcore_qwen import qwen3
from llmcore_qwen.common import FULL, SLIDING, Block, decoder
from llmcore_qwen.sparse import SparseConfig, read_sparse, weights

__all__ = ["build", "read_config", "weights"]

DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
"""Values that transformers takes for fields that config.json leaves out, where dense models have others."""


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(SparseConfig, qwen3.Qwen3Config):
    """Attention as in Qwen3, and MLPs as in every sparse Qwen."""


def read_config(hf: Mapping[str, Any]) -> Qwen3MoeConfig:
    """Reads config.json. If a window is used, all layers have it."""
    windowed = hf.get("use_sliding_window") and hf.get("sliding_window", 4096) is not None
    kinds = [SLIDING if windowed else FULL] * int(hf["num_hidden_layers"])
    given = {**DEFAULTS, **hf, "layer_types": kinds}
    return Qwen3MoeConfig(
        **read_sparse(given, "Qwen3MoeForCausalLM"), attention_bias=bool(hf.get("attention_bias", False))
    )


def build(config: Qwen3MoeConfig, build: Build) -> Decoder:
    """The whole model."""
    rope = Rope(build, config.rope)
    size = config.hidden_size

    def block(index: int) -> Block:
        mlp = (
            MoE(build, size, config.expert_inner, config.route, partial=True)
            if config.sparse[index]
            else GatedMLP(build, size, config.inner, partial=True)
        )
        return Block(build, config, qwen3.attention(build, config, rope, index), mlp)

    return decoder(build, config, block)
