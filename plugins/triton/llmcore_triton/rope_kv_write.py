"""rope_kv_write in one pass: rotates queries and keys in place, and also stores keys and values in the pool.

With NORM the same kernel is qk_norm_rope_kv_write. A program takes one token and a block of heads: either of queries
and keys, or of values. The layout's name says how keys and values are stored, see `quantized_kv`. Over a layout that
quantizes, the kernel leaves in `qk` and `v` what it stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers import KV, Op

from llmcore_triton.launch import Bound, overlaps, release, wait
from llmcore_triton.quantized_kv import exactly, halves_of, of_layout, store_heads
from llmcore_triton.rope import block_of_heads, turned
from llmcore_triton.rows import choose, power, size, small
from llmcore_triton.specs.layouts import QUANTIZED, TOKEN


@triton.jit
def _gains(q_weight, k_weight, columns, inside, is_query):  # type: ignore[no-untyped-def]
    """Returns the norms' weights of a block of heads at `columns`, [heads, columns] f32."""
    q = tl.load(q_weight + columns, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(k_weight + columns, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_query[:, None], q[None, :], k[None, :])


@triton.jit
def _squares(value):  # type: ignore[no-untyped-def]
    wide = value.to(tl.float32)
    return tl.sum(wide * wide, axis=1)


@triton.jit
def rotate_and_store(  # type: ignore[no-untyped-def]
    qk,
    v,
    cos,
    sin,
    keys,
    values,
    k_marks,
    v_marks,
    slots,
    q_weight,
    k_weight,
    eps,
    qk_stride,
    qk_head_stride,
    v_stride,
    v_head_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROTATED: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    QK_BLOCKS: tl.constexpr,
    NORM: tl.constexpr,
    K_CODES: tl.constexpr,
    K_GROUP: tl.constexpr,
    V_CODES: tl.constexpr,
    V_GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, block). The first QK_BLOCKS blocks are queries and keys, and the others are values."""
    release(PDL)
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if block < QK_BLOCKS:
        heads = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        pairs = tl.arange(0, HALF)
        there = heads < HEADS + KV_HEADS
        turning = pairs < ROTATED // 2
        others = ROTATED + tl.arange(0, REST)
        is_query = heads < HEADS
        if NORM:
            gain_first = _gains(q_weight, k_weight, pairs, turning, is_query)
            gain_second = _gains(q_weight, k_weight, ROTATED // 2 + pairs, turning, is_query)
            if ROTATED < SIZE:
                gain_rest = _gains(q_weight, k_weight, others, others < SIZE, is_query)
        keep = there[:, None] & turning[None, :]
        beside = there[:, None] & (others < SIZE)[None, :]
        source = qk + token * qk_stride + heads[:, None] * qk_head_stride
        wait(PDL)
        slot = tl.load(slots + token).to(tl.int64)
        # both hold each angle twice: read the first half of cos, and the second half of sin, which is not negated
        c = tl.load(cos + token * ROTATED + pairs, mask=turning, other=0.0)
        s = tl.load(sin + token * ROTATED + ROTATED // 2 + pairs, mask=turning, other=0.0)
        first = tl.load(source + pairs[None, :], mask=keep, other=0.0)
        second = tl.load(source + ROTATED // 2 + pairs[None, :], mask=keep, other=0.0)
        if ROTATED < SIZE:
            rest = tl.load(source + others[None, :], mask=beside, other=0.0)
        if NORM:
            squares = _squares(first) + _squares(second)
            if ROTATED < SIZE:
                squares += _squares(rest)
            scale = tl.rsqrt(squares / SIZE + eps)[:, None]
            # a norm rounds its result before rope
            first = (first.to(tl.float32) * scale * gain_first).to(first.dtype)
            second = (second.to(tl.float32) * scale * gain_second).to(second.dtype)
            if ROTATED < SIZE:
                rest = (rest.to(tl.float32) * scale * gain_rest).to(rest.dtype)
                tl.store(source + others[None, :], rest, mask=beside)
        left, right = turned(first, second, c, s, first.dtype)
        if K_CODES != "" and ROTATED == SIZE:
            # keys follow when they are stored
            keep = keep & is_query[:, None]
        tl.store(source + pairs[None, :], left, mask=keep)
        tl.store(source + ROTATED // 2 + pairs[None, :], right, mask=keep)
        if (block + 1) * BLOCK_HEADS > HEADS:
            if K_CODES == "":
                target = keys + slot * (KV_HEADS * SIZE) + (heads - HEADS)[:, None] * SIZE
                is_key = (heads >= HEADS)[:, None]
                tl.store(target + pairs[None, :], left, mask=keep & is_key)
                tl.store(target + ROTATED // 2 + pairs[None, :], right, mask=keep & is_key)
                if ROTATED < SIZE:
                    tl.store(target + others[None, :], rest, mask=beside & is_key)
            else:
                new = there & (heads >= HEADS)
                origin = qk + token * qk_stride + heads * qk_head_stride
                if ROTATED < SIZE:
                    # rope's halves are not the head's; this reads what other threads of the program have written
                    tl.debug_barrier()
                    low, high = halves_of(origin, new, SIZE)
                else:
                    low, high = left, right
                store_heads(
                    origin, low, high, keys, k_marks, slot, heads - HEADS, new, KV_HEADS, SIZE, K_CODES, K_GROUP
                )
    else:
        kv_heads = (block - QK_BLOCKS) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        columns = tl.arange(0, VALUE)
        inside = (kv_heads < KV_HEADS)[:, None] & (columns < VALUE_SIZE)[None, :]
        wait(PDL)
        place = tl.load(slots + token).to(tl.int64)
        if V_CODES == "":
            value = tl.load(v + token * v_stride + kv_heads[:, None] * v_head_stride + columns[None, :], mask=inside)
            destination = values + place * (KV_HEADS * VALUE_SIZE) + kv_heads[:, None] * VALUE_SIZE
            tl.store(destination + columns[None, :], value, mask=inside)
        else:
            own = kv_heads < KV_HEADS
            begin = v + token * v_stride + kv_heads * v_head_stride
            low, high = halves_of(begin, own, VALUE_SIZE)
            store_heads(
                begin, low, high, values, v_marks, place, kv_heads, own, KV_HEADS, VALUE_SIZE, V_CODES, V_GROUP
            )


def default(context: OpContext) -> Mapping[str, Any]:
    """The default: few heads per program if there are few tokens, or if heads are quantized, which takes registers."""
    many = 8 if context.layout in QUANTIZED else 16
    return block_of_heads(context, 4 if small(context) else many)


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """2 to 32 heads per program."""
    for heads in (2, 4, 8, 16, 32):
        yield block_of_heads(context, heads)


def by_value_size(context: OpContext, config: Mapping[str, Any], *, norm: bool) -> tuple[Callable[[int], Bound], int]:
    """Returns (size of a value -> the kernel in the configuration `config`, blocks of heads per token)."""
    heads, kv_heads, width, rotated = (size(context, name) for name in ("heads", "kv_heads", "size", "rotated"))
    pdl, block = overlaps(context), config["heads"]
    qk_blocks = -(-(heads + kv_heads) // block)
    key, value = QUANTIZED.get(context.layout or TOKEN, (None, None))
    launch = Bound(
        rotate_and_store,
        HEADS=heads,
        KV_HEADS=kv_heads,
        SIZE=width,
        ROTATED=rotated,
        HALF=power(rotated // 2),
        REST=power(width - rotated),
        BLOCK_HEADS=block,
        QK_BLOCKS=qk_blocks,
        NORM=norm,
        **of_layout(key, width, "K_"),
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=config["num_warps"],
        **exactly(context.dtype, key, value),
    )

    @cache
    def over(value_size: int) -> Bound:
        return launch.but(VALUE_SIZE=value_size, VALUE=power(value_size), **of_layout(value, value_size, "V_"))

    return over, qk_blocks + -(-kv_heads // block)


def four(kv: KV) -> KV:
    """Returns the keys, the values, and the marks of both. Tensors without a meaning stand in for marks."""
    return (*kv, *kv)[:4]


def make_with(context: OpContext, config: Mapping[str, Any]) -> Op:
    """The kernel in the configuration `config`."""
    kernel, blocks = by_value_size(context, config, norm=False)

    def run(
        qk: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv: KV,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """qk [T, heads + kv_heads, size], v [T, kv_heads, value_size] -> qk itself, rotated."""
        parts = (qk, v, cos, sin, *four(kv), slots, qk, qk, 0.0, *qk.stride()[:2], *v.stride()[:2])
        kernel(v.shape[2])((qk.shape[0], blocks), *parts)
        return qk

    return run


def make(context: OpContext) -> Op:
    """The kernel in the measured configuration, or in the default one."""
    return make_with(context, choose(context, default(context)))
