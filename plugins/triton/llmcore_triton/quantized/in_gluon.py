"""The parts that kernels in Gluon share. Only they import this module: other Tritons may have another Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from llmcore_triton import launch, linear_kernels

COPYING: gl.constexpr = gl.constexpr(24)
"""Registers of a thread that copies. Those that multiply share the rest."""

wait, release = gluon.jit(launch.wait.fn), gluon.jit(launch.release.fn)
tile_at, silu_and_mul = gluon.jit(linear_kernels.tile_at.fn), gluon.jit(linear_kernels.silu_and_mul.fn)


class Tiles(TensorDescriptor):  # type: ignore[misc]
    """A TMA descriptor whose maker has checked alignment already. Gluon's own class checks it again."""

    def __post_init__(self) -> None:
        """Checks nothing."""


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the stage after `stage`, and its phase."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase
