"""The device part of the KV layouts that quantize: the codes and marks of heads, and the numbers they stand for.

A pool has codes [slots, heads, bytes], and marks: scales [slots, heads, groups], or (scale, least value) pairs
[slots, heads, groups, 2] if the codes are unsigned. Fixed scales are constants [heads] f32 instead.

Kernels take these constants of the keys, of the values, or of the latent, which come from the layout's name
(`of_layout`). CODES: a `Form`'s codes, or "" for numbers in the model's type. GROUP: elements of a head that share a
mark, or 0 for fixed scales.

Two 4-bit codes share a byte: those of elements d and d + WIDTH / 2 of a head, the lower bits first. So heads are
encoded in two halves: [heads, BLOCK] with the elements from 0, and the same with those from `middle(WIDTH)`.

A number is code * scale (+ least value), in f32, rounded once to the model's type, as the layouts' `gather` computes
it. The product is exact if marks are f16. If they are f32, which only f32 models have, a product and a sum in one
instruction would round differently: launch such kernels with `exactly(dtype)`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from llmcore_triton.launch import INTERPRETED
from llmcore_triton.specs.layouts import Form

ROUNDING = tl.constexpr(1.5 * 2**23)
"""Added to and subtracted from a number below 2**22, it rounds the number to the nearest integer, halves to even."""

_WORDS = tl.constexpr(tl.pointer_type(tl.uint32))
_ONES = tl.constexpr(0x3C003C00)
"""Two f16 ones."""

_LEAST_F16, _LEAST_F32 = tl.constexpr(2.0**-24), tl.constexpr(2.0**-126)
"""The least scales: the least positive f16, and the least normal f32."""


def of_layout(form: Form | None, width: int, prefix: str = "") -> dict[str, Any]:
    """Returns CODES and GROUP, named with `prefix`, of heads of `width` elements. `form` None: not quantized."""
    if form is None:
        return {f"{prefix}CODES": "", f"{prefix}GROUP": 0}
    group = 0 if form.fixed else min(form.group or width, width)
    return {f"{prefix}CODES": form.codes, f"{prefix}GROUP": group}


def exactly(dtype: str, *forms: Form | None) -> dict[str, Any]:
    """Returns the launch options with which numbers of `dtype`, stored in `forms`, have the bits of `gather`."""
    least = any(form is not None and form.codes in ("u8", "u4") for form in forms)
    return {"enable_fp_fusion": False} if dtype == "f32" and least else {}


@triton.constexpr_function
def counted(codes: str) -> bool:
    """True if codes count from a least value."""
    return codes in ("u8", "u4")


# --- decoding ----------------------------------------------------------------------------------------------------

# The bits 0x6400 | n are the f16 number 1024 + n. An int8 is the byte n - 128.
_FLIPPED = {"i8": "xor.b32 n, {codes}, 0x80808080;", "u8": "mov.b32 n, {codes};"}
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
"""PTX that makes f16 of the lower and the upper halves of four bytes."""

_ASM = tl.constexpr(not INTERPRETED)


@triton.constexpr_function
def offset(codes: str) -> int:
    """The number that `raised_rows` and `raised_columns` add to codes of a byte. f16 holds the sum exactly."""
    return {"i8": 1024 + 128, "u8": 1024, "e4m3": 0}[codes]


@triton.constexpr_function
def _of_four(codes: str) -> str:
    """PTX that makes four f16 of four bytes."""
    if codes == "e4m3":
        body = "mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b;"
    else:
        flipped = _FLIPPED[codes].format(codes="$2")
        body = f"{flipped} prmt.b32 $0, n, 0x64646464, 0x4140; prmt.b32 $1, n, 0x64646464, 0x4342;"
    return f"{{ .reg .b32 n; .reg .b16 a, b; {body} }}"


@triton.constexpr_function
def _of_two(codes: str, odd: int) -> str:
    """PTX that makes two f16 of the first bytes of two pairs, or of the second bytes if `odd`."""
    if codes == "e4m3":
        body = f"prmt.b32 n, $1, 0, {0x4431 if odd else 0x4420}; mov.b32 {{a, b}}, n; cvt.rn.f16x2.e4m3x2 $0, a;"
    else:
        flipped = _FLIPPED[codes].format(codes="$1")
        body = f"{flipped} prmt.b32 $0, n, 0x64646464, {0x4341 if odd else 0x4240};"
    return f"{{ .reg .b32 n; .reg .b16 a, b; {body} }}"


@triton.jit
def raised_rows(codes, CODES: tl.constexpr, SPREAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns codes of a byte plus `offset(CODES)` as f16.

    SPREAD: the numbers pass through shared memory, because they are an operand of a product over tokens, or of two
    products. The compiler does not move an impure conversion behind shared memory. It would then not load codes ahead.
    """
    if _ASM:
        ASM: tl.constexpr = _of_four(CODES)
        rows = tl.inline_asm_elementwise(ASM, "=r,=r,r", [codes], dtype=tl.float16, is_pure=not SPREAD, pack=4)
    else:
        rows = (codes.to(tl.float32) + offset(CODES)).to(tl.float16)
    return rows


