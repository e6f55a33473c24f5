"""Tokens per granule of each KV group, fixed before its kernels are resolved for good."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from llmcore.layers.build import Build
from llmcore.models import ModelConfig
from llmcore.ops.attention import shape_of
from llmcore.resolve import REFERENCE, Candidate, Resolution, candidates_for, why_not
from llmcore.specs import OpContext


@dataclass(kw_only=True)
class DryBuild(Build):
    """A build whose layers hold nothing that can be called, on torch's meta device; no hook sees it."""

    def bind(self, resolution: Resolution) -> Any:
        """Nothing: the choice is recorded already."""
        return None

    def layer(self, module: torch.nn.Module, name: str, index: int) -> torch.nn.Module:
        """The module itself."""
        return module


def settle_granules(dry: DryBuild, make: Callable[[ModelConfig, Build], object]) -> dict[str, int]:
    """KV group -> granule for the model that `make` builds, under the pins of `dry`.

    The smallest that every pinned attention kernel of the group takes. Without a pin: 1 if every attention op has a
    kernel other than the reference there, or nowhere; else the smallest at which every one has.
    """
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
    # Without a kernel for mixed steps these are not captured, which is no reason for another granule.
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
    """Whether this kernel counts: the pinned one, or any but the reference."""
    name = candidate[0].name
    return name == pins[op] if op in pins else name != REFERENCE


def _fits(candidates: list[Candidate], context: OpContext) -> bool:
    return any(why_not(spec, context) is None for spec, _ in candidates)
