"""moe.combine: one program for each token and block of columns adds up the token's experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers import Op

from llmcore_triton.launch import Bound, overlaps, release, wait
from llmcore_triton.rows import choose, power, size, small, warps
from llmcore_triton.silu_and_mul import candidates

__all__ = ["candidates", "default", "make", "make_with"]


@triton.jit
def _sum(  # type: ignore[no-untyped-def]
    y, weights, extra, out, extra_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, EXTRA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [T, SIZE]: the sum of each token's TOP_K rows of y by their weights, in their order, and then its row of
    extra."""
    release(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = columns < SIZE
    wait(PDL)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        acc += tl.load(y + pair * SIZE + columns, mask=keep).to(tl.float32) * tl.load(weights + pair)
    if EXTRA:
        acc += tl.load(extra + token * extra_stride + columns, mask=keep).to(tl.float32)
    tl.store(out + token * SIZE + columns, acc.to(out.dtype.element_ty), mask=keep)


def default(context: OpContext) -> Mapping[str, Any]:
    """The default: blocks that give few tokens many programs."""
    block = min(power(size(context, "size")), 512 if small(context) else 2048)
    return {"block": block, "num_warps": warps(context, block, 1)}


def make_with(context: OpContext, config: Mapping[str, Any]) -> Op:
    """The kernel in the configuration `config`."""
    width, pdl, block = size(context, "size"), overlaps(context), config["block"]
    launch = Bound(
        _sum,
        SIZE=width,
        BLOCK=block,
        TOP_K=size(context, "top_k"),
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=config["num_warps"],
    )
    blocks = -(-width // block)

    def run(y: torch.Tensor, weights: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        """y [T top_k, size], weights [T, top_k] f32, extra [T, size] or None -> [T, size]."""
        tokens = len(weights)
        out = torch.empty((tokens, width), dtype=y.dtype, device=y.device)
        there = y if extra is None else extra
        launch.but(EXTRA=extra is not None)((tokens, blocks), y, weights, there, out, there.stride(0))
        return out

    return run


def make(context: OpContext) -> Op:
    """The kernel in the measured configuration, or in the default one."""
    return make_with(context, choose(context, default(context)))
