"""moe.fused, a composite: a whole mixture of experts, from the router to the weighted sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from llmcore.ops import SAMPLE_TOKENS, Op, Shape, draw, moe, moe_combine, moe_dispatch, moe_experts, moe_route, size
from llmcore.specs import OpContext

TOLERANCE: Mapping[str, float] = {"f32": 1e-4, "f16": 1.2e-2, "bf16": 4e-2}

SHAPES: tuple[Shape, ...] = tuple(
    {**route, "size": width, "inner": inner}
    for route, (width, inner) in zip(moe.ROUTES, ((72, 51), (40, 48), (64, 32), (64, 16), (64, 32)), strict=True)
)

Arguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor | None]

_ROUTE = ("experts", "top_k", "scoring", "normalize", "scale", "groups", "top_groups", "group_score", "bias", "size")
_PARTS: Mapping[str, tuple[str, ...]] = {
    "moe.route": _ROUTE,
    "moe.dispatch": ("experts", "top_k"),
    "moe.experts": ("experts", "top_k", "size", "inner"),
    "moe.combine": ("top_k", "size"),
}
"""The sizes each part is asked for with."""


class Fused:
    """One part after the other."""

    def __init__(self, route: Op, dispatch: Op, experts: Op, combine: Op) -> None:
        self._route, self._dispatch, self._experts, self._combine = route, dispatch, experts, combine

    def __call__(
        self,
        x: torch.Tensor,
        router: torch.Tensor,
        bias: torch.Tensor | None,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        extra: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, size], router [experts, size], bias [experts] f32 or None, gate_up [experts, 2 inner, size], down
        [experts, size, inner], extra [T, size] or None (added to the sum) -> [T, size].
        """
        weights, chosen = self._route(x, router, bias)
        y: torch.Tensor = self._combine(self._experts(self._dispatch(x, chosen), gate_up, down), weights, extra)
        return y


def make(context: OpContext) -> Op:
    """The reference, of the parts' references."""
    made = (module.make(context) for module in (moe_route, moe_dispatch, moe_experts, moe_combine))
    return Fused(*made)


meaning = make


def expand(context: OpContext, part: Callable[..., Op]) -> Op:
    """Route, dispatch, experts, combine."""
    sizes: dict[str, dict[str, Any]] = {
        op: {name: context.shape[name] for name in names if name in context.shape} for op, names in _PARTS.items()
    }
    return Fused(*(part(op, **shape) for op, shape in sizes.items()))


def samples(context: OpContext) -> Iterator[Arguments]:
    """With something to add and without."""
    width = size(context.shape, "size", 72)
    router, bias = moe.router(context, width)
    gate_up, down = moe_experts.weights(context)
    for tokens in SAMPLE_TOKENS[context.bucket]:
        x = moe.coarse(context, tokens, width)
        yield x, router, bias, gate_up, down, None
        yield x, router, bias, gate_up, down, draw(context, tokens, width, seed=1)


def timed(context: OpContext, tokens: int) -> Iterator[Arguments]:
    """As many tokens as asked for."""
    width = size(context.shape, "size", 72)
    gate_up, down = moe_experts.weights(context)
    yield moe.coarse(context, tokens, width), *moe.router(context, width), gate_up, down, draw(context, tokens, width)


def cost(shape: Shape) -> tuple[float, float]:
    """Those of router and experts; the sum of them is written once."""
    route, experts = moe_route.cost(shape), moe_experts.cost(shape)
    return route[0] + experts[0], route[1] + experts[1]
