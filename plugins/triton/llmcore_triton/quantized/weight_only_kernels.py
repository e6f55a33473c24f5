"""The GPU kernels of weights in 4 and 8 bits that multiply plain inputs. `packing` describes the weights' form.

The words of a step are loaded once. Each of their parts becomes a tile of weights in registers, the tensor cores'
first operand, and is multiplied with its own inputs. GATED: as in linear_kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmcore_triton.launch import release, wait
from llmcore_triton.linear_kernels import arrive, corner, end, pair_of, sum_parts, tokens_of
from llmcore_triton.quantized.codes import numbers, parts


@triton.jit(do_not_specialize=["tokens", "steps"])
def words_times_rows(  # type: ignore[no-untyped-def]
    x, words, x_tiles, w_tiles, scale, bias, out, partials, arrivals, tokens, outputs, inputs, x_stride, steps,
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr, BLOCK_W: tl.constexpr, CODES: tl.constexpr,
    GROUP_SIZE: tl.constexpr, SCALED: tl.constexpr, ZEROS: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, SHARED: tl.constexpr, ONE: tl.constexpr,
    GROUP: tl.constexpr, K_STEPS: tl.constexpr, SCALE: tl.constexpr, ALIKE: tl.constexpr,
    JOINED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [tokens, outputs] = x [tokens, inputs] weight^T. Weights are the rows of the MMA, and tokens its columns.

    It is cut into programs as linear_kernels.small_rows, but there may be several tiles of TOKENS tokens (GROUP). A
    step multiplies BLOCK_W words of BLOCK_N outputs.
    - WORDS: words of a block of inputs, for each output.
    - GROUP_SIZE: inputs that share a scale. 0: all, and the scale is applied at the end of a tile.
    - SCALED: the "sums" of a group are multiplied with the scale in f32, or the "weights" are before they are
      multiplied, which rounds them as the op's reference does.
    - ZEROS: each group has a zero too, and `scale` has the marks of packing.marks, with scales in SCALE.
    - K_STEPS: steps of a tile.
    - ALIKE: parts of a block that share a scale, and PARTS // ALIKE is whole.
    - JOINED: parts of words in one product, 1 or 2. Two mean fewer waits. They share a scale, and BLOCK_W is WORDS.
      `x_tiles` are [TOKENS, JOINED * BLOCK_W].
    """
    SUB: tl.constexpr = WORDS // BLOCK_W
    row_words = K_STEPS * BLOCK_W
    tiles = tl.cdiv(outputs, BLOCK_N)
    if GROUP > 0:
        tiles *= tl.cdiv(tokens, TOKENS)
    first = tl.program_id(0) * steps
    last = tl.minimum(first + steps, tiles * K_STEPS) - 1
    if GROUP_SIZE == 0:
        # those of the program's last tile
        _, column, _ = _place(last, tokens, outputs, K_STEPS, TOKENS, BLOCK_N, GROUP, ONE)
        s_last, t_last = _marks(scale, column, 0, outputs, BLOCK_N, GATED, EVEN_N)
    wait(PDL)
    release(PDL)
    acc = tl.zeros([BLOCK_N, TOKENS], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, TOKENS], dtype=tl.float32)
    for step in range(first, last + 1):
        row, column, k = _place(step, tokens, outputs, K_STEPS, TOKENS, BLOCK_N, GROUP, ONE)
        w, v = pair_of(words, w_tiles, column, k, outputs, row_words, BLOCK_N, BLOCK_W, GATED, EVEN_N, True)
        marks = _marks_of(scale, column, k // SUB, outputs, inputs,
                          BLOCK_N, WORDS, CODES, GROUP_SIZE, ALIKE, GATED, EVEN_N, EVEN_K)  # fmt: skip
        # see linear_kernels.small_rows. And ptxas would make the tensor cores' instructions wait for each other if one
        # could still read its weights in the next round, so each round does something with an accumulator
        if not ONE or GROUP_SIZE == 0 or SCALED != "sums":
            acc, up = tl.where(k != 0, acc, 0.0), tl.where(k != 0, up, 0.0)
        acc, up = _multiplied(acc, up, w, v, x, x_tiles, marks, row, k, tokens, inputs, x_stride,
                              TOKENS, WORDS, BLOCK_W, CODES, GROUP_SIZE, SCALED, ZEROS, GATED,
                              EVEN_K, SCALE, ALIKE, JOINED)  # fmt: skip
        if not ONE:  # noqa: SIM102
            if k == K_STEPS - 1 and step < last:
                whole, whole_up = acc, up
                if GROUP_SIZE == 0:
                    s, t = _marks(scale, column, 0, outputs, BLOCK_N, GATED, EVEN_N)
                    whole, whole_up = acc * s[:, None], up * t[:, None]
                end(out, None, None, bias, partials, whole, whole_up, step, first, tokens, outputs, 0, K_STEPS,
                    TOKENS, BLOCK_N, GATED, HAS_BIAS, SHARED, GROUP)  # fmt: skip
    if GROUP_SIZE == 0:
        acc, up = acc * s_last[:, None], up * t_last[:, None]
    end(out, None, None, bias, partials, acc, up, last, first, tokens, outputs, 0, K_STEPS,
        TOKENS, BLOCK_N, GATED, HAS_BIAS, SHARED, GROUP)  # fmt: skip
    if SHARED:
        head, tail = first // K_STEPS, last // K_STEPS
        sums_head, sums_tail = arrive(arrivals, head, tail, K_STEPS, steps)
        if sums_head:
            sum_parts(out, None, None, bias, partials, arrivals, head, tokens, outputs, 0, K_STEPS, steps,
                      TOKENS, BLOCK_N, GATED, HAS_BIAS, GROUP)  # fmt: skip
        if sums_tail:
            sum_parts(out, None, None, bias, partials, arrivals, tail, tokens, outputs, 0, K_STEPS, steps,
                      TOKENS, BLOCK_N, GATED, HAS_BIAS, GROUP)  # fmt: skip


