"""The kernel of attn.varlen: a tile of one row's queries and one head, over all keys that the tile sees.

A key has two parts, each a power of two in size: 192 elements are 128 and 64 instead of a padded 256. Blocks of keys
that all queries of a tile see come by TMA if TMA can read them. The others, at the diagonal and at the row's end, are
read under a mask, because the next row follows. Softmax is FlashAttention-2's (arXiv:2307.08691).
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmcore_triton.attention.tile import LN_2, LOG2_E, inside_of
from llmcore_triton.launch import release, wait


@triton.jit
def _scores(q_low, q_high, k_low, k_high, HIGH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns [M, N] products of keys in two parts. If HIGH is 0, only the first part exists."""
    s = tl.dot(q_low, tl.trans(k_low), input_precision="ieee")
    if HIGH > 0:
        s = tl.dot(q_high, tl.trans(k_high), s, input_precision="ieee")
    return s


@triton.jit
def _folded(acc, total, top, s, v, FACTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Folds a block's scores [M, N] and values into the running softmax. Each query has seen at least one key by
    now."""
    now = tl.maximum(top, tl.max(s, 1) * FACTOR)
    p = tl.exp2(s * FACTOR - now[:, None])
    shrink = tl.exp2(top - now)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, total, now


@triton.jit(do_not_specialize=["rows", "tiles"], do_not_specialize_on_alignment=["q_start", "k_start", "lse"])
def varlen(  # type: ignore[no-untyped-def]
    q, k, v, k_low_tiles, k_high_tiles, v_tiles, q_start, k_start, out, lse, rows, tiles,
    q_stride, q_head, k_stride, k_head, v_stride, v_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, PAD_LOW: tl.constexpr, PAD_HIGH: tl.constexpr, PAD_V: tl.constexpr,
    SCALE: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program: a row's last tile comes first, because it sees most. Heads change fastest, then rows.

    LOW and HIGH: elements of a key's parts. `k_low_tiles` and so on: tensor descriptors of k and v as [L, width] in
    blocks of BLOCK_N tokens, or None. Strides of tokens and heads are in elements.
    """
    FACTOR: tl.constexpr = SCALE * LOG2_E
    wait(PDL)
    release(PDL)
    head = tl.program_id(0) % HEADS
    rest = tl.program_id(0) // HEADS
    row = rest % rows
    first = (tiles - 1 - rest // rows) * BLOCK_M
    begin = tl.load(q_start + row)
    n = tl.load(q_start + row + 1) - begin
    k_begin = tl.load(k_start + row)
    length = tl.load(k_start + row + 1) - k_begin
    if first >= n:
        return

    m_at, n_at = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    low_at, high_at, v_at = tl.arange(0, PAD_LOW), tl.arange(0, PAD_HIGH), tl.arange(0, PAD_V)
    mine = first + m_at < n
    index = (begin + first + m_at).to(tl.int64)
    from_q = q + index[:, None] * q_stride + head * q_head
    q_low = tl.load(from_q + low_at[None, :], mask=inside_of(mine, low_at, LOW), other=0.0)
    if HIGH > 0:
        q_high = tl.load(from_q + LOW + high_at[None, :], mask=inside_of(mine, high_at, HIGH), other=0.0)
    else:
        q_high = q_low
    # the queries' places among the row's keys, the keys that the whole tile sees, and the keys that some query sees
    position = length - n + first + m_at
    if CAUSAL:
        whole = tl.maximum(tl.minimum(length - n + first + 1, length), 0) // BLOCK_N
        last = tl.minimum(length - n + first + BLOCK_M, length)
    else:
        whole = length // BLOCK_N
        last = length
    k_at, v_col = head // GROUP * k_head, head // GROUP * v_head
    from_k = k + k_begin.to(tl.int64) * k_stride + k_at
    from_v = v + k_begin.to(tl.int64) * v_stride + v_col

    acc = tl.zeros((BLOCK_M, PAD_V), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    for block in tl.range(0, whole, num_stages=STAGES):
        if k_low_tiles is None:
            token = (block * BLOCK_N + n_at).to(tl.int64)
            k_rows = from_k + token[:, None] * k_stride
            k_low = tl.load(k_rows + low_at[None, :], mask=(low_at < LOW)[None, :], other=0.0)
            k_high = k_low
            if HIGH > 0:
                k_high = tl.load(k_rows + LOW + high_at[None, :], mask=(high_at < HIGH)[None, :], other=0.0)
            v_block = tl.load(
                from_v + token[:, None] * v_stride + v_at[None, :], mask=(v_at < VALUE)[None, :], other=0.0
            )
        else:
            k_low = k_low_tiles.load([k_begin + block * BLOCK_N, k_at])
            k_high = k_low
            if HIGH > 0:
                k_high = k_high_tiles.load([k_begin + block * BLOCK_N, k_at + LOW])
            v_block = v_tiles.load([k_begin + block * BLOCK_N, v_col])
        s = _scores(q_low, q_high, k_low, k_high, HIGH)
        acc, total, top = _folded(acc, total, top, s, v_block, FACTOR)
    for block in tl.range(whole, tl.cdiv(last, BLOCK_N), num_stages=1):
        token = block * BLOCK_N + n_at
        there = token < length
        k_rows = from_k + token.to(tl.int64)[:, None] * k_stride
        k_low = tl.load(k_rows + low_at[None, :], mask=inside_of(there, low_at, LOW), other=0.0)
        k_high = k_low
        if HIGH > 0:
            k_high = tl.load(k_rows + LOW + high_at[None, :], mask=inside_of(there, high_at, HIGH), other=0.0)
        v_rows = from_v + token.to(tl.int64)[:, None] * v_stride
        v_block = tl.load(v_rows + v_at[None, :], mask=inside_of(there, v_at, VALUE), other=0.0)
        s = _scores(q_low, q_high, k_low, k_high, HIGH)
        seen = there[None, :]
        if CAUSAL:
            seen = seen & (token[None, :] <= position[:, None])
        acc, total, top = _folded(acc, total, top, tl.where(seen, s, float("-inf")), v_block, FACTOR)

    some = tl.where(total > 0, total, 1.0)
    tl.store(
        out + (index * HEADS + head)[:, None] * VALUE + v_at[None, :],
        (acc / some[:, None]).to(out.dtype.element_ty),
        mask=inside_of(mine, v_at, VALUE),
    )
    tl.store(lse + index * HEADS + head, (top + tl.log2(some)) * LN_2, mask=mine)
