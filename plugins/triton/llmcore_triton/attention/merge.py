"""Merges the partial results of one tile of queries. Each was computed from a chunk of the tile's KV.

Partial results are f32, normalized, [room, heads, value_size]. Their log2-sum-exp2 [room, heads] follow. The chunks of
a tile are adjacent, and each has all query tokens of the tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmcore_triton.attention.tile import LN_2, fold, reach
from llmcore_triton.launch import release, wait


@triton.jit(
    do_not_specialize=["room"],
    do_not_specialize_on_alignment=["q_start", "kv_len", "items", "firsts", "lse"],
)
def merge_row(  # type: ignore[no-untyped-def]
    partial,
    items,
    firsts,
    q_start,
    kv_len,
    out,
    lse,
    room,
    out_stride,
    HEADS: tl.constexpr,
    V_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WINDOW: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_C: tl.constexpr,
    LSE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merges rows of one query token. Program (block of values, head, row). `firsts`: where each row's parts begin.

    BLOCK_C chunks are read at a time. Data of the step's first kernels and uploads is read before `wait`: the
    attention kernel just ahead releases this one only after its own `wait`.
    """
    release(PDL)
    head, row = tl.program_id(1), tl.program_id(2)
    # bypass the L1 cache, which may hold the previous step's data
    at = tl.load(firsts + row, cache_modifier=".cg").to(tl.int64)
    chunk = tl.load(items, cache_modifier=".cg")
    length = tl.load(kv_len + row, cache_modifier=".cg")
    token = tl.load(q_start + row, cache_modifier=".cg").to(tl.int64)
    wait(PDL)
    if at < 0:
        return
    first, last = reach(length, 1, 0, 1, WINDOW, ALIGN)
    count = tl.cdiv(last - first, chunk)
    if count <= 1:
        return
    place = tl.arange(0, BLOCK_C)
    v_at = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = v_at < V_SIZE
    part_lse = partial + room.to(tl.int64) * (HEADS * V_SIZE) + at * HEADS + head
    part = partial + (at * HEADS + head) * V_SIZE
    m = tl.full([1], float("-inf"), tl.float32)
    l = tl.zeros([1], tl.float32)  # noqa: E741
    acc = tl.zeros([1, BLOCK_V], tl.float32)
    for start in range(0, count, BLOCK_C):
        here = start + place
        there = here < count
        scores = tl.load(part_lse + here * HEADS, mask=there, other=float("-inf"))
        there_inside = there[:, None] & inside[None, :]
        x = tl.load(part + here[:, None] * (HEADS * V_SIZE) + v_at[None, :], mask=there_inside, other=0.0)
        highest = tl.maximum(m, tl.max(scores, 0)[None])
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weight, keep = tl.exp2(scores - base), tl.exp2(m - base)
        l = l * keep + tl.sum(weight, 0)[None]  # noqa: E741
        acc = acc * keep[:, None] + tl.sum(x * weight[:, None], 0)[None, :]
        m = highest
    y = (acc / l[:, None]).to(out.dtype.element_ty)
    tl.store(out + token * out_stride + head * V_SIZE + v_at[None, :], y, mask=inside[None, :])
    if LSE:  # noqa: SIM102 - known when compiling
        if tl.program_id(0) == 0:
            tl.store(lse + token * HEADS + head + tl.zeros([1], tl.int32), (m + tl.log2(l)) * LN_2)


@triton.jit(do_not_specialize=["room"], do_not_specialize_on_alignment=["q_start", "kv_len", "items", "lse"])
def merge_tile(  # type: ignore[no-untyped-def]
    partial,
    items,
    q_start,
    kv_len,
    out,
    lse,
    room,
    out_stride,
    HEADS: tl.constexpr,
    V_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WINDOW: tl.constexpr,
    ALIGN: tl.constexpr,
    TOKENS: tl.constexpr,
    AHEAD: tl.constexpr,
    LSE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merges tiles of several query tokens. Program (head, item) merges one tile and head, in the order of the chunks.

    The item is the tile's first one. AHEAD chunks are loaded at a time: the sum needs the order, the loads do not.
    """
    release(PDL)
    wait(PDL)
    head = tl.program_id(0)
    record = items + (tl.program_id(1) + 1) * 4
    row = tl.load(record)
    if row < 0:
        return
    if tl.load(record + 2) != 0:
        return
    tile = tl.load(record + 1)
    at = tl.load(record + 3).to(tl.int64)
    chunk = tl.load(items)
    token = tl.load(q_start + row)
    n_query = tl.load(q_start + row + 1) - token
    first, last = reach(tl.load(kv_len + row), n_query, tile, TOKENS, WINDOW, ALIGN)
    count = tl.cdiv(last - first, chunk)
    if count <= 1:
        return
    tokens = tl.minimum(n_query - tile * TOKENS, TOKENS)
    i = tl.arange(0, TOKENS)
    v_at = tl.arange(0, BLOCK_V)
    inside = (i < tokens)[:, None] & (v_at < V_SIZE)[None, :]
    part_lse = partial + room.to(tl.int64) * (HEADS * V_SIZE) + (at + i) * HEADS + head
    part = partial + ((at + i) * HEADS + head)[:, None] * V_SIZE + v_at[None, :]
    m = tl.full([TOKENS], float("-inf"), tl.float32)
    l = tl.zeros([TOKENS], tl.float32)  # noqa: E741
    acc = tl.zeros([TOKENS, BLOCK_V], tl.float32)
    for start in range(0, count, AHEAD):
        for ahead in tl.static_range(AHEAD):
            here = start + ahead
            there = here < count
            x_lse = tl.load(part_lse + here * tokens * HEADS, mask=there & (i < tokens), other=float("-inf"))
            x = tl.load(part + here * tokens * (HEADS * V_SIZE), mask=there & inside, other=0.0)
            m, l, acc = fold(m, l, acc, x, x_lse)  # noqa: E741
    some = tl.where(l > 0, l, 1.0)
    rows = (token + tile * TOKENS + i).to(tl.int64)
    y = (acc / some[:, None]).to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * out_stride + head * V_SIZE + v_at[None, :], y, mask=inside)
    if LSE:
        tl.store(lse + rows * HEADS + head, (m + tl.log2(some)) * LN_2, mask=i < tokens)