@triton.jit
def _place(  # type: ignore[no-untyped-def]
    step, tokens, outputs,
    K_STEPS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Returns the first token of a step, its tile of outputs, and its number in the tile."""
    # with ONE the compiler sees that the tile stays the same
    tile = tl.program_id(0) if ONE else step // K_STEPS
    row, column = corner(tile, tokens, outputs, TOKENS, BLOCK_N, GROUP)
    return row, column, step - tile * K_STEPS


@triton.jit
def _multiplied(  # type: ignore[no-untyped-def]
    acc, up, w, v, x, x_tiles, marks, row, k, tokens, inputs, x_stride,
    TOKENS: tl.constexpr, WORDS: tl.constexpr, BLOCK_W: tl.constexpr, CODES: tl.constexpr,
    GROUP_SIZE: tl.constexpr, SCALED: tl.constexpr, ZEROS: tl.constexpr, GATED: tl.constexpr, EVEN_K: tl.constexpr,
    SCALE: tl.constexpr, ALIKE: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """Returns (acc, up) with the products of one step's words added."""
    KIND: tl.constexpr = x.dtype.element_ty
    PARTS: tl.constexpr = parts(CODES)
    SUB: tl.constexpr = WORDS // BLOCK_W
    SUMS: tl.constexpr = GROUP_SIZE > 0 and SCALED == "sums"
    SCALES: tl.constexpr = GROUP_SIZE > 0 and SCALED == "weights"
    block = k // SUB
    for group in tl.static_range(PARTS // ALIKE):
        z, y, a, b = 0, 0, 0, 0
        if GROUP_SIZE > 0:
            s, t = _scales(marks[group], ZEROS, SCALE)
            z, y, a, b = as_operands(marks[group], GROUP_SIZE, ZEROS, SCALE, KIND)
        total, total_up = acc, up
        if SUMS:
            total, total_up = tl.zeros_like(acc), tl.zeros_like(up)
        for turn in tl.static_range(ALIKE // JOINED):
            at = (block * PARTS + group * ALIKE + turn * JOINED) * SUB // JOINED + k % SUB
            xt = tl.trans(tokens_of(x, x_tiles, row, at, tokens, inputs, x_stride, TOKENS, JOINED * BLOCK_W, EVEN_K))
            weights = _operand(w, z, a, group * ALIKE + turn * JOINED, JOINED, CODES, GROUP_SIZE, SCALES, ZEROS, KIND)
            total = tl.dot(weights, xt, total, input_precision="ieee")
            if GATED:
                weights = _operand(
                    v, y, b, group * ALIKE + turn * JOINED, JOINED, CODES, GROUP_SIZE, SCALES, ZEROS, KIND
                )
                total_up = tl.dot(weights, xt, total_up, input_precision="ieee")
        if SUMS:
            acc += total * s[:, None]
            up += total_up * t[:, None]
        else:
            acc, up = total, total_up
    return acc, up


@triton.jit
def _operand(  # type: ignore[no-untyped-def]
    words, zero, scale, FIRST: tl.constexpr, JOINED: tl.constexpr, CODES: tl.constexpr, GROUP_SIZE: tl.constexpr,
    SCALES: tl.constexpr, ZEROS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Returns JOINED parts of words, from FIRST on and side by side: [BLOCK_N, JOINED * BLOCK_W]."""
    found = _part(words, zero, scale, FIRST, CODES, GROUP_SIZE, SCALES, ZEROS, KIND)
    if JOINED == 2:
        # each thread keeps its numbers: only their places in registers change
        both = tl.join(found, _part(words, zero, scale, FIRST + 1, CODES, GROUP_SIZE, SCALES, ZEROS, KIND))
        found = both.permute(0, 2, 1).reshape(words.shape[0], 2 * words.shape[1])
    return found


@triton.jit
def _part(  # type: ignore[no-untyped-def]
    words, zero, scale, PART: tl.constexpr, CODES: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALES: tl.constexpr,
    ZEROS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    found = numbers(words, zero[:, None] if GROUP_SIZE > 0 else zero, PART, CODES, KIND, ZEROS)
    return found * scale[:, None] if SCALES else found


@triton.jit
def _marks_of(  # type: ignore[no-untyped-def]
    scale, column, block, outputs, inputs,
    BLOCK_N: tl.constexpr, WORDS: tl.constexpr, CODES: tl.constexpr, GROUP_SIZE: tl.constexpr, ALIKE: tl.constexpr,
    GATED: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Returns the marks and up's of each group of a block, as they are stored.

    Each product has an operand that depends on them, since the compiler loads nothing else ahead. All groups come by
    one load, since the compiler would do one with fewer numbers than threads a second time, and not ahead.
    """
    GROUPS: tl.constexpr = parts(CODES) // ALIKE
    found = ()
    # a scale of whole rows is applied at the end of a tile
    if GROUP_SIZE > 0:
        lines = column * BLOCK_N + tl.arange(0, BLOCK_N)
        which = (block * GROUPS + tl.arange(0, GROUPS)) * (ALIKE * WORDS) // GROUP_SIZE
        if not EVEN_K:
            # the last block may reach over the last group
            which = tl.minimum(which, tl.cdiv(inputs, GROUP_SIZE) - 1)
        place = scale + (which * ((1 + GATED) * outputs))[None, :] + lines[:, None]
        if EVEN_N:
            s = tl.load(place)
        else:
            s = tl.load(place, mask=(lines < outputs)[:, None], other=0)
        t = s
        if GATED:
            if EVEN_N:
                t = tl.load(place + outputs)
            else:
                t = tl.load(place + outputs, mask=(lines < outputs)[:, None], other=0)
        found = _each(s, t, GROUPS)
    return found


@triton.jit
def _each(s, t, GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the columns of s and t [BLOCK_N, GROUPS], as pairs."""
    if GROUPS == 1:
        found = ((s.reshape(s.shape[0]), t.reshape(t.shape[0])),)
    elif GROUPS == 2:
        s0, s1 = tl.split(s)
        t0, t1 = tl.split(t)
        found = ((s0, t0), (s1, t1))  # type: ignore[assignment]
    else:
        # the last axis that `reshape` makes is the number's lowest bit
        s_even, s_odd = tl.split(s.reshape(s.shape[0], 2, 2))
        t_even, t_odd = tl.split(t.reshape(t.shape[0], 2, 2))
        s0, s2 = tl.split(s_even)
        s1, s3 = tl.split(s_odd)
        t0, t2 = tl.split(t_even)
        t1, t3 = tl.split(t_odd)
        found = ((s0, t0), (s1, t1), (s2, t2), (s3, t3))  # type: ignore[assignment]
    return found


@triton.jit
def marks_at(  # type: ignore[no-untyped-def]
    scale, column, block, part, outputs, inputs,
    BLOCK_N: tl.constexpr, WORDS: tl.constexpr, PARTS: tl.constexpr, GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    """Returns the marks, as they are stored, of one part of a block and of tile `column` of the outputs: a pair, as
    `as_operands` takes it."""
    which = 0
    if GROUP_SIZE > 0:
        # the last block may reach over the last group
        which = tl.minimum((block * PARTS + part) * WORDS // GROUP_SIZE, tl.cdiv(inputs, GROUP_SIZE) - 1)
    return _marks(scale, column, which, outputs, BLOCK_N, False)


@triton.jit
def _scales(marks, ZEROS: tl.constexpr, SCALE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns a group's scale and up's as f32."""
    s, t = marks
    if ZEROS:
        s, t = _low(s, SCALE), _low(t, SCALE)
    return s.to(tl.float32), t.to(tl.float32)


@triton.jit
def _low(marks, SCALE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the scales of marks that have zeros too."""
    KIND: tl.constexpr = tl.bfloat16 if SCALE == "bf16" else tl.float16
    return marks.to(tl.int16).to(KIND, bitcast=True)


@triton.jit
def as_operands(  # type: ignore[no-untyped-def]
    marks, GROUP_SIZE: tl.constexpr, ZEROS: tl.constexpr, SCALE: tl.constexpr, KIND: tl.constexpr
):
    """Returns (zero, up's zero, scale, up's scale) of a group as KIND, for the first operand of a product.

    Without ZEROS the first two are numbers that nothing uses, and for which `numbers` says why they are there.
    """
    s, t = marks
    z, y = 0, 0
    if ZEROS:
        z, y = (s >> 16).to(tl.int16), (t >> 16).to(tl.int16)
        s, t = _low(s, SCALE), _low(t, SCALE)
    elif GROUP_SIZE > 0:
        z, y = s.to(tl.int32, bitcast=True).to(tl.int16), t.to(tl.int32, bitcast=True).to(tl.int16)
    if GROUP_SIZE > 0:
        s, t = s.to(KIND), t.to(KIND)
    return z, y, s, t


@triton.jit
def _marks(  # type: ignore[no-untyped-def]
    table, column, group, outputs, BLOCK_N: tl.constexpr, GATED: tl.constexpr, EVEN_N: tl.constexpr = False
):
    """Returns a group's scales or zeros, of `table` [groups, rows of the weight], and up's if GATED, as stored."""
    lines = column * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = EVEN_N | (lines < outputs)
    place = table + group * (1 + GATED) * outputs + lines
    found = tl.load(place, mask=inside, other=0)
    up = found
    if GATED:
        up = tl.load(place + outputs, mask=inside, other=0)
    return found, up
