"""The GPU kernels of a mixture of experts for one token, in Gluon: weights as in direct_kernel.

Tensor cores multiply, although seven of the eight columns of a product are not needed. Without them each weight in 4
bits takes about five instructions, and these take longer than its way from memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from llmcore_triton.quantized.direct_kernel import added, columns_of, loads_ahead, summed
from llmcore_triton.quantized.in_gluon import release, silu_and_mul, wait

COLUMNS: gl.constexpr = gl.constexpr(8)
"""Tokens of a product, the least that tensor cores have."""


@gluon.jit
def gate_up_of_choices(  # type: ignore[no-untyped-def]
    x, words, scale, chosen, out, outputs,
    ROWS: gl.constexpr, CODES: gl.constexpr, GROUP_SIZE: gl.constexpr, ALIKE: gl.constexpr, ZEROS: gl.constexpr,
    SCALE: gl.constexpr, BLOCKS: gl.constexpr, AHEAD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out [choices, outputs] = silu(gate) * up of the one token x [inputs], by the chosen experts.

    A program has ROWS outputs of one choice. GROUP_SIZE: the inputs that share a scale, at most all of a row. Other
    arguments are as in direct_kernel.
    """
    tiles = gl.cdiv(outputs, ROWS)
    choice, first = gl.program_id(0) // tiles, gl.program_id(0) % tiles * ROWS
    wait(PDL)
    release(PDL)
    stack = gl.load(chosen + choice).to(gl.int64)
    held = loads_ahead(words, scale, stack, None, first, outputs,
                       ROWS, CODES, GROUP_SIZE, ALIKE, True, BLOCKS, BLOCKS, AHEAD)  # fmt: skip
    # again, because no load passes it: else the compiler would load some words after the first products
    wait(PDL)
    acc, up = summed(x, columns_of(COLUMNS) * 0, words, scale, stack, None, held, first, outputs,
                     COLUMNS, ROWS, CODES, GROUP_SIZE, ALIKE, ZEROS, SCALE, True, BLOCKS, BLOCKS, AHEAD)  # fmt: skip
    _store(out + choice * outputs, silu_and_mul(added(acc), added(up)), first, outputs)


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
    before `wait`. This is right only behind `gate_up_of_choices`, which releases this one after its own `wait`, so the
    kernel before it has written `chosen` and `shares`.
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
def _store(out, y, first, outputs):  # type: ignore[no-untyped-def]
    """Write the first column of y [rows, COLUMNS]. All are of one token."""
    lines = first + gl.arange(0, y.shape[0], gl.SliceLayout(1, y.type.layout))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, y.type.layout))
    here = (lines < outputs)[:, None] & (columns == 0)[None, :]
    gl.store(out + (lines[:, None] + columns[None, :]), y.to(out.dtype.element_ty), mask=here)