@triton.jit
def raised_columns(pairs, CODES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns two blocks: the first bytes of `pairs` (int16), and their second bytes, each as in `raised_rows`."""
    if _ASM:
        EVEN: tl.constexpr = _of_two(CODES, 0)
        ODD: tl.constexpr = _of_two(CODES, 1)
        even = tl.inline_asm_elementwise(EVEN, "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2)
        odd = tl.inline_asm_elementwise(ODD, "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2)
    else:
        KIND: tl.constexpr = tl.int8 if CODES == "i8" else tl.uint8 if CODES == "u8" else tl.float8e4nv
        even = raised_rows((pairs & 255).to(tl.uint8).to(KIND, bitcast=True), CODES, False)
        odd = raised_rows((pairs >> 8).to(tl.uint8).to(KIND, bitcast=True), CODES, False)
    return even, odd


@triton.jit
def as_f16(codes, CODES: tl.constexpr, SPREAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns codes of a byte as f16, which holds them exactly. For SPREAD see `raised_rows`."""
    rows = raised_rows(codes, CODES, SPREAD)
    if offset(CODES) > 0:
        rows -= offset(CODES)
    return rows


@triton.jit
def halves_as_f16(pairs, SPREAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the lower and the upper 4-bit codes as f16. For SPREAD see `raised_rows`."""
    if _ASM:
        low, high = tl.inline_asm_elementwise(
            _FROM_U4, "=r,=r,=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=not SPREAD, pack=4
        )
    else:
        low, high = (pairs & 15).to(tl.float16), (pairs >> 4).to(tl.float16)
    return low, high


@triton.jit
def decoded(codes, scale, least, CODES: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the numbers, in DTYPE, that codes stand for. Of 4-bit codes there is one per element here.

    `scale` and `least` are what `marks_of` returns, or their likes for another block of tokens.
    """
    number = codes.to(tl.float32) * scale
    if counted(CODES):
        number += least
    return number.to(DTYPE)


@triton.jit
def marks_of(  # type: ignore[no-untyped-def]
    marks, slot, head, there,
    BLOCK: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, CODES: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Returns (scale, least value) in f32 of the BLOCK >= WIDTH elements of a head at slots [N] where `there`.

    The shapes are [N, BLOCK], or [N, 1] if the whole head shares a mark, or scalars if scales are fixed. See
    `group_marks` for the other slots and for signed codes.
    """
    if GROUP == 0:
        scale = tl.load(marks + head)
        least = scale
    elif GROUP == WIDTH:
        scale, least = head_marks(marks, head, slot, there, HEADS, CODES, GROUP)
        scale, least = scale[:, None], least[:, None]
    else:
        group = tl.arange(0, BLOCK // GROUP)[None, :]
        keep = there[:, None] & (group < WIDTH // GROUP)
        at = ((slot * HEADS + head) * (WIDTH // GROUP))[:, None] + group
        scale, least = group_marks(marks, at, keep, CODES)
        scale, least = spread(scale.to(tl.float32), BLOCK), spread(least.to(tl.float32), BLOCK)
    return scale, least


@triton.jit
def head_marks(  # type: ignore[no-untyped-def]
    marks, head, slot, there, HEADS: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr
):
    """Returns the scales and least values of a head at slots [N], [N] f32, or [1] if scales are fixed."""
    if GROUP == 0:
        scale = tl.load(marks + head + tl.arange(0, 1))
        least = scale
    elif HEADS % 2 == 0 and not counted(CODES) and marks.dtype.element_ty == tl.float16:
        # words of memory, each the scales of two heads: unlike smaller pieces, the compiler fetches these ahead
        words = tl.load(marks.to(_WORDS, bitcast=True) + slot * (HEADS // 2) + head // 2, mask=there, other=_ONES)
        scale = _f16(words >> (head % 2 * 16)).to(tl.float32)
        least = scale
    else:
        scale, least = group_marks(marks, slot * HEADS + head, there, CODES)
        scale, least = scale.to(tl.float32), least.to(tl.float32)
    return scale, least


@triton.jit
def group_marks(marks, at, there, CODES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the scales and least values of the groups `at`, as they are stored; 1 and 0 where not `there`.

    Codes with a sign have no least values: the scales stand in their place.
    """
    if not counted(CODES):
        scale = tl.load(marks + at, mask=there, other=1.0)
        least = scale
    elif marks.dtype.element_ty == tl.float16:
        # both are one word of memory
        words = tl.load(marks.to(_WORDS, bitcast=True) + at, mask=there, other=_ONES & 0xFFFF)
        scale, least = _f16(words), _f16(words >> 16)
    else:
        scale = tl.load(marks + 2 * at, mask=there, other=1.0)
        least = tl.load(marks + 2 * at + 1, mask=there, other=0.0)
    return scale, least


@triton.jit
def _f16(words):  # type: ignore[no-untyped-def]
    """Returns the lower halves of words as f16."""
    return words.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def spread(parts, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns [N, BLOCK], where each of `parts` [N, P] stands for BLOCK / P neighbours."""
    N: tl.constexpr = parts.shape[0]
    P: tl.constexpr = parts.shape[1]
    return tl.reshape(tl.broadcast_to(parts[:, :, None], [N, P, BLOCK // P]), [N, BLOCK])


# --- encoding ----------------------------------------------------------------------------------------------------


@triton.constexpr_function
def middle(width: int) -> int:
    """The first element of a head's second half."""
    return (width + 1) // 2


@triton.constexpr_function
def half_block(width: int) -> int:
    """The least power of two that holds a head's half."""
    return 1 << max((width - 1) // 2, 0).bit_length()


@triton.constexpr_function
def _shared(width: int, group: int) -> int:
    """Neighbours that share a mark in each half: a group, or half of one if a group lies across the border."""
    return group if width // 2 % group == 0 else group // 2


@triton.constexpr_function
def largest(codes: str) -> float:
    return {"i8": 127.0, "u8": 255.0, "u4": 15.0, "e4m3": 448.0}[codes]


@triton.jit
def halves_of(source, there, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the halves of the heads that begin at `source` [N], where `there`, [N, half_block(WIDTH)] each."""
    at = tl.arange(0, half_block(WIDTH))
    MIDDLE: tl.constexpr = middle(WIDTH)
    from_low = source[:, None] + at[None, :]
    low = tl.load(from_low, mask=there[:, None] & (at < MIDDLE)[None, :], other=0.0)
    high = tl.load(from_low + MIDDLE, mask=there[:, None] & (at < WIDTH - MIDDLE)[None, :], other=0.0)
    return low, high


@triton.jit
def store_heads(  # type: ignore[no-untyped-def]
    source, low, high, codes, marks, slot, heads, there,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Stores heads [N] where `there` of a token at `slot`, given as halves [N, BLOCK], and writes the numbers that
    were stored to `source` [N], where the heads begin."""
    BLOCK: tl.constexpr = low.shape[1]
    MIDDLE: tl.constexpr = middle(WIDTH)
    at = tl.arange(0, BLOCK)
    in_low, in_high = (at < MIDDLE)[None, :], (at < WIDTH - MIDDLE)[None, :]
    x, y = low.to(tl.float32), high.to(tl.float32)
    if GROUP == 0:
        scale = tl.load(marks + heads, mask=there, other=1.0)[:, None]
        x_scale, y_scale = scale, scale
        x_least, y_least = scale, scale
        x_each, y_each = tl.div_rn(1.0, scale), tl.div_rn(1.0, scale)
    else:
        SHARED: tl.constexpr = BLOCK if GROUP == WIDTH else _shared(WIDTH, GROUP)
        PARTS: tl.constexpr = 2 if counted(CODES) else 1
        TYPE: tl.constexpr = marks.dtype.element_ty
        if counted(CODES):
            x_most, y_most = _largest_of(x, y, in_low, in_high, SHARED, WIDTH, GROUP)
            x_least, y_least = _largest_of(-x, -y, in_low, in_high, SHARED, WIDTH, GROUP)
            x_least, y_least = (-x_least).to(TYPE).to(tl.float32), (-y_least).to(TYPE).to(tl.float32)
            x_scale, y_scale = _scale(x_most - x_least, TYPE, CODES), _scale(y_most - y_least, TYPE, CODES)
        else:
            x_most, y_most = _largest_of(tl.abs(x), tl.abs(y), in_low, in_high, SHARED, WIDTH, GROUP)
            x_scale, y_scale = _scale(x_most, TYPE, CODES), _scale(y_most, TYPE, CODES)
            x_least, y_least = x_scale, y_scale
        x_each, y_each = tl.div_rn(1.0, x_scale), tl.div_rn(1.0, y_scale)
        row = marks + ((slot * HEADS + heads) * (WIDTH // GROUP * PARTS))[:, None]
        if GROUP == WIDTH:
            tl.store(row, x_scale.to(TYPE), mask=there[:, None])
            if counted(CODES):
                tl.store(row + 1, x_least.to(TYPE), mask=there[:, None])
        else:
            part = tl.arange(0, BLOCK // SHARED)
            x_group = row + (part // (GROUP // SHARED) * PARTS)[None, :]
            y_group = row + ((MIDDLE // SHARED + part) // (GROUP // SHARED) * PARTS)[None, :]
            inside = there[:, None] & (part < MIDDLE // SHARED)[None, :]
            tl.store(x_group, x_scale.to(TYPE), mask=inside)
            tl.store(y_group, y_scale.to(TYPE), mask=inside)
            if counted(CODES):
                tl.store(x_group + 1, x_least.to(TYPE), mask=inside)
                tl.store(y_group + 1, y_least.to(TYPE), mask=inside)
            x_scale, y_scale = spread(x_scale, BLOCK), spread(y_scale, BLOCK)
            x_least, y_least = spread(x_least, BLOCK), spread(y_least, BLOCK)
            x_each, y_each = spread(x_each, BLOCK), spread(y_each, BLOCK)
    x_codes, y_codes = _coded(x, x_scale, x_each, x_least, CODES), _coded(y, y_scale, y_each, y_least, CODES)
    keep_low, keep_high = there[:, None] & in_low, there[:, None] & in_high
    KIND: tl.constexpr = codes.dtype.element_ty
    if CODES == "u4":
        into = codes + (slot * HEADS + heads)[:, None] * MIDDLE + at[None, :]
        tl.store(into, (x_codes | (y_codes << 4)).to(KIND), mask=keep_low)
    else:
        into = codes + (slot * HEADS + heads)[:, None] * WIDTH + at[None, :]
        tl.store(into, x_codes.to(KIND), mask=keep_low)
        tl.store(into + MIDDLE, y_codes.to(KIND), mask=keep_high)
    target = source[:, None] + at[None, :]
    tl.store(target, decoded(x_codes, x_scale, x_least, CODES, low.dtype), mask=keep_low)
    tl.store(target + MIDDLE, decoded(y_codes, y_scale, y_least, CODES, high.dtype), mask=keep_high)


@triton.jit
def _largest_of(  # type: ignore[no-untyped-def]
    x, y, in_x, in_y, SHARED: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr
):
    """Returns the largest number of the group of every SHARED neighbours of both halves, [N, BLOCK / SHARED] each.

    A NaN counts as infinity, which makes the scale infinite: the group reads as NaN.
    """
    x = tl.where(in_x, tl.where(x == x, x, float("inf")), float("-inf"))
    y = tl.where(in_y, tl.where(y == y, y, float("inf")), float("-inf"))
    if GROUP == WIDTH:
        x = tl.max(tl.maximum(x, y), 1)[:, None]
        y = x
    else:
        N: tl.constexpr = x.shape[0]
        P: tl.constexpr = x.shape[1] // SHARED
        x, y = tl.max(tl.reshape(x, [N, P, SHARED]), 2), tl.max(tl.reshape(y, [N, P, SHARED]), 2)
    if WIDTH > GROUP and GROUP > SHARED:
        # an odd number of groups: one of them lies across the border, and each has two parts
        part = tl.arange(0, P)[None, :]
        x_group, y_group = part // 2, (WIDTH // GROUP + part) // 2
        for group in tl.static_range(WIDTH // GROUP):
            from_x = tl.max(tl.where(x_group == group, x, float("-inf")), 1)
            from_y = tl.max(tl.where(y_group == group, y, float("-inf")), 1)
            both = tl.maximum(from_x, from_y)[:, None]
            x, y = tl.where(x_group == group, both, x), tl.where(y_group == group, both, y)
    return x, y


@triton.jit
def _scale(span, TYPE: tl.constexpr, CODES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the scale of groups whose numbers span `span`, in f32, as TYPE holds it."""
    LEAST: tl.constexpr = _LEAST_F16 if TYPE.primitive_bitwidth == 16 else _LEAST_F32
    return tl.maximum(tl.div_rn(span, largest(CODES)).to(TYPE).to(tl.float32), LEAST)


@triton.jit
def _coded(x, scale, each, least, CODES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns codes, as int32 or e4m3. `each`: 1 / scale."""
    MOST: tl.constexpr = largest(CODES)
    if counted(CODES):
        x -= least
    steps, exact = quotient(x, scale, each)
    if CODES == "e4m3":
        codes = to_e4m3(steps, exact)
    else:
        LEAST: tl.constexpr = 0.0 if counted(CODES) else -MOST
        whole = (exact + ROUNDING) - ROUNDING
        # the scale of a NaN is infinite, and infinity times zero is NaN again
        codes = tl.where(whole == whole, tl.minimum(tl.maximum(whole, LEAST), MOST), 0.0).to(tl.int32)
    return codes


@triton.jit
def quotient(x, scale, each):  # type: ignore[no-untyped-def]
    """Returns x * each, and x / scale to the last bit, so that halves round as in a division. `each`: 1 / scale."""
    steps = x * each
    each = tl.broadcast_to(each, x.shape)
    # the product, with what it missed
    return steps, tl.fma(tl.fma(-steps, tl.broadcast_to(scale, x.shape), x), each, steps)


@triton.jit
def to_e4m3(steps, exact):  # type: ignore[no-untyped-def]
    """Returns what `quotient` returned as e4m3, at most 448. NaN stays NaN."""
    MOST: tl.constexpr = largest("e4m3")
    # of an infinite product nothing is known to be missed
    steps = tl.where(tl.abs(steps) < 2 * MOST, exact, steps)
    # conversions of larger numbers give NaN on some devices
    return tl.clamp(steps, -MOST, MOST, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
