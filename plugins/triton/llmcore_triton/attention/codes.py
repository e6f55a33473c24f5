"""Attention whose matrix products are of f16, over keys and values in codes.

It takes several instructions to make a number of the model's type of a code, and decode at large batches has few to
spare. f16 takes the fewest. It holds all codes exactly, and other numbers more precisely than bf16.

If codes are bytes and one mark belongs to a token's whole head, the products are of the codes. The marks are applied
to the scores and to the weights of values. Conversion adds a number to each code (`quantized_kv.offset`), which the
product's first summand takes away again. Values are loaded as pairs of bytes: tensor cores can load pairs, but not
bytes, in the order of a product over tokens. The first bytes of the pairs make one product, the second bytes another.

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
    group_marks,
    halves_as_f16,
    head_marks,
    offset,
    raised_columns,
    raised_rows,
)
from llmcore_triton.specs.layouts import QUANTIZED, Form

LEAST = 8
"""The fewest columns of a product."""

_PAIRS = tl.constexpr(tl.pointer_type(tl.int16))


@triton.constexpr_function
def whole(size: int, codes: str, group: int) -> bool:
    """True if codes are bytes, a head has one mark, and its pairs of bytes are the 16 rows that a product needs."""
    return codes != "u4" and group in (0, size) and size >= 32


def half(context: OpContext) -> bool:
    """True if products over the context's layout are of f16.

    Under `deterministic` they are not: the numbers of a token are those of `gather` wherever they are read.
    """
    sides = _sides(context)
    return bool(sides) and context.dtype != "f32" and not context.deterministic and all(_fits(*side) for side in sides)


def by_element(context: OpContext) -> bool:
    """True if marks are applied to each number of the context's layout."""
    return any(not whole(size, form.codes, _group(form, size)) for form, size in _sides(context))


def _sides(context: OpContext) -> list[tuple[Form, int]]:
    """Returns the forms and sizes of keys and of values, or [] if the layout does not quantize."""
    spec = spec_of(context)
    return list(zip(QUANTIZED.get(str(context.layout), ()), (spec.key_size, spec.value_size), strict=False))


def _group(form: Form, size: int) -> int:
    return 0 if form.fixed else min(form.group or size, size)


def _fits(form: Form, size: int) -> bool:
    marked = bool(whole(size, form.codes, _group(form, size))) or form.group > 0
    return size >= 16 and size & (size - 1) == 0 and marked


