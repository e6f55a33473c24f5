"""attn.merge: joins attention over parts of the keys by their lse. One program for each token and block of heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers import Op

from llmcore_triton.attention.tile import LN_2, LOG2_E
from llmcore_triton.launch import Bound, overlaps, release, wait
from llmcore_triton.rows import choose, power, size, small


@triton.jit(do_not_specialize=["lse_part"], do_not_specialize_on_alignment=["lses", "lse"])
def joined(  # type: ignore[no-untyped-def]
    parts, lses, out, lse, part_stride, token_stride, head_stride, lse_part, lse_token, lse_head,
    COUNT: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, block of heads). A part with an lse of -inf is not read."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    at = tl.arange(0, BLOCK)
    there = heads < HEADS
    from_lse = lses + token * lse_token + heads * lse_head
    from_part = parts + token * token_stride + heads[:, None] * head_stride + at[None, :]
    wait(PDL)
    release(PDL)
    top = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
    for part in tl.static_range(COUNT):
        top = tl.maximum(top, tl.load(from_lse + part * lse_part, mask=there, other=float("-inf")))
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    acc = tl.zeros([BLOCK_HEADS, BLOCK], tl.float32)
    for part in tl.static_range(COUNT):
        own = tl.load(from_lse + part * lse_part, mask=there, other=float("-inf"))
        weight = tl.exp2((own - base) * LOG2_E)
        total += weight
        some = (weight > 0)[:, None] & (at < SIZE)[None, :]
        x = tl.load(from_part, mask=some, other=0.0)
        acc += x.to(tl.float32) * weight[:, None]
        from_part += part_stride
    known = tl.where(total > 0, total, 1.0)
    to = token * HEADS + heads
    y = (acc / known[:, None]).to(out.dtype.element_ty)
    tl.store(out + to[:, None] * SIZE + at[None, :], y, mask=there[:, None] & (at < SIZE)[None, :])
    tl.store(lse + to, top + tl.log2(known) * LN_2, mask=there)


def default(context: OpContext) -> dict[str, Any]:
    """The default: few heads per program if there are few tokens."""
    return {"heads": 4, "num_warps": 2} if small(context) else {"heads": 16, "num_warps": 8}


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """2 to 16 heads per program."""
    for heads, warps in ((2, 1), (4, 1), (4, 2), (8, 4), (16, 4), (16, 8)):
        yield {"heads": heads, "num_warps": warps}


def make_with(context: OpContext, config: Mapping[str, Any]) -> Op:
    """The kernel in the configuration `config`."""
    heads, width = size(context, "heads"), size(context, "value_size")
    pdl, block = overlaps(context), config["heads"]
    launch = Bound(
        joined,
        HEADS=heads,
        SIZE=width,
        BLOCK=power(width),
        BLOCK_HEADS=block,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=config["num_warps"],
    )

    def run(parts: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """parts [P, T, heads, size], lses [P, T, heads] -> ([T, heads, size], [T, heads])."""
        count, tokens = lses.shape[:2]
        out = parts.new_empty(tokens, heads, width)
        lse = lses.new_empty(tokens, heads)
        strides = (*parts.stride()[:3], *lses.stride())
        launch.but(COUNT=count)((tokens, -(-heads // block)), parts, lses, out, lse, *strides)
        return out, lse

    return run


def make(context: OpContext) -> Op:
    """The kernel in the measured configuration, or in the default one."""
    return make_with(context, choose(context, default(context)))
