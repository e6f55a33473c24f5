"""What a model would ask for on a device that need not be here: its kernels are chosen, none is made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from llmcore.engine.granules import choose_granules
from llmcore.layers.build import Build
from llmcore.modes import Pins
from llmcore.ops.sample import VARIANTS
from llmcore.plugins import load
from llmcore.registry import Registry
from llmcore.resolve import Resolution
from llmcore.specs import DeviceInfo
from llmcore.weights.source import open_checkpoint, read_model


@dataclass(kw_only=True)
class DryBuild(Build):
    """A build whose layers hold nothing that can be called, on torch's meta device."""

    def bind(self, resolution: Resolution) -> Any:
        """Nothing: the choice is recorded already."""
        return None


def resolutions_of(
    path: Path, registry: Registry, device: DeviceInfo, pins: Pins, dtype: str | None = None
) -> list[Resolution]:
    """Every choice that serving the checkpoint at `path` on `device` takes. `dtype`: a spelling of `--data_type`.

    Reads the config only. Raises ConfigError for the checkpoint, ResolveError where no kernel can be chosen.
    """
    checkpoint = open_checkpoint(registry, path, weights=False)
    family, config = read_model(registry, checkpoint.config(), dtype)
    build: Build = DryBuild(
        registry=registry,
        config=config,
        device=device,
        torch_device=torch.device("meta"),
        pins=pins,
        order=registry.order,
    )
    make = load(family.build)
    make(config, build)
    granules = choose_granules(build)
    if any(granule > 1 for granule in granules.values()):
        build = replace(build, granules=granules)
        make(config, build)
    for variant in VARIANTS:
        build.op("sample", variant=variant, vocab=config.vocab_size)
    return build.resolutions
