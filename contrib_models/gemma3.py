"""Gemma3ForCausalLM: windowed and full layers, each kind with its own rope, and norms before and after each half.

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
    RopeConfig,
    ScaledEmbedding,
    Step,
    dense_weights,
    read_dense,
    read_rope,
    windowed_groups,
)

DEFAULTS = {
    "eos_token_id": 1,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
"""Values that transformers takes for fields that config.json leaves out."""


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(DenseConfig):
    """The fields that a Gemma 3 block reads. `window`: tokens that a query of a windowed layer sees, itself included.
    `rope` is for full layers, `window_rope` for windowed ones. `logit_cap`: soft cap of logits, or None."""

    window: int | None
    window_rope: RopeConfig
    scale: float
    logit_cap: float | None
    bias: bool


@hookimpl
def register_models() -> Iterable[ModelSpec]:
    """Gemma3ForCausalLM, for use of this file as a plugin."""
    yield ModelSpec(
        name="gemma3",
        architectures=("Gemma3ForCausalLM",),
        read_config=f"{__name__}:read_config",
        build=f"{__name__}:build",
        weights=f"{__name__}:weights",
    )


def read_config(hf: Mapping[str, Any]) -> Gemma3Config:
    """Reads config.json. Without `layer_types` every sixth layer is full, or as `sliding_window_pattern` says."""
    if (activation := hf.get("hidden_activation", "gelu_pytorch_tanh")) != "gelu_pytorch_tanh":
        raise ConfigError(f"Gemma3ForCausalLM with hidden_activation {activation!r} is not known; its MLP uses gelu")
    if hf.get("use_bidirectional_attention"):
        raise ConfigError("Gemma3ForCausalLM with use_bidirectional_attention is not known; generation is causal")
    full, windowed = _ropes(hf)
    dense = read_dense(full, "Gemma3ForCausalLM", defaults=DEFAULTS, partial_rotary=False)
    window_rope = read_rope(windowed, dense["head_size"], partial_rotary=False)
    fixed = [rope.fixed_angles_up_to for rope in (dense["rope"], window_rope)]
    dense["fixed_angles_up_to"] = min((length for length in fixed if length is not None), default=None)
    # the file gives the length after scaling
    dense["max_position"] = int(full["max_position_embeddings"])
    window, every = hf.get("sliding_window", 4096), int(hf.get("sliding_window_pattern", 6))
    layers = range(1, dense["num_layers"] + 1)
    types = hf.get("layer_types") or ["sliding_attention" if i % every else "full_attention" for i in layers]
    dense["kv_groups"] = windowed_groups(dense["kv_groups"][0], types, window)
    return Gemma3Config(
        **dense,
        window=window,
        window_rope=window_rope,
        scale=float(hf.get("query_pre_attn_scalar", 256)) ** -0.5,
        logit_cap=hf.get("final_logit_softcapping"),
        bias=bool(hf.get("attention_bias", False)),
    )


def _ropes(hf: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the config for full layers, and the config for windowed ones.

    Newer files have `rope_parameters` by layer type. Older ones have a base for each type, and `rope_scaling` for full
    layers.
    """
    lengths = {"max_position_embeddings": hf.get("max_position_embeddings") or DEFAULTS["max_position_embeddings"]}
    both = hf.get("rope_parameters") or {}
    full = {"rope_theta": hf.get("rope_theta", 1e6), **(both.get("full_attention") or {})}
    windowed = {"rope_theta": hf.get("rope_local_base_freq", 1e4), **(both.get("sliding_attention") or {})}
    scaled = full | dict(hf.get("rope_scaling") or {})
    return {**hf, **lengths, "rope_scaling": scaled}, {**hf, **lengths, "rope_scaling": windowed}


def weights(config: Gemma3Config) -> WeightMap:
    """Maps names as transformers saves them."""
    return dense_weights(config)


class Block(Layer):
    """norm, attention, norm; norm, MLP, norm. The output of each half is normed before the residual adds it."""

    def __init__(self, build: Build, config: Gemma3Config, ropes: Mapping[str, Rope], index: int) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.head_size
        group = next(group.name for group in config.kv_groups if index in group.layers)
        sizes: dict[str, Any] = {"heads": config.heads, "kv_heads": config.kv_heads, "key_size": size}
        window = config.window if group == "window" else None
        self.input_layernorm = OffsetRMSNorm(build, hidden, config.eps)
        self.self_attn = Attention(
            build,
            AttnSpec(**sizes, value_size=size, scale=config.scale, window=window),
            group=group,
            index=index,
            qkv=QKVLinear(build, hidden, bias=config.bias, **sizes, source=self.input_layernorm),
            out=Linear(build, config.heads * size, hidden, bias=config.bias, shard=Shard("attn_tp", 1)),
            rope=ropes[group],
            norms=(OffsetRMSNorm(build, size, config.eps), OffsetRMSNorm(build, size, config.eps)),
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


def build(config: Gemma3Config, build: Build) -> Decoder:
    """The whole model."""
    hidden, vocab = config.hidden_size, config.vocab_size
    ropes = {"full": Rope(build, config.rope), "window": Rope(build, config.window_rope)}
    embedding = ScaledEmbedding(build, vocab, hidden, hidden**0.5)
    tied = embedding.weight if config.tied else None
    return Decoder(
        build,
        lambda index: Block(build, config, ropes, index),
        embedding=embedding,
        norm=OffsetRMSNorm(build, hidden, config.eps),
        head=LMHead(build, hidden, vocab, weight=tied)
        if config.logit_cap is None
        else CappedHead(build, hidden, vocab, weight=tied, cap=config.logit_cap),
    )
