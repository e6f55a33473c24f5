"""The kernel of attn.gqa.prefill: a tile of queries of one row and one KV head, over all keys that the tile sees.

Blocks of BLOCK_N keys begin at multiples of BLOCK_N, wherever the row's cached prefix ends. So a query's result does
not depend on how its prompt was cut. Blocks with a cached token, and the block in which the row ends, are gathered
from the slots. All others are this step's own and contiguous in k_new and v_new. Softmax is the streaming one of
FlashAttention-2 (https://arxiv.org/abs/2307.08691), in powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmcore_triton.launch import release, wait

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _fold(  # type: ignore[no-untyped-def]
    acc, total, top, q, k, v, block, edge, q_position, length, scale,
    CAP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Folds one block of keys [BLOCK_N, K] and values into the running (acc, total, top). Scores are in powers of two.

    Only with `edge` may the block have keys that some queries do not see.
    """
    BLOCK_N: tl.constexpr = k.shape[0]
    s = tl.dot(q, k.T, input_precision="ieee")
    if CAP is None:
        factor = scale * LOG2E
    else:
        s = CAP - 2 * CAP / (1 + tl.exp2(s * (2 * LOG2E * scale / CAP)))
        factor = LOG2E
    if edge:
        position = block * BLOCK_N + tl.arange(0, BLOCK_N)
        seen = position[None, :] < length
        if CAUSAL:
            seen = seen & (position[None, :] <= q_position[:, None])
        if WINDOW is not None:
            seen = seen & (position[None, :] > q_position[:, None] - WINDOW)
        s = tl.where(seen, s, float("-inf"))
    now = tl.maximum(top, tl.max(s, 1) * factor)
    if WINDOW is None:
        base = now
    else:  # a query may see none of its first blocks
        base = tl.where(now == float("-inf"), 0.0, now)
    p = tl.exp2(s * factor - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, total, now


@triton.jit(do_not_specialize_on_alignment=["request", "q_start", "kv_len", "tiles", "lse"])
def flash(  # type: ignore[no-untyped-def]
    q, k_new, v_new, k_tiles, v_tiles, k_pool, v_pool, table, request, q_start, kv_len, tiles, out, lse,
    table_stride, q_stride, k_stride, v_stride, k_slot, v_slot, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    PAD_K: tl.constexpr, PAD_V: tl.constexpr, GRANULE: tl.constexpr, PACK: tl.constexpr,
    CAP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program: one entry of `tiles` (row, tile of the row), then PACK heads of one KV head. Heads change fastest.

    A tile is BLOCK_M // PACK tokens times PACK heads. `k_tiles`, `v_tiles`: tensor descriptors of k_new and v_new as
    [T, KV_HEADS * size] in blocks of [BLOCK_N, size], or None. Strides are in elements.
    """
    TOKENS: tl.constexpr = BLOCK_M // PACK
    PARTS: tl.constexpr = HEADS // PACK
    wait(PDL)
    tile = tl.program_id(0) // PARTS
    head = tl.program_id(0) % PARTS * PACK
    kv_head = head // (HEADS // KV_HEADS)
    row = tl.load(tiles + 2 * tile)
    first = tl.load(tiles + 2 * tile + 1) * TOKENS
    begin = tl.load(q_start + row)
    n = tl.load(q_start + row + 1) - begin
    length = tl.load(kv_len + row)
    start = length - n
    entries = table + tl.load(request + row).to(tl.int64) * table_stride
    release(PDL)

    m = tl.arange(0, BLOCK_M)
    at = first + m // PACK
    mine = (at < n) & (m < TOKENS * PACK)
    k_at, v_at, ones = tl.arange(0, PAD_K), tl.arange(0, PAD_V), tl.arange(0, BLOCK_N)
    heads = head + m % PACK
    q_rows = q + (begin + at).to(tl.int64) * q_stride + heads * KEY
    queries = tl.load(q_rows[:, None] + k_at[None, :], mask=mine[:, None] & (k_at < KEY)[None, :], other=0.0)
    q_position = start + at

    last = tl.minimum(start + first + TOKENS, length)  # the first position that no query of the tile sees
    low, whole_from = 0, 0  # blocks: the first that the tile sees, and the first that the window does not cut
    if CAUSAL:
        whole_to = (start + first + 1) // BLOCK_N
    else:
        last = length
        whole_to = length // BLOCK_N
    if WINDOW is not None:
        low = tl.maximum(start + first + 1 - WINDOW, 0) // BLOCK_N
        whole_from = tl.cdiv(tl.maximum(start + first + TOKENS - WINDOW, 0), BLOCK_N)
    end = tl.cdiv(last, BLOCK_N)
    own_from = tl.minimum(tl.maximum(tl.cdiv(start, BLOCK_N), low), end)
    own_to = tl.maximum(tl.minimum(length // BLOCK_N, end), own_from)

    k_head, v_head = kv_head * KEY, kv_head * VALUE
    k_own = k_new + begin.to(tl.int64) * k_stride + k_head
    v_own = v_new + begin.to(tl.int64) * v_stride + v_head
    acc = tl.zeros((BLOCK_M, PAD_V), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    # Two rounds: the cached blocks and then the new ones, then the block in which the row ends. One loop gathers for
    # both.
    for half in tl.range(0, 2, num_stages=1):
        gather_from = tl.where(half == 0, low, own_to)
        gather_to = tl.where(half == 0, own_from, end)
        for block in tl.range(gather_from, gather_to, num_stages=STAGES):
            position = block * BLOCK_N + ones
            there = position < length
            if GRANULE == 1:
                slot = tl.load(entries + position, mask=there, other=0).to(tl.int64)
            else:
                granule = tl.load(entries + position // GRANULE, mask=there, other=0)
                slot = granule.to(tl.int64) * GRANULE + position % GRANULE
            k_rows, v_rows = k_pool + k_head + slot * k_slot, v_pool + v_head + slot * v_slot
            k = tl.load(k_rows[:, None] + k_at[None, :], mask=there[:, None] & (k_at < KEY)[None, :], other=0.0)
            v = tl.load(v_rows[:, None] + v_at[None, :], mask=there[:, None] & (v_at < VALUE)[None, :], other=0.0)
            edge = (block >= whole_to) | (block < whole_from)
            acc, total, top = _fold(
                acc, total, top, queries, k, v, block, edge, q_position, length, scale, CAP, CAUSAL, WINDOW
            )
        for block in tl.range(tl.where(half == 0, own_from, own_to), own_to, num_stages=STAGES):
            if k_tiles is None:
                offset = (block * BLOCK_N - start).to(tl.int64)
                k_rows, v_rows = k_own + offset * k_stride, v_own + offset * v_stride
                k = tl.load(k_rows + (ones * k_stride)[:, None] + k_at[None, :], mask=(k_at < KEY)[None, :], other=0.0)
                v = tl.load(
                    v_rows + (ones * v_stride)[:, None] + v_at[None, :], mask=(v_at < VALUE)[None, :], other=0.0
                )
            else:
                k = k_tiles.load([begin + block * BLOCK_N - start, k_head])
                v = v_tiles.load([begin + block * BLOCK_N - start, v_head])
            edge = (block >= whole_to) | (block < whole_from)
            acc, total, top = _fold(
                acc, total, top, queries, k, v, block, edge, q_position, length, scale, CAP, CAUSAL, WINDOW
            )

    index = (begin + at).to(tl.int64) * HEADS + heads
    result = acc / total[:, None]
    tl.store(
        out + index[:, None] * VALUE + v_at[None, :],
        result.to(out.dtype.element_ty),
        mask=mine[:, None] & (v_at < VALUE)[None, :],
    )
    if LSE:
        tl.store(lse + index, (top + tl.log2(total)) * LN2, mask=mine)
