"""The kernel for one token over codes of 8 bits, without tensor cores.

A weight is [outputs, inputs] codes, int8 or float8 e4m3. A register has a quad, four codes that lie side by side. A
thread loads a chunk, four quads, at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmcore_triton.launch import INTERPRETED, release, wait
from llmcore_triton.linear_kernels import weights_of

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

_FLOATS = tl.constexpr(FLOATS)


@triton.jit
def gemv_codes(  # type: ignore[no-untyped-def]
    x, x_scale, codes, scale, bias, out, inputs, x_stride, x_scale_stride, scale_stride, outputs,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    GROUP: tl.constexpr, SPREAD: tl.constexpr, CODES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [T, outputs] = x weight^T. Each program has BLOCK_N outputs of token program_id(1).

    x [T, inputs] has codes of the weight's type. The next BLOCK_K codes load while these are multiplied. The first
    load starts before `wait`.
    - GROUP: 0, or the codes that share a scale. Groups are neighbours in x_scale and in scale.
    - SPREAD: rows that share a scale. It is 1, or a multiple of BLOCK_N.
    """
    tile, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    BLOCK_Q: tl.constexpr = BLOCK_K // QUAD
    rows, quads = tl.arange(0, BLOCK_N), inputs // QUAD
    place = codes.to(_QUADS, bitcast=True) + (tile * BLOCK_N).to(tl.int64) * quads
    place += (rows * quads)[:, None] + tl.arange(0, BLOCK_Q)[None, :]
    w = weights_of(place, tile, 0, outputs, quads, BLOCK_N, BLOCK_Q, EVEN_N, EVEN_K)
    by_w = _scales(scale, tile, 0, outputs, inputs, scale_stride, BLOCK_N, BLOCK_K, GROUP, SPREAD)
    outs = tile * BLOCK_N + rows
    inside = outs < outputs
    # not after the loop, where nothing else would happen while they come from memory
    row_scale, token_scale = 1.0, 1.0
    if GROUP == 0:
        row_scale = tl.load(scale + outs, mask=inside, other=0.0)
    row_bias = 0.0
    if HAS_BIAS:
        row_bias = tl.load(bias + outs, mask=inside, other=0.0).to(tl.float32)
    wait(PDL)
    release(PDL)
    x += token * x_stride
    x_scale += token * x_scale_stride
    if GROUP == 0:
        token_scale = tl.load(x_scale)
    xs = _inputs(x, 0, inputs, BLOCK_K, EVEN_K)
    by_x = _input_scales(x_scale, 0, inputs, BLOCK_K, GROUP)
    SUMS: tl.constexpr = tl.int32 if CODES == "i8" else tl.float32
    acc = tl.zeros([BLOCK_N, BLOCK_K // CHUNK, CHUNK // QUAD], dtype=SUMS)
    # the last block has no next one
    for k in range(1, tl.cdiv(inputs, BLOCK_K)):
        place += BLOCK_Q
        now_w, now_xs, now_by_w, now_by_x = w, xs, by_w, by_x
        w = weights_of(place, tile, k, outputs, quads, BLOCK_N, BLOCK_Q, EVEN_N, EVEN_K)
        by_w = _scales(scale, tile, k, outputs, inputs, scale_stride, BLOCK_N, BLOCK_K, GROUP, SPREAD)
        xs = _inputs(x, k, inputs, BLOCK_K, EVEN_K)
        by_x = _input_scales(x_scale, k, inputs, BLOCK_K, GROUP)
        acc = _added(acc, now_w, now_xs, now_by_w, now_by_x, GROUP)
    acc = _added(acc, w, xs, by_w, by_x, GROUP)
    y = tl.sum(tl.reshape(acc, [BLOCK_N, BLOCK_Q]), axis=1).to(tl.float32) * row_scale * token_scale + row_bias
    tl.store(out + token * outputs + outs, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _added(acc, w, xs, by_w, by_x, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the sums with the products of a step added, a sum for each quad.

    acc [BLOCK_N, chunks, 4], w [BLOCK_N, BLOCK_K / 4], xs [chunks, 4], scales [BLOCK_N or 1, chunks].
    """
    w = tl.reshape(w, acc.shape)
    if acc.dtype == tl.int32:
        acc = _dot(w, xs[None, :, :], acc)
    else:
        w0, w1, w2, w3 = floats(w)
        a, b, c, d = floats(xs)
        if GROUP == 0:
            acc += w0 * a[None, :, :]
            acc += w1 * b[None, :, :]
            acc += w2 * c[None, :, :]
            acc += w3 * d[None, :, :]
        else:
            part = w0 * a[None, :, :] + w1 * b[None, :, :] + w2 * c[None, :, :] + w3 * d[None, :, :]
            acc += part * (by_w * by_x)[:, :, None]
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
def floats(quads):  # type: ignore[no-untyped-def]
    """Returns the four numbers of each quad of float8 as f32."""
    if _ASM:
        KINDS: tl.constexpr = (tl.float32, tl.float32, tl.float32, tl.float32)
        a, b, c, d = tl.inline_asm_elementwise(_FLOATS, "=f,=f,=f,=f,r", [quads], dtype=KINDS, is_pure=True, pack=1)
    else:
        a, b, c, d = _number(quads, 0), _number(quads, 1), _number(quads, 2), _number(quads, 3)
    return a, b, c, d


@triton.jit
def _number(quads, PLACE: tl.constexpr):  # type: ignore[no-untyped-def]
    return (quads >> 8 * PLACE & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _inputs(x, k, inputs, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the quads of x that meet those of step k, [chunks, 4] int32, with zeros outside."""
    first = k * BLOCK_K + tl.arange(0, BLOCK_K // CHUNK) * CHUNK
    columns = (first // QUAD)[:, None] + tl.arange(0, CHUNK // QUAD)[None, :]
    place = x.to(_QUADS, bitcast=True) + columns
    if EVEN_K:
        found = tl.load(place)
    else:
        found = tl.load(place, mask=columns < inputs // QUAD, other=0)
    return found


@triton.jit
def _scales(  # type: ignore[no-untyped-def]
    scale, tile, k, outputs, inputs, stride,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """Returns the scales of step k's chunks, [BLOCK_N or 1, BLOCK_K / CHUNK]. Without groups nothing reads them."""
    found = tl.zeros([1, 1], dtype=tl.float32)
    if GROUP:
        first = k * BLOCK_K + tl.arange(0, BLOCK_K // CHUNK) * CHUNK
        place = scale + (first // GROUP)[None, :]
        here = (first < inputs)[None, :]
        if SPREAD > 1:
            place += tile * BLOCK_N // SPREAD * stride
        else:
            rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            place += (rows * stride)[:, None]
            here = here & (rows < outputs)[:, None]
        found = tl.load(place, mask=here, other=0.0)
    return found


@triton.jit
def _input_scales(x_scale, k, inputs, BLOCK_K: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the scales of step k of a token, [1, BLOCK_K / CHUNK]. Without groups nothing reads them."""
    found = tl.zeros([1, 1], dtype=tl.float32)
    if GROUP:
        first = k * BLOCK_K + tl.arange(0, BLOCK_K // CHUNK) * CHUNK
        found = tl.load(x_scale + first // GROUP, mask=first < inputs, other=0.0)[None, :]
    return found
