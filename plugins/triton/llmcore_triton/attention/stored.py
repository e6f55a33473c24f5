"""The part of attention that reads keys, values and latents from a pool, as the layout stores them.

Numbers of the model's type are read as they are. Codes become the numbers that the layout's `gather` gives, see
`quantized_kv`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers import DTYPES, spec_of

from llmcore_triton.quantized_kv import as_f16, decoded, exactly, marks_of, of_layout
from llmcore_triton.specs.layouts import QUANTIZED


def stored_as(context: OpContext) -> dict[str, Any]:
    """Returns K_CODES, K_GROUP, V_CODES and V_GROUP for the context's layout of heads, and launch options."""
    spec = spec_of(context)
    key, value = QUANTIZED.get(str(context.layout), (None, None))
    constants = of_layout(key, spec.key_size, "K_") | of_layout(value, spec.value_size, "V_")
    return constants | exactly(context.dtype, key, value)


def pools(kv: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor | None, ...]:
    """Returns the pools of keys and of values, and their marks or fixed scales, or None."""
    return kv if len(kv) == 4 else (*kv, None, None)


def element_bytes(context: OpContext) -> int:
    """Returns the bytes of an element of keys and values where a program keeps them before it uses them."""
    return 1 if context.layout in QUANTIZED else DTYPES[context.dtype].itemsize


@triton.jit
def inside_of(there, at, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the mask of a [tokens, sizes] block."""
    if at.shape[0] == SIZE:
        inside = there[:, None]
    else:
        inside = there[:, None] & (at < SIZE)[None, :]
    return inside


@triton.jit
def numbers_at(pool, head, slot, stride, at, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns where the numbers `at` [BLOCK] of one head are at slots [N], [N, BLOCK]. `stride`: from slot to slot."""
    return pool + head * SIZE + slot[:, None] * stride + at[None, :]


@triton.jit
def rows_of(  # type: ignore[no-untyped-def]
    pool, marks, head, slot, there, stride,
    BLOCK: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Returns one head's numbers at slots [N] where `there`, [N, BLOCK >= SIZE], in DTYPE. The others are finite.

    `stride`: elements of the pool from slot to slot.
    """
    at = tl.arange(0, BLOCK)
    inside = inside_of(there, at, SIZE)
    if CODES == "":
        rows = tl.load(numbers_at(pool, head, slot, stride, at, SIZE), mask=inside, other=0.0)
    else:
        if CODES == "u4":
            # elements d and d + SIZE / 2 share a byte, which a warp loads once for both
            MIDDLE: tl.constexpr = SIZE // 2
            pairs = pool + head * MIDDLE + slot[:, None] * stride + (at % MIDDLE)[None, :]
            codes = (tl.load(pairs, mask=inside, other=0.0) >> (at // MIDDLE * 4).to(tl.uint8)[None, :]) & 15
        else:
            codes = tl.load(numbers_at(pool, head, slot, stride, at, SIZE), mask=inside, other=0.0)
            if CODES == "e4m3":
                # of latents, which two products take, the compiler would else not load codes ahead
                codes = as_f16(codes, CODES, True)
        scale, least = marks_of(marks, slot, head, there, BLOCK, HEADS, SIZE, CODES, GROUP)
        rows = decoded(codes, scale, least, CODES, DTYPE)
    return rows
