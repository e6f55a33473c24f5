"""Olmo2ForCausalLM: norms follow attention and MLP instead of preceding them. q and k are normed over all heads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from llmcore.api import AttnSpec, ConfigError, ModelSpec, Placement, Shard, WeightMap, hookimpl
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

DEFAULTS = {"eos_token_id": 50279, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
"""Values that transformers takes for fields that config.json leaves out."""


@dataclass(frozen=True, kw_only=True)
class Olmo2Config(DenseConfig):
    """The fields that an OLMo 2 block reads in addition to those of every dense decoder."""

    attention_bias: bool


@hookimpl
def register_models() -> Iterable[ModelSpec]:
    """Olmo2ForCausalLM, for use of this file as a plugin."""
    yield ModelSpec(
        name="olmo2",
        architectures=("Olmo2ForCausalLM",),
        read_config=f"{__name__}:read_config",
        build=f"{__name__}:build",
        weights=f"{__name__}:weights",
    )


def read_config(hf: Mapping[str, Any]) -> Olmo2Config:
    """Reads config.json."""
    if (activation := hf.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ConfigError(f"Olmo2ForCausalLM with hidden_act {activation!r} is not known; its MLP uses silu")
    return Olmo2Config(
        **read_dense(hf, "Olmo2ForCausalLM", defaults=DEFAULTS, partial_rotary=False),
        attention_bias=bool(hf.get("attention_bias", False)),
    )


def weights(config: Olmo2Config) -> WeightMap:
    """Maps names as transformers saves them. The norms of q and k belong to the projection here."""
    return replace(dense_weights(config), split={name: (f"qkv_proj.{name}",) for name in ("q_norm", "k_norm")})


class HeadsNorm(RMSNorm):
    """An RMSNorm over all heads, of which a rank has its share. The ranks exchange their sums of squares."""

    def __init__(self, build: Build, heads: int, size: int, eps: float) -> None:
        shard, total = Shard("attn_tp", 0, size, repeat=True), heads * size
        share = build.mesh.share(total, shard, "head norms")
        super().__init__(build, share, eps)
        self.placements = {"weight": Placement(shard=shard, totals={"": total})}
        self._exchange = build.comm("exchange", shard.group, 1)
        self._summed = share * build.mesh.size(shard.group)  # more than `total` if neighbours hold the same heads

    def forward(self, x: torch.Tensor, step: Bucketed) -> torch.Tensor:
        """[T, the heads of this rank] -> the same shape."""
        if self._exchange is None:
            return super().forward(x, step)
        wide = x.float()
        squares = self._exchange[step.bucket](wide.square().sum(-1, keepdim=True)).sum(0)
        normed = wide * torch.rsqrt(squares / self._summed + self.eps)
        return (normed * self.weight).to(x.dtype)


class NormedQKV(QKVLinear):
    """A QKVLinear that norms the queries over all heads at once, and likewise the keys."""

    def __init__(self, build: Build, config: Olmo2Config) -> None:
        heads, kv_heads, size = config.heads, config.kv_heads, config.head_size
        super().__init__(
            build, config.hidden_size, heads=heads, kv_heads=kv_heads, key_size=size, bias=config.attention_bias
        )
        self.q_norm = HeadsNorm(build, heads, size, config.eps)
        self.k_norm = HeadsNorm(build, kv_heads, size, config.eps)
        self._sizes = tuple(self.shape.parts.values())

    def forward(self, x: torch.Tensor, step: Bucketed) -> torch.Tensor:
        """[T, hidden_size] -> [T, (heads + 2 kv_heads) head_size]."""
        q, k, v = super().forward(x, step).split_with_sizes(self._sizes, 1)
        return torch.cat((self.q_norm(q, step), self.k_norm(k, step), v), 1)


class Block(Layer):
    """attention, norm, MLP, norm. Each sublayer reads the residual stream itself."""

    def __init__(self, build: Build, config: Olmo2Config, rope: Rope, index: int) -> None:
        super().__init__()
        hidden, size, bias = config.hidden_size, config.head_size, config.attention_bias
        self.self_attn = Attention(
            build,
            AttnSpec(heads=config.heads, kv_heads=config.kv_heads, key_size=size, value_size=size, scale=size**-0.5),
            group="all",
            index=index,
            qkv=NormedQKV(build, config),
            out=Linear(build, config.heads * size, hidden, bias=bias, shard=Shard("attn_tp", 1)),
            rope=rope,
        )
        self.post_attention_layernorm = RMSNorm(build, hidden, config.eps)
        self.mlp = GatedMLP(build, hidden, config.inner)
        self.post_feedforward_layernorm = RMSNorm(build, hidden, config.eps)

    def forward(self, x: Hidden, step: Step) -> Hidden:
        """(hidden, residual) -> (hidden, residual), [T, hidden_size] each."""
        return self.feed(self.attend(x, step), step)

    def attend(self, x: Hidden, step: Step) -> Hidden:
        """The block up to the MLP."""
        total = _total(x)
        return self.post_attention_layernorm(self.self_attn(total, step), step), total

    def feed(self, x: Hidden, step: Bucketed) -> Hidden:
        """The MLP. Each token is computed by itself."""
        total = _total(x)
        return self.post_feedforward_layernorm(self.mlp(total, step), step), total


def _total(x: Hidden) -> torch.Tensor:
    hidden, residual = x
    return hidden if residual is None else residual + hidden


def build(config: Olmo2Config, build: Build) -> Decoder:
    """The whole model."""
    rope = Rope(build, config.rope)
    embedding = Embedding(build, config.vocab_size, config.hidden_size)
    tied = embedding.weight if config.tied else None
    return Decoder(
        build,
        lambda index: Block(build, config, rope, index),
        embedding=embedding,
        norm=RMSNorm(build, config.hidden_size, config.eps),
        head=LMHead(build, config.hidden_size, config.vocab_size, weight=tied),
    )
