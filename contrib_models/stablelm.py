"""StableLmForCausalLM: LayerNorm, and rope on a part of each head. The config may add norms of q and k or a parallel
MLP."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
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
    QKVLinear,
    Rope,
    Step,
    dense_weights,
    read_dense,
)
from torch import nn

DEFAULTS = {"eos_token_id": 0, "max_position_embeddings": 4096, "num_key_value_heads": 32}
"""Values that transformers takes for fields that config.json leaves out."""


@dataclass(frozen=True, kw_only=True)
class StableLmConfig(DenseConfig):
    """The fields that a StableLM block reads. `parallel`: attention and MLP read one norm, and the residual adds
    both."""

    qkv_bias: bool
    qk_norm: bool
    parallel: bool


@hookimpl
def register_models() -> Iterable[ModelSpec]:
    """StableLmForCausalLM, for use of this file as a plugin."""
    yield ModelSpec(
        name="stablelm",
        architectures=("StableLmForCausalLM",),
        read_config=f"{__name__}:read_config",
        build=f"{__name__}:build",
        weights=f"{__name__}:weights",
    )


def read_config(hf: Mapping[str, Any]) -> StableLmConfig:
    """Reads config.json. By default rope covers a quarter of each head."""
    if (activation := hf.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ConfigError(f"StableLmForCausalLM with hidden_act {activation!r} is not known; its MLP uses silu")
    given = {"partial_rotary_factor": 0.25, **hf, "rms_norm_eps": hf.get("layer_norm_eps", 1e-5)}
    return StableLmConfig(
        **read_dense(given, "StableLmForCausalLM", defaults=DEFAULTS),
        qkv_bias=bool(hf.get("use_qkv_bias", False)),
        qk_norm=bool(hf.get("qk_layernorm", False)),
        parallel=bool(hf.get("use_parallel_residual", False)),
    )


def weights(config: StableLmConfig) -> WeightMap:
    """Maps names as transformers saves them."""
    return dense_weights(config)


class HeadNorms(Layer):
    """A LayerNorm without bias for each head. The checkpoint has one weight per head, and every rank holds all.

    `own`: (first, number) of the heads that this rank norms.
    """

    def __init__(self, build: Build, heads: int, own: tuple[int, int], size: int, eps: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.ParameterDict({"weight": build.empty(size)}) for _ in range(heads))
        self.eps = eps
        self._own, self._weights = own, torch.empty(0)
        self._norm = build.op("layer_norm", size=size, heads=own[1], bias=False)

    def finish(self) -> None:
        """Stack the weights of this rank's heads. The loader calls it once."""
        weights = torch.stack([norm.get_parameter("weight").data for norm in self.norms])
        self._weights = weights.narrow(0, *self._own)

    def forward(self, x: torch.Tensor, step: Bucketed) -> torch.Tensor:
        """[T, heads, size] -> [T, heads, size]."""
        y: torch.Tensor = self._norm[step.bucket](x, self._weights, None, self.eps)
        return y


class NormedAttention(Attention):
    """Attention that norms queries and keys head by head before rope."""

    def __init__(self, build: Build, spec: AttnSpec, *, eps: float, **parts: Any) -> None:
        super().__init__(build, spec, **parts)
        rank, ranks, cut = build.mesh.rank("attn_tp"), build.mesh.size("attn_tp"), Shard("attn_tp", 0, repeat=True)
        queries, keys = (
            HeadNorms(build, heads, cut.held(heads, own, rank, ranks), spec.key_size, eps)
            for heads, own in ((spec.heads, self.spec.heads), (spec.kv_heads, self.spec.kv_heads))
        )
        self.q_layernorm, self.k_layernorm = queries, keys

    def project(self, x: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns normed queries and keys [T, heads + kv_heads, key_size], and values."""
        qk, v = super().project(x, step)
        q, k = qk[:, : self.spec.heads], qk[:, self.spec.heads :]
        return torch.cat((self.q_layernorm(q, step), self.k_layernorm(k, step)), 1), v


def attention(build: Build, config: StableLmConfig, rope: Rope, index: int) -> Attention:
    """Returns the attention of one layer."""
    hidden, size = config.hidden_size, config.head_size
    sizes: dict[str, Any] = {"heads": config.heads, "kv_heads": config.kv_heads, "key_size": size}
    kind = partial(NormedAttention, eps=config.eps) if config.qk_norm else Attention
    return kind(
        build,
        AttnSpec(**sizes, value_size=size, scale=size**-0.5),
        group="all",
        index=index,
        qkv=QKVLinear(build, hidden, bias=config.qkv_bias, **sizes),
        out=Linear(build, config.heads * size, hidden, shard=Shard("attn_tp", 1)),
        rope=rope,
    )


class Block(Layer):
    """norm, attention, norm, MLP."""

    def __init__(self, build: Build, config: StableLmConfig, rope: Rope, index: int) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(build, config.hidden_size, config.eps)
        self.self_attn = attention(build, config, rope, index)
        self.post_attention_layernorm = LayerNorm(build, config.hidden_size, config.eps)
        self.mlp = GatedMLP(build, config.hidden_size, config.inner)

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


class ParallelBlock(Layer):
    """norm, then attention and MLP in parallel."""

    def __init__(self, build: Build, config: StableLmConfig, rope: Rope, index: int) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(build, config.hidden_size, config.eps)
        self.self_attn = attention(build, config, rope, index)
        self.mlp = GatedMLP(build, config.hidden_size, config.inner)

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
        hidden, residual = x
        return hidden + self.mlp(self.input_layernorm(residual, step), step), residual


def build(config: StableLmConfig, build: Build) -> Decoder:
    """The whole model."""
    rope = Rope(build, config.rope)
    embedding = Embedding(build, config.vocab_size, config.hidden_size)
    block = ParallelBlock if config.parallel else Block
    return Decoder(
        build,
        lambda index: block(build, config, rope, index),
        embedding=embedding,
        norm=LayerNorm(build, config.hidden_size, config.eps),
        head=LMHead(build, config.hidden_size, config.vocab_size, weight=embedding.weight if config.tied else None),
    )
