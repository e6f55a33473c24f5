"""gelu_and_mul: gelu(gate) * up, for the two halves of one tensor; gelu's tanh approximation (arXiv:1606.08415)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from llmcore.api.specs import OpContext
from llmcore.ops import ROUNDING, SAMPLE_TOKENS, Op, Shape, draw, size

TOLERANCE = ROUNDING

SHAPES: tuple[Shape, ...] = ({"size": 44}, {"size": 128})


def reference(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2 size], gate first -> [T, size]; rounded once."""
    gate, up = x.chunk(2, dim=-1)
    gate = gate.float()
    bend = (gate * gate).mul_(0.044715).add_(1).mul_(gate).mul_(math.sqrt(2 / math.pi))
    return bend.tanh_().add_(1).mul_(gate).mul_(0.5).mul_(up).to(x.dtype)


def in_one_pass(x: torch.Tensor) -> torch.Tensor:
    """The same, faster. On a CPU torch computes a tensor's last elements differently, so a row's bits depend on T."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate.float(), approximate="tanh").mul_(up).to(x.dtype)


def make(context: OpContext) -> Op:
    """The reference if a row's bits must not depend on other rows, else the faster function."""
    return reference if context.deterministic else in_one_pass


def samples(context: OpContext) -> Iterator[tuple[torch.Tensor]]:
    """Usual values, and large values of both signs whose cubes overflow f16."""
    width = 2 * size(context.shape, "size", 44)
    for tokens in SAMPLE_TOKENS[context.bucket]:
        x = draw(context, tokens, width)
        yield (x,)
        yield (x * 100,)


def cost(shape: Shape) -> tuple[float, float]:
    """Two reads and a write per output."""
    elements = size(shape, "tokens") * size(shape, "size")
    return 3.0 * elements * size(shape, "element", 2), 10.0 * elements
