"""moe.route: choose the experts of each token, and their weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from llmcore.api.models import RouteSpec
from llmcore.api.specs import OpContext
from llmcore.ops import SAMPLE_TOKENS, Shape, moe, size

TOLERANCE = {"f32": 1e-5, "f16": 1e-5, "bf16": 1e-5}
"""The same for all types, because the op computes in f32."""

SHAPES: tuple[Shape, ...] = tuple({**shape, "size": width} for shape in moe.ROUTES for width in (40, 128))

Arguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


class Route:
    """The reference."""

    def __init__(self, context: OpContext) -> None:
        self.spec = moe.spec_of(context)

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, size], the router's weight [experts, size], its correction [experts] f32 or None -> weights
        [T, top_k] f32 and experts [T, top_k] int32, best first. Of equal experts, the lower index is first.
        """
        spec = self.spec
        logits = F.linear(x.float(), weight.float())
        scores = logits.softmax(-1) if spec.scoring == "softmax" else logits.sigmoid()
        choice = scores if bias is None else scores + bias
        experts = _best(_in_groups(choice, spec), spec.top_k)
        weights = scores.gather(-1, experts)
        if spec.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * spec.scale, experts.to(torch.int32)


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices [..., count] of the best scores, best first; of equal scores, the lower index is first."""
    return scores.sort(stable=True, dim=-1, descending=True).indices[..., :count]


def _in_groups(choice: torch.Tensor, spec: RouteSpec) -> torch.Tensor:
    """The scores, with -inf for experts outside the best groups."""
    if spec.groups == 1:
        return choice
    grouped = choice.view(*choice.shape[:-1], spec.groups, -1)
    score = grouped.amax(-1) if spec.group_score == "max" else grouped.topk(2, -1).values.sum(-1)
    kept = torch.zeros_like(score, dtype=torch.bool).scatter(-1, _best(score, spec.top_groups), True)
    return grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(-2)


make = Route


def samples(context: OpContext) -> Iterator[Arguments]:
    """Numbers with few bits, so that no choice depends on rounding. Some scores are equal."""
    width = size(context.shape, "size", 40)
    weight, bias = moe.router(context, width)
    for tokens in SAMPLE_TOKENS[context.bucket]:
        yield moe.coarse(context, tokens, width), weight, bias


def cost(shape: Shape) -> tuple[float, float]:
    """(bytes, flops): the router's weight is read once, in the model's dtype."""
    tokens, experts, width = (size(shape, name) for name in ("tokens", "experts", "size"))
    moved = (experts + tokens) * width * size(shape, "element", 2) + 8 * tokens * size(shape, "top_k")
    return float(moved), 2.0 * tokens * experts * width
