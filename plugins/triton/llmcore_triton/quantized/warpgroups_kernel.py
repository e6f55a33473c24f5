"""The GPU kernel of `warpgroups`, in Gluon: weights in 4 and 8 bits times plain inputs, with Hopper's instructions.

A product reads its weights from registers while the warps go on. So the next weights are converted while the tensor
cores multiply. (Triton would wait for the product first.) One more warp copies words to shared memory, and one copies
inputs.

Each tile has rows in an order that suits a thread, which holds rows r and r + 8 of each 16: two neighbouring outputs,
or gate and up of one.

Two other forms were not faster on an H200. In one, two partitions of four warps did not wait for each other. In one,
words were loaded into registers a step ahead.
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

from llmcore_triton.quantized import codes, shares
from llmcore_triton.quantized.in_gluon import COPYING, next_stage, release, silu_and_mul, wait

WORDS: gl.constexpr = gl.constexpr(64)
"""Words of a block of inputs. Their 128 bytes are the longest row that TMA swizzles."""

SHARED_TILES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
"""The layout of tiles of inputs and of words in shared memory."""

_numbers = gluon.jit(codes.numbers.fn)
share, work_of, turns = gluon.jit(shares.share.fn), gluon.jit(shares.work_of.fn), gluon.jit(shares.turns.fn)
tile_of, others_of = gluon.jit(shares.tile_of.fn), gluon.jit(shares.others_of.fn)


@gluon.constexpr_function
def sums_of(tokens: int, warps: int) -> gl.NVMMADistributedLayout:
    """The layout of sums [rows, tokens]: each warp has 16 of every 16 * warps rows."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, tokens, 16])


