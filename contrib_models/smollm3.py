"""SmolLM3ForCausalLM: a Llama block. Every fourth layer has no rope, and may have a sliding window instead.

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
    NoRope,
    QKVLinear,
    RMSNorm,
    Rope,
    Step,
    dense_weights,
    read_dense,
    windowed_groups,
)

DEFAULTS = {
    "eos_token_id": 128001,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 2000000.0,
    "tie_word_embeddings": True,
}
"""Values that transformers takes for fields that config.json leaves out."""


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(DenseConfig):
    """The fields that a SmolLM3 block reads. `turned`: for each layer, True if it has rope. `windows`: for each layer,
    the tokens that a query sees, itself included; None: all."""

    turned: tuple[bool, ...]
    windows: tuple[int | None, ...]
    attention_bias: bool
    mlp_bias: bool


@hookimpl
def register_models() -> Iterable[ModelSpec]:
    """SmolLM3ForCausalLM, for use of this file as a plugin."""
    yield ModelSpec(
        name="smollm3",
        architectures=("SmolLM3ForCausalLM",),
        read_config=f"{__name__}:read_config",
        build=f"{__name__}:build",
        weights=f"{__name__}:weights",
    )


def read_config(hf: Mapping[str, Any]) -> SmolLM3Config:
    """Reads config.json. `no_rope_layers` has a 1 for each layer that has rope, in spite of its name."""
    if (activation := hf.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ConfigError(f"SmolLM3ForCausalLM with hidden_act {activation!r} is not known; its MLP uses silu")
    fields = read_dense(hf, "SmolLM3ForCausalLM", defaults=DEFAULTS, partial_rotary=False)
    count, every = fields["num_layers"], int(hf.get("no_rope_layer_interval", 4))
    turned = [bool(one) for one in hf.get("no_rope_layers") or ((i + 1) % every for i in range(count))][:count]
    if len(turned) < count:
        raise ConfigError(
            f"no_rope_layers is for {len(turned)} layers, num_hidden_layers is {count}: check config.json"
        )
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    windowed = ["full_attention" if rope or window is None else "sliding_attention" for rope in turned]
    types = (hf.get("layer_types") or windowed) if window is not None else windowed
    fields["kv_groups"] = windowed_groups(fields["kv_groups"][0], types, window)
    return SmolLM3Config(
        **fields,
        turned=tuple(turned),
        windows=tuple(window if kind == "sliding_attention" else None for kind in types),
        attention_bias=bool(hf.get("attention_bias", False)),
        mlp_bias=bool(hf.get("mlp_bias", False)),
    )


def weights(config: SmolLM3Config) -> WeightMap:
    """Maps names as transformers saves them."""
    return dense_weights(config)


class Block(Layer):
    """norm, attention, norm, MLP."""

    def __init__(self, build: Build, config: SmolLM3Config, ropes: tuple[Rope, Rope], index: int) -> None:
        super().__init__()
        hidden, size, bias = config.hidden_size, config.head_size, config.attention_bias
        window = config.windows[index]
        sizes: dict[str, Any] = {"heads": config.heads, "kv_heads": config.kv_heads, "key_size": size}
        self.input_layernorm = RMSNorm(build, hidden, config.eps)
        self.self_attn = Attention(
            build,
            AttnSpec(**sizes, value_size=size, scale=size**-0.5, window=window),
            group="full" if window is None else "window",
            index=index,
            qkv=QKVLinear(build, hidden, bias=bias, **sizes, source=self.input_layernorm),
            out=Linear(build, config.heads * size, hidden, bias=bias, shard=Shard("attn_tp", 1)),
            rope=ropes[config.turned[index]],
        )
        self.post_attention_layernorm = RMSNorm(build, hidden, config.eps)
        self.mlp = GatedMLP(build, hidden, config.inner, bias=config.mlp_bias, source=self.post_attention_layernorm)

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


def build(config: SmolLM3Config, build: Build) -> Decoder:
    """The whole model."""
    ropes = NoRope(build, config.rope), Rope(build, config.rope)
    embedding = Embedding(build, config.vocab_size, config.hidden_size)
    tied = embedding.weight if config.tied else None
    return Decoder(
        build,
        lambda index: Block(build, config, ropes, index),
        embedding=embedding,
        norm=RMSNorm(build, config.hidden_size, config.eps),
        head=LMHead(build, config.hidden_size, config.vocab_size, weight=tied),
    )
