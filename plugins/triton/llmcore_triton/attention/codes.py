"""Attention whose matrix products are of f16, over keys and values in codes.

It takes several instructions to make a number of the model's type of a code, and decode at large batches has few to
spare. f16 takes the fewest. It holds all codes exactly, and other numbers more precisely than bf16. If one mark
belongs to a token's whole head, the products are of the codes. The marks are then applied to the scores and to the
weights of values.

Tokens are the rows of these products and queries the columns, of which there may be as few as 8.
"""

from __future__ import annotations

import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers import spec_of

from llmcore_triton.attention.tile import LOG2_E, capped, slots_of
from llmcore_triton.quantized_kv import (
    as_f16,
    counted,
    factor,
    group_marks,
    halves_as_f16,
    head_marks,
    offset,
    quick_columns,
    quick_rows,
)
from llmcore_triton.specs.layouts import QUANTIZED, Form

LEAST = 8
"""The fewest columns of a product."""

_NARROWEST = tl.constexpr(32)
"""The fewest bytes of a token's head in a tile: 16 pairs, which are the fewest rows of a product."""


def half(context: OpContext) -> bool:
    """True if products over the context's layout are of f16.

    Under `deterministic` they are not: the numbers of a token are those of `gather` wherever they are read.
    """
    sides = _sides(context)
    return bool(sides) and context.dtype != "f32" and not context.deterministic and all(_fits(*side) for side in sides)


def several(context: OpContext) -> bool:
    """True if heads of the context's layout have several marks."""
    return any(0 < form.group < size for form, size in _sides(context))


def _sides(context: OpContext) -> list[tuple[Form, int]]:
    """Returns the forms and sizes of keys and of values, or [] if the layout does not quantize."""
    spec = spec_of(context)
    return list(zip(QUANTIZED.get(str(context.layout), ()), (spec.key_size, spec.value_size), strict=False))


def _fits(form: Form, size: int) -> bool:
    grouped = 0 < form.group < size
    return size >= 16 and size & (size - 1) == 0 and (grouped or bool(tiled(size, form.codes, 0)))


@triton.constexpr_function
def heap(codes: str) -> int:
    """The codes of a byte."""
    return 2 if codes == "u4" else 1


@triton.constexpr_function
def groups(size: int, group: int) -> int:
    """The marks of a head."""
    return size // (group or size)


