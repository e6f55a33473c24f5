"""GraniteForCausalLM: a Llama block. Constants scale embeddings, attention scores, sublayers' outputs and logits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
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
    QKVLinear,
    RMSNorm,
    Rope,
    Step,
    dense_weights,
    read_dense,
)
from torch import nn

DEFAULTS = {"eos_token_id": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
"""Values that transformers takes for fields that config.json leaves out."""


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(DenseConfig):
    """The fields that a Granite block reads in addition to those of every dense decoder."""

    embedding_factor: float
    """Factor of the embeddings."""
    score_factor: float
    """Factor of q k, in place of 1 / sqrt(head size)."""
    residual_factor: float
    """Factor of the outputs of attention and MLP."""
    logits_divisor: float
    """Logits are divided by it."""
    attention_bias: bool
    mlp_bias: bool


@hookimpl
def register_models() -> Iterable[ModelSpec]:
    """GraniteForCausalLM, for use of this file as a plugin."""
    yield ModelSpec(
        name="granite",
        architectures=("GraniteForCausalLM",),
        read_config=f"{__name__}:read_config",
        build=f"{__name__}:build",
        weights=f"{__name__}:weights",
    )


def read_config(hf: Mapping[str, Any]) -> GraniteConfig:
    """Reads config.json. A missing factor is 1, as in transformers."""
    if (activation := hf.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ConfigError(f"GraniteForCausalLM with hidden_act {activation!r} is not known; its MLP uses silu")
    return GraniteConfig(
        **read_dense(hf, "GraniteForCausalLM", defaults=DEFAULTS, partial_rotary=False),
        embedding_factor=float(hf.get("embedding_multiplier", 1.0)),
        score_factor=float(hf.get("attention_multiplier", 1.0)),
        residual_factor=float(hf.get("residual_multiplier", 1.0)),
        logits_divisor=float(hf.get("logits_scaling", 1.0)),
        attention_bias=bool(hf.get("attention_bias", False)),
        mlp_bias=bool(hf.get("mlp_bias", False)),
    )


def weights(config: GraniteConfig) -> WeightMap:
    """Maps names as transformers saves them."""
    return dense_weights(config)


class ScaledEmbedding(Embedding):
    """Looks up rows of a table and multiplies them by `factor`."""

    def __init__(self, build: Build, vocab: int, size: int, factor: float) -> None:
        super().__init__(build, vocab, size)
        self.factor = factor

    def forward(self, tokens: torch.Tensor, step: Bucketed) -> torch.Tensor:
        """tokens [T] int64 -> [T, size]."""
        return super().forward(tokens, step) * self.factor


class ScaledHead(LMHead):
    """Divides logits by `divisor`."""

    def __init__(
        self, build: Build, size: int, vocab: int, divisor: float, *, weight: nn.Parameter | None = None
    ) -> None:
        super().__init__(build, size, vocab, weight=weight)
        self.divisor = divisor

    def scores(self, x: torch.Tensor, step: Bucketed) -> torch.Tensor:
        """[S, size] -> [S, share]."""
        return super().scores(x, step) / self.divisor


class Block(Layer):
    """norm, attention, norm, MLP. The outputs of both sublayers are scaled before they are added."""

    def __init__(self, build: Build, config: GraniteConfig, rope: Rope, index: int) -> None:
        super().__init__()
        hidden, size, bias = config.hidden_size, config.head_size, config.attention_bias
        sizes: dict[str, Any] = {"heads": config.heads, "kv_heads": config.kv_heads, "key_size": size}
        self.factor = config.residual_factor
        self.input_layernorm = RMSNorm(build, hidden, config.eps)
        self.self_attn = Attention(
            build,
            AttnSpec(**sizes, value_size=size, scale=config.score_factor),
            group="all",
            index=index,
            qkv=QKVLinear(build, hidden, bias=bias, **sizes, source=self.input_layernorm),
            out=Linear(build, config.heads * size, hidden, bias=bias, shard=Shard("attn_tp", 1)),
            rope=rope,
        )
        self.post_attention_layernorm = RMSNorm(build, hidden, config.eps)
        self.mlp = GatedMLP(build, hidden, config.inner, bias=config.mlp_bias, source=self.post_attention_layernorm)

    def forward(self, x: Hidden, step: Step) -> Hidden:
        """(hidden, residual) -> (hidden, residual), [T, hidden_size] each."""
        return self.feed(self.attend(x, step), step)

    def attend(self, x: Hidden, step: Step) -> Hidden:
        """The block up to the MLP."""
        hidden, residual = self.input_layernorm.add(*x, step)
        return self.self_attn(hidden, step) * self.factor, residual

    def feed(self, x: Hidden, step: Bucketed) -> Hidden:
        """The MLP. Each token is computed by itself."""
        hidden, residual = self.post_attention_layernorm.add(*x, step)
        return self.mlp(hidden, step) * self.factor, residual


def build(config: GraniteConfig, build: Build) -> Decoder:
    """The whole model."""
    rope = Rope(build, config.rope)
    vocab, hidden = config.vocab_size, config.hidden_size
    embedding = ScaledEmbedding(build, vocab, hidden, config.embedding_factor)
    tied = embedding.weight if config.tied else None
    return Decoder(
        build,
        lambda index: Block(build, config, rope, index),
        embedding=embedding,
        norm=RMSNorm(build, hidden, config.eps),
        head=ScaledHead(build, hidden, vocab, config.logits_divisor, weight=tied),
    )
