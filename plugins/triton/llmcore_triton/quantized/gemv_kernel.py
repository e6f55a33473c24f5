"""The kernel for one token over weights of 8 bits, without tensor cores.

A weight is [outputs, length] codes, int8 or float8 e4m3. A register has a quad, four codes that lie side by side. A
thread loads a chunk, four quads, at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmcore_triton.launch import INTERPRETED, release, wait
from llmcore_triton.linear_kernels import silu_and_mul, weights_of

QUAD: tl.constexpr = tl.constexpr(4)
CHUNK: tl.constexpr = tl.constexpr(16)
"""The codes of a quad, and those of a chunk, which share a scale."""

_QUADS = tl.constexpr(tl.pointer_type(tl.int32))

_ASM = tl.constexpr(not INTERPRETED)

_DOT = tl.constexpr("dp4a.s32.s32 $0, $1, $2, $3;")

FLOATS = " ".join(
    (
        "{ .reg .b16 a, b, c, d; .reg .b32 low, high; mov.b32 {a, b}, $4;",
        "cvt.rn.f16x2.e4m3x2 low, a; cvt.rn.f16x2.e4m3x2 high, b; mov.b32 {a, b}, low; mov.b32 {c, d}, high;",
        "cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c; cvt.f32.f16 $3, d; }",
    )
)
"""PTX that makes four f32 ($0 to $3) of a quad of float8 ($4). Exact."""

INTEGERS = " ".join(
    (
        "{ .reg .b32 n, m; .reg .f32 f; xor.b32 n, $4, 0x80808080;",
        *(
            f"prmt.b32 m, n, 0x4B000000, 0x754{i}; mov.b32 f, m; sub.f32 ${i}, f, 0f4B000080;"
            for i in range(QUAD.value)
        ),
        "}",
    )
)
"""The same of a quad of int8. code + 128 becomes the low bits of 2^23, whose last bit counts 1."""

_FLOATS, _INTEGERS = tl.constexpr(FLOATS), tl.constexpr(INTEGERS)


@triton.jit
def gemv_codes(  # type: ignore[no-untyped-def]
    x, x_scale, codes, scale, bias, out, outputs, inputs, length, x_stride, x_scale_stride, row_stride, group_stride,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, GROUP: tl.constexpr, SPREAD: tl.constexpr, WORDS: tl.constexpr,
    CODES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [T, outputs] = x weight^T. Each program has BLOCK_N outputs of token program_id(1).

    The next BLOCK_K codes load while these are multiplied. The first load starts before `wait`.
    - WORDS: 0 if x [T, inputs] has codes of the weight's type and the scales x_scale. Else x has 16-bit numbers and
      no scales, and the weight has words of two codes as `packing` arranges them, WORDS to a block.
    - `length`: codes of a row. Those of words may reach over the end of the inputs.
    - GROUP: 0, or the codes that share a scale. Rows of scales are `row_stride` apart, groups `group_stride`.
    - SPREAD: rows that share a scale. It is 1, or a multiple of BLOCK_N.
    """
    tile, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    BLOCK_Q: tl.constexpr = BLOCK_K // QUAD
    rows, quads = tl.arange(0, BLOCK_N), length // QUAD
    place = codes.to(_QUADS, bitcast=True) + (tile * BLOCK_N).to(tl.int64) * quads
    place += (rows * quads)[:, None] + tl.arange(0, BLOCK_Q)[None, :]
    place_up, scale_up = place, scale
    if GATED:
        place_up += outputs.to(tl.int64) * quads
        scale_up += outputs * row_stride
    w = weights_of(place, tile, 0, outputs, quads, BLOCK_N, BLOCK_Q, EVEN_N, EVEN_K)
    by_w = _scales(scale, tile, 0, outputs, length, row_stride, group_stride, BLOCK_N, BLOCK_K, GROUP, SPREAD)
    v, by_v = w, by_w
    if GATED:
        v = weights_of(place_up, tile, 0, outputs, quads, BLOCK_N, BLOCK_Q, EVEN_N, EVEN_K)
        by_v = _scales(scale_up, tile, 0, outputs, length, row_stride, group_stride, BLOCK_N, BLOCK_K, GROUP, SPREAD)
    outs = tile * BLOCK_N + rows
    inside = outs < outputs
    # not after the loop, where nothing else would happen while they come from memory
    row_scale, up_scale, token_scale = 1.0, 1.0, 1.0
    if GROUP == 0:
        row_scale = tl.load(scale + outs, mask=inside, other=0.0)
        if GATED:
            up_scale = tl.load(scale_up + outs, mask=inside, other=0.0)
    row_bias, up_bias = 0.0, 0.0
    if HAS_BIAS:
        row_bias = tl.load(bias + outs, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            up_bias = tl.load(bias + outputs + outs, mask=inside, other=0.0).to(tl.float32)
    wait(PDL)
    release(PDL)
    x += token * x_stride
    if WORDS == 0:
        x_scale += token * x_scale_stride
        if GROUP == 0:
            token_scale = tl.load(x_scale)
    x0, x1 = _inputs(x, 0, inputs, BLOCK_K, WORDS, EVEN_K)
    by_x = _input_scales(x_scale, 0, length, BLOCK_K, GROUP, WORDS)
    SUMS: tl.constexpr = tl.int32 if CODES == "i8" and WORDS == 0 else tl.float32
    acc = tl.zeros([BLOCK_N, BLOCK_K // CHUNK, CHUNK // QUAD], dtype=SUMS)
    up = tl.zeros([BLOCK_N, BLOCK_K // CHUNK, CHUNK // QUAD], dtype=SUMS)
    # the last block has no next one
    for k in range(1, tl.cdiv(length, BLOCK_K)):
        place += BLOCK_Q
        place_up += BLOCK_Q
        now_w, now_v, now_x0, now_x1, now_by_w, now_by_v, now_by_x = w, v, x0, x1, by_w, by_v, by_x
        w = weights_of(place, tile, k, outputs, quads, BLOCK_N, BLOCK_Q, EVEN_N, EVEN_K)
        by_w = _scales(scale, tile, k, outputs, length, row_stride, group_stride, BLOCK_N, BLOCK_K, GROUP, SPREAD)
        if GATED:
            v = weights_of(place_up, tile, k, outputs, quads, BLOCK_N, BLOCK_Q, EVEN_N, EVEN_K)
            by_v = _scales(
                scale_up, tile, k, outputs, length, row_stride, group_stride, BLOCK_N, BLOCK_K, GROUP, SPREAD
            )
        x0, x1 = _inputs(x, k, inputs, BLOCK_K, WORDS, EVEN_K)
        by_x = _input_scales(x_scale, k, length, BLOCK_K, GROUP, WORDS)
        acc = _added(acc, now_w, now_x0, now_x1, now_by_w, now_by_x, CODES, GROUP, WORDS, x.dtype.element_ty)
        if GATED:
            up = _added(up, now_v, now_x0, now_x1, now_by_v, now_by_x, CODES, GROUP, WORDS, x.dtype.element_ty)
    acc = _added(acc, w, x0, x1, by_w, by_x, CODES, GROUP, WORDS, x.dtype.element_ty)
    y = tl.sum(tl.reshape(acc, [BLOCK_N, BLOCK_Q]), axis=1).to(tl.float32) * row_scale * token_scale + row_bias
    if GATED:
        up = _added(up, v, x0, x1, by_v, by_x, CODES, GROUP, WORDS, x.dtype.element_ty)
        y = silu_and_mul(y, tl.sum(tl.reshape(up, [BLOCK_N, BLOCK_Q]), axis=1) * up_scale + up_bias)
    tl.store(out + token * outputs + outs, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _added(  # type: ignore[no-untyped-def]
    acc, w, x0, x1, by_w, by_x, CODES: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr, KIND: tl.constexpr
):
    """Returns the sums with the products of a step added, a sum for each quad.

    acc [BLOCK_N, chunks, 4], w [BLOCK_N, BLOCK_K / 4], scales [BLOCK_N or 1, chunks], x as `_inputs` returns it.
    """
    w = tl.reshape(w, acc.shape)
    if acc.dtype == tl.int32:
        acc = _dot(w, x0[None, :, :], acc)
    else:
        w0, w1, w2, w3 = _numbers(w, CODES)
        if WORDS == 0:
            a, b, c, d = _numbers(x0, CODES)
        else:
            a, c = _halves(x0, KIND)
            b, d = _halves(x1, KIND)
        if GROUP == 0:
            acc += w0 * a[None, :, :]
            acc += w1 * b[None, :, :]
            acc += w2 * c[None, :, :]
            acc += w3 * d[None, :, :]
        else:
            part = w0 * a[None, :, :] + w1 * b[None, :, :] + w2 * c[None, :, :] + w3 * d[None, :, :]
            by = by_w * by_x if WORDS == 0 else by_w
            acc += part * by[:, :, None]
    return acc


@triton.jit
def _dot(w, x, acc):  # type: ignore[no-untyped-def]
    """Returns acc with the four products of int8 in each quad added."""
    if _ASM:
        acc = tl.inline_asm_elementwise(_DOT, "=r,r,r,r", [w, x, acc], dtype=tl.int32, is_pure=True, pack=1)
    else:
        for i in tl.static_range(QUAD):
            acc += (w << 24 - 8 * i >> 24) * (x << 24 - 8 * i >> 24)
    return acc


@triton.jit
def _numbers(quads, CODES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the four numbers of each quad as f32."""
    if _ASM:
        KINDS: tl.constexpr = (tl.float32, tl.float32, tl.float32, tl.float32)
        ASM: tl.constexpr = _INTEGERS if CODES == "i8" else _FLOATS
        a, b, c, d = tl.inline_asm_elementwise(ASM, "=f,=f,=f,=f,r", [quads], dtype=KINDS, is_pure=True, pack=1)
    else:
        a, b = _number(quads, 0, CODES), _number(quads, 1, CODES)
        c, d = _number(quads, 2, CODES), _number(quads, 3, CODES)
    return a, b, c, d


@triton.jit
def _number(quads, PLACE: tl.constexpr, CODES: tl.constexpr):  # type: ignore[no-untyped-def]
    STORED: tl.constexpr = tl.int8 if CODES == "i8" else tl.float8e4nv
    return (quads >> 8 * PLACE & 255).to(tl.uint8).to(STORED, bitcast=True).to(tl.float32)


@triton.jit
def _halves(pairs, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the two numbers of 16 bits in each int32 as f32."""
    low = (pairs & 0xFFFF).to(tl.int16).to(KIND, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(KIND, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _inputs(  # type: ignore[no-untyped-def]
    x, k, inputs, BLOCK_K: tl.constexpr, WORDS: tl.constexpr, EVEN_K: tl.constexpr
):
    """Returns what meets the quads of step k, [chunks, 4] int32, with zeros outside: quads of x, twice.

    For words it returns pairs of inputs: those of the quads' first and third codes, and of the second and fourth.
    """
    first = k * BLOCK_K + tl.arange(0, BLOCK_K // CHUNK) * CHUNK
    place, pair = x.to(_QUADS, bitcast=True), tl.arange(0, CHUNK // QUAD)[None, :]
    if WORDS == 0:
        columns = (first // QUAD)[:, None] + pair
        last = inputs // QUAD
    else:
        words = first // 2
        columns = (words // WORDS * WORDS + words % WORDS // 2)[:, None] + pair
        last = inputs // 2
    if EVEN_K:
        low = tl.load(place + columns)
    else:
        low = tl.load(place + columns, mask=columns < last, other=0)
    high = low
    if WORDS > 0:
        columns += WORDS // 2
        if EVEN_K:
            high = tl.load(place + columns)
        else:
            high = tl.load(place + columns, mask=columns < last, other=0)
    return low, high


@triton.jit
def _scales(  # type: ignore[no-untyped-def]
    scale, tile, k, outputs, length, row_stride, group_stride,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """Returns the scales of step k's chunks, [BLOCK_N or 1, BLOCK_K / CHUNK]. Without groups nothing reads them."""
    found = tl.zeros([1, 1], dtype=tl.float32)
    if GROUP:
        first = k * BLOCK_K + tl.arange(0, BLOCK_K // CHUNK) * CHUNK
        place = scale + (first // GROUP * group_stride)[None, :]
        here = (first < length)[None, :]
        if SPREAD > 1:
            place += tile * BLOCK_N // SPREAD * row_stride
        else:
            rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            place += (rows * row_stride)[:, None]
            here = here & (rows < outputs)[:, None]
        found = tl.load(place, mask=here, other=0.0)
    return found


@triton.jit
def _input_scales(  # type: ignore[no-untyped-def]
    x_scale, k, length, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr
):
    """Returns the scales of step k of a token, [1, BLOCK_K / CHUNK]. Without groups nothing reads them."""
    found = tl.zeros([1, 1], dtype=tl.float32)
    if GROUP and WORDS == 0:
        first = k * BLOCK_K + tl.arange(0, BLOCK_K // CHUNK) * CHUNK
        found = tl.load(x_scale + first // GROUP, mask=first < length, other=0.0)[None, :]
    return found
