"""The GPU kernel of `direct`, in Gluon: weights in 4 and 8 bits times up to 16 tokens, without tiles in shared memory.

The words that a thread loads from memory are its part of the tensor cores' first operand, and the numbers of x that it
loads are its part of the second one. So nothing moves between threads until the sums are complete. The products add up
the inputs of a block in an order that makes this so: see `loads_of` and `_inputs_last`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from llmcore_triton import linear_kernels
from llmcore_triton.quantized import codes
from llmcore_triton.quantized.in_gluon import release, wait

WORDS: gl.constexpr = gl.constexpr(64)
"""Words of a block of inputs, which a warp multiplies in one step."""

_numbers = gluon.jit(codes.numbers.fn)
_silu_and_mul = gluon.jit(linear_kernels.silu_and_mul.fn)


@gluon.constexpr_function
def sums_of(warps: int) -> gl.NVMMADistributedLayout:
    """The layout of sums [warps, rows, tokens]: each warp has its own."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@gluon.constexpr_function
def loads_of(sides: int, warps: int) -> gl.DistributedLinearLayout:
    """The layout [warps, sides, WORDS] in which a part of a block comes from memory, for `sides` rows or tokens.

    Thread t of four has inputs 8t to 8t + 7, 16 bytes, and those 32 further on.
    """
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 32], *([0, 8 << bit, 0] for bit in range(sides // 16))]
    lanes = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    by_warp = [[1 << bit, 0, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, by_warp, [], [warps, sides, WORDS.value])


@gluon.constexpr_function
def results_of(warps: int) -> gl.BlockedLayout:
    """Another layout of the sums: a thread has those of all warps, and neighbours have neighbouring rows."""
    return gl.BlockedLayout([warps, 1, 1], [1, 16, 2], [1, 1, warps], [1, 2, 0])


@gluon.jit(do_not_specialize=["tokens"])
def words_times_tokens(  # type: ignore[no-untyped-def]
    x, words, scale, bias, out, tokens, outputs, x_stride,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, CODES: gl.constexpr, GROUP_SIZE: gl.constexpr, ALIKE: gl.constexpr,
    ZEROS: gl.constexpr, SCALE: gl.constexpr, GATED: gl.constexpr, BLOCKS: gl.constexpr, AHEAD: gl.constexpr,
    PDL: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """out [tokens, outputs] = x [tokens, inputs] weight^T. A program has ROWS outputs of TOKENS tokens.

    Its warps take the BLOCKS blocks of a row by turns, and add their sums at the end. Each loads the words of AHEAD
    steps, at most all of its steps, before it multiplies. The other arguments are as in weight_only_kernels, where
    WORDS is as here, and SCALED "sums".
    """
    first, token = gl.program_id(0) * ROWS, gl.program_id(1) * TOKENS
    held = loads_ahead(words, scale, None, None, first, outputs,
                       ROWS, CODES, GROUP_SIZE, ALIKE, GATED, BLOCKS, BLOCKS, AHEAD)  # fmt: skip
    wait(PDL)
    release(PDL)
    # sums of tokens outside are not stored
    row = gl.minimum(token + columns_of(TOKENS), tokens - 1) * x_stride
    acc, up = summed(x, row, words, scale, None, None, held, first, outputs,
                     TOKENS, ROWS, CODES, GROUP_SIZE, ALIKE, ZEROS, SCALE, GATED, BLOCKS, BLOCKS, AHEAD)  # fmt: skip
    y, z = added(acc), added(up) if GATED else 0
    lines = first + gl.arange(0, ROWS, gl.SliceLayout(1, y.type.layout))
    rows = token + gl.arange(0, TOKENS, gl.SliceLayout(0, y.type.layout))
    inside = lines < outputs
    if GROUP_SIZE == 0:
        y *= gl.load(scale + lines, mask=inside, other=0.0)[:, None]
        if GATED:
            z *= gl.load(scale + outputs + lines, mask=inside, other=0.0)[:, None]
    if HAS_BIAS:
        y += gl.load(bias + lines, mask=inside, other=0.0).to(gl.float32)[:, None]
        if GATED:
            z += gl.load(bias + outputs + lines, mask=inside, other=0.0).to(gl.float32)[:, None]
    if GATED:
        y = _silu_and_mul(y, z)
    here = inside[:, None] & (rows < tokens)[None, :]
    gl.store(out + rows[None, :] * outputs + lines[:, None], y.to(out.dtype.element_ty), mask=here)


@gluon.jit
def loads_ahead(  # type: ignore[no-untyped-def]
    words, scale, chosen, shares, first, outputs,
    ROWS: gl.constexpr, CODES: gl.constexpr, GROUP_SIZE: gl.constexpr, ALIKE: gl.constexpr, GATED: gl.constexpr,
    BLOCKS: gl.constexpr, TOTAL: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Returns what `_loaded` loads for the first AHEAD steps."""
    held = ()
    for j in gl.static_range(AHEAD):
        more = _loaded(words, scale, chosen, shares, first, j, outputs,
                       ROWS, CODES, GROUP_SIZE, ALIKE, GATED, BLOCKS, TOTAL)  # fmt: skip
        held = _put(held, j, more)
    return held


@gluon.jit
def summed(  # type: ignore[no-untyped-def]
    x, row, words, scale, chosen, shares, held, first, outputs,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, CODES: gl.constexpr, GROUP_SIZE: gl.constexpr, ALIKE: gl.constexpr,
    ZEROS: gl.constexpr, SCALE: gl.constexpr, GATED: gl.constexpr, BLOCKS: gl.constexpr, TOTAL: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    """Returns (sums, up's sums) [warps, ROWS, TOKENS] of all TOTAL blocks, of which `held` has the first AHEAD steps.

    `row` [TOKENS]: where each token's row begins in x, in the layout of `columns_of`. Blocks follow one another there.
    See `_loaded` for `chosen` and `shares`.
    """
    W: gl.constexpr = gl.num_warps()
    STEPS: gl.constexpr = (TOTAL + W - 1) // W
    # the loop has the steps after which words are loaded, as far as they are whole turns
    TURNS: gl.constexpr = (STEPS - AHEAD) // AHEAD
    SHARES: gl.constexpr = shares is not None
    acc = gl.zeros([W, ROWS, TOKENS], gl.float32, sums_of(W))
    up = acc
    for turn in range(TURNS):
        for j in gl.static_range(AHEAD):
            step = turn * AHEAD + j
            xs = _inputs(x, row, step, TOKENS, CODES, TOTAL)
            acc, up = _multiplied(acc, up, xs, held[j], CODES, GROUP_SIZE, ALIKE, ZEROS, SCALE, GATED, SHARES)
            # else the compiler would load the words of all AHEAD steps at the end of a turn, and the next one would
            # wait for them at once
            _keep_order(first)
            more = _loaded(words, scale, chosen, shares, first, step + AHEAD, outputs,
                           ROWS, CODES, GROUP_SIZE, ALIKE, GATED, BLOCKS, TOTAL)  # fmt: skip
            held = _put(held, j, more)
            _keep_order(first)
    for step in gl.static_range(TURNS * AHEAD, STEPS):
        xs = _inputs(x, row, step, TOKENS, CODES, TOTAL)
        acc, up = _multiplied(acc, up, xs, held[step % AHEAD], CODES, GROUP_SIZE, ALIKE, ZEROS, SCALE, GATED, SHARES)
        if step + AHEAD < STEPS:
            more = _loaded(words, scale, chosen, shares, first, step + AHEAD, outputs,
                           ROWS, CODES, GROUP_SIZE, ALIKE, GATED, BLOCKS, TOTAL)  # fmt: skip
            held = _put(held, step % AHEAD, more)
    return acc, up


@gluon.jit
def _put(held, i: gl.constexpr, more):  # type: ignore[no-untyped-def]
    """Returns a tuple with `more` at place i, which may be the first one behind it."""
    return held[:i] + (more,) + held[i + 1 :]  # noqa: RUF005 - Gluon knows no unpacking


@gluon.jit
def _keep_order(number):  # type: ignore[no-untyped-def]
    """Let the compiler move no load from one side to the other. A warp's threads go together, so none waits."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xFFFFFFFF; mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def added(acc):  # type: ignore[no-untyped-def]
    """Returns the sums of all warps, [rows, tokens]."""
    return gl.sum(gl.convert_layout(acc, results_of(acc.shape[0])), 0)


@gluon.jit
def _places(step, SIDES: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Returns each warp's block in a step, [warps, 1], and the rows or tokens, [1, SIDES], in LAYOUT less an axis."""
    W: gl.constexpr = gl.num_warps()
    block = step * W + gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    sides = gl.arange(0, SIDES, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    return block[:, None], sides[None, :]


@gluon.jit
def _inside(LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the places in a part of a block, [1, 1, WORDS]."""
    return gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]


@gluon.jit
def _ordered(tile):  # type: ignore[no-untyped-def]
    """Returns what was loaded in the order of the products, for which a thread needs two pairs of neighbours each."""
    W: gl.constexpr = tile.shape[0]
    SIDES: gl.constexpr = tile.shape[1]
    tile = tile.reshape([W, SIDES, 2, 4, 2, 2, 2]).permute([0, 1, 2, 4, 5, 3, 6])
    return tile.reshape([W, SIDES, WORDS])


@gluon.jit
def _choice(chosen, block, BLOCKS: gl.constexpr, TOTAL: gl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the experts of blocks, and the blocks' numbers in a row."""
    expert = chosen
    if TOTAL > BLOCKS:
        expert = gl.load(chosen + block // BLOCKS, cache_modifier=".cg").to(gl.int64)
        block = block % BLOCKS
    return expert, block


@gluon.jit
def _loaded(  # type: ignore[no-untyped-def]
    words, scale, chosen, shares, first, step, outputs,
    ROWS: gl.constexpr, CODES: gl.constexpr, GROUP_SIZE: gl.constexpr, ALIKE: gl.constexpr, GATED: gl.constexpr,
    BLOCKS: gl.constexpr, TOTAL: gl.constexpr,
):  # fmt: skip
    """Returns a step's words, up's words, the marks and up's of each of its groups, and the shares of its blocks.

    A step has a block for each warp, of TOTAL blocks. A row of weights has BLOCKS.
    - chosen: None; or `words` and `scale` are stacks, and this is the expert, int64. With more blocks than in a row it
      is a pointer to the experts that take BLOCKS blocks each. These bypass the L1 cache, which may hold the previous
      step's.
    - shares: None, or a pointer to the factors of their sums.
    """
    W: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = loads_of(ROWS, W)
    PARTS: gl.constexpr = codes.parts(CODES)
    GROUPS: gl.constexpr = PARTS // ALIKE if GROUP_SIZE > 0 else 0
    # a block behind the last one is multiplied with zeros, and rows outside are not stored
    block, i = _places(step, ROWS, LAYOUT)
    block, row = gl.minimum(block, TOTAL - 1), gl.minimum(first + i, outputs - 1).to(gl.int64)
    if chosen is not None:
        expert, block = _choice(chosen, block, BLOCKS, TOTAL)
        row += expert * ((1 + GATED) * outputs)
    place = words + (row * (BLOCKS * WORDS))[:, :, None] + ((block * WORDS)[:, :, None] + _inside(LAYOUT))
    w = gl.load(place, eviction_policy="evict_first")
    v = w
    if GATED:
        v = gl.load(place + outputs.to(gl.int64) * (BLOCKS * WORDS), eviction_policy="evict_first")
    marks = ()
    block, i = _places(step, ROWS, sums_of(W))
    block, row = gl.minimum(block, TOTAL - 1), gl.minimum(first + i, outputs - 1)
    share = gl.to_tensor(1.0)
    if shares is not None:
        share = gl.load(shares + block // BLOCKS, cache_modifier=".cg")
    if chosen is not None:
        expert, block = _choice(chosen, block, BLOCKS, TOTAL)
        row = row + expert * (BLOCKS * PARTS * WORDS // GROUP_SIZE * (1 + GATED) * outputs)
    for group in gl.static_range(GROUPS):
        which = (block * GROUPS + group) * (ALIKE * WORDS) // GROUP_SIZE
        at = scale + which * ((1 + GATED) * outputs) + row
        s = gl.load(at)
        marks = _put(marks, group, (s, gl.load(at + outputs) if GATED else s))
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, sums_of(W), 2)
    w = gl.convert_layout(_ordered(w), OPERAND, assert_trivial=True)
    v = gl.convert_layout(_ordered(v), OPERAND, assert_trivial=True)
    return w, v, marks, share


@gluon.jit
def columns_of(TOKENS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Returns 0 to TOKENS - 1, in the layout in which `_inputs` needs rows of x."""
    return gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(2, loads_of(TOKENS, gl.num_warps()))))


@gluon.jit
def _inputs(x, row, step, TOKENS: gl.constexpr, CODES: gl.constexpr, BLOCKS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Returns what meets each part of a step's words, [warps, WORDS, TOKENS]."""
    W: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = loads_of(TOKENS, W)
    PARTS: gl.constexpr = codes.parts(CODES)
    block, _ = _places(step, TOKENS, LAYOUT)
    place = x + row[None, :][:, :, None] + ((block * (PARTS * WORDS))[:, :, None] + _inside(LAYOUT))
    found = ()
    for part in gl.static_range(PARTS):
        if BLOCKS % W:
            xs = gl.load(place + part * WORDS, mask=(block < BLOCKS)[:, :, None], other=0.0)
        else:
            xs = gl.load(place + part * WORDS)
        xs = _ordered(xs).permute([0, 2, 1])
        xs = gl.convert_layout(xs, gl.DotOperandLayout(1, sums_of(W), 2), assert_trivial=True)
        found = _put(found, part, xs)
    return found


@gluon.jit
def _multiplied(  # type: ignore[no-untyped-def]
    acc, up, xs, held,
    CODES: gl.constexpr, GROUP_SIZE: gl.constexpr, ALIKE: gl.constexpr, ZEROS: gl.constexpr, SCALE: gl.constexpr,
    GATED: gl.constexpr, SHARES: gl.constexpr,
):  # fmt: skip
    """Returns (acc, up) with the products of one step's words added. SHARES: times the share of each block."""
    KIND: gl.constexpr = xs[0].dtype
    w, v, marks, share = held
    for group in gl.static_range(codes.parts(CODES) // ALIKE):
        total, total_up = acc, up
        z, y = gl.to_tensor(0), gl.to_tensor(0)
        if GROUP_SIZE > 0:
            s, t = marks[group]
            total, total_up = gl.zeros_like(acc), gl.zeros_like(up)
            if ZEROS:
                z, y = _zeros(s, w), _zeros(t, v)
        for part in gl.static_range(group * ALIKE, (group + 1) * ALIKE):
            total = mma_v2(_numbers(w, z, part, CODES, KIND, ZEROS), xs[part], total)
            if GATED:
                total_up = mma_v2(_numbers(v, y, part, CODES, KIND, ZEROS), xs[part], total_up)
        if GROUP_SIZE > 0:
            by = _scales(s, ZEROS, SCALE)
            if SHARES:
                by = by * share[:, :, None]
            acc += total * by
            if GATED:
                up += total_up * _scales(t, ZEROS, SCALE)
        else:
            acc, up = total, total_up
    return acc, up


@gluon.jit
def _zeros(marks, like):  # type: ignore[no-untyped-def]
    """Returns a group's zeros for `codes.numbers`. Each thread has those of its own rows already."""
    zeros = (marks >> 16).to(gl.int16)
    return gl.convert_layout(zeros, gl.SliceLayout(2, like.type.layout), assert_trivial=True)[:, :, None]


@gluon.jit
def _scales(marks, ZEROS: gl.constexpr, SCALE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the scales of a group's sums as f32."""
    if ZEROS:
        marks = marks.to(gl.int16).to(gl.bfloat16 if SCALE == "bf16" else gl.float16, bitcast=True)
    return marks.to(gl.float32)[:, :, None]
