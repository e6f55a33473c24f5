"""moe.dispatch: bring tokens to their experts. On one device it moves no tokens and only sorts the pairs by expert."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from llmcore.api.specs import OpContext
from llmcore.ops import SAMPLE_TOKENS, Shape, draw, draws_on, size
from llmcore.ops.moe import Dispatched

TOLERANCE = {"f32": 0.0, "f16": 0.0, "bf16": 0.0}

SHAPES: tuple[Shape, ...] = ({"experts": 8, "top_k": 2}, {"experts": 1, "top_k": 1}, {"experts": 60, "top_k": 8})


class Dispatch:
    """The reference."""

    def __init__(self, context: OpContext) -> None:
        self.experts = size(context.shape, "experts", 8)

    def __call__(self, x: torch.Tensor, experts: torch.Tensor) -> Dispatched:
        """x [T, size], experts [T, top_k] int32 -> Dispatched with the same tensor x."""
        chosen = experts.flatten().long()
        pairs = chosen.argsort(stable=True).to(torch.int32)
        counts = torch.zeros(self.experts + 1, dtype=torch.int64, device=x.device)
        starts = counts.index_add_(0, chosen + 1, torch.ones_like(chosen)).cumsum(0)
        return Dispatched(x, pairs, starts.to(torch.int32))


make = Dispatch


def samples(context: OpContext) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Choices spread over the experts, and all tokens at the same experts."""
    experts, top_k = size(context.shape, "experts", 8), size(context.shape, "top_k", 2)
    for tokens in SAMPLE_TOKENS[context.bucket]:
        x = draw(context, tokens, 24)
        chosen = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(tokens)).argsort(-1)
        chosen = chosen[:, :top_k].to(draws_on(), torch.int32).contiguous()
        yield x, chosen
        yield x, chosen[:1].expand(tokens, -1).contiguous()


def cost(shape: Shape) -> tuple[float, float]:
    """(bytes, flops): choices are read, pairs and borders are written."""
    pairs = size(shape, "tokens") * size(shape, "top_k")
    return 4.0 * (2 * pairs + size(shape, "experts")), 0.0
