"""The GPU kernels of the experts' linears: tiles of an expert's tokens by tiles of its weights.

Weights are [experts, rows, inputs], inputs contiguous. GATED: an expert has the gate's rows first and then as many of
up, and the result is silu(gate) * up. CODES other than "": weights are words as llmcore_triton.quantized.packing makes
them, with `marks` [experts, groups of inputs, rows]: scales, and with ZEROS zeros beside them. ZEROS is "" or the
scales' type.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmcore_triton.launch import release, wait
from llmcore_triton.linear_kernels import silu_and_mul
from llmcore_triton.quantized.codes import numbers, parts


@triton.jit
def _find(starts, tile, EXPERTS: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns (expert, first pair, the pair after the expert's last one) of tile number `tile`, counted over all
    experts' tiles of BLOCK_M pairs. The expert is PADDED if there are fewer tiles."""
    experts = tl.arange(0, PADDED)
    begin = tl.load(starts + experts, mask=experts < EXPERTS, other=0)
    end = tl.load(starts + 1 + experts, mask=experts < EXPERTS, other=0)
    tiles = (end - begin + BLOCK_M - 1) // BLOCK_M
    before = tl.cumsum(tiles, axis=0) <= tile
    expert = tl.sum(before.to(tl.int32), axis=0)
    here = experts == expert
    first = tl.sum(tl.where(here, begin, 0), axis=0)
    last = tl.sum(tl.where(here, end, 0), axis=0)
    return expert, first + (tile - tl.sum(tl.where(before, tiles, 0), axis=0)) * BLOCK_M, last


