"""A Build of small layers on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from llmcore.api import KVGroupSpec, ModelConfig
from llmcore.api.specs import DeviceInfo
from llmcore.layers import Build
from llmcore.registry.registry import Registry
from llmcore_devtools.loaded_model import registry_for_tests

CONFIG = ModelConfig(
    architecture="Test",
    vocab_size=10,
    hidden_size=8,
    num_layers=1,
    max_position=10,
    dtype="f32",
    kv_groups=(KVGroupSpec(name="all", layers=(0,), kv_heads=1, key_size=4, value_size=4),),
)


def build(registry: Registry | None = None, **more: Any) -> Build:
    return Build(
        registry=registry or registry_for_tests(),
        config=more.pop("config", CONFIG),
        device=DeviceInfo("cpu"),
        torch_device=torch.device("cpu"),
        **more,
    )
