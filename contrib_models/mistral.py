"""MistralForCausalLM: a Llama block whose attention may see a sliding window only.

Used as a plugin by its path, this file brings the family by itself (and imports torch to do so).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from llmcore.api import (
    AttnSpec,
    ConfigError,
    KVGroupSpec,
    ModelConfig,
    ModelSpec,
    Shard,
    WeightMap,
    hookimpl,
    read_dtype,
)
from llmcore.layers import (
    Attention,
    Build,
    Decoder,
    Embedding,
    GatedMLP,
    Hidden,
    Linear,
    LMHead,
    QKVLinear,
    RMSNorm,
    Rope,
    RopeConfig,
    Step,
    read_rope,
)
from torch import nn

KV = "sliding"
"""The one KV group; what it reaches back to is the window."""


@dataclass(frozen=True, kw_only=True)
class MistralConfig(ModelConfig):
    """What a Mistral block reads. `window`: tokens a query sees including itself, None for all."""

    heads: int
    kv_heads: int
    head_size: int
    inner: int
    eps: float
    rope: RopeConfig
    window: int | None
    tied: bool


@hookimpl
def register_models() -> Iterable[ModelSpec]:
    """MistralForCausalLM, where this file is the plugin."""
    yield ModelSpec(
        name="mistral",
        architectures=("MistralForCausalLM",),
        read_config=f"{__name__}:read_config",
        build=f"{__name__}:build",
        weights=f"{__name__}:weights",
    )


def read_config(hf: Mapping[str, Any]) -> MistralConfig:
    """From config.json; a window that is not mentioned is 4096, as in transformers, and null is none."""
    if (activation := hf.get("hidden_act", "silu")) != "silu":
        raise ConfigError(f"MistralForCausalLM with hidden_act {activation!r} is not known; its MLP uses silu")
    heads, layers, window = (
        int(hf["num_attention_heads"]),
        int(hf["num_hidden_layers"]),
        hf.get("sliding_window", 4096),
    )
    kv_heads = int(hf.get("num_key_value_heads") or 8)
    head_size = int(hf.get("head_dim") or hf["hidden_size"] // heads)
    eos, rope = hf.get("eos_token_id", 2), read_rope(hf, head_size)
    group = KVGroupSpec(
        name=KV,
        layers=tuple(range(layers)),
        kv_heads=kv_heads,
        key_size=head_size,
        value_size=head_size,
        reach="all" if window is None else f"window:{window}",
    )
    return MistralConfig(
        architecture="MistralForCausalLM",
        vocab_size=int(hf["vocab_size"]),
        hidden_size=int(hf["hidden_size"]),
        num_layers=layers,
        max_position=max(int(hf.get("max_position_embeddings") or 131072), rope.max_position),
        dtype=read_dtype(hf),
        eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        kv_groups=(group,),
        fixed_angles_up_to=rope.fixed_angles_up_to,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        inner=int(hf["intermediate_size"]),
        eps=float(hf.get("rms_norm_eps", 1e-6)),
        rope=rope,
        window=window,
        tied=bool(hf.get("tie_word_embeddings", False)),
    )


def weights(config: MistralConfig) -> WeightMap:
    """Names as transformers saves them."""
    return WeightMap(
        rename={"model.": ""},
        fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
        skip=("lm_head.weight",) if config.tied else (),
    )


class Block(nn.Module):
    """norm, windowed attention, norm, MLP."""

    def __init__(self, build: Build, config: MistralConfig, rope: Rope, index: int) -> None:
        super().__init__()
        ranks, hidden, size = build.mesh.size("attn_tp"), config.hidden_size, config.head_size
        spec = AttnSpec(
            heads=config.heads // ranks,
            kv_heads=config.kv_heads // ranks,
            key_size=size,
            value_size=size,
            scale=size**-0.5,
            window=config.window,
        )
        self.input_layernorm = RMSNorm(build, hidden, config.eps)
        self.self_attn = Attention(
            build,
            spec,
            group=KV,
            index=index,
            qkv=QKVLinear(build, hidden, heads=config.heads, kv_heads=config.kv_heads, key_size=size),
            out=Linear(build, config.heads * size, hidden, shard=Shard("attn_tp", 1)),
            rope=rope,
        )
        self.post_attention_layernorm = RMSNorm(build, hidden, config.eps)
        self.mlp = GatedMLP(build, hidden, config.inner)

    def forward(self, x: Hidden, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden, residual) -> (hidden, residual), [T, hidden_size] each."""
        hidden, residual = self.input_layernorm.add(*x, step)
        hidden, residual = self.post_attention_layernorm.add(self.self_attn(hidden, step), residual, step)
        return self.mlp(hidden, step), residual


def build(config: MistralConfig, build: Build) -> Decoder:
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
