"""moe.fused.w4a16, a composite: moe.fused with the experts of moe.experts.w4a16, and the fields of both shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from llmcore.api import OpContext
from llmcore.ops import Op, Shape, moe_experts, moe_fused

from llmcore_quantization.canonical import Scheme
from llmcore_quantization.ops import moe_experts_w4a16
from llmcore_quantization.ops.moe_experts_w4a16 import Stack, plain

TOLERANCE = moe_fused.TOLERANCE
STACKS = moe_experts_w4a16.STACKS

_ROUTES = tuple(shape for shape in moe_fused.SHAPES if shape["experts"] in (1, 8, 16))


def shapes_of(*schemes: Scheme) -> tuple[Shape, ...]:
    """A shape for each scheme, with a route and a shared MLP, or none, of moe.fused."""
    return tuple(
        {**route, "size": 64, "inner": 64, **moe_experts_w4a16.told(scheme)}
        for route, scheme in zip(_ROUTES, schemes, strict=True)
    )


SHAPES = shapes_of(
    Scheme(codes="u4", group=64, zeros=True), Scheme(codes="u4", group=32), Scheme(codes="u4", scale="bf16")
)


def make(context: OpContext) -> Op:
    """The reference: that of moe.fused with dequantized experts."""
    fused = moe_fused.make(context)

    def run(
        x: torch.Tensor,
        router: torch.Tensor,
        bias: torch.Tensor | None,
        gate_up: Stack,
        down: Stack,
        extra: torch.Tensor | None = None,
        shared: moe_fused.Shared | None = None,
    ) -> torch.Tensor:
        y: torch.Tensor = fused(x, router, bias, plain(gate_up, x.dtype), plain(down, x.dtype), extra, shared)
        return y

    return run


def expand(context: OpContext, part: Callable[..., Op]) -> Op:
    """The parts of moe.fused, with quantized experts."""
    experts = context.op.replace("fused", "experts")

    def own(op: str, **shape: Any) -> Op:
        if op != "moe.experts":
            return part(op, **shape)
        return part(experts, **shape, **moe_experts_w4a16.told(moe_experts_w4a16.scheme_of(context.shape)))

    return moe_fused.expand(context, own)


def samples(context: OpContext) -> Iterator[tuple[Any, ...]]:
    """As those of moe.fused."""
    stacks = moe_experts_w4a16.stacks(context)
    for x, router, bias, _, _, *more in moe_fused.samples(context):
        yield x, router, bias, *stacks, *more


def cost(shape: Shape) -> tuple[float, float]:
    """(bytes, flops) of the router, the experts and the shared MLP."""
    (moved, flops), (plain, _) = moe_fused.cost(shape), moe_experts.cost(shape)
    return moved - plain + moe_experts_w4a16.cost(shape)[0], flops
