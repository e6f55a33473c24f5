"""MixtralForCausalLM: a Mistral block whose MLP is a mixture of experts.

Used as a plugin by its path, this file brings the family by itself (and imports torch to do so).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmcore.api import AttnSpec, ConfigError, ModelSpec, RouteSpec, Shard, WeightMap, hookimpl
from llmcore.layers import (
    Attention,
    Bucketed,
    Build,
    Decoder,
    DenseConfig,
    Embedding,
    Hidden,
    Layer,
    Linear,
    LMHead,
    MoE,
    QKVLinear,
    RMSNorm,
    Rope,
    Step,
    dense_weights,
    expert_elements,
    expert_names,
    read_dense,
)

DEFAULTS = {
    "eos_token_id": 2,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
}
"""Values that transformers takes for fields that config.json leaves out."""


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(DenseConfig):
    """The fields that a Mixtral block reads. `route`: how experts are chosen; each has width `inner`. `window`: tokens
    that a query sees, itself included; None: all."""

    route: RouteSpec
    window: int | None


@hookimpl
def register_models() -> Iterable[ModelSpec]:
    """MixtralForCausalLM, for use of this file as a plugin."""
    yield ModelSpec(
        name="mixtral",
        architectures=("MixtralForCausalLM",),
        read_config=f"{__name__}:read_config",
        build=f"{__name__}:build",
        weights=f"{__name__}:weights",
    )


def read_config(hf: Mapping[str, Any]) -> MixtralConfig:
    """Reads config.json. A missing window means that there is none, as in transformers."""
    if (activation := hf.get("hidden_act", "silu")) != "silu":
        raise ConfigError(f"MixtralForCausalLM with hidden_act {activation!r} is not known; its experts use silu")
    window = hf.get("sliding_window")
    reach = "all" if window is None else f"window:{window}"
    experts, top_k = int(hf.get("num_local_experts", 8)), int(hf.get("num_experts_per_tok", 2))
    fields = read_dense(
        {**DEFAULTS, "rope_theta": 1e6, **hf},
        "MixtralForCausalLM",
        defaults=DEFAULTS,
        reach=reach,
        partial_rotary=False,
    )
    route = RouteSpec(experts=experts, top_k=top_k, normalize=True)
    elements = expert_elements(route, fields["hidden_size"], fields["inner"])
    return MixtralConfig(**fields, expert_elements=elements, route=route, window=window)


def weights(config: MixtralConfig) -> WeightMap:
    """Maps names as transformers saves them: w1 is an expert's gate, w3 its up, w2 its down."""
    return replace(dense_weights(config), stack=expert_names("w1", "w3", "w2"))


class Block(Layer):
    """norm, attention, norm, experts."""

    def __init__(self, build: Build, config: MixtralConfig, rope: Rope, index: int) -> None:
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
        self.block_sparse_moe = MoE(build, hidden, config.inner, config.route)

    def forward(self, x: Hidden, step: Step) -> Hidden:
        """(hidden, residual) -> (hidden, residual), [T, hidden_size] each."""
        return self.feed(self.attend(x, step), step)

    def attend(self, x: Hidden, step: Step) -> Hidden:
        """The block up to the experts."""
        hidden, residual = self.input_layernorm.add(*x, step)
        return self.self_attn(hidden, step), residual

    def feed(self, x: Hidden, step: Bucketed) -> Hidden:
        """The experts. Each token is computed by itself."""
        hidden, residual = self.post_attention_layernorm.add(*x, step)
        return self.block_sparse_moe(hidden, step), residual


def build(config: MixtralConfig, build: Build) -> Decoder:
    """The whole model."""
    rope = Rope(build, config.rope)
    embedding = Embedding(build, config.vocab_size, config.hidden_size)
    return Decoder(
        build,
        lambda index: Block(build, config, rope, index),
        embedding=embedding,
        norm=RMSNorm(build, config.hidden_size, config.eps),
        head=LMHead(build, config.hidden_size, config.vocab_size, weight=embedding.weight if config.tied else None),
    )
