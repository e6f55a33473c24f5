"""Qwen3ForCausalLM: q and k are normed head by head before rope. The config gives the head size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmcore.api import Shard, WeightMap
from llmcore.layers import Attention, Build, Decoder, GatedMLP, Linear, QKVLinear, RMSNorm, Rope, dense_weights

from llmcore_qwen.common import Block, QwenConfig, decoder, read_qwen


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(QwenConfig):
    """`attention_bias`: all four linears of attention have biases."""

    attention_bias: bool


def read_config(hf: Mapping[str, Any]) -> Qwen3Config:
    """Reads config.json. The default head size is 128, as in transformers."""
    fields = read_qwen({"head_dim": 128, **hf}, "Qwen3ForCausalLM")
    return Qwen3Config(**fields, attention_bias=bool(hf.get("attention_bias", False)))


def weights(config: Qwen3Config) -> WeightMap:
    """Maps names as transformers saves them."""
    return dense_weights(config)


def attention(build: Build, config: Qwen3Config, rope: Rope, index: int) -> Attention:
    """Returns the attention of layer `index`."""
    hidden, size, bias = config.hidden_size, config.head_size, config.attention_bias
    return Attention(
        build,
        config.attention(index),
        group=config.group(index),
        index=index,
        qkv=QKVLinear(build, hidden, bias=bias, **config.sizes),
        out=Linear(build, config.heads * size, hidden, bias=bias, shard=Shard("attn_tp", 1), partial=True),
        rope=rope,
        norms=(RMSNorm(build, size, config.eps), RMSNorm(build, size, config.eps)),
    )


def build(config: Qwen3Config, build: Build) -> Decoder:
    """The whole model."""
    rope = Rope(build, config.rope)

    def block(index: int) -> Block:
        mlp = GatedMLP(build, config.hidden_size, config.inner, partial=True)
        return Block(build, config, attention(build, config, rope, index), mlp)

    return decoder(build, config, block)
