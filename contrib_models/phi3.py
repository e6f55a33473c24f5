"""Phi3ForCausalLM: a Llama block. Its checkpoints hold q, k, v as one tensor, and gate, up as another.

Rope may cover a part of a head, and attention may have a sliding window. Models with long contexts (Phi-3's 128k
models, Phi-3.5 mini, Phi-4-mini) have longrope. The longest request that a server allows chooses its factors.
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
    "eos_token_id": 32000,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
"""Values that transformers takes for fields that config.json leaves out."""


@dataclass(frozen=True, kw_only=True)
class Phi3Config(DenseConfig):
    """The fields that a Phi-3 block reads. `window`: tokens that a query sees, itself included; None: all."""

    window: int | None


@hookimpl
def register_models() -> Iterable[ModelSpec]:
    """Phi3ForCausalLM, for use of this file as a plugin."""
    yield ModelSpec(
        name="phi3",
        architectures=("Phi3ForCausalLM",),
        read_config=f"{__name__}:read_config",
        build=f"{__name__}:build",
        weights=f"{__name__}:weights",
    )


def read_config(hf: Mapping[str, Any]) -> Phi3Config:
    """Reads config.json."""
    if (activation := hf.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ConfigError(f"Phi3ForCausalLM with hidden_act {activation!r} is not known; its MLP uses silu")
    window = hf.get("sliding_window")
    reach = "all" if window is None else f"window:{window}"
    given = {**hf, "rope_scaling": _scaling(hf)}
    return Phi3Config(**read_dense(given, "Phi3ForCausalLM", defaults=DEFAULTS, reach=reach), window=window)


def _scaling(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the rope's parameters. The first Phi-3 checkpoints call longrope "su" or "yarn"."""
    scaling = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    if (scaling.get("rope_type") or scaling.get("type")) in ("su", "yarn"):
        scaling["rope_type"] = "longrope"
    return scaling


def weights(config: Phi3Config) -> WeightMap:
    """Maps names as transformers saves them. `qkv_proj` and `gate_up_proj` are stacked already."""
    return dense_weights(config)


class Block(Layer):
    """norm, attention, norm, MLP."""

    def __init__(self, build: Build, config: Phi3Config, rope: Rope, index: int) -> None:
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


def build(config: Phi3Config, build: Build) -> Decoder:
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
