"""The GPU kernel of `codes_warpgroups`, in Gluon: codes of 8 bits times codes, with Hopper's instructions.

A tile belongs to two warpgroups, here called teams. Each has sums of its own. One team writes results while the other
one multiplies. (Triton would have all warps write at the same time, and would wait for each product of integers.) One
more warp copies tiles to shared memory. It goes on with the next tile while results are written.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from llmcore_triton.quantized.in_gluon import COPYING, next_stage, release, tile_at, wait

BLOCK_K: gl.constexpr = gl.constexpr(128)
"""Inputs of a step. Their 128 bytes are the longest row that TMA swizzles."""

SHARED_TILES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
"""The layout of tiles of codes in shared memory."""

_MULTIPLYING: gl.constexpr = gl.constexpr(240)
"""Registers of a thread that multiplies."""


@gluon.constexpr_function
def sums_of(n: int, kind: gl.dtype) -> gl.NVMMADistributedLayout:
    """The layout of a team's sums [M, n]. Triton multiplies integers with up to 128 columns at once."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, min(n, 128) if kind == gl.int8 else n, 32])


@gluon.constexpr_function
def results_of(m: int, n: int) -> gl.DistributedLinearLayout:
    """The same sums for stores: a thread has eight neighbouring columns, and four threads have 32.

    No sum leaves its warp.
    """
    more = [[0, 32 << bit] for bit in range((n // 32).bit_length() - 1)]
    more += [[64 << bit, 0] for bit in range((m // 64).bit_length() - 1)]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], [8, 0], *more], lanes, [[16, 0], [32, 0]], [], [m, n])


@gluon.jit(do_not_specialize=["tokens", "parts"])
def codes_times_codes(  # type: ignore[no-untyped-def]
    x, weight, x_scale, scale, bias, out, tokens, outputs, inputs, scale_stride, parts,
    M: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, TURN: gl.constexpr, SUMS: gl.constexpr,
    HAS_BIAS: gl.constexpr, PDL: gl.constexpr, SPREAD: gl.constexpr,
):  # fmt: skip
    """out [tokens, outputs] = x [tokens, inputs] weight^T, times x_scale [tokens, 1] and scale [outputs, 1], + bias.

    Descriptors: x in boxes of [M, BLOCK_K], weight [outputs, inputs] in boxes of [N, BLOCK_K]. A tile has N outputs,
    and M tokens for each team. Program i takes tiles i, i + programs, and so on.

    SUMS: out [parts, tokens, outputs] has sums without scales, each over one of `parts` parts of the inputs.

    SPREAD: 0, or each BLOCK_K inputs have a scale. Then x_scale is [tokens, groups], and scale [outputs / SPREAD,
    groups]. SPREAD is 1, or a multiple of N. The sum of a step is scaled at once, before SUMS and before bias.
    """
    # for each stage first those of the first team
    xs = gl.allocate_shared_memory(x.dtype, [2 * STAGES, M, BLOCK_K], x.layout)
    ws = gl.allocate_shared_memory(weight.dtype, [STAGES, N, BLOCK_K], weight.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # first all those of the first team
    free = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
        mbarrier.init(free.index(STAGES + i), count=1)
    fence_async_shared()
    copied = x, weight, xs, ws, full, free, tokens, outputs, inputs, parts
    multiplied = xs, ws, full, free, x_scale, scale, bias, out, tokens, outputs, inputs, scale_stride, parts
    gl.warp_specialize(
        [
            (_multiply, (multiplied, 0, TURN, SUMS, HAS_BIAS, PDL, SPREAD)),
            (_multiply, (multiplied, 1, TURN, SUMS, HAS_BIAS, PDL, SPREAD)),
            (_copy, (copied, TURN, PDL)),
        ],
        [4, 1],
        [_MULTIPLYING, COPYING],
    )


@gluon.jit
def _place(  # type: ignore[no-untyped-def]
    unit, tokens, outputs, inputs, parts, M: gl.constexpr, N: gl.constexpr, TURN: gl.constexpr
):
    """Returns the first row and column of a unit of work, its part, and the steps from the first to before the end."""
    rows, columns = gl.cdiv(tokens, 2 * M), gl.cdiv(outputs, N)
    # units of one part come one after another, because they read the same inputs
    part = unit // (rows * columns)
    row, column = tile_at(unit - part * (rows * columns), rows, columns, 2 * M, N, TURN)
    steps = gl.cdiv(inputs, BLOCK_K)
    return row, column, part, part * steps // parts, (part + 1) * steps // parts


# --- the warp that copies --------------------------------------------------------------------------------------


@gluon.jit
def _copy(copied, TURN: gl.constexpr, PDL: gl.constexpr):  # type: ignore[no-untyped-def]
    x, weight, xs, ws, full, free, tokens, outputs, inputs, parts = copied
    STAGES: gl.constexpr = full.shape[0]
    M: gl.constexpr = xs.shape[1]
    N: gl.constexpr = ws.shape[1]
    units = gl.cdiv(tokens, 2 * M) * gl.cdiv(outputs, N) * parts
    _, column, _, first, end = _place(gl.program_id(0), tokens, outputs, inputs, parts, M, N, TURN)
    # no kernel writes weights, so the first ones come while the kernels before this one end
    ahead = gl.minimum(end - first, STAGES)
    for i in range(ahead):
        _copy_weights(weight, ws, full, i, column, first + i, M)
    wait(PDL)
    stage, phase = 0, 1
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row, column, _, first, end = _place(unit, tokens, outputs, inputs, parts, M, N, TURN)
        for step in range(first, end):
            if ahead > 0:
                ahead -= 1
            else:
                mbarrier.wait(free.index(stage), phase)
                mbarrier.wait(free.index(STAGES + stage), phase)
                _copy_weights(weight, ws, full, stage, column, step, M)
            for team in gl.static_range(2):
                place = xs.index(2 * stage + team)
                tma.async_copy_global_to_shared(x, [row + team * M, step * BLOCK_K], full.index(stage), place)
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _copy_weights(weight, ws, full, stage, column, step, M: gl.constexpr):  # type: ignore[no-untyped-def]
    """Copy the weights of a step. The step's 2 * M rows of x are still to come."""
    mbarrier.expect(full.index(stage), (2 * M + ws.shape[1]) * BLOCK_K)
    tma.async_copy_global_to_shared(weight, [column, step * BLOCK_K], full.index(stage), ws.index(stage))


# --- the warps that multiply -----------------------------------------------------------------------------------


@gluon.jit
def _multiply(  # type: ignore[no-untyped-def]
    multiplied,
    TEAM: gl.constexpr,
    TURN: gl.constexpr,
    SUMS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PDL: gl.constexpr,
    SPREAD: gl.constexpr,
):
    xs, ws, full, free, x_scale, scale, bias, out, tokens, outputs, inputs, scale_stride, parts = multiplied
    STAGES: gl.constexpr = full.shape[0]
    M: gl.constexpr = xs.shape[1]
    N: gl.constexpr = ws.shape[1]
    LAYOUT: gl.constexpr = sums_of(N, xs.dtype)
    KIND: gl.constexpr = gl.int32 if xs.dtype == gl.int8 else gl.float32
    units = gl.cdiv(tokens, 2 * M) * gl.cdiv(outputs, N) * parts
    wait(PDL)
    release(PDL)
    # `before` starts here: if it started as `stage` in front of the inner loop, Triton would not see that it changes
    stage, phase, before = 0, 0, 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row, column, part, first, end = _place(unit, tokens, outputs, inputs, parts, M, N, TURN)
        row += TEAM * M
        lines = row + gl.arange(0, M, gl.SliceLayout(1, LAYOUT))
        columns = column + gl.arange(0, N, gl.SliceLayout(0, LAYOUT))
        if not SUMS and not SPREAD:
            # before the products, which take longer
            by_x = gl.load(x_scale + lines * scale_stride, mask=lines < tokens, other=0.0)
            by_w = gl.load(scale + columns, mask=columns < outputs, other=0.0)
        acc = gl.zeros([M, N], KIND, LAYOUT)
        if SPREAD:
            sources = xs, ws, full, x_scale, scale, row, column, tokens, outputs, inputs, scale_stride
            # Two products have sums of their own. While one is computed, those of the other one are scaled. If a
            # product went on into the next turn of the loop, ptxas would wait for each at once
            one, other = acc, acc
            for step in range(first, end - 1, 2):
                before = stage
                begun, by_one = _product(sources, one, stage, phase, step, TEAM, SPREAD)
                stage, phase = next_stage(stage, phase, STAGES)
                begun_other, by_other = _product(sources, other, stage, phase, step + 1, TEAM, SPREAD)
                one = warpgroup_mma_wait(1, deps=[begun])
                mbarrier.arrive(free.index(TEAM * STAGES + before), count=1)
                acc += one * by_one
                other = warpgroup_mma_wait(0, deps=[begun_other])
                mbarrier.arrive(free.index(TEAM * STAGES + stage), count=1)
                acc += other * by_other
                stage, phase = next_stage(stage, phase, STAGES)
            for step in range(first + (end - first) // 2 * 2, end):
                begun, by_one = _product(sources, one, stage, phase, step, TEAM, SPREAD)
                one = warpgroup_mma_wait(0, deps=[begun])
                mbarrier.arrive(free.index(TEAM * STAGES + stage), count=1)
                acc += one * by_one
                stage, phase = next_stage(stage, phase, STAGES)
        else:
            for step in range(first, end):
                mbarrier.wait(full.index(stage), phase)
                ours, weights = xs.index(2 * stage + TEAM), ws.index(stage).permute([1, 0])
                acc = warpgroup_mma(ours, weights, acc, use_acc=step > first, is_async=True)
                # all products but the last one have ended
                acc = warpgroup_mma_wait(1, deps=[acc])
                mbarrier.arrive(free.index(TEAM * STAGES + before), count=1, pred=step > first)
                before = stage
                stage, phase = next_stage(stage, phase, STAGES)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(free.index(TEAM * STAGES + before), count=1)
        if SUMS:
            y = acc
            corner = out + part.to(gl.int64) * tokens * outputs
        else:
            y = acc.to(gl.float32)
            if not SPREAD:
                y = y * by_x[:, None] * by_w[None, :]
            if HAS_BIAS:
                # no load passes this. So registers hold either scales or bias
                gl.thread_barrier()
                y += gl.load(bias + columns, mask=columns < outputs, other=0.0).to(gl.float32)[None, :]
            y = gl.convert_layout(y.to(out.dtype.element_ty), results_of(M, N))
            corner = out
        _store(corner, y, row, column, tokens, outputs)


@gluon.jit
def _product(  # type: ignore[no-untyped-def]
    sources, sums, stage, phase, step, TEAM: gl.constexpr, SPREAD: gl.constexpr
):
    """Begin the product of a step. Returns its sums, which are in flight, and their scales."""
    xs, ws, full, x_scale, scale, row, column, tokens, outputs, inputs, scale_stride = sources
    M: gl.constexpr = xs.shape[1]
    N: gl.constexpr = ws.shape[1]
    LAYOUT: gl.constexpr = sums_of(N, xs.dtype)
    mbarrier.wait(full.index(stage), phase)
    ours, weights = xs.index(2 * stage + TEAM), ws.index(stage).permute([1, 0])
    sums = warpgroup_mma(ours, weights, sums, use_acc=False, is_async=True)
    # they come while products are computed
    lines = row + gl.arange(0, M, gl.SliceLayout(1, LAYOUT))
    by_x = gl.load(x_scale + lines * scale_stride + step, mask=lines < tokens, other=0.0)
    if SPREAD > 1:
        by = (by_x * gl.load(scale + column // SPREAD * (inputs // BLOCK_K) + step))[:, None]
    else:
        columns = column + gl.arange(0, N, gl.SliceLayout(0, LAYOUT))
        by_w = gl.load(scale + columns * (inputs // BLOCK_K) + step, mask=columns < outputs, other=0.0)
        by = by_x[:, None] * by_w[None, :]
    return sums, by


@gluon.jit
def _store(corner, y, row, column, tokens, outputs):  # type: ignore[no-untyped-def]
    """Write y as a part of a tensor [tokens, outputs] that begins at `corner`."""
    lines = row + gl.arange(0, y.shape[0], gl.SliceLayout(1, y.type.layout))
    columns = column + gl.arange(0, y.shape[1], gl.SliceLayout(0, y.type.layout))
    here = (lines < tokens)[:, None] & (columns < outputs)[None, :]
    gl.store(corner + lines.to(gl.int64)[:, None] * outputs + columns[None, :], y, mask=here)
