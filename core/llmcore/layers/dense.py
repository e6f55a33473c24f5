"""The common part of the configs of dense decoders, for every family.

A family with more fields adds them in its own config class. A family that differs reads the different fields itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmcore.api.errors import ConfigError
from llmcore.api.models import KVGroupSpec, ModelConfig, read_dtype
from llmcore.layers.rope import RopeConfig, read_rope
from llmcore.weights.map import WeightMap


@dataclass(frozen=True, kw_only=True)
class DenseConfig(ModelConfig):
    """The config of a decoder whose layers are alike and share one KV group.

    `heads` and `kv_heads` count the whole model. `inner` is the width of the MLP. `eps` belongs to the norms. `tied`
    is True if the head uses the embedding's table.
    """

    heads: int
    kv_heads: int
    head_size: int
    inner: int
    eps: float
    rope: RopeConfig
    tied: bool


def read_dense(
    hf: Mapping[str, Any],
    architecture: str,
    *,
    defaults: Mapping[str, Any] | None = None,
    group: str = "all",
    reach: str = "all",
    partial_rotary: bool = True,
) -> dict[str, Any]:
    """The fields of a DenseConfig from config.json: ``YourConfig(**read_dense(hf, "YourModel"), more=...)``.

    `defaults`: the values that transformers uses for fields that the file leaves out. `group`, `reach`: name and reach
    of the KV group. `partial_rotary`: False if the family's code in transformers does not read
    `partial_rotary_factor`. Raises KeyError for a missing field, ConfigError for values that contradict each other.
    """
    given = {**(defaults or {}), **{name: value for name, value in hf.items() if value is not None}}
    heads, layers = int(given["num_attention_heads"]), int(given["num_hidden_layers"])
    kv_heads = int(given.get("num_key_value_heads", heads))
    if heads % kv_heads:
        raise ConfigError(f"{heads} attention heads cannot share {kv_heads} KV heads; check the model's config.json")
    head_size = int(given.get("head_dim") or given["hidden_size"] // heads)
    rope = read_rope(given, head_size, partial_rotary=partial_rotary)
    # A null in the file means that the model does not have an end token.
    eos = hf["eos_token_id"] if "eos_token_id" in hf else given.get("eos_token_id")
    sizes: dict[str, Any] = {"kv_heads": kv_heads, "key_size": head_size, "value_size": head_size}
    return {
        "architecture": architecture,
        "vocab_size": int(given["vocab_size"]),
        "hidden_size": int(given["hidden_size"]),
        "num_layers": layers,
        "max_position": max(int(given["max_position_embeddings"]), rope.max_position),
        "dtype": read_dtype(hf),
        "eos_ids": tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        "kv_groups": (KVGroupSpec(name=group, layers=tuple(range(layers)), reach=reach, **sizes),),
        "fixed_angles_up_to": rope.fixed_angles_up_to,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_size": head_size,
        "inner": int(given["intermediate_size"]),
        "eps": float(given["rms_norm_eps"]),
        "rope": rope,
        "tied": bool(given.get("tie_word_embeddings", False)),
    }


LAYER_TYPES: Mapping[str, str] = {"full_attention": "full", "sliding_attention": "window"}
"""A layer's type in `layer_types` of config.json -> the KV group of such layers."""


def windowed_groups(whole: KVGroupSpec, types: Sequence[str], window: int | None) -> tuple[KVGroupSpec, ...]:
    """The layers of `whole` as KV groups "full" and "window", by each layer's type (see `LAYER_TYPES`).

    A group without layers is left out. Raises ConfigError for an unknown type, a wrong number of types, or a window
    below 1.
    """
    if window is not None and window < 1:
        raise ConfigError(f"sliding_window is {window}; a query sees at least itself: check the model's config.json")
    if unknown := sorted(set(types) - set(LAYER_TYPES)):
        raise ConfigError(f"layer type {', '.join(unknown)} is not known; known: {', '.join(LAYER_TYPES)}")
    if len(types) != len(whole.layers):
        raise ConfigError(
            f"layer_types is for {len(types)} layers, num_hidden_layers is {len(whole.layers)}: "
            "check the model's config.json"
        )
    reach = {"full": "all", "window": "all" if window is None else f"window:{window}"}
    layers = {
        name: tuple(index for index, kind in zip(whole.layers, types, strict=True) if LAYER_TYPES[kind] == name)
        for name in reach
    }
    return tuple(replace(whole, name=name, layers=layers[name], reach=reach[name]) for name in reach if layers[name])


def dense_weights(config: DenseConfig, *, skip: tuple[str, ...] = ()) -> WeightMap:
    """The WeightMap for transformers' names and blocks with `qkv_proj` and `gate_up_proj`. `skip`: more globs."""
    return WeightMap(
        rename={f"model.{name}.": f"{name}." for name in ("embed_tokens", "layers", "norm")} | {"model.": ""},
        fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
        skip=skip,
    )


def read_scoring(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a DenseConfig that differ if a `score` head replaces the language model's head."""
    labels = hf.get("id2label") or hf.get("num_labels") or 2
    scores = labels if isinstance(labels, int) else len(labels)
    return {"architecture": hf["architectures"][0], "scores": scores, "tied": False}


def scoring_weights(weights: WeightMap) -> WeightMap:
    """`weights` for the same decoder with a `score` head. Skips the language model's head, which some files have."""
    return replace(weights, rename={**weights.rename, "score.": "lm_head."}, skip=(*weights.skip, "lm_head.*"))