@gluon.constexpr_function
def results_of(columns: int, tokens: int, warps: int, each: int) -> gl.DistributedLinearLayout:
    """The layout of results [columns, tokens] for stores: a thread has 8 neighbouring outputs of a token.

    `each`: the neighbouring outputs of a warp, 8 or 16. No result leaves its warp.
    """
    neighbours = [[8, 0]] if each == 16 else []
    rows = [[0, 1 << bit] for bit in range(tokens.bit_length() - 1)]
    lanes = [*neighbours, *rows[: 5 - len(neighbours)]]
    more = [[each * warps << bit, 0] for bit in range((columns // (each * warps)).bit_length() - 1)]
    registers = [[1, 0], [2, 0], [4, 0], *rows[5 - len(neighbours) :], *more]
    by_warp = [[each << bit, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, by_warp, [], [columns, tokens])


@gluon.jit(do_not_specialize=["tokens", "whole", "steps"])
def words_by_warpgroups(  # type: ignore[no-untyped-def]
    x, words, scale, bias, out, partials, arrivals, tokens, outputs, inputs, whole, steps,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, CODES: gl.constexpr,
    GROUP_SIZE: gl.constexpr, ALIKE: gl.constexpr, ZEROS: gl.constexpr, SCALE: gl.constexpr, GATED: gl.constexpr,
    PARTS: gl.constexpr, K_STEPS: gl.constexpr, GROUP: gl.constexpr, JOINED: gl.constexpr,
    X_STAGES: gl.constexpr, W_STAGES: gl.constexpr, FLIGHT: gl.constexpr, DEPTH: gl.constexpr,
    PDL: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """out [tokens, outputs] = x [tokens, inputs] weight^T, divided among programs as shares.py says.

    A step multiplies PARTS * WORDS inputs, one or more blocks, of ROWS rows of the weight, of gate and up together if
    GATED. Scales of groups multiply the weights, and scales of whole rows the sums. WORDS divides inputs.
    - whole: the tiles that each program computes alone. The steps of the others are cut into shares of `steps`.
    - x: a descriptor of [tokens, inputs], in tiles of [TOKENS, WORDS].
    - words: a descriptor of [rows of the weight, words of a row], in tiles of WORDS words of ROWS rows, or of half of
      them if GATED.
    - JOINED: parts whose inputs share a stage of shared memory. X_STAGES and W_STAGES: the stages.
    - DEPTH: inputs of a product, and FLIGHT: the products in flight while the next weights are converted. A product of
      16 inputs leaves little time between two, and one of more needs fewer instructions.
    """
    TURNS: gl.constexpr = PARTS // JOINED
    BLOCKS: gl.constexpr = PARTS // codes.parts(CODES)
    xs = gl.allocate_shared_memory(x.dtype, [X_STAGES * JOINED, TOKENS, WORDS], x.layout)
    ws = gl.allocate_shared_memory(gl.int16, [W_STAGES * BLOCKS, ROWS, WORDS], words.layout)
    x_full, x_free = _barriers(X_STAGES), _barriers(X_STAGES)
    w_full, w_free = _barriers(W_STAGES), _barriers(W_STAGES)
    fence_async_shared()
    work = work_of(tokens, outputs, whole, steps, TOKENS, ROWS // (1 + GATED), K_STEPS)
    gl.warp_specialize(
        [
            (_multiply, (xs, ws, x_full, x_free, w_full, w_free, scale, bias, out, partials, arrivals, inputs, steps,
                         work, ROWS, CODES, GROUP_SIZE, ALIKE, ZEROS, SCALE, GATED, HAS_BIAS, PARTS, K_STEPS, GROUP,
                         TURNS, X_STAGES, W_STAGES, FLIGHT, DEPTH, PDL)),
            (_copy_words, (words, ws, w_full, w_free, work, ROWS, GATED, TOKENS, K_STEPS, GROUP, W_STAGES)),
            (_copy_inputs, (x, xs, x_full, x_free, work, ROWS // (1 + GATED), K_STEPS, GROUP, TURNS, X_STAGES, PDL)),
        ],
        [1, 1],
        [COPYING, COPYING],
    )  # fmt: skip


@gluon.jit
def _barriers(COUNT: gl.constexpr):  # type: ignore[no-untyped-def]
    found = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(found.index(i), count=1)
    return found


# --- the warps that copy ---------------------------------------------------------------------------------------


@gluon.jit
def _copy_words(  # type: ignore[no-untyped-def]
    words, ws, full, free, work, ROWS: gl.constexpr, GATED: gl.constexpr, TOKENS: gl.constexpr,
    K_STEPS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """No kernel writes words, so the first ones come while the kernels before this one end."""
    OUTPUTS: gl.constexpr = ROWS // (1 + GATED)
    BLOCKS: gl.constexpr = ws.shape[0] // STAGES
    outputs = work[1]
    stage, phase = 0, 1
    begin, end = turns(work, K_STEPS)
    for turn in range(begin, end):
        _, column, k_first, k_end = tile_of(turn, work, TOKENS, OUTPUTS, K_STEPS, GROUP)
        for k in range(k_first, k_end):
            mbarrier.wait(free.index(stage), phase)
            mbarrier.expect(full.index(stage), BLOCKS * ROWS * WORDS * 2)
            for block in gl.static_range(BLOCKS):
                for half in gl.static_range(1 + GATED):
                    place = ws.index(stage * BLOCKS + block).slice(half * OUTPUTS, OUTPUTS)
                    at = [half * outputs + column * OUTPUTS, (k * BLOCKS + block) * WORDS]
                    tma.async_copy_global_to_shared(words, at, full.index(stage), place)
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _copy_inputs(  # type: ignore[no-untyped-def]
    x, xs, full, free, work, COLUMNS: gl.constexpr, K_STEPS: gl.constexpr, GROUP: gl.constexpr, TURNS: gl.constexpr,
    STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    TOKENS: gl.constexpr = xs.shape[1]
    JOINED: gl.constexpr = xs.shape[0] // STAGES
    stage, phase = 0, 1
    wait(PDL)
    begin, end = turns(work, K_STEPS)
    for turn in range(begin, end):
        row, _, k_first, k_end = tile_of(turn, work, TOKENS, COLUMNS, K_STEPS, GROUP)
        for i in range(k_first * TURNS, k_end * TURNS):
            mbarrier.wait(free.index(stage), phase)
            mbarrier.expect(full.index(stage), JOINED * TOKENS * WORDS * 2)
            for j in gl.static_range(JOINED):
                at = (i * JOINED + j) * WORDS
                tma.async_copy_global_to_shared(x, [row, at], full.index(stage), xs.index(stage * JOINED + j))
            stage, phase = next_stage(stage, phase, STAGES)


# --- the warps that multiply -----------------------------------------------------------------------------------


@gluon.jit
def _multiply(  # type: ignore[no-untyped-def]
    xs, ws, x_full, x_free, w_full, w_free, scale, bias, out, partials, arrivals, inputs, steps, work,
    ROWS: gl.constexpr, CODES: gl.constexpr, GROUP_SIZE: gl.constexpr, ALIKE: gl.constexpr, ZEROS: gl.constexpr,
    SCALE: gl.constexpr, GATED: gl.constexpr, HAS_BIAS: gl.constexpr, PARTS: gl.constexpr,
    K_STEPS: gl.constexpr, GROUP: gl.constexpr, TURNS: gl.constexpr, X_STAGES: gl.constexpr, W_STAGES: gl.constexpr,
    FLIGHT: gl.constexpr, DEPTH: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    TOKENS: gl.constexpr = xs.shape[1]
    COLUMNS: gl.constexpr = ROWS // (1 + GATED)
    JOINED: gl.constexpr = xs.shape[0] // X_STAGES
    MMA: gl.constexpr = sums_of(TOKENS, gl.num_warps())
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    BLOCKS: gl.constexpr = ws.shape[0] // W_STAGES
    PIECES: gl.constexpr = WORDS // DEPTH
    GROUPS: gl.constexpr = PARTS // ALIKE if GROUP_SIZE > 0 else 0
    LINES: gl.constexpr = gl.SliceLayout(1, OPERAND)
    tokens, outputs, _, _, _ = work
    begin, end = turns(work, K_STEPS)
    row, column, k_first, k_end = tile_of(begin, work, TOKENS, COLUMNS, K_STEPS, GROUP)
    marks = _marks(scale, column, k_first, outputs, inputs, ROWS, GROUPS, ALIKE, GROUP_SIZE, GATED, LINES)
    now = _ready(marks, GROUPS, ZEROS, SCALE, xs.dtype)
    wait(PDL)
    release(PDL)
    w_stage, w_phase, x_stage, x_phase, before = 0, 0, 0, 0, -1
    # tiles have a loop of their own: if a branch of the loop over steps used the sums, ptxas would wait for all
    # products in every step
    for turn in range(begin, end):
        # new ones: the last tile's would keep their registers while this one is written
        sums = gl.zeros([ROWS, TOKENS], gl.float32, MMA)
        for k in range(k_first, k_end):
            mbarrier.wait(w_full.index(w_stage), w_phase)
            held = ()
            for block in gl.static_range(BLOCKS):
                held = held + _loaded(_in_order(ws.index(w_stage * BLOCKS + block), ROWS, GATED), DEPTH, OPERAND)
            # those of the next step. After the last step of a tile others are loaded instead
            ahead = gl.minimum(k + 1, K_STEPS - 1)
            marks = _marks(scale, column, ahead, outputs, inputs, ROWS, GROUPS, ALIKE, GROUP_SIZE, GATED, LINES)
            for part in gl.static_range(TURNS):
                mbarrier.wait(x_full.index(x_stage), x_phase)
                for j in gl.static_range(JOINED):
                    xt = xs.index(x_stage * JOINED + j)
                    for i in gl.static_range(PIECES):
                        weights = _weights(
                            held[(part * JOINED + j) * BLOCKS // PARTS * PIECES + i],
                            *(now, part * JOINED + j, CODES, ALIKE, GROUPS, ZEROS, xs.dtype),
                        )
                        piece = xt.slice(i * DEPTH, DEPTH, dim=1).permute([1, 0])
                        more = (k > k_first) | (part + j + i != 0)
                        sums = warpgroup_mma(weights, piece, sums, use_acc=more, is_async=True)
                        sums = warpgroup_mma_wait(FLIGHT, deps=[sums])
                        # all products but the last ones have ended, and with them those of the stage before
                        if j * PIECES + i == FLIGHT - 1:
                            mbarrier.arrive(x_free.index(before), count=1, pred=before >= 0)
                            if part == 0:
                                mbarrier.arrive(w_free.index(w_stage), count=1)
                before = x_stage
                x_stage, x_phase = next_stage(x_stage, x_phase, X_STAGES)
            # marks that enter a loop may still be loading. If the next step used them as they were loaded, ptxas would
            # wait there for all loads, those of the step after it too
            now = _ready(marks, GROUPS, ZEROS, SCALE, xs.dtype)
            w_stage, w_phase = next_stage(w_stage, w_phase, W_STAGES)
        sums = warpgroup_mma_wait(0, deps=[sums])
        done = sums
        if GROUP_SIZE == 0:
            (whole,) = _marks(scale, column, 0, outputs, inputs, ROWS, 1, 1, 0, GATED, gl.SliceLayout(1, MMA))
            done = sums * whole[:, None]
        # the program that begins a tile adds the parts of the others, and writes the tile
        if k_first > 0:
            _hand_over(partials, arrivals, done, turn, ROWS, TOKENS)
        else:
            if k_end < K_STEPS:
                done = _joined(done, partials, arrivals, turn, steps, K_STEPS, ROWS, TOKENS)
            _store(out, bias, done, row, column, tokens, outputs, ROWS, TOKENS, GATED, HAS_BIAS)
        following = gl.minimum(turn + 1, end - 1)
        row, column, k_first, k_end = tile_of(following, work, TOKENS, COLUMNS, K_STEPS, GROUP)
        marks = _marks(scale, column, k_first, outputs, inputs, ROWS, GROUPS, ALIKE, GROUP_SIZE, GATED, LINES)
        now = _ready(marks, GROUPS, ZEROS, SCALE, xs.dtype)


@gluon.jit
def _in_order(tile, ROWS: gl.constexpr, GATED: gl.constexpr):  # type: ignore[no-untyped-def]
    """Returns a view of a tile of words whose rows are in the order of the sums."""
    if GATED:
        tile = tile.reshape([2, ROWS // 16, 8, WORDS]).permute([1, 0, 2, 3])
    else:
        tile = tile.reshape([ROWS // 16, 8, 2, WORDS]).permute([0, 2, 1, 3])
    return tile.reshape([ROWS, WORDS])


@gluon.jit
def _loaded(tile, DEPTH: gl.constexpr, OPERAND: gl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the words of a tile in registers: those of each product."""
    found = ()
    for i in gl.static_range(WORDS // DEPTH):
        words = tile.slice(i * DEPTH, DEPTH, dim=1).load(OPERAND)
        found = found + (words,)  # type: ignore[assignment]  # noqa: RUF005 - Gluon's compiler has no such tuples
    return found


@gluon.jit
def _lines(  # type: ignore[no-untyped-def]
    column, outputs, ROWS: gl.constexpr, GATED: gl.constexpr, LAYOUT: gl.constexpr
):
    """Returns the weight's row for each row of a tile's sums, and whether it exists."""
    i = gl.arange(0, ROWS, LAYOUT)
    if GATED:
        output = column * (ROWS // 2) + i // 16 * 8 + i % 8
        line = output + i // 8 % 2 * outputs
    else:
        output = column * ROWS + i // 16 * 16 + i % 8 * 2 + i // 8 % 2
        line = output
    return line, output < outputs


@gluon.jit
def _marks(  # type: ignore[no-untyped-def]
    scale, column, k, outputs, inputs,
    ROWS: gl.constexpr, GROUPS: gl.constexpr, ALIKE: gl.constexpr, GROUP_SIZE: gl.constexpr, GATED: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Returns the marks of each group of a step, as they are stored."""
    found = ()
    if GROUPS > 0:
        lines, inside = _lines(column, outputs, ROWS, GATED, LAYOUT)
        for i in gl.static_range(GROUPS):
            which = 0
            if GROUP_SIZE > 0:
                # the last block may reach over the last group
                last = gl.cdiv(inputs, GROUP_SIZE) - 1
                which = gl.minimum((k * GROUPS + i) * (ALIKE * WORDS) // GROUP_SIZE, last)
            mark = gl.load(scale + which * ((1 + GATED) * outputs) + lines, mask=inside, other=0)
            found = found + (mark,)  # type: ignore[assignment]  # noqa: RUF005 - Gluon's compiler has no such tuples
    return found


@gluon.jit
def _ready(  # type: ignore[no-untyped-def]
    marks, GROUPS: gl.constexpr, ZEROS: gl.constexpr, SCALE: gl.constexpr, KIND: gl.constexpr
):
    """Returns marks with scales of KIND, and with zeros in the low bits."""
    found = ()
    for i in gl.static_range(GROUPS):
        mark = marks[i]
        if ZEROS:
            scale = mark.to(gl.int16).to(gl.bfloat16 if SCALE == "bf16" else gl.float16, bitcast=True)
            bits = scale.to(KIND).to(gl.int16, bitcast=True).to(gl.int32)
            mark = (bits << 16) | ((mark >> 16) & 0xFFFF)
        else:
            mark = mark.to(KIND)
        found = found + (mark,)  # type: ignore[assignment]  # noqa: RUF005 - Gluon's compiler has no such tuples
    return found


@gluon.jit
def _weights(  # type: ignore[no-untyped-def]
    held, marks, PART: gl.constexpr, CODES: gl.constexpr, ALIKE: gl.constexpr, GROUPS: gl.constexpr,
    ZEROS: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """Returns the numbers of part PART of a step, as KIND in the layout of `held`, times the scales of groups."""
    zero = 0
    if ZEROS:
        zero = gl.convert_layout(marks[PART // ALIKE].to(gl.int16)[:, None], held.type.layout)
    found = _numbers(held, zero, PART % codes.parts(CODES), CODES, KIND, ZEROS)
    if GROUPS > 0:
        mark = marks[PART // ALIKE]
        if ZEROS:
            mark = (mark >> 16).to(gl.int16).to(KIND, bitcast=True)
        found = found * mark[:, None]
    return found


@gluon.jit
def _flat(sums, ROWS: gl.constexpr, TOKENS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Returns sums in an order in which each thread has four neighbours, and the threads of a warp too."""
    WARPS: gl.constexpr = gl.num_warps()
    parts = sums.reshape([ROWS // (16 * WARPS), WARPS, 2, 8, TOKENS // 8, 4, 2])
    return parts.permute([0, 4, 1, 3, 5, 2, 6]).reshape([ROWS * TOKENS])


@gluon.jit
def _tile(flat, ROWS: gl.constexpr, TOKENS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Returns what _flat put in order, as it was."""
    WARPS: gl.constexpr = gl.num_warps()
    parts = flat.reshape([ROWS // (16 * WARPS), TOKENS // 8, WARPS, 8, 4, 2, 2])
    return parts.permute([0, 2, 5, 3, 1, 4, 6]).reshape([ROWS, TOKENS])


@gluon.jit
def _store(  # type: ignore[no-untyped-def]
    out, bias, acc, row, column, tokens, outputs,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, GATED: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Write one finished tile as rows of out [tokens, outputs]."""
    COLUMNS: gl.constexpr = ROWS // (1 + GATED)
    if HAS_BIAS:
        lines, inside = _lines(column, outputs, ROWS, GATED, gl.SliceLayout(1, acc.type.layout))
        acc += gl.load(bias + lines, mask=inside, other=0.0).to(gl.float32)[:, None]
    if GATED:
        gate, up = gl.split(acc.reshape([ROWS // 16, 2, 8, TOKENS]).permute([0, 2, 3, 1]))
        y = silu_and_mul(gate, up).reshape([COLUMNS, TOKENS])
    else:
        y = acc.reshape([ROWS // 16, 2, 8, TOKENS]).permute([0, 2, 1, 3]).reshape([ROWS, TOKENS])
    LAYOUT: gl.constexpr = results_of(COLUMNS, TOKENS, gl.num_warps(), 16 // (1 + GATED))
    y = gl.convert_layout(y.to(out.dtype.element_ty), LAYOUT)
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(1, LAYOUT))
    rows = gl.arange(0, TOKENS, gl.SliceLayout(0, LAYOUT))
    here = (columns < outputs - column * COLUMNS)[:, None] & (rows < tokens - row)[None, :]
    corner = out + row.to(gl.int64) * outputs + column * COLUMNS
    gl.store(corner + rows[None, :] * outputs + columns[:, None], y, mask=here)


@gluon.jit
def _hand_over(partials, arrivals, sums, tile, ROWS: gl.constexpr, TOKENS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Give this program's part of `tile` to the program that begins it."""
    flat = _flat(sums, ROWS, TOKENS)
    part = partials + share().to(gl.int64) * (ROWS * TOKENS)
    gl.store(part + gl.arange(0, ROWS * TOKENS, flat.type.layout), flat)
    # all threads write before one of them reports it
    gl.thread_barrier()
    gl.atomic_add(arrivals + tile, 1, sem="release", scope="gpu")


@gluon.jit
def _joined(  # type: ignore[no-untyped-def]
    sums, partials, arrivals, tile, steps, K_STEPS: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr
):
    """Returns this program's part of `tile`, plus the parts of all later shares, in their order."""
    SIZE: gl.constexpr = ROWS * TOKENS
    # by two, because their loads then run at the same time, if they fit into registers
    TURNS: gl.constexpr = 2 if 1024 * gl.num_warps() >= SIZE else 1
    others = others_of(tile, steps, K_STEPS)
    while gl.atomic_add(arrivals + tile, 0, sem="acquire", scope="gpu") < others:
        pass
    # reset the counter for the next launch
    gl.store(arrivals + tile, 0)
    acc = _flat(sums, ROWS, TOKENS)
    places = partials + (share() + 1).to(gl.int64) * SIZE + gl.arange(0, SIZE, acc.type.layout)
    for other in range(0, others, TURNS):
        for i in gl.static_range(TURNS):
            # bypass the L1 cache, which does not see other multiprocessors' writes
            acc += gl.load(places + (other + i) * SIZE, mask=other + i < others, other=0.0, cache_modifier=".cg")
    return gl.convert_layout(_tile(acc, ROWS, TOKENS), sums.type.layout, assert_trivial=True)
