"""The fake model's config. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmcore.api import KVGroupSpec, ModelConfig, WeightMap

GROUP = "kv"
_WIDTH = 4


@dataclass(frozen=True, kw_only=True)
class FakeConfig(ModelConfig):
    """`step_delay`: seconds per forward. A forward that meets `fail_token` raises; a row at `nan_token` gives NaN."""

    step_delay: float = 0.0
    fail_token: int | None = None
    nan_token: int | None = None


def read_config(config: Mapping[str, Any]) -> FakeConfig:
    """ModelSpec.read_config."""
    group = KVGroupSpec(name=GROUP, layers=(0,), kv_heads=1, key_size=_WIDTH, value_size=_WIDTH)
    return FakeConfig(
        architecture="LlmcoreFake",
        vocab_size=config["vocab_size"],
        hidden_size=_WIDTH + 1,
        num_layers=1,
        max_position=config["max_position_embeddings"],
        dtype="f32",
        eos_ids=(config["eos_token_id"],),
        kv_groups=(group,),
        step_delay=config.get("step_delay", 0.0),
        fail_token=config.get("fail_token"),
        nan_token=config.get("nan_token"),
    )


def weights(config: FakeConfig) -> WeightMap:
    """ModelSpec.weights: names in the checkpoint are those of the parameters."""
    return WeightMap()
