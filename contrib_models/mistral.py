"""MistralForCausalLM: a Llama block whose attention may have a sliding window.

Used as a plugin by its path, this file brings the family by itself (and imports torch to do so).
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
    QKVLinear,
    RMSNorm,
    Rope,
    Step,
    dense_weights,
    read_dense,
)

DEFAULTS = {
    "eos_token_id": 2,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
}
"""Values that transformers takes for fields that config.json leaves out."""


@dataclass(frozen=True, kw_only=True)
class MistralConfig(DenseConfig):
    """The fields that a Mistral block reads. `window`: tokens that a query sees, itself included; None: all."""

    window: int | None


@hookimpl
def register_models() -> Iterable[ModelSpec]:
    """MistralForCausalLM, for use of this file as a plugin."""
    yield ModelSpec(
        name="mistral",
        architectures=("MistralForCausalLM",),
        read_config=f"{__name__}:read_config",
        build=f"{__name__}:build",
        weights=f"{__name__}:weights",
    )


def read_config(hf: Mapping[str, Any]) -> MistralConfig:
    """Reads config.json. A missing window is 4096, as in transformers. A null means full attention."""
    if (activation := hf.get("hidden_act", "silu")) != "silu":
        raise ConfigError(f"MistralForCausalLM with hidden_act {activation!r} is not known; its MLP uses silu")
    window = hf.get("sliding_window", 4096)
    reach = "all" if window is None else f"window:{window}"
    return MistralConfig(
        **read_dense(hf, "MistralForCausalLM", defaults=DEFAULTS, reach=reach, partial_rotary=False), window=window
    )


def weights(config: MistralConfig) -> WeightMap:
    """Maps names as transformers saves them."""
    return dense_weights(config)


class Block(Layer):
    """norm, windowed attention, norm, MLP."""

    def __init__(self, build: Build, config: MistralConfig, rope: Rope, index: int) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.head_size
        sizes: dict[str, Any] = {"heads": config.heads, "kv_heads": config.kv_heads, "key_size": size}
        self.input_layernorm = RMSNorm(build, hidden, config.eps)
        self.self_attn = Attention(
            build,
            AttnSpec(**sizes, value_size=size, scale=size**-0.5, window=config.window),
            group="all",
            index=index,
            qkv=QKVLinear(build, hidden, **sizes, source=self.input_layernorm),
            out=Linear(build, config.heads * size, hidden, shard=Shard("attn_tp", 1), partial=True),
            rope=rope,
        )
        self.post_attention_layernorm = RMSNorm(build, hidden, config.eps)
        self.mlp = GatedMLP(build, hidden, config.inner, partial=True, source=self.post_attention_layernorm)

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