@triton.jit
def attend_codes(  # type: ignore[no-untyped-def]
    q, query, keys, values, k_marks, v_marks, head, places, first, last, k_stride, v_stride,
    SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr, GRANULE: tl.constexpr,
    KV_HEADS: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, K_CODES: tl.constexpr, K_GROUP: tl.constexpr,
    V_CODES: tl.constexpr, V_GROUP: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same as `tile.attend`, for contexts that are `half`."""
    M: tl.constexpr = q.shape[0]
    K_WHOLE: tl.constexpr = whole(K_SIZE, K_CODES, K_GROUP)
    V_WHOLE: tl.constexpr = whole(V_SIZE, V_CODES, V_GROUP)
    # bf16 queries can be too large or too small for f16
    wide = q.to(tl.float32)
    top = tl.max(tl.max(tl.abs(wide), 1), 0)
    x = (wide / tl.where(top > 0, top, 1.0)).to(tl.float16)
    x_sum = tl.sum(x.to(tl.float32), 1)
    unit = top * (SCALE * LOG2_E) if SOFT_CAP == 0 else top
    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)  # noqa: E741 - the usual name
    if V_WHOLE:
        # of the first bytes of pairs and of the second
        even_acc = tl.zeros([V_SIZE // 2, M], tl.float32)
        odd_acc = tl.zeros([V_SIZE // 2, M], tl.float32)
        ones = tl.full([V_SIZE // 2, BLOCK_N], 1.0, tl.float16)
        rest = tl.zeros([M], tl.float32)
    else:
        acc = tl.zeros([V_SIZE, M], tl.float32)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        token = start + tl.arange(0, BLOCK_N)
        there = token < last
        slot = slots_of(places, token, there, GRANULE)
        if K_WHOLE:
            at = keys + head * K_SIZE + slot[:, None] * k_stride + tl.arange(0, K_SIZE)[None, :]
            k = raised_rows(tl.load(at, mask=there[:, None], other=0.0), K_CODES, False)
            scale, least = head_marks(k_marks, head, slot, there, KV_HEADS, K_CODES, K_GROUP)
            scores = tl.dot(k, tl.trans(x), tl.broadcast_to((x_sum * -offset(K_CODES))[None, :], (BLOCK_N, M)))
            scores *= (scale * unit)[:, None]
            if counted(K_CODES):
                scores += (least * unit)[:, None] * x_sum[None, :]
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
        if V_WHOLE:
            # The weights of codes are p times a scale. Its power of two belongs to p's exponent, so that the largest
            # of these weights is less than 2, whatever the scales are.
            v_scale, v_least = head_marks(v_marks, head, slot, there, KV_HEADS, V_CODES, V_GROUP)
            power = v_scale.to(tl.int32, bitcast=True) >> 23
            shrink = ((254 - power) << 23).to(tl.float32, bitcast=True)
            scores += (power - 127).to(tl.float32)[:, None]
        highest = tl.maximum(m, tl.max(scores, 0))
        # a column that has seen nothing yet has no finite maximum to subtract
        base = tl.where(highest == float("-inf"), 0.0, highest)
        p = tl.exp2(scores - base[None, :])
        keep = tl.exp2(m - base)
        if V_WHOLE:
            own = p * shrink[:, None]
            l = l * keep + tl.sum(own, 0)  # noqa: E741
            if counted(V_CODES):
                rest = rest * keep + tl.sum(own * v_least[:, None], 0)
            weights = (p * (v_scale * shrink)[:, None]).to(tl.float16)
            row = values.to(_PAIRS, bitcast=True) + slot * (v_stride // 2)
            at = head * (V_SIZE // 2) + tl.arange(0, V_SIZE // 2)
            even, odd = raised_columns(tl.load(row[None, :] + at[:, None], mask=there[None, :], other=0), V_CODES)
            even_acc *= keep[None, :]
            odd_acc *= keep[None, :]
            if offset(V_CODES) > 0:
                raised = tl.dot(ones, weights) * offset(V_CODES)
                even_acc -= raised
                odd_acc -= raised
            even_acc = tl.dot(even, weights, even_acc)
            odd_acc = tl.dot(odd, weights, odd_acc)
        else:
            l = l * keep + tl.sum(p, 0)  # noqa: E741
            v = half_rows(values, v_marks, head, slot, there, v_stride, KV_HEADS, V_SIZE, V_CODES, V_GROUP, True)
            acc = tl.dot(tl.trans(v), p.to(tl.float16), acc * keep[None, :])
        m = highest
    if V_WHOLE:
        acc = tl.reshape(tl.permute(tl.join(even_acc, odd_acc), (0, 2, 1)), (V_SIZE, M)) + rest[None, :]
    return m, l, tl.trans(acc)


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
    GROUPS: tl.constexpr = SIZE // GROUP
    if CODES == "u4":
        MIDDLE: tl.constexpr = SIZE // 2
        at = pool + head * MIDDLE + slot[:, None] * stride + tl.arange(0, MIDDLE)[None, :]
        low, high = halves_as_f16(tl.load(at, mask=there[:, None], other=0.0), SPREAD)
        rows = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (N, SIZE))
    else:
        at = pool + head * SIZE + slot[:, None] * stride + tl.arange(0, SIZE)[None, :]
        rows = as_f16(tl.load(at, mask=there[:, None], other=0.0), CODES, SPREAD)
    at = (slot * HEADS + head)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    scale, least = group_marks(marks, at, there[:, None], CODES)
    groups = tl.reshape(rows, (N, GROUPS, GROUP)) * scale[:, :, None]
    if counted(CODES):
        groups += least[:, :, None]
    return tl.reshape(groups, (N, SIZE))
