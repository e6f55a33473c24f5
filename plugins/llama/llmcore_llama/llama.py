"""LlamaForCausalLM: pre-norm blocks of grouped-query attention with rope, and a gated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmcore.api import AttnSpec, ConfigError, Shard, WeightMap
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
class LlamaConfig(DenseConfig):
    """The fields that a Llama block reads in addition to those of every dense decoder."""

    attention_bias: bool
    mlp_bias: bool


def read_config(hf: Mapping[str, Any]) -> LlamaConfig:
    """Reads config.json."""
    if (activation := hf.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ConfigError(f"LlamaForCausalLM with hidden_act {activation!r} is not known; its MLP uses silu")
    return LlamaConfig(
        **read_dense(hf, "LlamaForCausalLM", defaults=DEFAULTS, partial_rotary=False),
        attention_bias=bool(hf.get("attention_bias", False)),
        mlp_bias=bool(hf.get("mlp_bias", False)),
    )


def weights(config: LlamaConfig) -> WeightMap:
    """Maps names as transformers saves them."""
    return dense_weights(config)


class Block(Layer):
    """norm, attention, norm, MLP. The residual stream runs beside the hidden states."""

    def __init__(self, build: Build, config: LlamaConfig, rope: Rope, index: int) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias
        sizes: dict[str, Any] = {"heads": config.heads, "kv_heads": config.kv_heads, "key_size": config.head_size}
        self.input_layernorm = RMSNorm(build, hidden, config.eps)
        self.self_attn = Attention(
            build,
            AttnSpec(**sizes, value_size=config.head_size, scale=config.head_size**-0.5),
            group="all",
            index=index,
            qkv=QKVLinear(build, hidden, bias=bias, **sizes, source=self.input_layernorm),
            out=Linear(
                build, config.heads * config.head_size, hidden, bias=bias, shard=Shard("attn_tp", 1), partial=True
            ),
            rope=rope,
        )
        self.post_attention_layernorm = RMSNorm(build, hidden, config.eps)
        source = self.post_attention_layernorm
        self.mlp = GatedMLP(build, hidden, config.inner, bias=config.mlp_bias, partial=True, source=source)

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


def build(config: LlamaConfig, build: Build) -> Decoder:
    """The whole model."""
    embedding = Embedding(build, config.vocab_size, config.hidden_size)
    tied = embedding.weight if config.tied else None
    return decoder(config, build, embedding, LMHead(build, config.hidden_size, config.vocab_size, weight=tied))


def decoder(config: LlamaConfig, build: Build, embedding: Embedding, head: nn.Module) -> Decoder:
    """Returns the model with its layers between `embedding` and `head`."""
    rope = Rope(build, config.rope)
    norm = RMSNorm(build, config.hidden_size, config.eps)
    return Decoder(build, lambda index: Block(build, config, rope, index), embedding=embedding, norm=norm, head=head)
