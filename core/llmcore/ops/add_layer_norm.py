"""add_layer_norm, a composite: residual + x, and its layer_norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from llmcore.api.specs import OpContext
from llmcore.ops import ROUNDING, Op, Shape, layer_norm, size

TOLERANCE = ROUNDING

IN_PLACE = ("x", "residual")

SHAPES: tuple[Shape, ...] = tuple(shape for shape in layer_norm.SHAPES if "heads" not in shape)


def reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [T, size], weight, bias [size] -> (normed sum, sum)."""
    total = residual + x
    return layer_norm.reference(total, weight, bias, eps), total


def expand(context: OpContext, part: Callable[..., Op]) -> Op:
    """An addition, then the chosen layer_norm."""
    norm = part("layer_norm", **context.shape)

    def run(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual + x
        return norm(total, weight, bias, eps), total

    return run


def samples(
    context: OpContext,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float]]:
    """The samples of layer_norm, each with a usual residual and with one that cancels x.

    For rows far from zero the residual is constant, so that the sum is exact in every type. Otherwise a half type's
    rounding error would be large beside the row's variance, while a reference in f32 does not round.
    """
    for x, weight, bias, eps in layer_norm.samples(context):
        far = bool((x > 16).all())
        yield x, torch.full_like(x, 8.0) if far else x.flip(-1), weight, bias, eps
        yield x, -x, weight, bias, eps


def cost(shape: Shape) -> tuple[float, float]:
    """Two reads, two writes; eight operations per element."""
    elements = size(shape, "tokens") * size(shape, "size")
    return 4.0 * elements * size(shape, "element", 2), 8.0 * elements
