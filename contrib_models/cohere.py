"""CohereForCausalLM (Command R): attention and MLP in parallel behind one LayerNorm, and logits times a constant.

Used as a plugin by its path, this file brings the family by itself (and imports torch to do so).

Cohere's rope rotates neighbours, elements 2i and 2i + 1 of a head. Heads are reordered for our rope, which rotates
halves, and the weights of the heads' norms are reordered with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from llmcore.api import AttnSpec, ConfigError, ModelSpec, Placement, Shard, WeightMap, hookimpl
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
    PairedQKV,
    Rope,
    Step,
    apart,
    dense_weights,
    read_dense,
)
from torch import nn

DEFAULTS = {"eos_token_id": 255001, "max_position_embeddings": 8192, "tie_word_embeddings": True}
"""Values that transformers takes for fields that config.json leaves out."""


@dataclass(frozen=True, kw_only=True)
class CohereConfig(DenseConfig):
    """The fields that a Cohere block reads. `bias`: attention's linears have biases. `logit_scale`: factor of the
    logits."""

    bias: bool
    qk_norm: bool
    logit_scale: float


@hookimpl
def register_models() -> Iterable[ModelSpec]:
    """CohereForCausalLM, for use of this file as a plugin."""
    yield ModelSpec(
        name="cohere",
        architectures=("CohereForCausalLM",),
        read_config=f"{__name__}:read_config",
        build=f"{__name__}:build",
        weights=f"{__name__}:weights",
    )


def read_config(hf: Mapping[str, Any]) -> CohereConfig:
    """Reads config.json. Command R gives its longest context in `model_max_length`."""
    if (activation := hf.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ConfigError(f"CohereForCausalLM with hidden_act {activation!r} is not known; its MLP uses silu")
    given = {"rope_theta": 500000.0, **hf, "rms_norm_eps": hf.get("layer_norm_eps", 1e-5)}
    fields = read_dense(given, "CohereForCausalLM", defaults=DEFAULTS, partial_rotary=False)
    fields["max_position"] = max(fields["max_position"], int(hf.get("model_max_length") or 0))
    return CohereConfig(
        **fields,
        bias=bool(hf.get("attention_bias", False)),
        qk_norm=bool(hf.get("use_qk_norm", False)),
        logit_scale=float(hf.get("logit_scale", 0.0625)),
    )


def weights(config: CohereConfig) -> WeightMap:
    """Maps names as transformers saves them."""
    plain = dense_weights(config)
    return replace(plain, fuse={**plain.fuse, "qk_norm": ("q_norm", "k_norm")})


class HeadNorms(Layer):
    """A LayerNorm without bias for each head of q and k. PairedQKV has reordered the heads.

    `whole`, `spec`: the attention of the model, and of this rank.
    """

    def __init__(self, build: Build, whole: AttnSpec, spec: AttnSpec, eps: float) -> None:
        super().__init__()
        totals = {"q_norm": whole.heads, "k_norm": whole.kv_heads}
        parts = {"q_norm": (0, spec.heads), "k_norm": (spec.heads, spec.kv_heads)}
        heads = spec.heads + spec.kv_heads
        self.weight = build.empty(heads, spec.key_size)
        self.placements = {"weight": Placement(parts, Shard("attn_tp", 0, repeat=True), totals=totals)}
        self.eps = eps
        self._norm = build.op("layer_norm", size=spec.key_size, heads=heads, bias=False)

    def finish(self) -> None:
        """Reorder the weights like their heads. The loader calls it once."""
        self.weight.data.copy_(self.weight.data[:, apart(self.weight.shape[1])])

    def forward(self, x: torch.Tensor, step: Bucketed) -> torch.Tensor:
        """Norms q and k [T, heads + kv_heads, size]."""
        return self._norm[step.bucket](x, self.weight, None, self.eps)  # type: ignore[no-any-return]


class NormedAttention(Attention):
    """Attention that norms queries and keys head by head before rope."""

    def __init__(self, build: Build, spec: AttnSpec, *, eps: float, **parts: Any) -> None:
        super().__init__(build, spec, **parts)
        self.qk_norm = HeadNorms(build, spec, self.spec, eps)

    def project(self, x: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns normed queries and keys [T, heads + kv_heads, key_size], and values."""
        qk, v = super().project(x, step)
        return self.qk_norm(qk, step), v


class Block(Layer):
    """norm, then attention and MLP in parallel."""

    def __init__(self, build: Build, config: CohereConfig, rope: Rope, index: int) -> None:
        super().__init__()
        hidden, size, bias = config.hidden_size, config.head_size, config.bias
        sizes: dict[str, Any] = {"heads": config.heads, "kv_heads": config.kv_heads, "key_size": size}
        self.input_layernorm = LayerNorm(build, hidden, config.eps, bias=False)
        attention = partial(NormedAttention, eps=config.eps) if config.qk_norm else Attention
        self.self_attn = attention(
            build,
            AttnSpec(**sizes, value_size=size, scale=size**-0.5),
            group="all",
            index=index,
            qkv=PairedQKV(build, hidden, bias=bias, rotated=size, **sizes),
            out=Linear(build, config.heads * size, hidden, bias=bias, shard=Shard("attn_tp", 1)),
            rope=rope,
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

    def __init__(self, build: Build, config: CohereConfig, weight: nn.Parameter | None) -> None:
        super().__init__(build, config.hidden_size, config.vocab_size, weight=weight)
        self._scale = config.logit_scale

    def scores(self, x: torch.Tensor, step: Bucketed) -> torch.Tensor:
        """[S, hidden_size] -> [S, share]."""
        return super().scores(x * self._scale, step)


def build(config: CohereConfig, build: Build) -> Decoder:
    """The whole model."""
    rope = Rope(build, config.rope)
    embedding = Embedding(build, config.vocab_size, config.hidden_size)
    return Decoder(
        build,
        lambda index: Block(build, config, rope, index),
        embedding=embedding,
        norm=LayerNorm(build, config.hidden_size, config.eps, bias=False),
        head=ScaledHead(build, config, embedding.weight if config.tied else None),
    )
