"""The common part of the Qwen families: which layers have a window, the pre-norm block, and the decoder around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmcore.api import AttnSpec, ConfigError
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
    LMHead,
    RMSNorm,
    Step,
    read_dense,
    windowed_groups,
)
from torch import nn

DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
}
"""Values that transformers takes for fields that config.json leaves out."""

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class QwenConfig(DenseConfig):
    """`windows`: for each layer, the number of tokens that a query sees, itself included; None: all. Layers with a
    window are one KV group, and the other layers are another."""

    windows: tuple[int | None, ...]

    def attention(self, index: int) -> AttnSpec:
        """Returns the attention of layer `index`."""
        return AttnSpec(
            **self.sizes, value_size=self.head_size, scale=self.head_size**-0.5, window=self.windows[index]
        )

    def group(self, index: int) -> str:
        """Returns the KV group of layer `index`."""
        return "full" if self.windows[index] is None else "window"

    @property
    def sizes(self) -> dict[str, Any]:
        """Returns the heads and their size, as QKVLinear takes them."""
        return {"heads": self.heads, "kv_heads": self.kv_heads, "key_size": self.head_size}


def read_qwen(hf: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The fields of a QwenConfig from config.json. Raises ConfigError for unsupported or contradictory values."""
    if (activation := hf.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ConfigError(f"{architecture} with hidden_act {activation!r} is not known; its MLP uses silu")
    fields = read_dense({**DEFAULTS, **hf}, architecture, partial_rotary=False)
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    # without layer_types, the layers from max_window_layers on have the window
    first = fields["num_layers"] if window is None else hf.get("max_window_layers", 28)
    types = hf.get("layer_types") or [SLIDING if index >= first else FULL for index in range(fields["num_layers"])]
    fields["kv_groups"] = windowed_groups(fields["kv_groups"][0], types, window)
    if window is None and SLIDING in types:
        raise ConfigError(f"layer_types has {SLIDING!r}, but use_sliding_window and sliding_window give no window")
    return {**fields, "windows": tuple(window if kind == SLIDING else None for kind in types)}


class Block(Layer):
    """norm, attention, norm, MLP. The residual stream runs beside the hidden states."""

    def __init__(self, build: Build, config: DenseConfig, attention: Attention, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(build, config.hidden_size, config.eps)
        self.self_attn = attention
        attention.qkv_proj.read(self.input_layernorm)
        self.post_attention_layernorm = RMSNorm(build, config.hidden_size, config.eps)
        self.mlp = mlp
        if isinstance(mlp, GatedMLP):
            mlp.gate_up_proj.read(self.post_attention_layernorm)

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


def decoder(
    build: Build, config: DenseConfig, block: Callable[[int], nn.Module], head: nn.Module | None = None
) -> Decoder:
    """Returns the whole model. `block(i)` makes layer i. `head`: None for a language model's."""
    embedding = Embedding(build, config.vocab_size, config.hidden_size)
    if head is None:
        weight = embedding.weight if config.tied else None
        head = LMHead(build, config.hidden_size, config.vocab_size, weight=weight)
    return Decoder(
        build,
        block,
        embedding=embedding,
        norm=RMSNorm(build, config.hidden_size, config.eps),
        head=head,
    )
