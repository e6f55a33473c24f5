"""The GPU kernels of a mixture of experts for up to 16 tokens, in Gluon: weights in 4 and 8 bits as in direct_kernel.

One token is multiplied by tensor cores too, although seven of the eight columns of a product are not needed. Without
them each weight takes about five instructions, which take longer than the weights' way from memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from llmcore_triton import linear_kernels
from llmcore_triton.quantized.direct_kernel import added, columns_of, loads_ahead, summed
from llmcore_triton.quantized.in_gluon import release, wait

COLUMNS: gl.constexpr = gl.constexpr(8)
"""Tokens of a product, the least that tensor cores have."""

_silu_and_mul = gluon.jit(linear_kernels.silu_and_mul.fn)


@gluon.jit(do_not_specialize=["tokens"])
def pairs_of_experts(  # type: ignore[no-untyped-def]
    x, words, scale, chosen, out, tokens, outputs, x_stride,
    TOKENS: gl.constexpr, TOP_K: gl.constexpr, BY_PAIR: gl.constexpr, GATED: gl.constexpr, ROWS: gl.constexpr,
    CODES: gl.constexpr, GROUP_SIZE: gl.constexpr, ALIKE: gl.constexpr, ZEROS: gl.constexpr, SCALE: gl.constexpr,
    BLOCKS: gl.constexpr, AHEAD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out [pairs, outputs]: the products of x with the chosen experts' weights. A pair is a token and one of its
    choices. With GATED rows of x are tokens and the result is silu(gate) * up, else rows of x are pairs.

    A program has ROWS outputs of one expert, for all pairs of up to TOKENS tokens. There are programs for each expert,
    or with BY_PAIR for each pair; those of an expert's first pair then do the work. Without GATED it loads the first
    words before `wait`. This is right only behind a launch with GATED, which releases this one after its own `wait`,
    so the kernel before it has written `chosen`. The other arguments are as in direct_kernel.
    """
    tiles = gl.cdiv(outputs, ROWS)
    tile, first = gl.program_id(0) // tiles, gl.program_id(0) % tiles * ROWS
    if GATED:
        wait(PDL)
        release(PDL)
    expert = tile
    if BY_PAIR:
        expert = gl.load(chosen + tile, cache_modifier=".cg")
    column = columns_of(TOKENS)
    pair = column * 0 - 1
    for choice in gl.static_range(TOP_K):
        there = column * TOP_K + choice
        hit = gl.load(chosen + there, mask=column < tokens, other=-1, cache_modifier=".cg") == expert
        pair = gl.where(hit, there, pair)
    begin = gl.min(gl.where(pair >= 0, pair, TOKENS * TOP_K), 0)
    if begin == tile if BY_PAIR else begin < TOKENS * TOP_K:
        stack = expert.to(gl.int64)
        held = loads_ahead(words, scale, stack, None, first, outputs,
                           ROWS, CODES, GROUP_SIZE, ALIKE, GATED, BLOCKS, BLOCKS, AHEAD)  # fmt: skip
        # with GATED it is the second time, because no load passes it: else the compiler would load some words after
        # the first products
        wait(PDL)
        if not GATED:
            release(PDL)
        # columns of tokens that chose other experts are not stored
        row = gl.where(pair >= 0, pair // TOP_K if GATED else pair, begin // TOP_K if GATED else begin) * x_stride
        acc, up = summed(x, row, words, scale, stack, None, held, first, outputs, TOKENS, ROWS,
                         CODES, GROUP_SIZE, ALIKE, ZEROS, SCALE, GATED, BLOCKS, BLOCKS, AHEAD)  # fmt: skip
        y = _scaled(added(acc), scale, stack, first, outputs, GROUP_SIZE, GATED, 0)
        if GATED:
            y = _silu_and_mul(y, _scaled(added(up), scale, stack, first, outputs, GROUP_SIZE, GATED, outputs))
        lines = first + gl.arange(0, ROWS, gl.SliceLayout(1, y.type.layout))
        into = gl.convert_layout(pair, gl.SliceLayout(0, y.type.layout))
        here = (lines < outputs)[:, None] & (into >= 0)[None, :]
        gl.store(out + (into * outputs)[None, :] + lines[:, None], y.to(out.dtype.element_ty), mask=here)


@gluon.jit
def gate_up_of_choices(  # type: ignore[no-untyped-def]
    x, words, scale, chosen, out, outputs,
    ROWS: gl.constexpr, CODES: gl.constexpr, GROUP_SIZE: gl.constexpr, ALIKE: gl.constexpr, ZEROS: gl.constexpr,
    SCALE: gl.constexpr, BLOCKS: gl.constexpr, AHEAD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out [choices, outputs] = silu(gate) * up of the one token x [inputs], by the chosen experts. A program has ROWS
    outputs of one choice. The other arguments are as in direct_kernel."""
    tiles = gl.cdiv(outputs, ROWS)
    choice, first = gl.program_id(0) // tiles, gl.program_id(0) % tiles * ROWS
    wait(PDL)
    release(PDL)
    stack = gl.load(chosen + choice).to(gl.int64)
    held = loads_ahead(words, scale, stack, None, first, outputs,
                       ROWS, CODES, GROUP_SIZE, ALIKE, True, BLOCKS, BLOCKS, AHEAD)  # fmt: skip
    # again, as above
    wait(PDL)
    acc, up = summed(x, columns_of(COLUMNS) * 0, words, scale, stack, None, held, first, outputs,
                     COLUMNS, ROWS, CODES, GROUP_SIZE, ALIKE, ZEROS, SCALE, True, BLOCKS, BLOCKS, AHEAD)  # fmt: skip
    y = _scaled(added(acc), scale, stack, first, outputs, GROUP_SIZE, True, 0)
    z = _scaled(added(up), scale, stack, first, outputs, GROUP_SIZE, True, outputs)
    _store(out + choice * outputs, _silu_and_mul(y, z), first, outputs)


@gluon.jit
def down_of_choices(  # type: ignore[no-untyped-def]
    x, words, scale, chosen, shares, extra, out, outputs,
    ROWS: gl.constexpr, CODES: gl.constexpr, GROUP_SIZE: gl.constexpr, ALIKE: gl.constexpr, ZEROS: gl.constexpr,
    SCALE: gl.constexpr, BLOCKS: gl.constexpr, TOTAL: gl.constexpr, AHEAD: gl.constexpr, PDL: gl.constexpr,
    EXTRA: gl.constexpr,
):  # fmt: skip
    """out [outputs] = the sum over one token's choices of their shares times x [choice, inputs] by the expert's down,
    plus extra.

    A program has ROWS outputs. Its warps take the TOTAL blocks of all choices by turns. It loads the first words
    before `wait`, as `pairs_of_experts` does behind GATED. GROUP_SIZE: the inputs that share a scale; never 0.
    """
    first = gl.program_id(0) * ROWS
    stack = chosen
    if TOTAL == BLOCKS:
        stack = gl.load(chosen, cache_modifier=".cg").to(gl.int64)
    held = loads_ahead(words, scale, stack, shares, first, outputs,
                       ROWS, CODES, GROUP_SIZE, ALIKE, False, BLOCKS, TOTAL, AHEAD)  # fmt: skip
    wait(PDL)
    release(PDL)
    acc, _ = summed(x, columns_of(COLUMNS) * 0, words, scale, stack, shares, held, first, outputs,
                    COLUMNS, ROWS, CODES, GROUP_SIZE, ALIKE, ZEROS, SCALE, False, BLOCKS, TOTAL, AHEAD)  # fmt: skip
    y = added(acc)
    if EXTRA:
        lines = first + gl.arange(0, ROWS, gl.SliceLayout(1, y.type.layout))
        y += gl.load(extra + lines, mask=lines < outputs, other=0.0).to(gl.float32)[:, None]
    _store(out, y, first, outputs)


@gluon.jit
def _scaled(  # type: ignore[no-untyped-def]
    y, scale, expert, first, outputs, GROUP_SIZE: gl.constexpr, GATED: gl.constexpr, offset
):
    """Returns y [rows, tokens] times the expert's scales of whole rows, if it has those, from `offset` on."""
    if GROUP_SIZE == 0:
        lines = first + gl.arange(0, y.shape[0], gl.SliceLayout(1, y.type.layout))
        place = scale + expert * ((1 + GATED) * outputs) + offset + lines
        y *= gl.load(place, mask=lines < outputs, other=0.0)[:, None]
    return y


@gluon.jit
def _store(out, y, first, outputs):  # type: ignore[no-untyped-def]
    """Write the first column of y [rows, COLUMNS]. All are of one token."""
    lines = first + gl.arange(0, y.shape[0], gl.SliceLayout(1, y.type.layout))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, y.type.layout))
    here = (lines < outputs)[:, None] & (columns == 0)[None, :]
    gl.store(out + (lines[:, None] + columns[None, :]), y.to(out.dtype.element_ty), mask=here)
