"""A model before its weights: what it is built of, the ops that it asks for, its granules, the modes that fit it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch

from llmcore.api.errors import ConfigError, ResolveError
from llmcore.api.models import ModelConfig
from llmcore.api.protocols import Checkpoint
from llmcore.api.specs import DeviceInfo, ModelSpec, ModeSpec, OpContext, OpSpec
from llmcore.config import Config, Kernels
from llmcore.config import Model as ModelSettings
from llmcore.engine.memory import total_len
from llmcore.engine.own_draw import OPS, own_samplers
from llmcore.layers.build import Build
from llmcore.layers.creation import create_linears
from llmcore.layers.embedding import VOCABULARY
from llmcore.layers.mesh import Mesh
from llmcore.ops.attention import shape_of
from llmcore.ops.sample import VARIANTS
from llmcore.registry.loader import load
from llmcore.registry.modes import Pins, apply_modes, check_mode, joined, mode_misfit, modes_with
from llmcore.registry.registry import Registry
from llmcore.registry.resolve import REFERENCE, Candidate, Resolution, candidates_for, why_not
from llmcore.weights.map import WeightMap
from llmcore.weights.quant import find_quantization, unquantized
from llmcore.weights.source import open_checkpoint, outputs_first, read_model_as_set


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


STEP_OPS = frozenset({"sample", "step_inputs", "step_outputs", "kv_slots"})
"""The ops that surround every model's forward."""


class Built(NamedTuple):
    """A model with the tensors of its linears, before its weights are loaded.

    `names`: the family's WeightMap. `checkpoint`: the one with the tensors that the model loads. `quant`: the name of
    the method that reads it, None if its weights are plain.
    """

    model: Any
    build: Build
    names: WeightMap
    checkpoint: Checkpoint
    quant: str | None


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """A model for one device, before its weights: everything that decides what it is built of."""

    registry: Registry
    device: DeviceInfo
    family: ModelSpec
    model: ModelConfig
    checkpoint: Checkpoint
    """As it is stored."""
    pins: Pins = field(default_factory=Pins)
    deterministic: bool = False
    granule: int | None = None
    """The granule that `--cache_block_seq_len` asks for."""
    longest_request: int | None = None
    mesh: Mesh = field(default_factory=Mesh)

    def pinned(self, modes: Sequence[str], kernels: Sequence[str] = ()) -> Blueprint:
        """The same with the pins of `--mode` and `--kernel`.

        Raises ConfigError for a mode or a pin that is not there or does not fit; it names the modes that do fit. For
        modes that fit and do not go together it names two of them.
        Raises ResolveError if the model cannot be built without any mode either.
        """
        if modes:
            replace(self, pins=Pins()).dry()
        known = {mode.name: mode for mode, _ in self.registry.specs(ModeSpec)}
        given = [known[name] for name in dict.fromkeys(modes) if name in known]
        beside = {option: value for mode in given for option, value in mode.quant_options.items()}
        trial = replace(self, pins=Pins(quant_options=beside))

        def misfit(mode: ModeSpec) -> str | None:
            # What another mode chooses for its method, such as the group, may make a mode fit.
            return self.misfit(mode) and trial.misfit(mode)

        where = f"{self.model.architecture} on {self.device.type}"
        for name in sorted(modes, key=known.__contains__):  # a misspelt one first
            check_mode(name, self.registry, where, misfit)
        pins = apply_modes(modes, self.registry, self.device, kernels)
        if len(given) > 1 and self.misfit(joined(given)) is not None:
            pairs = combinations(given, 2)
            culprits = next((pair for pair in pairs if misfit(joined(pair)) is not None), given)
            names = " and ".join(f"--mode {mode.name}" for mode in culprits)
            raise ConfigError(f"{names} do not go together for {where}: {misfit(joined(culprits))}")
        return replace(self, pins=pins)

    def misfit(self, mode: ModeSpec) -> str | None:
        """Why the model cannot be built with this mode alone, or None if it can."""
        if (why := mode_misfit(mode, self.registry, self.device)) is not None:
            return why
        if mode.quant_options and mode.quant is None:
            return self._misfit_beside(mode)
        if mode.dtypes and self.model.dtype not in mode.dtypes:
            return f"is for {' or '.join(sorted(mode.dtypes))}, this model runs as {self.model.dtype}; set --data_type"
        declared = sorted({group.layout for group in self.model.kv_groups})
        if mode.layouts and not set(mode.layouts) & set(declared):
            return f"is for KV of layout {' or '.join(sorted(mode.layouts))}, this model has {' and '.join(declared)}"
        options = {**self.pins.quant_options, **mode.quant_options}
        pins = Pins(mode.kernels, mode.layouts, mode.quant, options)
        try:
            build = replace(self, pins=pins).dry().build
        except (ConfigError, ResolveError) as error:
            return str(error).partition("\n")[0].removesuffix("; there are:")
        return mode_misfit(mode, self.registry, self.device, used_ops(build))

    def _misfit_beside(self, mode: ModeSpec) -> str | None:
        """Why a mode that chooses options of a quantization method fits beside no mode that pins such a method."""
        pinning = {other.quant: other for other in modes_with(mode.quant_options, self.registry)}
        reasons = [self.misfit(joined([other, mode])) for other in pinning.values()]
        return None if None in reasons else next(iter(reasons), "fits beside no mode of an active plugin")

    def dry(self) -> Built:
        """A model whose parameters have shapes and types but no data. Raises ConfigError if no method reads them."""
        return self._build(DryBuild, torch.device("meta"))

    def build(self, where: torch.device) -> Built:
        """The model with room for its weights. Raises ConfigError as `dry`, and for a pin that it does not use."""
        built = self._build(Build, where)
        used = used_ops(built.build)
        if idle := sorted(set(self.pins.kernels) - used):
            raise ConfigError(
                f"--kernel {idle[0]}=...: this model does not use {idle[0]}; it uses {', '.join(sorted(used))}"
            )
        return built

    def resolutions(self) -> list[Resolution]:
        """Every choice of a kernel that serving it takes. Raises ResolveError where none can be chosen."""
        build = self.dry().build
        for variant in VARIANTS:
            build.op("sample", variant=variant, vocab=self.model.vocab_size)
        own_samplers(build)
        return build.resolutions

    def _build(self, kind: type[Build], where: torch.device) -> Built:
        make, names = load(self.family.build), load(self.family.weights)(self.model)
        quantized = find_quantization(
            self.registry, self.checkpoint.config(), self.model, self.pins.quant, self.pins.quant_options
        )
        checkpoint = unquantized(quantized, outputs_first(self.checkpoint, names), where)
        shared: dict[str, Any] = {
            "registry": self.registry,
            "config": self.model,
            "device": self.device,
            "pins": self.pins,
            "order": self.registry.order,
            "deterministic": self.deterministic,
            "longest_request": self.longest_request,
            "mesh": self.mesh,
        }
        dry = DryBuild(torch_device=torch.device("meta"), **shared)
        build = kind(torch_device=where, granules=settle_granules(dry, make, self.granule), **shared)
        model = make(self.model, build)
        asked = () if quantized is None else (quantized.method.method_for, quantized.method.expert_method)
        create_linears(model, *asked, names=names, stored=self.checkpoint.sizes())
        return Built(model, build, names, checkpoint, None if quantized is None else quantized.name)


