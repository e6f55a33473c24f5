"""Gemma2ForCausalLM: alternating windowed and full layers, norms before and after each half of a block, soft caps.

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
    CappedHead,
    Decoder,
    DenseConfig,
    GatedMLP,
    Hidden,
    Layer,
    Linear,
    LMHead,
    OffsetRMSNorm,
    QKVLinear,
    Rope,
    ScaledEmbedding,
    Step,
    dense_weights,
    read_dense,
    windowed_groups,
)

DEFAULTS = {
    "eos_token_id": 1,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
"""Values that transformers takes for fields that config.json leaves out."""


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(DenseConfig):
    """The fields that a Gemma 2 block reads. `window`: tokens that a query of a windowed layer sees, itself included.
    `score_cap` and `logit_cap`: soft caps of attention scores and of logits, or None."""

    window: int | None
    scale: float
    score_cap: float | None
    logit_cap: float | None
    bias: bool


@hookimpl
def register_models() -> Iterable[ModelSpec]:
    """Gemma2ForCausalLM, for use of this file as a plugin."""
    yield ModelSpec(
        name="gemma2",
        architectures=("Gemma2ForCausalLM",),
        read_config=f"{__name__}:read_config",
        build=f"{__name__}:build",
        weights=f"{__name__}:weights",
    )


def read_config(hf: Mapping[str, Any]) -> Gemma2Config:
    """Reads config.json. Without `layer_types` every second layer is full, and the first one is not."""
    if (activation := hf.get("hidden_activation", "gelu_pytorch_tanh")) != "gelu_pytorch_tanh":
        raise ConfigError(f"Gemma2ForCausalLM with hidden_activation {activation!r} is not known; its MLP uses gelu")
    if hf.get("use_bidirectional_attention"):
        raise ConfigError("Gemma2ForCausalLM with use_bidirectional_attention is not known; generation is causal")
    dense = read_dense(hf, "Gemma2ForCausalLM", defaults=DEFAULTS, partial_rotary=False)
    window = hf.get("sliding_window", 4096)
    alternating = [("sliding_attention", "full_attention")[index % 2] for index in range(dense["num_layers"])]
    dense["kv_groups"] = windowed_groups(dense["kv_groups"][0], hf.get("layer_types") or alternating, window)
    return Gemma2Config(
        **dense,
        window=window,
        scale=float(hf.get("query_pre_attn_scalar", 256)) ** -0.5,
        score_cap=hf.get("attn_logit_softcapping", 50.0),
        logit_cap=hf.get("final_logit_softcapping", 30.0),
        bias=bool(hf.get("attention_bias", False)),
    )


def weights(config: Gemma2Config) -> WeightMap:
    """Maps names as transformers saves them."""
    return dense_weights(config)


class Block(Layer):
    """norm, attention, norm; norm, MLP, norm. The output of each half is normed before the residual adds it."""

    def __init__(self, build: Build, config: Gemma2Config, rope: Rope, index: int) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.head_size
        group = next(group.name for group in config.kv_groups if index in group.layers)
        sizes: dict[str, Any] = {"heads": config.heads, "kv_heads": config.kv_heads, "key_size": size}
        window = config.window if group == "window" else None
        self.input_layernorm = OffsetRMSNorm(build, hidden, config.eps)
        self.self_attn = Attention(
            build,
            AttnSpec(**sizes, value_size=size, scale=config.scale, window=window, soft_cap=config.score_cap),
            group=group,
            index=index,
            qkv=QKVLinear(build, hidden, bias=config.bias, **sizes, source=self.input_layernorm),
            out=Linear(build, config.heads * size, hidden, bias=config.bias, shard=Shard("attn_tp", 1)),
            rope=rope,
        )
        self.post_attention_layernorm = OffsetRMSNorm(build, hidden, config.eps)
        self.pre_feedforward_layernorm = OffsetRMSNorm(build, hidden, config.eps)
        self.mlp = GatedMLP(
            build, hidden, config.inner, activation="gelu_and_mul", source=self.pre_feedforward_layernorm
        )
        self.post_feedforward_layernorm = OffsetRMSNorm(build, hidden, config.eps)

    def forward(self, x: Hidden, step: Step) -> Hidden:
        """(hidden, residual) -> (hidden, residual), [T, hidden_size] each."""
        return self.feed(self.attend(x, step), step)

    def attend(self, x: Hidden, step: Step) -> Hidden:
        """The block up to the MLP's first norm."""
        hidden, residual = self.input_layernorm.add(*x, step)
        return self.post_attention_layernorm(self.self_attn(hidden, step), step), residual

    def feed(self, x: Hidden, step: Bucketed) -> Hidden:
        """The MLP. Each token is computed by itself."""
        hidden, residual = self.pre_feedforward_layernorm.add(*x, step)
        return self.post_feedforward_layernorm(self.mlp(hidden, step), step), residual


def build(config: Gemma2Config, build: Build) -> Decoder:
    """The whole model."""
    hidden, vocab = config.hidden_size, config.vocab_size
    rope = Rope(build, config.rope)
    embedding = ScaledEmbedding(build, vocab, hidden, hidden**0.5)
    tied = embedding.weight if config.tied else None
    return Decoder(
        build,
        lambda index: Block(build, config, rope, index),
        embedding=embedding,
        norm=OffsetRMSNorm(build, hidden, config.eps),
        head=LMHead(build, hidden, vocab, weight=tied)
        if config.logit_cap is None
        else CappedHead(build, hidden, vocab, weight=tied, cap=config.logit_cap),
    )
