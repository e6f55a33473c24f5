"""LlamaForCausalLM: pre-norm blocks of grouped-query attention with rope, and a gated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from llmcore.api import AttnSpec, ConfigError, KVGroupSpec, ModelConfig, Shard, WeightMap, read_dtype
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

KV = "all"
"""The one KV group of a model whose layers are all alike."""


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """What a Llama block reads. `heads`, `kv_heads`: of the whole model; `inner`: width of the MLP."""

    heads: int
    kv_heads: int
    head_size: int
    inner: int
    eps: float
    rope: RopeConfig
    attention_bias: bool
    mlp_bias: bool
    tied: bool


def read_config(hf: Mapping[str, Any]) -> LlamaConfig:
    """From config.json; a field that is missing has the value transformers gives it."""
    if (activation := hf.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ConfigError(f"LlamaForCausalLM with hidden_act {activation!r} is not known; its MLP uses silu")
    heads, layers = int(hf["num_attention_heads"]), int(hf["num_hidden_layers"])
    kv_heads = int(hf.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise ConfigError(f"{heads} attention heads cannot share {kv_heads} KV heads; check the model's config.json")
    head_size = int(hf.get("head_dim") or hf["hidden_size"] // heads)
    eos, rope = hf.get("eos_token_id", 2), read_rope(hf, head_size)
    return LlamaConfig(
        architecture="LlamaForCausalLM",
        vocab_size=int(hf["vocab_size"]),
        hidden_size=int(hf["hidden_size"]),
        num_layers=layers,
        max_position=max(int(hf.get("max_position_embeddings") or 2048), rope.max_position),
        dtype=read_dtype(hf),
        eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        kv_groups=(
            KVGroupSpec(
                name=KV, layers=tuple(range(layers)), kv_heads=kv_heads, key_size=head_size, value_size=head_size
            ),
        ),
        fixed_angles_up_to=rope.fixed_angles_up_to,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        inner=int(hf["intermediate_size"]),
        eps=float(hf.get("rms_norm_eps", 1e-6)),
        rope=rope,
        attention_bias=bool(hf.get("attention_bias", False)),
        mlp_bias=bool(hf.get("mlp_bias", False)),
        tied=bool(hf.get("tie_word_embeddings", False)),
    )


def weights(config: LlamaConfig) -> WeightMap:
    """Names as transformers saves them."""
    return WeightMap(
        rename={"model.": ""},
        fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
        # old checkpoints save the rope frequencies, and some save a tied head once more
        skip=("*.rotary_emb.inv_freq", *(("lm_head.weight",) if config.tied else ())),
    )


class Block(nn.Module):
    """norm, attention, norm, MLP; the residual stream runs beside the hidden states."""

    def __init__(self, build: Build, config: LlamaConfig, rope: Rope, index: int) -> None:
        super().__init__()
        ranks = build.mesh.size("attn_tp")
        spec = AttnSpec(
            heads=config.heads // ranks,
            kv_heads=config.kv_heads // ranks,
            key_size=config.head_size,
            value_size=config.head_size,
            scale=config.head_size**-0.5,
        )
        hidden, bias = config.hidden_size, config.attention_bias
        sizes = {"heads": config.heads, "kv_heads": config.kv_heads, "key_size": config.head_size}
        self.input_layernorm = RMSNorm(build, hidden, config.eps)
        self.self_attn = Attention(
            build,
            spec,
            group=KV,
            index=index,
            qkv=QKVLinear(build, hidden, bias=bias, **sizes),
            out=Linear(build, config.heads * config.head_size, hidden, bias=bias, shard=Shard("attn_tp", 1)),
            rope=rope,
        )
        self.post_attention_layernorm = RMSNorm(build, hidden, config.eps)
        self.mlp = GatedMLP(build, hidden, config.inner, bias=config.mlp_bias)

    def forward(self, x: Hidden, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden, residual) -> (hidden, residual), [T, hidden_size] each."""
        hidden, residual = self.input_layernorm.add(*x, step)
        hidden, residual = self.post_attention_layernorm.add(self.self_attn(hidden, step), residual, step)
        return self.mlp(hidden, step), residual


def build(config: LlamaConfig, build: Build) -> Decoder:
    """The whole model."""
    rope = Rope(build, config.rope)
    embedding = Embedding(build, config.vocab_size, config.hidden_size)
    return Decoder(
        build,
        lambda index: Block(build, config, rope, index),
        embedding=embedding,
        norm=RMSNorm(build, config.hidden_size, config.eps),
        head=LMHead(build, config.hidden_size, config.vocab_size, weight=embedding.weight if config.tied else None),
    )
