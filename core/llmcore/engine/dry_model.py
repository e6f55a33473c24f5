"""A model that is built without weights and without kernels: the ops that it asks for, its granules, its modes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from llmcore.api.errors import ConfigError, ResolveError
from llmcore.api.models import ModelConfig
from llmcore.api.specs import DeviceInfo, ModelSpec, ModeSpec, OpContext, OpSpec
from llmcore.layers.build import Build
from llmcore.ops.attention import shape_of
from llmcore.ops.sample import VARIANTS
from llmcore.registry.loader import load
from llmcore.registry.modes import Pins, check_mode, mode_misfit
from llmcore.registry.registry import Registry
from llmcore.registry.resolve import REFERENCE, Candidate, Resolution, candidates_for, why_not
from llmcore.weights.quant import Quantized, find_quantization, linear_method_of
from llmcore.weights.source import open_checkpoint, read_model


@dataclass(kw_only=True)
class DryBuild(Build):
    """A build whose layers hold nothing that can be called, on torch's meta device; no hook sees it."""

    def bind(self, resolution: Resolution) -> Any:
        """Nothing: the choice is recorded already."""
        return None

    def layer(self, module: torch.nn.Module, name: str, index: int) -> torch.nn.Module:
        """The module itself."""
        return module


def settle_granules(dry: DryBuild, make: Callable[[ModelConfig, Build], object], asked: int | None) -> dict[str, int]:
    """KV group -> granule for the model that `make` builds, under the pins of `dry`.

    The granule that is `asked` for; else the smallest that every pinned attention kernel of the group takes. Without a
    pin: 1 if every attention op has a kernel other than the reference there, or nowhere; else the smallest at which
    every one has.
    """
    if asked is not None:
        return {group.name: asked for group in dry.config.kv_groups}
    # At granule 1 a pinned kernel may not fit, so the contexts are found without pins for attention.
    kept = {op: kernel for op, kernel in dry.pins.kernels.items() if not op.startswith("attn.")}
    trial = replace(dry, granules={}, pins=replace(dry.pins, kernels=kept))
    make(trial.config, trial)
    return {group: _smallest(contexts, trial, dry.pins.kernels) for group, contexts in _by_group(trial).items()}


def _by_group(trial: Build) -> dict[str, list[OpContext]]:
    """The attention contexts of each group, every token bucket."""
    return {
        group: [r.context for r in trial.resolutions if r.context.op.startswith("attn.") and r.context.shape == shape]
        for group, shape in ((group, shape_of(spec)) for group, spec in trial.attention_specs.items())
    }


def _smallest(contexts: list[OpContext], trial: Build, pins: Mapping[str, str]) -> int:
    # Mixed steps without a kernel are not captured; that does not ask for another granule.
    needed = [context for context in contexts if not context.op.endswith(".mixed")]
    wanted = [context for context in contexts if context.op in pins] or needed
    ops = {context.op for context in wanted}
    deciding = {op: [c for c in candidates_for(trial.registry, op) if _decides(c, op, pins)] for op in ops}
    named = {granule for found in deciding.values() for spec, _ in found for granule in spec.when.granules}
    for granule in sorted({1, *named}):
        if all(_fits(deciding[context.op], replace(context, granule=granule)) for context in wanted):
            return granule
    return 1


def _decides(candidate: Candidate, op: str, pins: Mapping[str, str]) -> bool:
    """True for the pinned kernel; without a pin for any but the reference."""
    name = candidate[0].name
    return name == pins[op] if op in pins else name != REFERENCE


def _fits(candidates: list[Candidate], context: OpContext) -> bool:
    return any(why_not(spec, context) is None for spec, _ in candidates)


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
    """A model whose parameters have shapes but no data, and its build; `granule`: `asked` of settle_granules."""
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
    build = replace(build, granules=settle_granules(build, make, granule))
    return make(config, build), build


STEP_OPS = frozenset({"sample", "step_inputs", "step_outputs", "kv_slots"})
"""The ops that surround every model's forward."""


@dataclass(frozen=True, kw_only=True)
class ModeFit:
    """One model on one device. `described`: its config.json; `granule`: what `--cache_block_seq_len` asks for."""

    registry: Registry
    device: DeviceInfo
    family: ModelSpec
    model: ModelConfig
    described: Mapping[str, Any]
    deterministic: bool = False
    granule: int | None = None

    def misfit(self, mode: ModeSpec) -> str | None:
        """Why the model cannot be built with this mode alone, or None if it can."""
        if (why := mode_misfit(mode, self.registry, self.device)) is not None:
            return why
        try:
            used = self._ops(Pins(mode.kernels, mode.layout, mode.quant))
        except (ConfigError, ResolveError) as error:
            return str(error).partition("\n")[0].removesuffix("; there are:")
        return mode_misfit(mode, self.registry, self.device, used | STEP_OPS)

    def check(self, names: Sequence[str]) -> None:
        """Raises ConfigError for the first mode that is not there or does not fit, with those that do fit;
        ResolveError where the model cannot be built without any mode either."""
        if names:
            self._ops(Pins())
        for name in names:
            check_mode(name, self.registry, f"{self.model.architecture} on {self.device.type}", self.misfit)

    def _ops(self, pins: Pins) -> set[str]:
        quantized = find_quantization(self.registry, self.described, self.model, pins.quant)
        _, build = dry_model(
            self.family, self.model, self.registry, self.device, pins, self.deterministic, quantized, self.granule
        )
        return {resolution.context.op for resolution in build.resolutions}


def mode_fit_of(
    path: Path, registry: Registry, device: DeviceInfo, dtype: str | None = None, deterministic: bool = False
) -> ModeFit:
    """The same for the checkpoint at `path`, of which only the config is read. `dtype`: as `--data_type` spells it."""
    described = open_checkpoint(registry, path, weights=False).config()
    family, model = read_model(registry, described, dtype)
    return ModeFit(
        registry=registry,
        device=device,
        family=family,
        model=model,
        described=described,
        deterministic=deterministic,
    )
