"""The sampling kernels, one per variant."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from llmcore.api import KernelSpec, OpContext

from llmcore_triton import tuned
from llmcore_triton.specs.common import GPU

_VARIANTS = {
    "greedy": "the best of chunks, then of the row",
    "temperature": "a block by its mass, then a token in it",
    "filtered": "thresholds by bisection, nothing sorted",
    "full": "penalties by counting, and log-probabilities",
}
"""Variant, named after the most that a step's rows need -> how its kernel works."""


def kernels() -> Iterable[KernelSpec]:
    """One kernel per variant."""
    for variant, summary in _VARIANTS.items():
        yield KernelSpec(
            op="sample",
            name=f"triton_{variant}",
            make=f"llmcore_triton.sample.{variant}:make",
            when=replace(GPU, shape={"variant": frozenset({variant})}),
            cost="llmcore_triton.specs.sampling:microseconds",
            batch_invariant=True,
            summary=summary,
        )


def microseconds(context: OpContext) -> float | None:
    """Returns the measured microseconds, or None."""
    return tuned.microseconds(f"triton_{context.shape['variant']}", context)
