"""Reads config.json of the DeepSeek families. V2 and V3 differ in how they choose experts.

Sources: arXiv:2405.04434 (V2), arXiv:2412.19437 (V3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmcore.api import ConfigError, KVGroupSpec, RouteSpec
from llmcore.layers import DenseConfig, RopeConfig, expert_elements, read_dense

from llmcore_deepseek.mla import LatentSpec

GROUP = "all"

V2_DEFAULTS: Mapping[str, Any] = {
    "eos_token_id": 2,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 512,
    "max_position_embeddings": 2048,
    "moe_intermediate_size": 1407,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "v_head_dim": 128,
}
V3_DEFAULTS: Mapping[str, Any] = {
    **V2_DEFAULTS,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
}
"""Values that transformers takes for fields that config.json leaves out, and values that its code fixes."""


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(DenseConfig):
    """`sparse`: for each layer, True if it is a mixture of experts. `shared`: width of the experts that all tokens
    see. `skipped`: layers of the checkpoint after the model's own. They predict further tokens."""

    latent: LatentSpec
    route: RouteSpec
    sparse: tuple[bool, ...]
    expert_inner: int
    shared: int
    skipped: int


def read_v2(hf: Mapping[str, Any]) -> DeepseekConfig:
    """Reads config.json. Raises ConfigError for unsupported values.

    Normalized weights are not scaled, as in the model's own code. transformers does not read `norm_topk_prob` here.
    """
    given = _given(hf, V2_DEFAULTS)
    if (scoring := given["scoring_func"]) != "softmax":
        raise ConfigError(f"DeepseekV2ForCausalLM with scoring_func {scoring!r} is not known; it uses 'softmax'")
    route = RouteSpec(experts=int(given["n_routed_experts"]), top_k=int(given["num_experts_per_tok"]))
    if route.top_k > 1 and given["norm_topk_prob"]:
        route = replace(route, normalize=True)
    else:
        route = replace(route, scale=float(given["routed_scaling_factor"]))
    if (method := given["topk_method"]) == "group_limited_greedy":
        route = replace(route, groups=int(given["n_group"]), top_groups=int(given["topk_group"]))
    elif method != "greedy":
        raise ConfigError(f"topk_method {method!r} is not known for V2; known: greedy, group_limited_greedy")
    return _read(given, "DeepseekV2ForCausalLM", route, interleaved=True)


def read_v3(hf: Mapping[str, Any]) -> DeepseekConfig:
    """Reads config.json. Raises ConfigError for unsupported values."""
    given = _given(hf, V3_DEFAULTS)
    for name in ("scoring_func", "topk_method"):
        if given[name] != (known := V3_DEFAULTS[name]):
            raise ConfigError(f"DeepseekV3ForCausalLM with {name} {given[name]!r} is not known; it uses {known!r}")
    route = RouteSpec(
        experts=int(given["n_routed_experts"]),
        top_k=int(given["num_experts_per_tok"]),
        scoring="sigmoid",
        normalize=bool(given["norm_topk_prob"]),
        scale=float(given["routed_scaling_factor"]),
        groups=int(given["n_group"]),
        top_groups=int(given["topk_group"]),
        group_score="top2",
    )
    return _read(given, "DeepseekV3ForCausalLM", route, interleaved=bool(given.get("rope_interleave", True)))


def _given(hf: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields, with defaults for missing ones. A null stays: for q_lora_rank it has a meaning."""
    given = {**defaults, **hf}
    if (activation := given.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ConfigError(f"hidden_act {activation!r} is not known; DeepSeek's MLPs use silu")
    if given.get("mlp_bias"):
        raise ConfigError("mlp_bias is not known; DeepSeek's MLPs have none")
    return given


def _read(given: Mapping[str, Any], architecture: str, route: RouteSpec, *, interleaved: bool) -> DeepseekConfig:
    heads, rotated = int(given["num_attention_heads"]), int(given["qk_rope_head_dim"])
    sizes = {"head_dim": rotated, "num_key_value_heads": heads}
    fields = read_dense({**given, **sizes}, architecture, partial_rotary=False)
    layers: int = fields["num_layers"]
    plain, q_rank = int(given["qk_nope_head_dim"]), given["q_lora_rank"]
    latent = LatentSpec(
        heads=heads,
        plain=plain,
        rotated=rotated,
        value=int(given["v_head_dim"]),
        latent=int(given["kv_lora_rank"]),
        scale=(plain + rotated) ** -0.5 * sharpened(fields["rope"]),
        q_rank=None if q_rank is None else int(q_rank),
        bias=bool(given.get("attention_bias")),
        interleaved=interleaved,
    )
    fields["kv_groups"] = (
        KVGroupSpec(
            name=GROUP,
            layers=tuple(range(layers)),
            kv_heads=1,
            key_size=latent.latent + rotated,
            value_size=latent.latent,
            layout="mla-latent",
        ),
    )
    dense, every = int(given["first_k_dense_replace"]), int(given.get("moe_layer_freq") or 1)
    inner = int(given["moe_intermediate_size"])
    return DeepseekConfig(
        **fields,
        latent=latent,
        route=route,
        sparse=tuple(index >= dense and index % every == 0 for index in range(layers)),
        expert_inner=inner,
        expert_elements=expert_elements(route, fields["hidden_size"], inner),
        shared=inner * int(given["n_shared_experts"] or 0),
        skipped=int(given.get("num_nextn_predict_layers") or given.get("num_mtp_layers") or 0),
    )


def sharpened(rope: RopeConfig) -> float:
    """Yarn's factor of attention scores: (0.1 mscale_all_dim ln(factor) + 1)^2 (arXiv:2309.00071, equation 22)."""
    by, factor = rope.scaling.get("mscale_all_dim"), float(rope.scaling.get("factor") or 1)
    if rope.kind == "default" or not by or factor <= 1:
        return 1.0
    return (0.1 * float(by) * math.log(factor) + 1.0) ** 2
