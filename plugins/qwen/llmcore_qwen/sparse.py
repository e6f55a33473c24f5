"""The common part of the sparse Qwen families: which layers are mixtures of experts, and how their routers choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmcore.api import RouteSpec, WeightMap
from llmcore.layers import DenseConfig, dense_weights, expert_elements, expert_names

from llmcore_qwen.common import QwenConfig, read_qwen


@dataclass(frozen=True, kw_only=True)
class SparseConfig(QwenConfig):
    """`route`: how experts are chosen. `expert_inner`: width of one expert. `sparse`: for each layer, True if it is a
    mixture of experts. The other layers have an MLP of width `inner`."""

    route: RouteSpec
    expert_inner: int
    sparse: tuple[bool, ...]


def read_sparse(hf: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Returns the fields of a SparseConfig from config.json. Raises ConfigError as `read_qwen` does."""
    fields = read_qwen(hf, architecture)
    # transformers saves the number under either name
    experts = int(hf["num_local_experts"] if "num_local_experts" in hf else hf["num_experts"])
    every, dense = int(hf.get("decoder_sparse_step", 1)), frozenset(hf.get("mlp_only_layers") or ())
    layers = range(fields["num_layers"])
    top_k, inner = int(hf["num_experts_per_tok"]), int(hf["moe_intermediate_size"])
    route = RouteSpec(experts=experts, top_k=top_k, normalize=bool(hf.get("norm_topk_prob", False)))
    return {
        **fields,
        "route": route,
        "expert_inner": inner,
        "expert_elements": expert_elements(route, fields["hidden_size"], inner),
        "sparse": tuple(experts > 0 and index not in dense and (index + 1) % every == 0 for index in layers),
    }


def weights(config: DenseConfig) -> WeightMap:
    """Maps names as transformers saves them."""
    return replace(dense_weights(config), stack=expert_names())
