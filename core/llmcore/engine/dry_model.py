"""What a model would ask for on a device that need not be here: its kernels are chosen, none is made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from llmcore.engine.granules import DryBuild, settle_granules
from llmcore.models import ModelConfig
from llmcore.modes import Pins
from llmcore.ops.sample import VARIANTS
from llmcore.plugins import load
from llmcore.registry import Registry
from llmcore.resolve import REFERENCE, Resolution, candidates_for
from llmcore.specs import DeviceInfo, ModelSpec, OpSpec
from llmcore.weights.quant import Quantized, find_quantization, linear_method_of
from llmcore.weights.source import open_checkpoint, read_model


def resolutions_of(
    path: Path,
    registry: Registry,
    device: DeviceInfo,
    pins: Pins,
    dtype: str | None = None,
    deterministic: bool = False,
) -> list[Resolution]:
    """Every choice that serving the checkpoint at `path` on `device` takes. `dtype`: a spelling of `--data_type`.

    Reads the config only. Raises ConfigError for the checkpoint, ResolveError where no kernel can be chosen.
    """
    checkpoint = open_checkpoint(registry, path, weights=False)
    family, config = read_model(registry, checkpoint.config(), dtype)
    quantized = find_quantization(registry, checkpoint.config(), config, pins.quant)
    _, build = dry_model(family, config, registry, device, pins, deterministic, quantized)
    for variant in VARIANTS:
        build.op("sample", variant=variant, vocab=config.vocab_size)
    return build.resolutions


def fallbacks(registry: Registry, resolutions: Iterable[Resolution]) -> list[str]:
    """For every op that runs as its torch reference though there are kernels for the device: why they declined."""
    found = {}
    for resolution in resolutions:
        context = resolution.context
        if resolution.chosen.name != REFERENCE or registry.find(OpSpec, context.op).expands_to:
            continue
        meant = [s for s, _ in candidates_for(registry, context.op) if s.when.device in (None, context.device.type)]
        declined = {spec.name: resolution.reasons[spec.name] for spec in meant if spec.name in resolution.reasons}
        if declined:
            why = "; ".join(f"{name}: {reason}" for name, reason in sorted(declined.items()))
            found[context.op, why] = f"{context.op} runs as its slower torch reference, {why}"
    return list(found.values())


def dry_model(
    family: ModelSpec,
    config: ModelConfig,
    registry: Registry,
    device: DeviceInfo,
    pins: Pins,
    deterministic: bool = False,
    quantized: Quantized | None = None,
    granule: int | None = None,
) -> tuple[torch.nn.Module, DryBuild]:
    """A model whose parameters have shapes and nothing else, and what it was built with; `granule`: of every KV
    group, where it is not to be settled."""
    build = DryBuild(
        registry=registry,
        config=config,
        device=device,
        torch_device=torch.device("meta"),
        pins=pins,
        order=registry.order,
        deterministic=deterministic,
        linear_method=linear_method_of(quantized),
    )
    make = load(family.build)
    if granule is None:
        granules = settle_granules(build, make)
    else:
        granules = {group.name: granule for group in config.kv_groups}
    build = replace(build, granules=granules)
    return make(config, build), build
