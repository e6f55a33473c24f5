"""The part of attention that reads keys, values and latents from a pool, as the layout stores them.

Numbers of the model's type are read as they are. Codes become the numbers that the layout's `gather` gives, see
`quantized_kv`. That takes several instructions for each number, and decode at large batches has few to spare.

So matrix products may use f16 instead (HALF), which holds all codes exactly and numbers four times as precisely as
bf16. Where one mark belongs to a token's whole head, the tile has the codes, and the marks are applied to the scores
and to the weights of values.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers import DTYPES, spec_of

from llmcore_triton.launch import INTERPRETED
from llmcore_triton.quantized_kv import counted, decoded, exactly, marks_of, of_layout
from llmcore_triton.specs.layouts import QUANTIZED

# The bits 0x6400 | n are the f16 number 1024 + n. An int8 is the byte n - 128.
_BYTES = """{{
    .reg .b32 n, zero;
    xor.b32 n, $2, 0x{flip:08x};
    mov.b32 zero, 0x{zero:08x};
    prmt.b32 $0, n, 0x64646464, 0x4140;
    prmt.b32 $1, n, 0x64646464, 0x4342;
    sub.f16x2 $0, $0, zero;
    sub.f16x2 $1, $1, zero;
}}"""
_FROM_I8 = tl.constexpr(_BYTES.format(flip=0x80808080, zero=0x64806480))
_FROM_U8 = tl.constexpr(_BYTES.format(flip=0, zero=0x64006400))
_FROM_E4M3 = tl.constexpr("""{
    .reg .b16 a, b;
    mov.b32 {a, b}, $2;
    cvt.rn.f16x2.e4m3x2 $0, a;
    cvt.rn.f16x2.e4m3x2 $1, b;
}""")
_FROM_U4 = tl.constexpr("""{
    .reg .b32 low, high, zero;
    and.b32 low, $4, 0x0f0f0f0f;
    shr.b32 high, $4, 4;
    and.b32 high, high, 0x0f0f0f0f;
    mov.b32 zero, 0x64006400;
    prmt.b32 $0, low, 0x64646464, 0x4140;
    prmt.b32 $1, low, 0x64646464, 0x4342;
    prmt.b32 $2, high, 0x64646464, 0x4140;
    prmt.b32 $3, high, 0x64646464, 0x4342;
    sub.f16x2 $0, $0, zero;
    sub.f16x2 $1, $1, zero;
    sub.f16x2 $2, $2, zero;
    sub.f16x2 $3, $3, zero;
}""")
"""PTX that makes f16 of four bytes of codes, or of the lower and the upper halves of four bytes."""
_ASM = tl.constexpr(not INTERPRETED)

_WORDS = tl.constexpr(tl.pointer_type(tl.uint32))
_ONES = tl.constexpr(0x3C003C00)
"""Two f16 ones."""


def stored_as(context: OpContext) -> dict[str, Any]:
    """Returns K_CODES, K_GROUP, V_CODES and V_GROUP for the context's layout of heads, and launch options."""
    spec = spec_of(context)
    key, value = QUANTIZED.get(str(context.layout), (None, None))
    constants = of_layout(key, spec.key_size, "K_") | of_layout(value, spec.value_size, "V_")
    return constants | exactly(context.dtype, key, value)