@triton.constexpr_function
def tiles(size: int, codes: str, group: int) -> int:
    """The tiles into which a head's bytes are cut, so that the lower (or upper) codes of a tile share a mark."""
    return max(groups(size, group) // heap(codes), 1)


@triton.constexpr_function
def width(size: int, codes: str, group: int) -> int:
    """The bytes of a token's head in a tile."""
    return size // heap(codes) // tiles(size, codes, group)


@triton.constexpr_function
def group_of(half: int, tile: int, size: int, codes: str, group: int) -> int:
    """The group of a tile's lower (0) or upper (1) codes."""
    count = tiles(size, codes, group)
    return (half * count + tile) * groups(size, group) // (count * heap(codes))


@triton.constexpr_function
def tiled(size: int, codes: str, group: int) -> bool:
    """True if products take a head in tiles. Smaller groups are decoded element by element."""
    return width(size, codes, group) >= _NARROWEST.value


@triton.jit
def attend_codes(  # type: ignore[no-untyped-def]
    q, query, keys, values, k_marks, v_marks, head, places, first, last, k_stride, v_stride,
    SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr, GRANULE: tl.constexpr,
    KV_HEADS: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, K_CODES: tl.constexpr, K_GROUP: tl.constexpr,
    V_CODES: tl.constexpr, V_GROUP: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same as `tile.attend`, for contexts that are `half`."""
    M: tl.constexpr = q.shape[0]
    K_TILED: tl.constexpr = tiled(K_SIZE, K_CODES, K_GROUP)
    V_TILED: tl.constexpr = tiled(V_SIZE, V_CODES, V_GROUP)
    V_TILES: tl.constexpr = tiles(V_SIZE, V_CODES, V_GROUP)
    V_HEAP: tl.constexpr = heap(V_CODES)
    V_WIDTH: tl.constexpr = width(V_SIZE, V_CODES, V_GROUP)
    V_GROUPS: tl.constexpr = groups(V_SIZE, V_GROUP)
    # bf16 queries can be too large or too small for f16
    wide = q.to(tl.float32)
    top = tl.max(tl.max(tl.abs(wide), 1), 0)
    x = (wide / tl.where(top > 0, top, 1.0)).to(tl.float16)
    unit = top * (SCALE * LOG2_E) if SOFT_CAP == 0 else top
    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)  # noqa: E741 - the usual name
    if K_TILED:
        xs, sums = query_tiles(x, K_CODES, tiles(K_SIZE, K_CODES, K_GROUP))
    if V_TILED:
        accs = ()
        for _ in tl.static_range(2 * V_TILES * V_HEAP):
            accs = accs + (tl.zeros([V_WIDTH // 2, M], tl.float32),)
        rests = ()
        for _ in tl.static_range(V_GROUPS):
            rests = rests + (tl.zeros([M], tl.float32),)
        ones = tl.full([V_WIDTH // 2, BLOCK_N], 1.0, tl.float16)
    else:
        acc = tl.zeros([V_SIZE, M], tl.float32)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        token = start + tl.arange(0, BLOCK_N)
        there = token < last
        slot = slots_of(places, token, there, GRANULE)
        if K_TILED:
            scores = tiled_scores(
                xs, sums, unit, keys, k_marks, head, slot, there, k_stride, KV_HEADS, K_SIZE, K_CODES, K_GROUP
            )
        else:
            k = half_rows(keys, k_marks, head, slot, there, k_stride, KV_HEADS, K_SIZE, K_CODES, K_GROUP, False)
            scores = tl.dot(k, tl.trans(x)) * unit
        if SOFT_CAP > 0:
            scores = capped(scores, SCALE, SOFT_CAP)
        seen = there[:, None]
        if CAUSAL:
            seen = seen & (token[:, None] <= query[None, :])
        if WINDOW > 0:
            seen = seen & (token[:, None] > query[None, :] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        if V_TILED:
            # The weights of codes are p times a scale. The power of two of a token's largest scale belongs to p's
            # exponent, so that the largest of these weights is less than 2, whatever the scales are.
            scales = ()
            leasts = ()
            for g in tl.static_range(V_GROUPS):
                scale, least = mark_of(v_marks, head, slot, there, g, KV_HEADS, V_SIZE, V_CODES, V_GROUP)
                scales = scales + (scale,)
                leasts = leasts + (least,)
            most = scales[0]
            for g in tl.static_range(1, V_GROUPS):
                most = tl.maximum(most, scales[g])
            power = most.to(tl.int32, bitcast=True) >> 23
            shrink = ((254 - power) << 23).to(tl.float32, bitcast=True)
            scores += (power - 127).to(tl.float32)[:, None]
        highest = tl.maximum(m, tl.max(scores, 0))
        # a column that has seen nothing yet has no finite maximum to subtract
        base = tl.where(highest == float("-inf"), 0.0, highest)
        p = tl.exp2(scores - base[None, :])
        keep = tl.exp2(m - base)
        if V_TILED:
            own = p * shrink[:, None]
            l = l * keep + tl.sum(own, 0)  # noqa: E741
            if counted(V_CODES):
                new_rests = ()
                for g in tl.static_range(V_GROUPS):
                    new_rests = new_rests + (rests[g] * keep + tl.sum(own * leasts[g][:, None], 0),)
                rests = new_rests
            new_accs = ()
            words = values.to(tl.pointer_type(tl.int16), bitcast=True)
            for i in tl.static_range(V_TILES):
                at = (head * V_TILES * V_WIDTH + i * V_WIDTH) // 2 + tl.arange(0, V_WIDTH // 2)
                pairs = tl.load(words + slot[None, :] * (v_stride // 2) + at[:, None], mask=there[None, :], other=0)
                for h in tl.static_range(V_HEAP):
                    scale = scales[group_of(h, i, V_SIZE, V_CODES, V_GROUP)]
                    weights = (p * (scale * (shrink * (1.0 / factor(h))))[:, None]).to(tl.float16)
                    even, odd = quick_columns(pairs, V_CODES, h)
                    even_acc = accs[2 * (i * V_HEAP + h)] * keep[None, :]
                    odd_acc = accs[2 * (i * V_HEAP + h) + 1] * keep[None, :]
                    if offset(V_CODES) > 0:
                        added = tl.dot(ones, weights) * offset(V_CODES)
                        even_acc, odd_acc = even_acc - added, odd_acc - added
                    new_accs = new_accs + (tl.dot(even, weights, even_acc), tl.dot(odd, weights, odd_acc))
            accs = new_accs
        else:
            l = l * keep + tl.sum(p, 0)  # noqa: E741
            v = half_rows(values, v_marks, head, slot, there, v_stride, KV_HEADS, V_SIZE, V_CODES, V_GROUP, True)
            acc = tl.dot(tl.trans(v), p.to(tl.float16), acc * keep[None, :])
        m = highest
    if V_TILED:
        parts = ()
        for h in tl.static_range(V_HEAP):
            for i in tl.static_range(V_TILES):
                part = tl.join(accs[2 * (i * V_HEAP + h)], accs[2 * (i * V_HEAP + h) + 1])
                part = tl.reshape(tl.permute(part, (0, 2, 1)), (V_WIDTH, M))
                if counted(V_CODES):
                    part += rests[group_of(h, i, V_SIZE, V_CODES, V_GROUP)][None, :]
                parts = parts + (part,)
        acc = stacked(parts, V_TILES * V_HEAP)
    return m, l, tl.trans(acc)


@triton.jit
def stacked(parts, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns COUNT (a power of two) equal blocks of rows as one."""
    if COUNT == 1:
        both = parts[0]
    else:
        upper, lower = stacked(parts[: COUNT // 2], COUNT // 2), stacked(parts[COUNT // 2 :], COUNT // 2)
        ROWS: tl.constexpr = upper.shape[0]
        both = tl.reshape(tl.permute(tl.join(upper, lower), (2, 0, 1)), (2 * ROWS, upper.shape[1]))
    return both


@triton.jit
def cut(x, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns COUNT (a power of two) equal blocks of the columns of x."""
    if COUNT == 1:
        parts = (x,)
    else:
        HALF: tl.constexpr = x.shape[1] // 2
        left, right = tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, HALF)), (0, 2, 1)))
        parts = cut(left, COUNT // 2) + cut(right, COUNT // 2)
    return parts


@triton.jit
def query_tiles(x, CODES: tl.constexpr, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the parts of queries [M, SIZE] that meet the codes of each tile's lower and upper halves, and sums."""
    HEAP: tl.constexpr = heap(CODES)
    parts = cut(x, TILES * HEAP)
    xs = ()
    sums = ()
    for j in tl.static_range(TILES * HEAP):
        part = parts[j]
        if HEAP > 1:
            part = (part * (1.0 / factor(j // TILES))).to(tl.float16)
        xs = xs + (part,)
        sums = sums + (tl.sum(part.to(tl.float32), 1),)
    return xs, sums


@triton.jit
def tiled_scores(  # type: ignore[no-untyped-def]
    xs, sums, unit, keys, marks, head, slot, there, stride,
    HEADS: tl.constexpr, SIZE: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Returns the scores [N, M] of keys at slots [N] where `there`."""
    HEAP: tl.constexpr = heap(CODES)
    TILES: tl.constexpr = tiles(SIZE, CODES, GROUP)
    WIDTH: tl.constexpr = width(SIZE, CODES, GROUP)
    N: tl.constexpr = slot.shape[0]
    M: tl.constexpr = xs[0].shape[0]
    scores = tl.zeros([N, M], tl.float32)
    for i in tl.static_range(TILES):
        at = head * TILES * WIDTH + i * WIDTH + tl.arange(0, WIDTH)
        tile = tl.load(keys + slot[:, None] * stride + at[None, :], mask=there[:, None], other=0.0)
        for h in tl.static_range(HEAP):
            x, total = xs[h * TILES + i], sums[h * TILES + i]
            at_group = group_of(h, i, SIZE, CODES, GROUP)
            scale, least = mark_of(marks, head, slot, there, at_group, HEADS, SIZE, CODES, GROUP)
            subtract = tl.broadcast_to((total * -offset(CODES))[None, :], (N, M))
            scores += tl.dot(quick_rows(tile, CODES, h), tl.trans(x), subtract) * scale[:, None]
            if counted(CODES):
                scores += least[:, None] * (total * factor(h))[None, :]
    return scores * unit


@triton.jit
def mark_of(  # type: ignore[no-untyped-def]
    marks, head, slot, there, at,
    HEADS: tl.constexpr, SIZE: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Returns the scales and least values of a head's group `at` at slots [N], [N] f32, or [1] if scales are fixed."""
    COUNT: tl.constexpr = groups(SIZE, GROUP)
    if COUNT == 1:
        scale, least = head_marks(marks, head, slot, there, HEADS, CODES, GROUP)
    else:
        scale, least = group_marks(marks, (slot * HEADS + head) * COUNT + at, there, CODES)
        scale, least = scale.to(tl.float32), least.to(tl.float32)
    return scale, least


@triton.jit
def half_rows(  # type: ignore[no-untyped-def]
    pool, marks, head, slot, there, stride,
    HEADS: tl.constexpr, SIZE: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """Returns one head's numbers at slots [N] where `there`, [N, SIZE] f16.

    SPREAD: the tile is an operand of a product over tokens. Tensor cores cannot load bytes in that order, so the f16
    numbers pass through shared memory.
    """
    N: tl.constexpr = slot.shape[0]
    if CODES == "u4":
        MIDDLE: tl.constexpr = SIZE // 2
        at = pool + head * MIDDLE + slot[:, None] * stride + tl.arange(0, MIDDLE)[None, :]
        pairs = tl.load(at, mask=there[:, None], other=0.0)
        low, high = halves_as_f16(pairs, SPREAD)
        rows = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (N, SIZE))
    else:
        at = pool + head * SIZE + slot[:, None] * stride + tl.arange(0, SIZE)[None, :]
        rows = as_f16(tl.load(at, mask=there[:, None], other=0.0), CODES, SPREAD)
    GROUPS: tl.constexpr = SIZE // GROUP
    at = (slot * HEADS + head)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    scale, least = group_marks(marks, at, there[:, None], CODES)
    groups = tl.reshape(rows, (N, GROUPS, GROUP)) * scale[:, :, None]
    if counted(CODES):
        groups += least[:, :, None]
    return tl.reshape(groups, (N, SIZE))
