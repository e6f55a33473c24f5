"""The fake model's config. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmcore.api import KVGroupSpec, ModelConfig, WeightMap

GROUP = "kv"
_WIDTH = 4


@dataclass(frozen=True, kw_only=True)
class FakeConfig(ModelConfig):
    """The fake model's config. `step_delay`: seconds per forward. `faults`: name (`fault_names`) -> its token."""

    step_delay: float = 0.0
    faults: Mapping[str, int] = field(default_factory=dict)


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
        faults=config.get("faults", {}),
    )


def weights(config: FakeConfig) -> WeightMap:
    """ModelSpec.weights: the checkpoint and the parameters have the same names."""
    return WeightMap()