def used_ops(build: Build) -> set[str]:
    """The ops that a built model asks for, and those around its forward."""
    ranks = build.mesh.size(VOCABULARY.group)
    return {resolution.context.op for resolution in build.resolutions} | STEP_OPS | (OPS if ranks > 1 else set())


def blueprint(
    config: Config, registry: Registry, device: DeviceInfo, checkpoint: Checkpoint, mesh: Mesh | None = None
) -> Blueprint:
    """The blueprint of a checkpoint under the settings, without the pins of modes; of one rank of `mesh`, if there is
    one. Raises ConfigError."""
    family, model = read_model_as_set(registry, checkpoint.config(), config)
    return Blueprint(
        registry=registry,
        device=device,
        family=family,
        model=model,
        checkpoint=checkpoint,
        deterministic=config.kernels.deterministic,
        granule=config.memory.cache_block_seq_len,
        longest_request=total_len(config, model),
        mesh=mesh or Mesh(),
    )


def blueprint_at(
    path: Path, registry: Registry, device: DeviceInfo, dtype: str | None = None, deterministic: bool = False
) -> Blueprint:
    """The blueprint of the checkpoint at `path`, of which only the config is read, under default settings. `dtype`: as
    `--data_type` spells it. Raises ConfigError."""
    config = Config(model=ModelSettings(data_type=dtype), kernels=Kernels(deterministic=deterministic))
    return blueprint(config, registry, device, open_checkpoint(registry, path, weights=False))
