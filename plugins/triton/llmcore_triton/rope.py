"""rope: one program for each token and block of heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers import Op

from llmcore_triton.launch import Bound, overlaps, release, wait
from llmcore_triton.rows import choose, power, size, small, warps


@triton.jit
def turned(first, second, cos, sin, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rotates both halves of heads [heads, half], by cos and sin [half] of their angles."""
    left, right = first.to(tl.float32), second.to(tl.float32)
    c, s = cos[None, :], sin[None, :]
    return (left * c - right * s).to(DTYPE), (right * c + left * s).to(DTYPE)


@triton.jit
def _rotated(  # type: ignore[no-untyped-def]
    x,
    cos,
    sin,
    out,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROTATED: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    pairs = tl.arange(0, HALF)
    there = heads < HEADS
    turning = pairs < ROTATED // 2
    keep = there[:, None] & turning[None, :]
    source = x + token * token_stride + heads[:, None] * head_stride
    target = out + token * (HEADS * SIZE) + heads[:, None] * SIZE
    wait(PDL)
    release(PDL)
    # both hold each angle twice: read the first half of cos, and the second half of sin, which is not negated
    c = tl.load(cos + token * ROTATED + pairs, mask=turning, other=0.0)
    s = tl.load(sin + token * ROTATED + ROTATED // 2 + pairs, mask=turning, other=0.0)
    first = tl.load(source + pairs[None, :], mask=keep, other=0.0)
    second = tl.load(source + ROTATED // 2 + pairs[None, :], mask=keep, other=0.0)
    left, right = turned(first, second, c, s, first.dtype)
    tl.store(target + pairs[None, :], left, mask=keep)
    tl.store(target + ROTATED // 2 + pairs[None, :], right, mask=keep)
    if ROTATED < SIZE:
        others = ROTATED + tl.arange(0, REST)
        beside = there[:, None] & (others < SIZE)[None, :]
        tl.store(target + others[None, :], tl.load(source + others[None, :], mask=beside), mask=beside)


def default(context: OpContext) -> Mapping[str, Any]:
    """The default: few heads per program if there are few tokens."""
    return block_of_heads(context, 4 if small(context) else 16)


def block_of_heads(context: OpContext, heads: int) -> dict[str, Any]:
    """Returns the configuration with this many heads per program, and one load of each half per thread."""
    return {"heads": heads, "num_warps": warps(context, heads * power(size(context, "size")) // 2, 1)}


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """2 to 32 heads per program."""
    for heads in (2, 4, 8, 16, 32):
        yield block_of_heads(context, heads)


def make_with(context: OpContext, config: Mapping[str, Any]) -> Op:
    """The kernel in the configuration `config`."""
    heads, width, rotated = (size(context, name) for name in ("heads", "size", "rotated"))
    pdl = overlaps(context)
    blocks = -(-heads // config["heads"])
    fixed = {
        "HEADS": heads,
        "SIZE": width,
        "ROTATED": rotated,
        "HALF": power(rotated // 2),
        "REST": power(width - rotated),
        "BLOCK_HEADS": config["heads"],
        "PDL": pdl,
        "launch_pdl": pdl,
        "num_warps": config["num_warps"],
    }
    launch = Bound(_rotated, **fixed)

    def run(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [T, heads, size] -> [T, heads, size]."""
        n = x.shape[0]
        out = x.new_empty(n, heads, width)
        launch((n, blocks), x, cos, sin, out, x.stride(0), x.stride(1))
        return out

    return run


def make(context: OpContext) -> Op:
    """The kernel in the measured configuration, or in the default one."""
    return make_with(context, choose(context, default(context)))
