"""qk_norm_rope_kv_write, a composite: an rms_norm over each head of queries and keys, then rope_kv_write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from llmcore.api.specs import OpContext
from llmcore.ops import ROUNDING, Op, Shape, draw, rms_norm, rope_kv_write, size

TOLERANCE = ROUNDING

IN_PLACE = rope_kv_write.IN_PLACE

LAYOUTS = ("token",)

SHAPES = rope_kv_write.SHAPES


def reference(
    qk: torch.Tensor,
    v: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: tuple[torch.Tensor, ...],
    slots: torch.Tensor,
) -> torch.Tensor:
    """qk [T, heads + kv_heads, size] -> normed and rotated qk.

    `norms`: the weights [size] for queries and for keys. The rest is as in rope_kv_write, keys and values as stored
    too; keys are normed when stored.
    """
    return rope_kv_write.reference(_normed(qk, v.shape[1], norms, eps, rms_norm.reference), v, cos, sin, kv, slots)


def expand(context: OpContext, part: Callable[..., Op]) -> Op:
    """rms_norm of queries and of keys, then rope_kv_write or its expansion."""
    norm, write = part("rms_norm", size=context.shape["size"]), part("rope_kv_write", **context.shape)

    def run(
        qk: torch.Tensor,
        v: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor],
        eps: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv: tuple[torch.Tensor, ...],
        slots: torch.Tensor,
    ) -> torch.Tensor:
        turned: torch.Tensor = write(_normed(qk, v.shape[1], norms, eps, norm), v, cos, sin, kv, slots)
        return turned

    return run


def _normed(
    qk: torch.Tensor, kv_heads: int, norms: tuple[torch.Tensor, torch.Tensor], eps: float, norm: Op
) -> torch.Tensor:
    q_weight, k_weight = norms
    return torch.cat((norm(qk[:, :-kv_heads], q_weight, eps), norm(qk[:, -kv_heads:], k_weight, eps)), 1)


def samples(context: OpContext) -> Iterator[tuple[Any, ...]]:
    """The samples of rope_kv_write, with different weights for queries and keys, heads of zeros and large heads."""
    for qk, v, cos, sin, kv, slots in rope_kv_write.samples(context):
        norms = draw(context, qk.shape[-1], seed=4), draw(context, qk.shape[-1], seed=5)
        qk[0, 0], qk[-1] = 0, qk[-1] * 100
        yield qk, v, norms, 1e-6, cos, sin, kv, slots


def cost(shape: Shape) -> tuple[float, float]:
    """The cost of rope_kv_write, plus four operations per element."""
    moved, flops = rope_kv_write.cost(shape)
    return moved, flops + 4.0 * size(shape, "tokens") * size(shape, "heads") * size(shape, "size")
