"""Qwen2MoeForCausalLM: Qwen2 whose MLPs are mixtures of experts, beside an expert that every token sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from llmcore.layers import Bucketed, Build, Decoder, GatedMLP, Linear, MoE, Rope

from llmcore_qwen import qwen2
from llmcore_qwen.common import FULL, SLIDING, Block, decoder
from llmcore_qwen.sparse import SparseConfig, read_sparse, weights

__all__ = ["build", "read_config", "weights"]

DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}
"""Values that transformers takes for fields that config.json leaves out, where dense models have others."""


@dataclass(frozen=True, kw_only=True)
class Qwen2MoeConfig(SparseConfig):
    """`qkv_bias`: q, k and v have biases. `shared_inner`: width of the expert that every token sees."""

    qkv_bias: bool
    shared_inner: int


def read_config(hf: Mapping[str, Any]) -> Qwen2MoeConfig:
    """Reads config.json. Without layer_types, every other layer up to max_window_layers has the window."""
    given = {**DEFAULTS, **hf}
    if given.get("use_sliding_window") and not given.get("layer_types"):
        first = int(given.get("max_window_layers", 28))
        layers = range(int(given["num_hidden_layers"]))
        given["layer_types"] = [SLIDING if index % 2 == 0 and index < first else FULL for index in layers]
    return Qwen2MoeConfig(
        **read_sparse(given, "Qwen2MoeForCausalLM"),
        qkv_bias=bool(given.get("qkv_bias", True)),
        shared_inner=int(given["shared_expert_intermediate_size"]),
    )


class SharedMoE(MoE):
    """A mixture of experts, and one more expert that every token sees, scaled by its own gate."""

    def __init__(self, build: Build, config: Qwen2MoeConfig) -> None:
        super().__init__(build, config.hidden_size, config.expert_inner, config.route)
        self.shared_expert = GatedMLP(build, config.hidden_size, config.shared_inner)
        self.shared_expert_gate = Linear(build, config.hidden_size, 1)

    def extra(self, x: torch.Tensor, step: Bucketed) -> torch.Tensor:
        """Returns the output of the expert that every token sees, [T, size]."""
        return self.shared_expert_gate(x, step).sigmoid() * self.shared_expert(x, step)  # type: ignore[no-any-return]


def build(config: Qwen2MoeConfig, build: Build) -> Decoder:
    """The whole model."""
    rope = Rope(build, config.rope)

    def block(index: int) -> Block:
        mlp = SharedMoE(build, config) if config.sparse[index] else GatedMLP(build, config.hidden_size, config.inner)
        return Block(build, config, qwen2.attention(build, config, rope, index, bias=config.qkv_bias), mlp)

    return decoder(build, config, block)
