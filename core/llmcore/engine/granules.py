"""Tokens per granule of each KV group, fixed before its kernels are resolved for good."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from llmcore.layers.build import Build
from llmcore.ops.attention import shape_of
from llmcore.registry import Registry
from llmcore.resolve import REFERENCE, Candidate, candidates_for, why_not
from llmcore.specs import OpContext


def choose_granules(trial: Build) -> dict[str, int]:
    """KV group -> granule, given a build at granule 1.

    The smallest that every pinned attention kernel of the group takes. Without a pin: 1 if every attention op has a
    kernel other than the reference there, or nowhere; else the smallest at which every one has.
    """
    return {group: _smallest(contexts, trial) for group, contexts in _by_group(trial).items()}


def _by_group(trial: Build) -> dict[str, list[OpContext]]:
    """The attention contexts of each group, every token bucket."""
    return {
        group: [r.context for r in trial.resolutions if r.context.op.startswith("attn.") and r.context.shape == shape]
        for group, shape in ((group, shape_of(spec)) for group, spec in trial.attention_specs.items())
    }


def _smallest(contexts: list[OpContext], trial: Build) -> int:
    pinned = [context for context in contexts if context.op in trial.pins.kernels]
    wanted = pinned or contexts
    sizes = sorted({1, *_named(contexts, trial.registry)})
    fitting = [size for size in sizes if all(_has_kernel(c, size, trial) for c in wanted)]
    return fitting[0] if fitting else 1


def _named(contexts: list[OpContext], registry: Registry) -> Iterator[int]:
    """The granules that any kernel for these ops asks for."""
    for op in {context.op for context in contexts}:
        for spec, _ in candidates_for(registry, op):
            yield from spec.when.granules


def _has_kernel(context: OpContext, granule: int, trial: Build) -> bool:
    at = replace(context, granule=granule)
    return any(
        _counts(candidate, at.op, trial.pins.kernels) and why_not(candidate[0], at) is None
        for candidate in candidates_for(trial.registry, at.op)
    )


def _counts(candidate: Candidate, op: str, pins: Mapping[str, str]) -> bool:
    """Whether this kernel may decide: the pinned one, or any but the reference."""
    name = candidate[0].name
    return name == pins[op] if op in pins else name != REFERENCE
