"""moe.fused, a composite: a whole mixture of experts, from the router to the weighted sum.

Shape field `shared` is the width of a gated MLP that processes every token beside the experts, 0 for none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch

from llmcore.api.models import RouteSpec
from llmcore.api.specs import OpContext
from llmcore.ops import (
    SAMPLE_TOKENS,
    Op,
    Shape,
    draw,
    linear,
    linear_silu_and_mul,
    moe,
    moe_combine,
    moe_dispatch,
    moe_experts,
    moe_route,
    size,
)

TOLERANCE: Mapping[str, float] = {"f32": 1e-4, "f16": 1.2e-2, "bf16": 4e-2}

_SIZES = ((72, 51, 0), (40, 48, 40), (64, 32, 0), (64, 16, 24), (64, 32, 80))

SHAPES: tuple[Shape, ...] = tuple(
    {**route, "size": width, "inner": inner, "shared": shared}
    for route, (width, inner, shared) in zip(moe.ROUTES, _SIZES, strict=True)
)

Shared = tuple[torch.Tensor, torch.Tensor]
"""(gate_up [2 width, size] with the gate's rows first, down [size, width]) of the shared MLP."""

Arguments = tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor | None,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor | None,
    Shared | None,
]

_ROUTE = (*(field.name for field in fields(RouteSpec)), "bias", "size")
_PARTS: Mapping[str, tuple[str, ...]] = {
    "moe.route": _ROUTE,
    "moe.dispatch": ("experts", "top_k"),
    "moe.experts": ("experts", "top_k", "size", "inner"),
    "moe.combine": ("top_k", "size"),
}
"""Part -> the fields of the shape that it needs."""


class Fused:
    """The kernels of the four parts and of the shared MLP, called one after the other."""

    def __init__(
        self, route: Op, dispatch: Op, experts: Op, combine: Op, gate_up: Op | None = None, down: Op | None = None
    ) -> None:
        """`gate_up`, `down`: linear_silu_and_mul and linear of the shared MLP."""
        self._route, self._dispatch, self._experts, self._combine = route, dispatch, experts, combine
        self._gate_up, self._down = gate_up, down
        self.packing: str | None = getattr(experts, "packing", None)
        """The form of weights that the experts' kernel has for itself, which its `pack` makes."""

    @property
    def pack(self) -> Callable[..., Any]:
        """The experts' kernel's."""
        return self._experts.pack  # type: ignore[attr-defined,no-any-return]

    def __call__(
        self,
        x: torch.Tensor,
        router: torch.Tensor,
        bias: torch.Tensor | None,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        extra: torch.Tensor | None = None,
        shared: Shared | None = None,
    ) -> torch.Tensor:
        """x [T, size], router [experts, size], bias [experts] f32 or None, gate_up [experts, 2 inner, size], down
        [experts, size, inner], extra [T, size] or None, shared (see `Shared`) or None -> [T, size].

        The extra and the output of the shared MLP are added to the experts' weighted sum.
        """
        weights, chosen = self._route(x, router, bias)
        if shared is not None:
            assert self._gate_up is not None and self._down is not None, "shape field `shared` is its width"
            seen = self._down(self._gate_up(x, shared[0], None), shared[1], None)
            extra = seen if extra is None else extra + seen
        y: torch.Tensor = self._combine(self._experts(self._dispatch(x, chosen), gate_up, down), weights, extra)
        return y


def make(context: OpContext) -> Op:
    """The reference, made of the references of its parts."""
    chosen = (moe_route.make(context), moe_dispatch.make(context), moe_experts.make(context))
    return Fused(*chosen, moe_combine.reference, linear_silu_and_mul.reference, linear.reference)


def expand(context: OpContext, part: Callable[..., Op]) -> Op:
    """Route, dispatch, experts and combine, and two linears for the shared MLP."""
    sizes: dict[str, dict[str, Any]] = {
        op: {name: context.shape[name] for name in names if name in context.shape} for op, names in _PARTS.items()
    }
    parts = [part(op, **shape) for op, shape in sizes.items()]
    if width := context.shape.get("shared"):
        hidden = context.shape["size"]
        parts.append(part("linear_silu_and_mul", inputs=hidden, size=width, bias=False))
        parts.append(part("linear", inputs=width, outputs=hidden, bias=False))
    return Fused(*parts)


def shared_weights(context: OpContext) -> Shared | None:
    """Weights of the shared MLP, scaled so that outputs are about as large as inputs; None without one."""
    hidden, width = size(context.shape, "size", 72), int(context.shape.get("shared") or 0)
    if not width:
        return None
    return draw(context, 2 * width, hidden, seed=31) / hidden**0.5, draw(context, hidden, width, seed=32) / width**0.5


def samples(context: OpContext) -> Iterator[Arguments]:
    """With an extra and without."""
    width = size(context.shape, "size", 72)
    router, bias = moe.router(context, width)
    gate_up, down = moe_experts.weights(context)
    shared = shared_weights(context)
    for tokens in SAMPLE_TOKENS[context.bucket]:
        x = moe.coarse(context, tokens, width)
        yield x, router, bias, gate_up, down, None, shared
        yield x, router, bias, gate_up, down, draw(context, tokens, width, seed=1), shared


def cost(shape: Shape) -> tuple[float, float]:
    """(bytes, flops) of the router, the experts and the shared MLP."""
    route, experts = moe_route.cost(shape), moe_experts.cost(shape)
    hidden, width = size(shape, "size"), int(shape.get("shared") or 0)
    moved = 3.0 * width * hidden * size(shape, "element", 2)
    flops = 6.0 * size(shape, "tokens") * width * hidden
    return route[0] + experts[0] + moved, route[1] + experts[1] + flops
