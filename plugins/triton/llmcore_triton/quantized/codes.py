"""The device part of weights in 4 and 8 bits: 16-bit words, and the numbers that their codes stand for.

A block of inputs is a row of words (see `packing`). Part j of a word is its nibble j (CODES "u4") or its byte j ("i8",
"e4m3"), counted from the low bits. So a tile of words [BLOCK_N, WORDS] has a tile of codes [BLOCK_N, WORDS] in each
part. Each thread turns its own words into codes of the same places, and no thread needs another's.

Two words share a register, and each instruction here works on both. A code becomes the low bits of the mantissa of a
number whose last bit counts 1 (bf16: 128, f16: 1024), and the difference of two such numbers is exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmcore_triton.launch import INTERPRETED

_ASM = tl.constexpr(not INTERPRETED)


@triton.constexpr_function
def parts(codes: str) -> int:
    """The codes in a word."""
    return 4 if codes == "u4" else 2


_AND_OR, _AND_XOR = 0xEA, 0x6A
"""(a & b) | c and (a & b) ^ c, as lop3 names them."""

_HALF = {"bf16": "bf16x2", "fp16": "f16x2"}
_ONES = {"bf16": 0x3F803F80, "fp16": 0x3C003C00}
_MINUS_ZEROS = 0x80008000
_LAST_IS_ONE = {"bf16": 0x43004300, "fp16": 0x64006400}
"""128 as bf16, 1024 as f16: the last bit of the mantissa counts 1."""

_LIFT = {"bf16": 0x7B807B80, "fp16": 0x5C005C00}
"""2^120 as bf16, 2^8 as f16: the ratio of e4m3's exponents to those of the type with the same bits."""


@triton.constexpr_function
def _twice(half: int) -> int:
    return half | half << 16


@triton.constexpr_function
def numbers_asm(codes: str, part: int, kind: str, zeros: bool) -> str:
    """PTX that makes two numbers of `kind` ($0) of one part of two words ($1). `zeros`: $2 has the zeros' bits, as
    `packing.zero_bits` makes them."""
    half, base = _HALF[kind], _LAST_IS_ONE[kind]
    shift = part * 16 // parts(codes)
    lines = [f"shr.b32 w, $1, {shift};" if shift else "mov.b32 w, $1;", f"mov.b32 one, {_ONES[kind]};"]
    less = "less"
    if codes == "u4":
        # base + code, less base + 8 or the zero
        lines.append(f"lop3.b32 n, w, {_twice(15)}, {base}, {_AND_OR}; mov.b32 less, {base + _twice(0x8008)};")
        less = "$2" if zeros else less
    elif codes == "i8" and kind == "bf16":
        # 128 + the lower 7 bits, less 128 or 256 by the sign
        lines.append(f"lop3.b32 n, w, {_twice(0x7F)}, {base}, {_AND_OR};")
        lines.append(f"lop3.b32 less, w, {_twice(0x80)}, {base | _MINUS_ZEROS}, {_AND_OR};")
    elif codes == "i8":
        # 1024 + 128 + code
        lines.append(f"lop3.b32 n, w, {_twice(0xFF)}, {base + _twice(0x80)}, {_AND_XOR};")
        lines.append(f"mov.b32 less, {base + _twice(0x8080)};")
    else:
        # the sign goes to the top bit, exponent and mantissa to where the mantissa's 3 bits are the type's first
        room = 4 if kind == "bf16" else 7
        move = room - 8 * part
        lines.append("mov.b32 s, $1;" if part else "shl.b32 s, $1, 8;")
        lines.append(f"and.b32 s, s, {_MINUS_ZEROS};")
        lines.append(f"shl.b32 w, $1, {move};" if move >= 0 else f"shr.b32 w, $1, {-move};")
        lines.append(f"lop3.b32 n, w, {_twice(0x7F << room)}, s, {_AND_OR};")
        lines.append(f"mov.b32 s, {_LIFT[kind]}; mov.b32 less, {_MINUS_ZEROS};")
    factor = "s" if codes == "e4m3" else "one"
    if zeros and codes != "u4":
        lines.append(f"fma.rn.{half} n, n, {factor}, less;")
        factor, less = "one", "$2"
    return f"{{ .reg .b32 w, n, s, one, less; {' '.join(lines)} fma.rn.{half} $0, n, {factor}, {less}; }}"


@triton.jit
def numbers(  # type: ignore[no-untyped-def]
    words, zero, PART: tl.constexpr, CODES: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr
):
    """Returns part PART of each of the words [BLOCK_N, WORDS] as KIND, less its zero. Exact.

    `zero`: [BLOCK_N, 1], the bits that `packing.zero_bits` makes. Without ZEROS no instruction reads it, the zero of
    "u4" is 8, and there is none else. But it may still be a tile: Triton then loads ahead what the tile is made of.
    """
    if _ASM and KIND.name != "fp32":
        ASM: tl.constexpr = numbers_asm(CODES, PART, KIND.name, ZEROS)
        if zero.type.is_block():
            found = tl.inline_asm_elementwise(ASM, "=r,r,r", [words, zero], dtype=tl.int16, is_pure=True, pack=2)
        else:
            found = tl.inline_asm_elementwise(ASM, "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2)
        found = found.to(KIND, bitcast=True)
    else:
        BITS: tl.constexpr = tl.bfloat16 if KIND.name == "bf16" else tl.float16
        if CODES == "u4":
            found = ((words >> (4 * PART)) & 15).to(KIND)
            if ZEROS:
                found += zero.to(BITS, bitcast=True).to(KIND) + (128.0 if KIND.name == "bf16" else 1024.0)
            else:
                found -= 8.0
        else:
            STORED: tl.constexpr = tl.int8 if CODES == "i8" else tl.float8e4nv
            found = ((words >> (8 * PART)) & 255).to(tl.uint8).to(STORED, bitcast=True).to(KIND)
            if ZEROS:
                found += zero.to(BITS, bitcast=True).to(KIND)
    return found
