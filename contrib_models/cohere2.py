"""Cohere2ForCausalLM (Command R7B, Command A): windowed layers with rope, and full layers without positions.

Attention and MLP are parallel behind one LayerNorm, and logits are multiplied by a constant. Used as a plugin by its
path, this file brings the family by itself (and imports torch to do so).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
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
    LayerNorm,
    Linear,
    LMHead,
    NoRope,
    PairedQKV,
    Rope,
    Step,
    dense_weights,
    read_dense,
    windowed_groups,
)
from torch import nn

DEFAULTS = {"eos_token_id": 255001, "max_position_embeddings": 8192, "tie_word_embeddings": True}
"""Values that transformers takes for fields that config.json leaves out."""


@dataclass(frozen=True, kw_only=True)
class Cohere2Config(DenseConfig):
    """The fields that a Cohere 2 block reads."""

    window: int
    """Tokens that a query of a windowed layer sees, itself included."""
    windowed: frozenset[int]
    """The layers that have the window."""
    bias: bool
    """Attention's linears have biases."""
    logit_scale: float
    """Factor of the logits."""


@hookimpl
def register_models() -> Iterable[ModelSpec]:
    """Cohere2ForCausalLM, for use of this file as a plugin."""
    yield ModelSpec(
        name="cohere2",
        architectures=("Cohere2ForCausalLM",),
        read_config=f"{__name__}:read_config",
        build=f"{__name__}:build",
        weights=f"{__name__}:weights",
    )


def read_config(hf: Mapping[str, Any]) -> Cohere2Config:
    """Reads config.json. Without `layer_types` every fourth layer is full, or as `sliding_window_pattern` says."""
    if (activation := hf.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ConfigError(f"Cohere2ForCausalLM with hidden_act {activation!r} is not known; its MLP uses silu")
    given = {**hf, "rms_norm_eps": hf.get("layer_norm_eps", 1e-5)}
    fields = read_dense(given, "Cohere2ForCausalLM", defaults=DEFAULTS, partial_rotary=False)
    window, every = hf.get("sliding_window", 4096), int(hf.get("sliding_window_pattern", 4))
    if window is None:
        raise ConfigError("Cohere2ForCausalLM without a sliding_window is not known; only windowed layers have rope")
    layers = range(1, fields["num_layers"] + 1)
    types = hf.get("layer_types") or ["sliding_attention" if i % every else "full_attention" for i in layers]
    groups = fields["kv_groups"] = windowed_groups(fields["kv_groups"][0], types, window)
    return Cohere2Config(
        **fields,
        window=window,
        windowed=frozenset(index for group in groups if group.name == "window" for index in group.layers),
        bias=bool(hf.get("attention_bias", False)),
        logit_scale=float(hf.get("logit_scale", 0.0625)),
    )


def weights(config: Cohere2Config) -> WeightMap:
    """Maps names as transformers saves them."""
    return dense_weights(config)


class Block(Layer):
    """norm, then attention and MLP in parallel."""

    def __init__(self, build: Build, config: Cohere2Config, ropes: tuple[Rope, Rope], index: int) -> None:
        super().__init__()
        hidden, size, bias = config.hidden_size, config.head_size, config.bias
        windowed = index in config.windowed
        sizes: dict[str, Any] = {"heads": config.heads, "kv_heads": config.kv_heads, "key_size": size}
        self.input_layernorm = LayerNorm(build, hidden, config.eps, bias=False)
        self.self_attn = Attention(
            build,
            AttnSpec(**sizes, value_size=size, scale=size**-0.5, window=config.window if windowed else None),
            group="window" if windowed else "full",
            index=index,
            qkv=PairedQKV(build, hidden, bias=bias, rotated=size, **sizes),
            out=Linear(build, config.heads * size, hidden, bias=bias, shard=Shard("attn_tp", 1)),
            rope=ropes[windowed],
        )
        self.mlp = GatedMLP(build, hidden, config.inner)

    def forward(self, x: Hidden, step: Step) -> Hidden:
        """(hidden, residual) -> (hidden, residual), [T, hidden_size] each."""
        normed, residual = self.input_layernorm.add(*x, step)
        return self.self_attn(normed, step) + self.mlp(normed, step), residual

    def attend(self, x: Hidden, step: Step) -> Hidden:
        """The attention alone."""
        normed, residual = self.input_layernorm.add(*x, step)
        return self.self_attn(normed, step), residual

    def feed(self, x: Hidden, step: Bucketed) -> Hidden:
        """The MLP. The tokens that are left are few, so they are normed again."""
        return x[0] + self.mlp(self.input_layernorm(x[1], step), step), x[1]


class ScaledHead(LMHead):
    """Multiplies logits by a constant. It multiplies the hidden states instead, which are smaller."""

    def __init__(self, build: Build, config: Cohere2Config, weight: nn.Parameter | None) -> None:
        super().__init__(build, config.hidden_size, config.vocab_size, weight=weight)
        self._scale = config.logit_scale

    def scores(self, x: torch.Tensor, step: Bucketed) -> torch.Tensor:
        """[S, hidden_size] -> [S, share]."""
        return super().scores(x * self._scale, step)


def build(config: Cohere2Config, build: Build) -> Decoder:
    """The whole model."""
    ropes = NoRope(build, config.rope), Rope(build, config.rope)
    embedding = Embedding(build, config.vocab_size, config.hidden_size)
    return Decoder(
        build,
        lambda index: Block(build, config, ropes, index),
        embedding=embedding,
        norm=LayerNorm(build, config.hidden_size, config.eps, bias=False),
        head=ScaledHead(build, config, embedding.weight if config.tied else None),
    )
