"""Shared by the moe ops: the dispatched tokens, and samples whose routes do not depend on rounding.

A mixture of experts consists of `moe.route` (chooses experts), `moe.dispatch` (sorts tokens by expert), `moe.experts`
(one gated MLP per expert) and `moe.combine` (their weighted sum). `moe.fused` is all four in one. With experts on
several devices, dispatch and combine move the tokens.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from llmcore.api.models import RouteSpec
from llmcore.api.specs import OpContext
from llmcore.ops import Shape, draw, size


@dataclass
class Dispatched:
    """Tokens sorted by expert. A pair is one choice of one token: pair p is choice p % top_k of row p // top_k of `x`.

    `x` [N, size]: the rows that the experts of this device read. `pairs` [P] int32: all pairs, sorted by expert and
    within an expert by number. `starts` [experts + 1] int32: the index in `pairs` of each expert's first pair, and the
    index after the last expert's last pair.
    """

    x: torch.Tensor
    pairs: torch.Tensor
    starts: torch.Tensor


def shape_of(spec: RouteSpec) -> dict[str, Any]:
    """The fields of a RouteSpec, as a part of an OpContext's shape."""
    return asdict(spec)


def spec_of(context: OpContext) -> RouteSpec:
    """The RouteSpec that an OpContext's shape holds."""
    return RouteSpec(**{f.name: context.shape[f.name] for f in fields(RouteSpec) if f.name in context.shape})  # type: ignore[arg-type]


ROUTES: tuple[Shape, ...] = (
    {**shape_of(RouteSpec(experts=8, top_k=2, normalize=True)), "bias": False},
    {**shape_of(RouteSpec(experts=1, top_k=1)), "bias": False},
    {**shape_of(RouteSpec(experts=60, top_k=4)), "bias": False},
    {
        **shape_of(RouteSpec(experts=16, top_k=3, scale=2.5, groups=4, top_groups=2)),
        "bias": False,
    },
    {
        **shape_of(
            RouteSpec(
                experts=64,
                top_k=8,
                scoring="sigmoid",
                normalize=True,
                scale=1.5,
                groups=8,
                top_groups=3,
                group_score="top2",
            )
        ),
        "bias": True,
    },
)
"""One route of each kind, with 1 to 64 experts."""


def router(context: OpContext, width: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A router's weight [experts, width] with few bits, and its correction [experts] f32 or None."""
    experts = size(context.shape, "experts", 8)
    weight = (draw(context, experts, width, seed=11).float() * 4).round().clamp(-8, 8) / 64
    bias = (draw(context, experts, seed=12).float() * 16).round() / 128 if context.shape.get("bias") else None
    return weight.to(draw(context, 1).dtype), bias


def coarse(context: OpContext, tokens: int, width: int, seed: int = 0) -> torch.Tensor:
    """[tokens, width] numbers with few bits: with the weight of `router`, any summation order gives equal logits."""
    return ((draw(context, tokens, width, seed=seed).float() * 4).round().clamp(-12, 12) / 4).to(
        draw(context, 1).dtype
    )
