"""rope_angles: cos and sin of each token's rotary angles, in the form that op `rope` takes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from llmcore.api.specs import OpContext
from llmcore.ops import SAMPLE_TOKENS, Shape, size

TOLERANCE = {"f32": 1e-6, "f16": 1e-6, "bf16": 1e-6}

SHAPES: tuple[Shape, ...] = ({"rotated": 16}, {"rotated": 20})


def reference(
    positions: torch.Tensor, frequencies: torch.Tensor, amplitude: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """positions [T] int32, frequencies [rotated / 2] f32, in radians per token -> cos, sin [T, rotated] f32.

    The angle is the f32 product of position and frequency. All implementations of the models lose the same precision
    at far positions, so a kernel must round the product in the same way.
    """
    return turns(positions.float().unsqueeze(1) * frequencies, amplitude)


def turns(angles: torch.Tensor, amplitude: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [T, rotated] of angles [T, rotated / 2], times `amplitude`.

    Each angle appears twice, once per half of the rotated elements. The first half of sin is negated.
    """
    cos, sin = angles.cos() * amplitude, angles.sin() * amplitude
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def samples(context: OpContext) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
    """Near and far positions, and an amplitude that is not 1."""
    half = size(context.shape, "rotated", 16) // 2
    for tokens in SAMPLE_TOKENS[context.bucket]:
        for theta, amplitude in ((1e4, 1.0), (5e5, 1.3)):
            positions = torch.arange(tokens) * 977 % (1 << 17)
            positions[-1] = (1 << 17) - 1
            yield positions.int(), theta ** -(torch.arange(half) / half), amplitude


def cost(shape: Shape) -> tuple[float, float]:
    """Two f32 writes per rotated element; a sine or cosine counts as about twenty operations."""
    elements = size(shape, "tokens") * size(shape, "rotated")
    return 8.0 * elements + 4.0 * size(shape, "tokens"), 20.0 * elements