@triton.jit
def _weights(  # type: ignore[no-untyped-def]
    weight, tiles, row, lines, k, inputs, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """Returns weights [lines, BLOCK_K] of the rows from `row` on. ONCE: no other program reads them soon."""
    if tiles is not None:
        return tiles.load([row, k * BLOCK_K])
    columns = k * BLOCK_K + tl.arange(0, BLOCK_K)
    there = weight + row.to(tl.int64) * inputs + (lines * inputs)[:, None] + columns[None, :]
    policy: tl.constexpr = "evict_first" if ONCE else ""
    if EVEN_K:
        return tl.load(there, eviction_policy=policy)
    return tl.load(there, mask=(columns < inputs)[None, :], other=0.0, eviction_policy=policy)


@triton.jit
def _product(w, xs, acc, SWAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds w xs to acc [tokens, outputs], or with SWAP [outputs, tokens]. The longer side comes first."""
    if SWAP:
        acc = tl.dot(w, tl.trans(xs), acc, input_precision="ieee")
    else:
        acc = tl.dot(xs, tl.trans(w), acc, input_precision="ieee")
    return acc


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    x, x_tiles, first, rows, weight, w_tiles, expert, column, outputs, inputs, x_stride,
    GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr,
    EVEN_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of one expert, from `column` on, of `rows` of x, or of those from `first` on if TMA reads them.
    Returns [BLOCK_M, BLOCK_N], or with SWAP the transpose."""
    ks = tl.arange(0, BLOCK_K)
    from_x = x + rows.to(tl.int64)[:, None] * x_stride + ks[None, :]
    # lines behind the last output read the last one
    lines = tl.minimum(column + tl.arange(0, BLOCK_N), outputs - 1) - column
    row = expert * ((1 + GATED) * outputs) + column
    if SWAP:
        acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up = acc
    for k in range(0, tl.cdiv(inputs, BLOCK_K)):
        if x_tiles is not None:
            xs = x_tiles.load([first, k * BLOCK_K])
        elif EVEN_K:
            xs = tl.load(from_x + k * BLOCK_K)
        else:
            xs = tl.load(from_x + k * BLOCK_K, mask=(k * BLOCK_K + ks < inputs)[None, :], other=0.0)
        w = _weights(weight, w_tiles, row, lines, k, inputs, BLOCK_K, EVEN_K, SWAP)
        acc = _product(w, xs, acc, SWAP)
        if GATED:
            v = _weights(weight, w_tiles, row + outputs, lines, k, inputs, BLOCK_K, EVEN_K, SWAP)
            up = _product(v, xs, up, SWAP)
    if GATED:
        acc = silu_and_mul(acc, up)
    return acc


@triton.constexpr_function
def together(codes: str, block: int, group: int) -> int:
    """The parts of a block of inputs that share a scale, and are multiplied together."""
    whole = int(parts(codes))
    either = group * whole // block | whole
    return either & -either  # the greatest common divisor, because `whole` is a power of two


@triton.jit
def _marks_of(  # type: ignore[no-untyped-def]
    marks, expert, line, rows, inputs, k, BLOCK_K: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr
):
    """Returns the marks of rows `line` [N] of one expert for each group of block k of the inputs. Behind the last
    block they are the last ones. Without groups they are 0."""
    TURNS: tl.constexpr = parts(CODES) // together(CODES, BLOCK_K, GROUP)
    found = ()
    for turn in tl.static_range(TURNS):
        mark = 0
        if GROUP > 0:
            group = tl.minimum((k * BLOCK_K + turn * (BLOCK_K // TURNS)) // GROUP, tl.cdiv(inputs, GROUP) - 1)
            mark = tl.load(marks + (expert * tl.cdiv(inputs, GROUP) + group) * rows + line)
        found += (mark,)  # type: ignore[assignment]
    return found


@triton.jit
def _joined(  # type: ignore[no-untyped-def]
    words, zero, FIRST: tl.constexpr, COUNT: tl.constexpr, CODES: tl.constexpr, KIND: tl.constexpr,
    ZEROS: tl.constexpr,
):  # fmt: skip
    """Returns the COUNT (1, 2 or 4) parts of words [N, WORDS] from FIRST on, side by side: [N, COUNT * WORDS]."""
    N: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    found = numbers(words, zero, FIRST, CODES, KIND, ZEROS)
    if COUNT > 1:
        second = numbers(words, zero, FIRST + 1, CODES, KIND, ZEROS)
        found = tl.join(found, second).permute(0, 2, 1).reshape(N, 2 * WORDS)
    if COUNT > 2:
        third = numbers(words, zero, FIRST + 2, CODES, KIND, ZEROS)
        fourth = numbers(words, zero, FIRST + 3, CODES, KIND, ZEROS)
        second = tl.join(third, fourth).permute(0, 2, 1).reshape(N, 2 * WORDS)
        found = tl.join(found, second).permute(0, 2, 1).reshape(N, 4 * WORDS)
    return found


@triton.jit
def _coded_product(  # type: ignore[no-untyped-def]
    words, xs, acc, marks, now, FIRST: tl.constexpr, COUNT: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
):  # fmt: skip
    """Adds the product of COUNT parts of words and xs [tokens, COUNT * WORDS] to acc [N, tokens], times the scale of
    `marks` [N] if there are groups. Codes less zeros are small whole numbers, which every type holds. `now`: the same
    marks, for the zeros."""
    scale, zero = marks, 0
    if ZEROS != "":
        SCALE: tl.constexpr = tl.bfloat16 if ZEROS == "bf16" else tl.float16
        scale, zero = marks.to(tl.int16).to(SCALE, bitcast=True), (now >> 16).to(tl.int16)[:, None]
    w = _joined(words, zero, FIRST, COUNT, CODES, xs.dtype, ZEROS != "")
    if GROUP > 0:
        acc += tl.dot(w, tl.trans(xs), input_precision="ieee") * scale.to(tl.float32)[:, None]
    else:
        acc = tl.dot(w, tl.trans(xs), acc, input_precision="ieee")
    return acc


@triton.constexpr_function
def outputs_of(block_n: int, gated: bool, codes: str) -> int:
    """The outputs of a tile with `block_n` rows of weights. With codes half of the rows are the gate's, if there is
    one; without codes there are as many rows of up beside them."""
    return block_n // 2 if gated and codes else block_n


@triton.jit
def _coded_tile(  # type: ignore[no-untyped-def]
    x, rows, words, tiles, marks, expert, column, outputs, inputs, x_stride,
    GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    CODES: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """As `_tile` with SWAP, of words. GATED: the first half of the BLOCK_N rows is the gate's, the second is up's, so
    that few outputs still fill a product. BLOCK_K: the inputs of a block of the packing. GROUP: inputs that share a
    scale; 0: all of a row."""
    PARTS: tl.constexpr = parts(CODES)
    WORDS: tl.constexpr = BLOCK_K // PARTS
    COUNT: tl.constexpr = together(CODES, BLOCK_K, GROUP)
    WIDTH: tl.constexpr = outputs_of(BLOCK_N, GATED, CODES)
    ks = tl.arange(0, COUNT * WORDS)
    from_x = x + rows.to(tl.int64)[:, None] * x_stride + ks[None, :]
    blocks = tl.cdiv(inputs, BLOCK_K)
    of_expert = (1 + GATED) * outputs
    lines = tl.arange(0, BLOCK_N)
    # lines behind the last output read the last one
    line = tl.minimum(column + lines % WIDTH, outputs - 1)
    if GATED:
        line += tl.where(lines < WIDTH, 0, outputs)
    row = expert * of_expert + column
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    # The compiler does not load marks ahead of the products that need them. It keeps the first operand of a product in
    # registers only if all that it is made of is loaded in the same round, so zeros are loaded again.
    ahead = _marks_of(marks, expert, line, of_expert, inputs, 0, BLOCK_K, CODES, GROUP)
    for k in range(0, blocks):
        here = ahead
        ahead = _marks_of(marks, expert, line, of_expert, inputs, k + 1, BLOCK_K, CODES, GROUP)
        now = here
        if ZEROS != "":
            now = _marks_of(marks, expert, line, of_expert, inputs, k, BLOCK_K, CODES, GROUP)
        w = _weights(words, tiles, row, line - column, k, blocks * WORDS, WORDS, True, True)
        for turn in tl.static_range(PARTS // COUNT):
            at = k * BLOCK_K + turn * COUNT * WORDS
            if EVEN_K:
                xs = tl.load(from_x + at)
            else:
                xs = tl.load(from_x + at, mask=(at + ks < inputs)[None, :], other=0.0)
            acc = _coded_product(w, xs, acc, here[turn], now[turn], turn * COUNT, COUNT, CODES, GROUP, ZEROS)
    if GROUP == 0:
        acc *= tl.load(marks + expert * of_expert + line).to(tl.float32)[:, None]
    if GATED:
        gate, up = tl.split(acc.reshape(2, WIDTH, BLOCK_M).permute(1, 2, 0))
        acc = silu_and_mul(gate, up)
    return acc


@triton.jit
def _store(out, y, into, keep, column, outputs, BLOCK_N: tl.constexpr, SWAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write a tile into rows `into` of out, where `keep` is set."""
    columns = column + tl.arange(0, BLOCK_N)
    if SWAP:
        there = out + into.to(tl.int64)[None, :] * outputs + columns[:, None]
        mask = keep[None, :] & (columns < outputs)[:, None]
    else:
        there = out + into.to(tl.int64)[:, None] * outputs + columns[None, :]
        mask = keep[:, None] & (columns < outputs)[None, :]
    tl.store(there, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def grouped(  # type: ignore[no-untyped-def]
    x, x_tiles, weight, w_tiles, marks, out, pairs, starts, outputs, inputs, x_stride,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr, EVEN_K: tl.constexpr,
    CODES: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of BLOCK_M pairs of one expert by `outputs_of(BLOCK_N)`. Programs beyond the experts' tiles end at once.

    GATED: rows of x are tokens, and rows of out are pairs sorted by expert. Else rows of x are sorted, and rows of out
    are pairs at their own places. `x_tiles`, `w_tiles`: tensor descriptors of x in [BLOCK_M, BLOCK_K] and of all
    weight rows in [BLOCK_N, BLOCK_K], or None.
    """
    WIDTH: tl.constexpr = outputs_of(BLOCK_N, GATED, CODES)
    tiles_n = tl.cdiv(outputs, WIDTH)
    column = tl.program_id(0) % tiles_n * WIDTH
    wait(PDL)
    release(PDL)
    expert, first, last = _find(starts, tl.program_id(0) // tiles_n, EXPERTS, PADDED, BLOCK_M)
    if expert < EXPERTS:
        places = first + tl.arange(0, BLOCK_M)
        # rows behind the last pair read the last one, and are not written
        rows = tl.minimum(places, last - 1)
        if GATED:
            rows = tl.load(pairs + rows) // TOP_K
        if CODES == "":
            y = _tile(x, x_tiles, first, rows, weight, w_tiles, expert, column, outputs, inputs, x_stride,
                      GATED, BLOCK_M, BLOCK_N, BLOCK_K, SWAP, EVEN_K)  # fmt: skip
        else:
            y = _coded_tile(x, rows, weight, w_tiles, marks, expert, column, outputs, inputs, x_stride,
                            GATED, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, CODES, GROUP, ZEROS)  # fmt: skip
        into = places
        if not GATED:
            into = tl.load(pairs + rows)
        _store(out, y, into, places < last, column, outputs, WIDTH, SWAP)


@triton.jit(do_not_specialize=["tokens"])
def unsorted(  # type: ignore[no-untyped-def]
    x, weight, w_tiles, marks, out, also_x, also_weight, also_tiles, also_out, chosen, tokens,
    outputs, inputs, x_stride, also_outputs, also_inputs, also_stride,
    TOP_K: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, BY_PAIR: tl.constexpr,
    SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same as `grouped` for at most BLOCK_M tokens. One tile of each expert has room for all of them, without an
    order.

    Rows of out, and of x if not GATED, are pairs at their own places. There are programs for each expert, or with
    BY_PAIR for each pair; those of an expert's first pair then do the work. SHARED: the first programs compute the
    expert that every token sees, `also_x` [tokens, also_inputs] by `also_weight`, into `also_out` [tokens,
    also_outputs].
    """
    program = tl.program_id(0)
    lines = tl.arange(0, BLOCK_M)
    wait(PDL)
    release(PDL)
    if SHARED:
        column = program * BLOCK_N
        program -= tl.cdiv(also_outputs, BLOCK_N)
        if program < 0:
            rows = tl.minimum(lines, tokens - 1)
            y = _tile(also_x, None, 0, rows, also_weight, also_tiles, 0, column, also_outputs, also_inputs,
                      also_stride, GATED, BLOCK_M, BLOCK_N, BLOCK_K, True, EVEN_K)  # fmt: skip
            _store(also_out, y, lines, lines < tokens, column, also_outputs, BLOCK_N, True)
            return
    WIDTH: tl.constexpr = outputs_of(BLOCK_N, GATED, CODES)
    tiles_n = tl.cdiv(outputs, WIDTH)
    tile = program // tiles_n
    column = program % tiles_n * WIDTH
    expert = tile
    if BY_PAIR:
        expert = tl.load(chosen + tile)
    pairs = tl.full([BLOCK_M], -1, dtype=tl.int32)
    for choice in tl.static_range(TOP_K):
        there = lines * TOP_K + choice
        hit = tl.load(chosen + there, mask=lines < tokens, other=-1) == expert
        pairs = tl.where(hit, there, pairs)
    here = pairs >= 0
    first = tl.min(tl.where(here, pairs, BLOCK_M * TOP_K), axis=0)
    if first == tile if BY_PAIR else first < BLOCK_M * TOP_K:
        # lines of tokens that chose other experts read the first line, and are not written
        rows = tl.where(here, pairs, first)
        if GATED:
            rows = rows // TOP_K
        if CODES == "":
            y = _tile(x, None, 0, rows, weight, w_tiles, expert, column, outputs, inputs, x_stride,
                      GATED, BLOCK_M, BLOCK_N, BLOCK_K, True, EVEN_K)  # fmt: skip
        else:
            y = _coded_tile(x, rows, weight, w_tiles, marks, expert, column, outputs, inputs, x_stride,
                            GATED, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, CODES, GROUP, ZEROS)  # fmt: skip
        _store(out, y, pairs, here, column, outputs, WIDTH, True)
