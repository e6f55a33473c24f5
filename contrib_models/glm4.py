"""Glm4ForCausalLM (GLM-4-0414, GLM-Z1) and GlmForCausalLM (GLM-4-9B, GLM-Edge): rope of neighbours over half a head.

Glm4 also norms the outputs of attention and MLP. Used as a plugin by its path, this file brings the family by itself
(and imports torch to do so).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llmcore.api import AttnSpec, ConfigError, ModelSpec, Shard, WeightMap, hookimpl
from llmcore.layers import (
    Attention,
    Bucketed,
    Build,
    Decoder,
    DenseConfig,
    Embedding,
    GatedMLP,
    Hidden,
    Layer,
    Linear,
    LMHead,
    PairedQKV,
    RMSNorm,
    Rope,
    Step,
    dense_weights,
    read_dense,
)

DEFAULTS = {
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 0.00000015625,
}
"""Values that transformers takes for fields that config.json leaves out."""


@dataclass(frozen=True, kw_only=True)
class GlmConfig(DenseConfig):
    """The fields that a GLM block reads. `bias`: q, k and v have biases."""

    bias: bool


@hookimpl
def register_models() -> Iterable[ModelSpec]:
    """Glm4ForCausalLM and GlmForCausalLM, for use of this file as a plugin."""
    yield ModelSpec(
        name="glm4",
        architectures=("Glm4ForCausalLM", "GlmForCausalLM"),
        read_config=f"{__name__}:read_config",
        build=f"{__name__}:build",
        weights=f"{__name__}:weights",
    )


def read_config(hf: Mapping[str, Any]) -> GlmConfig:
    """Reads config.json."""
    architecture = "Glm4ForCausalLM" if "Glm4ForCausalLM" in hf["architectures"] else "GlmForCausalLM"
    if (activation := hf.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ConfigError(f"{architecture} with hidden_act {activation!r} is not known; its MLP uses silu")
    # a null means the default: transformers also ignores a null end token of Glm
    given = {name: value for name, value in hf.items() if value is not None}
    return GlmConfig(**read_dense(given, architecture, defaults=DEFAULTS), bias=bool(hf.get("attention_bias", True)))


def weights(config: GlmConfig) -> WeightMap:
    """Maps names as transformers saves them. `gate_up_proj` is stacked already."""
    return dense_weights(config)


class Block(Layer):
    """norm, attention, norm, MLP."""

    def __init__(self, build: Build, config: GlmConfig, rope: Rope, index: int) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.head_size
        sizes: dict[str, Any] = {"heads": config.heads, "kv_heads": config.kv_heads, "key_size": size}
        self.input_layernorm = RMSNorm(build, hidden, config.eps)
        self.self_attn = Attention(
            build,
            AttnSpec(**sizes, value_size=size, scale=size**-0.5),
            group="all",
            index=index,
            qkv=PairedQKV(build, hidden, bias=config.bias, rotated=rope.rotated, **sizes, source=self.input_layernorm),
            out=Linear(build, config.heads * size, hidden, shard=Shard("attn_tp", 1)),
            rope=rope,
        )
        self.post_attention_layernorm = RMSNorm(build, hidden, config.eps)
        self.mlp = GatedMLP(build, hidden, config.inner, source=self.post_attention_layernorm)

    def forward(self, x: Hidden, step: Step) -> Hidden:
        """(hidden, residual) -> (hidden, residual), [T, hidden_size] each."""
        return self.feed(self.attend(x, step), step)

    def attend(self, x: Hidden, step: Step) -> Hidden:
        """The block up to the MLP."""
        hidden, residual = self.input_layernorm.add(*x, step)
        return self.self_attn(hidden, step), residual

    def feed(self, x: Hidden, step: Bucketed) -> Hidden:
        """The MLP. Each token is computed by itself."""
        hidden, residual = self.post_attention_layernorm.add(*x, step)
        return self.mlp(hidden, step), residual


class NormedBlock(Block):
    """A Block that norms the outputs of attention and MLP before the residual adds them."""

    def __init__(self, build: Build, config: GlmConfig, rope: Rope, index: int) -> None:
        super().__init__(build, config, rope, index)
        self.post_self_attn_layernorm = RMSNorm(build, config.hidden_size, config.eps)
        self.post_mlp_layernorm = RMSNorm(build, config.hidden_size, config.eps)

    def attend(self, x: Hidden, step: Step) -> Hidden:
        """The block up to the MLP."""
        hidden, residual = super().attend(x, step)
        return self.post_self_attn_layernorm(hidden, step), residual

    def feed(self, x: Hidden, step: Bucketed) -> Hidden:
        """The MLP. Each token is computed by itself."""
        hidden, residual = super().feed(x, step)
        return self.post_mlp_layernorm(hidden, step), residual


def build(config: GlmConfig, build: Build) -> Decoder:
    """The whole model."""
    rope = Rope(build, config.rope)
    embedding = Embedding(build, config.vocab_size, config.hidden_size)
    block = NormedBlock if config.architecture == "Glm4ForCausalLM" else Block
    tied = embedding.weight if config.tied else None
    return Decoder(
        build,
        lambda index: block(build, config, rope, index),
        embedding=embedding,
        norm=RMSNorm(build, config.hidden_size, config.eps),
        head=LMHead(build, config.hidden_size, config.vocab_size, weight=tied),
    )
