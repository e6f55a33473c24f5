"""Qwen2ForCausalLM: a Llama block with biases on q, k and v only, and a sliding window on some of its layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmcore.api import Shard, WeightMap
from llmcore.layers import Attention, Build, Decoder, GatedMLP, Linear, QKVLinear, Rope, dense_weights
from torch import nn

from llmcore_qwen.common import Block, QwenConfig, decoder, read_qwen


def read_config(hf: Mapping[str, Any]) -> QwenConfig:
    """Reads config.json."""
    return QwenConfig(**read_qwen(hf, "Qwen2ForCausalLM"))


def weights(config: QwenConfig) -> WeightMap:
    """Maps names as transformers saves them."""
    return dense_weights(config)


def attention(build: Build, config: QwenConfig, rope: Rope, index: int, *, bias: bool = True) -> Attention:
    """Returns the attention of layer `index`. `bias`: of q, k and v."""
    hidden = config.hidden_size
    return Attention(
        build,
        config.attention(index),
        group=config.group(index),
        index=index,
        qkv=QKVLinear(build, hidden, bias=bias, **config.sizes),
        out=Linear(build, config.heads * config.head_size, hidden, shard=Shard("attn_tp", 1), partial=True),
        rope=rope,
    )


def build(config: QwenConfig, build: Build) -> Decoder:
    """The whole model."""
    return with_head(config, build)


def with_head(config: QwenConfig, build: Build, head: nn.Module | None = None) -> Decoder:
    """Returns the whole model. `head`: None for a language model's."""
    rope = Rope(build, config.rope)

    def block(index: int) -> Block:
        mlp = GatedMLP(build, config.hidden_size, config.inner, partial=True)
        return Block(build, config, attention(build, config, rope, index), mlp)

    return decoder(build, config, block, head)