def half(context: OpContext) -> bool:
    """True if products over the context's layout are of f16.

    Under `deterministic` they are not: the numbers of a token are those of `gather` wherever they are read.
    """
    spec = spec_of(context)
    whole = all(size >= 16 and size & (size - 1) == 0 for size in (spec.key_size, spec.value_size))
    return context.layout in QUANTIZED and context.dtype != "f32" and whole and not context.deterministic


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
        rows = tl.load(pool + head * SIZE + slot[:, None] * stride + at[None, :], mask=inside, other=0.0)
    else:
        if CODES == "u4":
            # elements d and d + SIZE / 2 share a byte, which a warp loads once for both
            MIDDLE: tl.constexpr = SIZE // 2
            pairs = pool + head * MIDDLE + slot[:, None] * stride + (at % MIDDLE)[None, :]
            codes = (tl.load(pairs, mask=inside, other=0.0) >> (at // MIDDLE * 4).to(tl.uint8)[None, :]) & 15
        else:
            codes = tl.load(pool + head * SIZE + slot[:, None] * stride + at[None, :], mask=inside, other=0.0)
        scale, least = marks_of(marks, slot, head, there, BLOCK, HEADS, SIZE, CODES, GROUP)
        rows = decoded(codes, scale, least, CODES, DTYPE)
    return rows


# --- f16 ---------------------------------------------------------------------------------------------------------


@triton.constexpr_function
def folded(size: int, codes: str, group: int) -> bool:
    """True if a head of codes is one group, so that `half_rows` leaves its marks to `head_marks`."""
    return codes != "" and group in (0, size)


@triton.jit
def half_rows(  # type: ignore[no-untyped-def]
    pool, marks, head, slot, there, stride,
    HEADS: tl.constexpr, SIZE: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """Returns one head's numbers at slots [N] where `there`, [N, SIZE] f16; its codes if `folded`.

    SPREAD: the tile is the right operand of a product whose columns are the head's elements. Tensor cores cannot
    load bytes in that order, so the f16 numbers pass through shared memory.
    """
    N: tl.constexpr = slot.shape[0]
    if CODES == "u4":
        MIDDLE: tl.constexpr = SIZE // 2
        at = pool + head * MIDDLE + slot[:, None] * stride + tl.arange(0, MIDDLE)[None, :]
        pairs = tl.load(at, mask=there[:, None], other=0.0)
        low, high = _halves(pairs, SPREAD)
        rows = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (N, SIZE))
    else:
        at = pool + head * SIZE + slot[:, None] * stride + tl.arange(0, SIZE)[None, :]
        rows = _half(tl.load(at, mask=there[:, None], other=0.0), CODES, SPREAD)
    if not folded(SIZE, CODES, GROUP):
        GROUPS: tl.constexpr = SIZE // GROUP
        at = (slot * HEADS + head)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
        scale, least = _marks(marks, at, there[:, None], CODES)
        groups = tl.reshape(rows, (N, GROUPS, GROUP)) * scale[:, :, None]
        if counted(CODES):
            groups += least[:, :, None]
        rows = tl.reshape(groups, (N, SIZE))
    return rows


@triton.jit
def head_marks(  # type: ignore[no-untyped-def]
    marks, head, slot, there, HEADS: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr
):
    """Returns the scales and least values of a head at slots [N], [N] f32, or [1] if scales are fixed.

    The scales where not `there` are 1. Codes with a sign have no least values: the scales stand in their place.
    """
    if GROUP == 0:
        scale = tl.load(marks + head + tl.arange(0, 1))
        least = scale
    elif HEADS % 2 == 0 and not counted(CODES):
        # words of memory, each the scales of two heads: unlike smaller pieces, the compiler fetches these ahead
        words = tl.load(marks.to(_WORDS, bitcast=True) + slot * (HEADS // 2) + head // 2, mask=there, other=_ONES)
        scale = _f16(words >> (head % 2 * 16)).to(tl.float32)
        least = scale
    else:
        scale, least = _marks(marks, slot * HEADS + head, there, CODES)
        scale, least = scale.to(tl.float32), least.to(tl.float32)
    return scale, least


@triton.jit
def _marks(marks, at, there, CODES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the f16 scales and least values of the groups `at`; 1 and 0 where not `there`."""
    if counted(CODES):
        # both are one word of memory
        words = tl.load(marks.to(_WORDS, bitcast=True) + at, mask=there, other=_ONES & 0xFFFF)
        scale, least = _f16(words), _f16(words >> 16)
    else:
        scale = tl.load(marks + at, mask=there, other=1.0)
        least = scale
    return scale, least


@triton.jit
def _f16(words):  # type: ignore[no-untyped-def]
    """Returns the lower halves of words as f16."""
    return words.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def _half(codes, CODES: tl.constexpr, SPREAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns codes as f16. The compiler does not move an impure conversion behind shared memory."""
    if _ASM:
        ASM: tl.constexpr = _FROM_I8 if CODES == "i8" else _FROM_U8 if CODES == "u8" else _FROM_E4M3
        rows = tl.inline_asm_elementwise(ASM, "=r,=r,r", [codes], dtype=tl.float16, is_pure=not SPREAD, pack=4)
    else:
        rows = codes.to(tl.float32).to(tl.float16)
    return rows


@triton.jit
def _halves(pairs, SPREAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the lower and the upper 4-bit codes as f16."""
    if _ASM:
        low, high = tl.inline_asm_elementwise(
            _FROM_U4, "=r,=r,=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=not SPREAD, pack=4
        )
    else:
        low, high = (pairs & 15).to(tl.float16), (pairs >> 4).to(tl.float16)
    return low, high
