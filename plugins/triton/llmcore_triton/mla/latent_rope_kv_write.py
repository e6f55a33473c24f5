"""latent_rope_kv_write in one pass: norms, rotates and stores a token's row, and rotates its queries in place.

The first program of a token takes the row. Each other one takes a block of query heads, and touches only their rotated
part. The layout's name says how the latent is stored, see `quantized_kv`. Over a layout that quantizes, the kernel
leaves in the row what it stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers import KV, Op

from llmcore_triton.launch import Bound, overlaps, release, wait
from llmcore_triton.quantized_kv import halves_of, of_layout, store_heads
from llmcore_triton.rope import turned
from llmcore_triton.rows import choose, power, size, small
from llmcore_triton.specs.layouts import LATENT, QUANTIZED_LATENT


@triton.jit
def norm_turn_and_store(  # type: ignore[no-untyped-def]
    q,
    row,
    weight,
    cos,
    sin,
    pool,
    codes,
    scales,
    slots,
    eps,
    q_stride,
    q_head_stride,
    row_stride,
    pool_stride,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    CODES: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, block). Block 0 is the row, and the others are query heads.

    `pool` has whole rows, or if the latent is quantized (CODES) their rotated parts.
    """
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    pairs = tl.arange(0, HALF)
    turning = pairs < ROTATED // 2
    # both hold each angle twice: read the first half of cos, and the second half of sin, which is not negated
    cos += token * ROTATED + pairs
    sin += token * ROTATED + ROTATED // 2 + pairs
    if block == 0:
        source = row + token * row_stride
        if CODES == "":
            at = tl.arange(0, BLOCK)
            inside = at < LATENT
            gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        else:
            # the latent is the one head of its row
            head = tl.arange(0, 1)
            gain_low, gain_high = halves_of(weight + head, head == 0, LATENT)
        wait(PDL)
        release(PDL)
        slot = tl.load(slots + token).to(tl.int64)
        c, s = tl.load(cos, mask=turning, other=0.0), tl.load(sin, mask=turning, other=0.0)
        if CODES == "":
            x = tl.load(source + at, mask=inside, other=0.0)
        else:
            low, high = halves_of(source + head, head == 0, LATENT)
        first = tl.load(source + LATENT + pairs, mask=turning, other=0.0)
        second = tl.load(source + LATENT + ROTATED // 2 + pairs, mask=turning, other=0.0)
        if CODES == "":
            wide = x.to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / LATENT + eps)
            y = (wide * scale * gain).to(x.dtype)
        else:
            wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
            squares = tl.sum(wide_low * wide_low, axis=1) + tl.sum(wide_high * wide_high, axis=1)
            scale = tl.rsqrt(squares / LATENT + eps)[:, None]
            low = (wide_low * scale * gain_low.to(tl.float32)).to(low.dtype)
            high = (wide_high * scale * gain_high.to(tl.float32)).to(high.dtype)
        left, right = turned(first[None, :], second[None, :], c, s, first.dtype)
        left, right = tl.reshape(left, [HALF]), tl.reshape(right, [HALF])
        target = pool + slot * pool_stride
        if CODES == "":
            tl.store(source + at, y, mask=inside)
            tl.store(target + at, y, mask=inside)
            target += LATENT
        else:
            store_heads(source + head, low, high, codes, scales, slot, head, head == 0, 1, LATENT, CODES, GROUP)
        tl.store(source + LATENT + pairs, left, mask=turning)
        tl.store(target + pairs, left, mask=turning)
        tl.store(source + LATENT + ROTATED // 2 + pairs, right, mask=turning)
        tl.store(target + ROTATED // 2 + pairs, right, mask=turning)
    else:
        heads = (block - 1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        keep = (heads < HEADS)[:, None] & turning[None, :]
        parts = q + token * q_stride + heads[:, None] * q_head_stride + (SIZE - ROTATED + pairs)[None, :]
        wait(PDL)
        release(PDL)
        c, s = tl.load(cos, mask=turning, other=0.0), tl.load(sin, mask=turning, other=0.0)
        one = tl.load(parts, mask=keep, other=0.0)
        other = tl.load(parts + ROTATED // 2, mask=keep, other=0.0)
        turned_one, turned_other = turned(one, other, c, s, one.dtype)
        tl.store(parts, turned_one, mask=keep)
        tl.store(parts + ROTATED // 2, turned_other, mask=keep)


def default(context: OpContext) -> dict[str, Any]:
    """The default: few heads per program if there are few tokens."""
    return {"heads": 8, "num_warps": 2} if small(context) else {"heads": 16, "num_warps": 4}


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """4 to 32 heads per program."""
    for heads, warps in ((4, 1), (4, 2), (8, 1), (8, 2), (8, 4), (16, 2), (16, 4), (32, 4)):
        yield {"heads": heads, "num_warps": warps}


def make_with(context: OpContext, config: Mapping[str, Any]) -> Op:
    """The kernel in the configuration `config`."""
    heads, latent, rotated = (size(context, name) for name in ("heads", "latent", "rotated"))
    pdl, block = overlaps(context), config["heads"]
    blocks = 1 + -(-heads // block)
    form = QUANTIZED_LATENT.get(context.layout or LATENT)
    launch = Bound(
        norm_turn_and_store,
        HEADS=heads,
        SIZE=size(context, "size"),
        LATENT=latent,
        ROTATED=rotated,
        BLOCK=power(latent),
        HALF=power(rotated // 2),
        BLOCK_HEADS=block,
        **of_layout(form, latent),
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=config["num_warps"],
    )

    def run(
        q: torch.Tensor,
        row: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv: KV,
        slots: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [T, heads, size], row [T, latent + rotated], weight [latent] -> q and row themselves, changed in place."""
        codes, scales, pool = kv if len(kv) == 3 else kv * 3
        strides = (*q.stride()[:2], row.stride(0), pool.stride(0))
        launch((q.shape[0], blocks), q, row, weight, cos, sin, pool, codes, scales, slots, eps, *strides)
        return q, row

    return run


def make(context: OpContext) -> Op:
    """The kernel in the measured configuration, or in the default one."""
    return make_with(context, choose(context, default(context)))
