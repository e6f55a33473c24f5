"""The GPU kernels of a mixture of experts for one token, over words. Weights are read once, without tensor cores.

A register has a pair of words, and a thread loads a chunk of them, 16 bytes. Codes become f32 by few instructions: a
code's bits are put into the mantissa of a number whose exponent is fixed, so the number is the code plus an offset. A
chunk's sum is rid of offsets and zeros at its end: they meet the sum of the inputs, which all rows share.

Tiles are [chunks, rows, PAIRS], and what a chunk of a row has once is [chunks, rows, 1]. The compiler then gives the
threads of a warp different chunks of the same rows, in every tile, so that nothing moves between threads before the
last sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmcore_triton.launch import INTERPRETED, release, wait
from llmcore_triton.linear_kernels import silu_and_mul
from llmcore_triton.moe.experts_kernels import together
from llmcore_triton.quantized.codes import parts
from llmcore_triton.quantized.gemv_kernel import floats

CHUNK: tl.constexpr = tl.constexpr(8)
"""Words of a chunk. All are in one block, and each part of them has one scale."""

PAIRS: tl.constexpr = tl.constexpr(CHUNK.value // 2)

_PAIRS = tl.constexpr(tl.pointer_type(tl.int32))

_ASM = tl.constexpr(not INTERPRETED)

_OFFSETS = {"u4": (256.0, 16.0), "i8": (256.0 + 128.0,), "e4m3": (0.0,)}
"""Codes -> the offsets of its parts, by turns. A code whose lowest bit is bit 15 of an f32 has 256, and bit 19 16. The
sign's bit of int8 is turned."""


