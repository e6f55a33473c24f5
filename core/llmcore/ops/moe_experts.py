"""moe.experts: one gated MLP per expert, over the tokens that were routed to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import torch
import torch.nn.functional as F

from llmcore.api.specs import OpContext
from llmcore.ops import Shape, draw, moe_dispatch, silu_and_mul, size
from llmcore.ops.moe import Dispatched

IN_PLACE = ("into",)
TOLERANCE = {"f32": 5e-5, "f16": 8e-3, "bf16": 3e-2}

SHAPES: tuple[Shape, ...] = (
    {"experts": 8, "top_k": 2, "size": 72, "inner": 51},
    {"experts": 60, "top_k": 4, "size": 64, "inner": 32},
    {"experts": 1, "top_k": 1, "size": 40, "inner": 48},
)
"""Sizes that no tile divides, experts without tokens, and a single expert."""


class Experts:
    """The reference: one expert after the other."""

    def __init__(self, context: OpContext) -> None:
        self.top_k = size(context.shape, "top_k", 2)

    def __call__(
        self, tokens: Dispatched, gate_up: torch.Tensor, down: torch.Tensor, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """gate_up [experts, 2 inner, size] (gate first), down [experts, size, inner] -> [N top_k, size].

        Row p of the result belongs to pair p, as `moe.combine` reads it. `into`: the tensor to write it to, which
        keeps the rows of pairs before the first expert's and after the last one's.
        """
        y = tokens.x.new_empty(len(tokens.x) * self.top_k, tokens.x.shape[1]) if into is None else into
        for expert, (first, last) in enumerate(pairwise(tokens.starts.tolist())):
            if first < last:
                pairs = tokens.pairs[first:last].long()
                inner = silu_and_mul.reference(F.linear(tokens.x[pairs // self.top_k], gate_up[expert]))
                y[pairs] = F.linear(inner, down[expert])
        return y


make = Experts


def weights(context: OpContext) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up and down, scaled so that outputs are about as large as inputs."""
    experts, width, inner = (size(context.shape, name, default) for name, default in _DEFAULTS)
    gate_up = draw(context, experts, 2 * inner, width, seed=21) / width**0.5
    return gate_up, draw(context, experts, width, inner, seed=22) / inner**0.5


_DEFAULTS = (("experts", 8), ("size", 72), ("inner", 51))


def samples(context: OpContext) -> Iterator[tuple[Dispatched, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Tokens spread over the experts, all tokens at the same experts, and pairs of which some are not computed."""
    gate_up, down = weights(context)
    width = size(context.shape, "size", 72)
    dispatch = moe_dispatch.make(context)
    for _, chosen in moe_dispatch.samples(context):
        tokens = dispatch(draw(context, len(chosen), width), chosen)
        yield tokens, gate_up, down, None
        pairs = len(tokens.pairs)
        some = replace(tokens, starts=tokens.starts.clamp(pairs // 4, pairs - pairs // 4))
        yield some, gate_up, down, draw(context, pairs, width, seed=23)


def cost(shape: Shape) -> tuple[float, float]:
    """(bytes, flops): each expert with tokens is read once.

    Shape field `touched` is their number; without it, the expected number if all experts are equally likely.
    """
    tokens, experts, top_k, width, inner = (
        size(shape, name) for name in ("tokens", "experts", "top_k", "size", "inner")
    )
    even = experts * (1 - (1 - top_k / experts) ** tokens)
    known = shape.get("touched")
    touched = float(known) if isinstance(known, int | float) else even
    moved = touched * 3 * inner * width + tokens * width + tokens * top_k * width
    return float(moved * size(shape, "element", 2)), 6.0 * tokens * top_k * inner * width
