"""Starcoder2ForCausalLM: LayerNorm, an MLP without a gate, biases in every linear, and perhaps a sliding window.

Used as a plugin by its path, this file brings the family by itself (and imports torch to do so).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmcore.api import AttnSpec, ConfigError, ModelSpec, Shard, WeightMap, hookimpl
from llmcore.layers import (
    MLP,
    Attention,
    Bucketed,
    Build,
    Decoder,
    DenseConfig,
    Embedding,
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

DEFAULTS = {
    "eos_token_id": 50256,
    "max_position_embeddings": 4096,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
"""Values that transformers takes for fields that config.json leaves out."""


@dataclass(frozen=True, kw_only=True)
class Starcoder2Config(DenseConfig):
    """The fields that a StarCoder2 block reads. `bias`: its linears have biases. `window`: tokens that a query sees,
    itself included; None: all."""

    bias: bool
    window: int | None


@hookimpl
def register_models() -> Iterable[ModelSpec]:
    """Starcoder2ForCausalLM, for use of this file as a plugin."""
    yield ModelSpec(
        name="starcoder2",
        architectures=("Starcoder2ForCausalLM",),
        read_config=f"{__name__}:read_config",
        build=f"{__name__}:build",
        weights=f"{__name__}:weights",
    )


def read_config(hf: Mapping[str, Any]) -> Starcoder2Config:
    """Reads config.json."""
    activation = hf.get("hidden_act", "gelu_pytorch_tanh")
    if activation not in ("gelu_pytorch_tanh", "gelu_new"):
        raise ConfigError(
            f"Starcoder2ForCausalLM with hidden_act {activation!r} is not known; its MLP uses gelu_pytorch_tanh"
        )
    window = hf.get("sliding_window")
    given = {**hf, "rms_norm_eps": hf.get("norm_epsilon", 1e-5)}
    reach = "all" if window is None else f"window:{window}"
    return Starcoder2Config(
        **read_dense(given, "Starcoder2ForCausalLM", defaults=DEFAULTS, reach=reach, partial_rotary=False),
        bias=bool(hf.get("use_bias", True)),
        window=window,
    )


def weights(config: Starcoder2Config) -> WeightMap:
    """Maps names as transformers saves them. c_fc and c_proj are the MLP's two linears."""
    return replace(dense_weights(config), split={"c_fc": ("up_proj",), "c_proj": ("down_proj",)})


class Block(Layer):
    """norm, attention, norm, MLP."""

    def __init__(self, build: Build, config: Starcoder2Config, rope: Rope, index: int) -> None:
        super().__init__()
        hidden, size, bias = config.hidden_size, config.head_size, config.bias
        sizes: dict[str, Any] = {"heads": config.heads, "kv_heads": config.kv_heads, "key_size": size}
        self.input_layernorm = LayerNorm(build, hidden, config.eps)
        self.self_attn = Attention(
            build,
            AttnSpec(**sizes, value_size=size, scale=size**-0.5, window=config.window),
            group="all",
            index=index,
            qkv=QKVLinear(build, hidden, bias=bias, **sizes),
            out=Linear(build, config.heads * size, hidden, bias=bias, shard=Shard("attn_tp", 1)),
            rope=rope,
        )
        self.post_attention_layernorm = LayerNorm(build, hidden, config.eps)
        self.mlp = MLP(build, hidden, config.inner, bias=bias)

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


def build(config: Starcoder2Config, build: Build) -> Decoder:
    """The whole model."""
    rope = Rope(build, config.rope)
    embedding = Embedding(build, config.vocab_size, config.hidden_size)
    tied = embedding.weight if config.tied else None
    return Decoder(
        build,
        lambda index: Block(build, config, rope, index),
        embedding=embedding,
        norm=LayerNorm(build, config.hidden_size, config.eps),
        head=LMHead(build, config.hidden_size, config.vocab_size, weight=tied),
    )