@triton.jit
def _numbers(pairs, CODES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns f32 numbers of each pair: part 0 of the first word, of the second, part 1 of the first, and so on. Each
    is a code plus its `_offset`."""
    if CODES == "e4m3":
        low, more_low, high, more_high = floats(pairs)
        return low, high, more_low, more_high
    found = ()
    for byte in tl.static_range(2):
        # the byte from bit 15 on, for the first word and for the second
        low, high = pairs << 15 - 8 * byte, pairs >> 1 + 8 * byte
        if CODES == "u4":
            found += (_coded(low, 0x00078000, 0x43800000), _coded(high, 0x00078000, 0x43800000))  # type: ignore[assignment]
            found += (_coded(low, 0x00780000, 0x41800000), _coded(high, 0x00780000, 0x41800000))  # type: ignore[assignment]
        else:
            found += (_coded(low, 0x007F8000, 0x43C00000), _coded(high, 0x007F8000, 0x43C00000))  # type: ignore[assignment]
    return found


@triton.constexpr_function
def _coded_asm(mask: int, base: int) -> str:
    """PTX of one instruction. The compiler takes two for the same in Triton's terms."""
    return f"lop3.b32 $0, $1, {mask}, {base}, 0x6A;"


@triton.jit
def _coded(pairs, MASK: tl.constexpr, BASE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the bits under MASK, beside those of BASE or changed by them, as f32."""
    if _ASM:
        ASM: tl.constexpr = _coded_asm(MASK, BASE)
        return tl.inline_asm_elementwise(ASM, "=f,r", [pairs], dtype=tl.float32, is_pure=True, pack=1)
    return _floats(pairs & MASK ^ BASE)


@triton.jit
def _floats(bits):  # type: ignore[no-untyped-def]
    return bits.to(tl.float32, bitcast=True)


@triton.constexpr_function
def _offset(part: int, codes: str) -> float:
    """Returns the number that `_numbers` adds to the codes of a part."""
    offsets = _OFFSETS[codes]
    return offsets[part % len(offsets)]


@triton.constexpr_function
def _turns(codes: str, block_k: int, group: int) -> int:
    """The scales of a row's block of inputs."""
    return int(parts(codes)) // int(together(codes, block_k, group))


@triton.jit
def _pairs(x, first, column, inputs, AT: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the inputs that meet the first and the second words of a part at AT, as f32 [chunks, 1, PAIRS]."""
    if WHOLE and x.dtype.element_ty.primitive_bitwidth == 16:
        # as the words are loaded, so in their layout
        place = x.to(_PAIRS, bitcast=True) + (first + AT) // 2 + tl.arange(0, PAIRS)[None, None, :]
        if EVEN:
            pairs = tl.load(place)
        else:
            pairs = tl.load(place, mask=column + AT < inputs, other=0)
        if x.dtype.element_ty == tl.bfloat16:
            low, high = _floats(pairs << 16), _floats(pairs & -65536)
        else:
            low = pairs.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            high = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        at = AT + 2 * tl.arange(0, PAIRS)[None, None, :]
        low = tl.load(x + first + at, mask=column + at < inputs, other=0.0).to(tl.float32)
        at += 1
        high = tl.load(x + first + at, mask=column + at < inputs, other=0.0).to(tl.float32)
    return low, high


@triton.jit
def _inputs(  # type: ignore[no-untyped-def]
    x, first, column, inputs,
    BLOCK_K: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, EVEN: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Returns the inputs that meet chunks, and their sums.

    The inputs of each part are pairs of f32 [chunks, 1, PAIRS], in the order of `_numbers`. Each turn has two sums
    [chunks, 1, 1] of its inputs: times the offsets, and plain.

    `first` [chunks, 1, 1]: the place of a chunk's first input in x. `column`: the same in its row of `inputs`. EVEN:
    none is behind the last input. WHOLE: no chunk reaches over it.
    """
    PARTS: tl.constexpr = parts(CODES)
    TURNS: tl.constexpr = _turns(CODES, BLOCK_K, GROUP)
    found, sums = (), ()
    for turn in tl.static_range(TURNS):
        times, plain = 0.0, 0.0
        for part in tl.static_range(turn * (PARTS // TURNS), (turn + 1) * (PARTS // TURNS)):
            low, high = _pairs(x, first, column, inputs, part * (BLOCK_K // PARTS), EVEN, WHOLE)
            found += (low, high)  # type: ignore[assignment]
            if CODES != "e4m3" or ZEROS != "":
                total = tl.sum(low + high, axis=2, keep_dims=True)
                plain += total
                times += total * _offset(part, CODES)
        if CODES == "u4" and ZEROS == "":
            times += plain * 8.0
        sums += (times, plain)  # type: ignore[assignment]
    return found, sums


@triton.jit
def _words(  # type: ignore[no-untyped-def]
    words, marks, expert, row, rows, block, chunk, inputs,
    BLOCKS: tl.constexpr, BLOCK_K: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Returns the pairs of rows `row` [1, rows, 1], and for each turn their marks. Nothing is read twice.

    `expert`: a number, or one for each chunk [chunks, 1, 1], int64, of `rows` rows. `block` [chunks, 1, 1]: the
    chunk's block of the inputs. `chunk`: its number within the block.
    """
    TURNS: tl.constexpr = _turns(CODES, BLOCK_K, GROUP)
    OF_BLOCK: tl.constexpr = BLOCK_K // parts(CODES) // 2
    place = words.to(_PAIRS, bitcast=True) + expert * rows * (BLOCKS * OF_BLOCK)
    place += row * (BLOCKS * OF_BLOCK) + (block * OF_BLOCK + chunk * PAIRS) + tl.arange(0, PAIRS)[None, None, :]
    held = tl.load(place, eviction_policy="evict_first")
    groups = 1
    if GROUP > 0:
        groups = tl.cdiv(inputs, GROUP)
    place = marks + expert * groups * rows
    found = ()
    for turn in tl.static_range(TURNS):
        group = 0
        if GROUP > 0:
            group = tl.minimum((block * BLOCK_K + turn * (BLOCK_K // TURNS)) // GROUP, groups - 1)
        mark = tl.load(place + group * rows + row + block * 0)
        found += (mark,)  # type: ignore[assignment]
    return held, found


@triton.jit
def _scale_and_zero(marks, CODES: tl.constexpr, ZEROS: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the scale and the zero, negated, of each mark as f32. See `packing.zero_bits`."""
    SCALE: tl.constexpr = tl.bfloat16 if ZEROS == "bf16" else tl.float16
    HALF: tl.constexpr = tl.bfloat16 if KIND.name == "bf16" else tl.float16
    zero = (marks >> 16).to(tl.int16).to(HALF, bitcast=True).to(tl.float32)
    if CODES == "u4":
        zero += 128.0 if KIND.name == "bf16" else 1024.0
    return marks.to(tl.int16).to(SCALE, bitcast=True).to(tl.float32), zero


@triton.jit
def _products(  # type: ignore[no-untyped-def]
    acc, held, inputs, share, BLOCK_K: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Adds to acc [chunks, rows, 1] the products of `_words` with `_inputs` of the type KIND, times `share`."""
    PARTS: tl.constexpr = parts(CODES)
    TURNS: tl.constexpr = _turns(CODES, BLOCK_K, GROUP)
    pairs, marks = held
    xs, sums = inputs
    numbers = _numbers(pairs, CODES)
    for turn in tl.static_range(TURNS):
        total = tl.zeros(pairs.shape, dtype=tl.float32)
        for n in tl.static_range(turn * (PARTS // TURNS) * 2, (turn + 1) * (PARTS // TURNS) * 2):
            total += numbers[n] * xs[n]
        of_chunk = tl.sum(total, axis=2, keep_dims=True) - sums[2 * turn]
        scale = marks[turn]
        if ZEROS != "":
            scale, zero = _scale_and_zero(scale, CODES, ZEROS, KIND)
            of_chunk += zero * sums[2 * turn + 1]
        acc += of_chunk * (scale * share)
    return acc


@triton.jit
def gate_up_of_token(  # type: ignore[no-untyped-def]
    x, words, marks, chosen, out, inner, inputs,
    BLOCK_N: tl.constexpr, TOGETHER: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    WHOLE: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [choices, inner] = silu(gate) * up of x [inputs], by the chosen experts.

    A program has BLOCK_N outputs. It takes TOGETHER of the BLOCKS blocks of BLOCK_K inputs in a step, and loads the
    words of all steps at once. GROUP, ZEROS: as in experts_kernels.
    """
    OF_BLOCK: tl.constexpr = BLOCK_K // parts(CODES) // CHUNK
    STEPS: tl.constexpr = (BLOCKS + TOGETHER - 1) // TOGETHER
    N: tl.constexpr = TOGETHER * OF_BLOCK
    tiles = tl.cdiv(inner, BLOCK_N)
    choice, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    places = tl.arange(0, N)[:, None, None]
    block, chunk = places // OF_BLOCK, places % OF_BLOCK
    lines = tl.arange(0, 2 * BLOCK_N)[None, :, None]
    # gate and up by turns; lines behind the last output read the last one
    row = tl.minimum(tile * BLOCK_N + lines // 2, inner - 1) + lines % 2 * inner
    wait(PDL)
    release(PDL)
    expert = tl.load(chosen + choice).to(tl.int64)
    held = ()
    for step in tl.static_range(STEPS):
        here = tl.minimum(step * TOGETHER + block, BLOCKS - 1)
        held += (_words(words, marks, expert, row, 2 * inner, here, chunk, inputs,
                        BLOCKS, BLOCK_K, CODES, GROUP),)  # type: ignore[assignment]  # fmt: skip
    # Again, because no load passes it: else the compiler would load a row's words when the row before is multiplied.
    # x comes afterwards, so that nothing is multiplied sooner.
    wait(PDL)
    acc = tl.zeros([N, 2 * BLOCK_N, 1], dtype=tl.float32)
    for step in tl.static_range(STEPS):
        column = (step * TOGETHER + block) * BLOCK_K + chunk * CHUNK
        given = _inputs(x, column, column, inputs, BLOCK_K, CODES, GROUP, ZEROS, EVEN, WHOLE)
        acc = _products(acc, held[step], given, 1.0, BLOCK_K, CODES, GROUP, ZEROS, x.dtype.element_ty)
    gate, up = tl.split(tl.reshape(tl.sum(acc, axis=0), [BLOCK_N, 2]))
    outs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    y = silu_and_mul(gate, up)
    tl.store(out + choice * inner + outs, y.to(out.dtype.element_ty), mask=outs < inner)


@triton.jit
def down_of_token(  # type: ignore[no-untyped-def]
    x, words, marks, chosen, weights, extra, out, outputs, inputs,
    TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, TOGETHER: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, WHOLE: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    EXTRA: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [outputs] = the sum over TOP_K choices of weights times x [choice, inputs] by the expert's down, plus extra.

    A program has BLOCK_N outputs. It takes the blocks of all choices, TOGETHER in a step. The words of a step load
    AHEAD steps before they are multiplied, and those of the first AHEAD steps before `wait`. This is right only behind
    `gate_up_of_token`, which releases this one after its own `wait`, so the kernel before it has written `chosen` and
    `weights`. The rest is as there.
    """
    OF_BLOCK: tl.constexpr = BLOCK_K // parts(CODES) // CHUNK
    ALL: tl.constexpr = TOP_K * BLOCKS
    STEPS: tl.constexpr = (ALL + TOGETHER - 1) // TOGETHER
    N: tl.constexpr = TOGETHER * OF_BLOCK
    places = tl.arange(0, N)[:, None, None]
    block, chunk = places // OF_BLOCK, places % OF_BLOCK
    outs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(outs, outputs - 1)[None, :, None]
    held = ()
    for step in tl.static_range(AHEAD):
        held += (_down(words, marks, chosen, weights, row, outputs, step * TOGETHER + block, chunk, inputs,
                       ALL, BLOCKS, BLOCK_K, CODES, GROUP, True),)  # type: ignore[assignment]  # fmt: skip
    wait(PDL)
    release(PDL)
    acc = tl.zeros([N, BLOCK_N, 1], dtype=tl.float32)
    for step in tl.static_range(STEPS):
        number = step * TOGETHER + block
        column = number % BLOCKS * BLOCK_K + chunk * CHUNK
        # blocks behind the last one meet zeros
        given = _inputs(x, number // BLOCKS * inputs + column, tl.where(number < ALL, column, inputs), inputs,
                        BLOCK_K, CODES, GROUP, ZEROS, EVEN, WHOLE)  # fmt: skip
        acc = _products(acc, held[step][0], given, held[step][1], BLOCK_K, CODES, GROUP, ZEROS, x.dtype.element_ty)
        if step + AHEAD < STEPS:
            held += (_down(words, marks, chosen, weights, row, outputs, number + AHEAD * TOGETHER, chunk, inputs,
                           ALL, BLOCKS, BLOCK_K, CODES, GROUP, False),)  # type: ignore[assignment]  # fmt: skip
    y = tl.reshape(tl.sum(acc, axis=0), [BLOCK_N])
    inside = outs < outputs
    if EXTRA:
        y += tl.load(extra + outs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + outs, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _down(  # type: ignore[no-untyped-def]
    words, marks, chosen, weights, row, outputs, number, chunk, inputs,
    ALL: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_K: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr,
    OLD: tl.constexpr,
):  # fmt: skip
    """Returns `_words` of the blocks `number` [chunks, 1, 1], counted over all choices, and the choices' weights."""
    number = tl.minimum(number, ALL - 1)
    choice = number // BLOCKS
    modifier: tl.constexpr = ".cg" if OLD else ""
    expert = tl.load(chosen + choice, cache_modifier=modifier).to(tl.int64)
    share = tl.load(weights + choice, cache_modifier=modifier)
    held = _words(words, marks, expert, row, outputs, number % BLOCKS, chunk, inputs,
                  BLOCKS, BLOCK_K, CODES, GROUP)  # fmt: skip
    return held, share
