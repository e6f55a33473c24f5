"""The device part that the attention kernels share: which KV a tile sees, and the loop over it.

Scores are kept in units of log2, so that exponentials are the hardware's exp2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmcore_triton.attention.stored import rows_of

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def reach(length, n_query, tile, TOKENS: tl.constexpr, WINDOW: tl.constexpr, align):  # type: ignore[no-untyped-def]
    """Returns (first, last) of the KV tokens that the queries of a row's tile see, without last. first is a multiple
    of align."""
    query = length - n_query + tile * TOKENS
    last = tl.minimum(query + TOKENS, length)
    first = query * 0
    if WINDOW > 0:
        first = tl.maximum(query - WINDOW + 1, 0) // align * align
    return first, last


@triton.jit
def row_of(row, request, q_start, kv_len):  # type: ignore[no-untyped-def]
    """Returns (tokens, first query token, query tokens, row of the table) of a row. For row -1 it is some row's.

    Call it before `wait`. The step wrote all these arrays before the kernel just ahead began, and that kernel releases
    this one only after its own `wait`.
    """
    row = tl.maximum(row, 0)
    # bypass the L1 cache, which may hold the previous step's data
    token = tl.load(q_start + row, cache_modifier=".cg")
    n_query = tl.load(q_start + row + 1, cache_modifier=".cg") - token
    length = tl.load(kv_len + row, cache_modifier=".cg")
    return length, token, n_query, tl.load(request + row, cache_modifier=".cg")


@triton.jit
def slots_of(places, token, there, GRANULE: tl.constexpr, EARLY: tl.constexpr = False):  # type: ignore[no-untyped-def]
    """Returns the int64 slots of tokens of the row whose table starts at `places`. EARLY: `wait` comes later."""
    # bypass the L1 cache, which may hold the previous step's data
    policy: tl.constexpr = ".cg" if EARLY else ""
    slot = tl.load(places + token // GRANULE, mask=there, other=0, cache_modifier=policy).to(tl.int64)
    if GRANULE > 1:
        slot = slot * GRANULE + token % GRANULE
    return slot


@triton.jit
def capped(scores, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns scaled and soft-capped scores, in units of log2."""
    if SOFT_CAP > 0:
        # cap * tanh(score / cap)
        scaled = (SOFT_CAP * LOG2_E) * (1.0 - 2.0 / (1.0 + tl.exp(scores * (2.0 * SCALE / SOFT_CAP))))
    else:
        scaled = scores * (SCALE * LOG2_E)
    return scaled


@triton.jit
def nothing(M: tl.constexpr, BLOCK_V: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns (m, l, acc) of queries that have seen nothing: see `attend`."""
    return tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, BLOCK_V], tl.float32)


@triton.jit
def attend(  # type: ignore[no-untyped-def]
    m,
    l,  # noqa: E741 - the usual name
    acc,
    q,
    query,
    keys,
    values,
    k_marks,
    v_marks,
    head,
    places,
    first,
    last,
    k_stride,
    v_stride,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    GRANULE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    K_CODES: tl.constexpr,
    K_GROUP: tl.constexpr,
    V_CODES: tl.constexpr,
    V_GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attention of queries q [M, >= K_SIZE, zero beyond] at positions `query` [M] over KV tokens first to last of KV
    head `head`, after those that m, l and acc are of. `quantized_kv` says what pools, marks and their constants are.

    Returns the largest score m [M], the sum l [M] of exp2(score - m), and acc [M, BLOCK_V], the values with these
    weights. A row that sees nothing has -inf, 0 and 0. Without CAUSAL all queries see up to `last`.
    """
    BLOCK_K: tl.constexpr = q.shape[1]
    BLOCK_V: tl.constexpr = acc.shape[1]
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        token = start + tl.arange(0, BLOCK_N)
        there = token < last
        slot = slots_of(places, token, there, GRANULE)
        k = rows_of(keys, k_marks, head, slot, there, k_stride, BLOCK_K, KV_HEADS, K_SIZE, K_CODES, K_GROUP, q.dtype)
        v = rows_of(values, v_marks, head, slot, there, v_stride, BLOCK_V, KV_HEADS, V_SIZE, V_CODES, V_GROUP, q.dtype)
        m, l, acc = seen(m, l, acc, q, query, k, v, token, there, SCALE, SOFT_CAP, WINDOW, CAUSAL)  # noqa: E741
    return m, l, acc


@triton.jit
def seen(  # type: ignore[no-untyped-def]
    m, l, acc, q, query, k, v, token, there,  # noqa: E741
    SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Returns (m, l, acc) of `attend` after queries have also seen keys k [N, >= K_SIZE] and values v [N, BLOCK_V] of
    the tokens `token` [N] that are `there`."""
    scores = capped(tl.dot(q, tl.trans(k), input_precision="ieee"), SCALE, SOFT_CAP)
    sees = there[None, :]
    if CAUSAL:
        sees = sees & (token[None, :] <= query[:, None])
    if WINDOW > 0:
        sees = sees & (token[None, :] > query[:, None] - WINDOW)
    scores = tl.where(sees, scores, float("-inf"))
    highest = tl.maximum(m, tl.max(scores, 1))
    # a row that has seen nothing yet has no finite maximum to subtract
    base = tl.where(highest == float("-inf"), 0.0, highest)
    p = tl.exp2(scores - base[:, None])
    keep = tl.exp2(m - base)
    l = l * keep + tl.sum(p, 1)  # noqa: E741
    acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
    return highest, l, acc


@triton.jit
def normalized(m, l, acc):  # type: ignore[no-untyped-def] # noqa: E741
    """Returns (result, log2-sum-exp2) from the results of `attend`: 0 and -inf for rows that saw nothing."""
    some = tl.where(l > 0, l, 1.0)
    return acc / some[:, None], tl.where(l > 0, m + tl.log2(some), float("-inf"))


@triton.jit
def fold(m, l, acc, part, part_lse):  # type: ignore[no-untyped-def] # noqa: E741
    """Adds one chunk's `normalized` result to those before it. A chunk of which nothing is seen changes no bit.

    Multiplications and additions are fused explicitly, so that every kernel that folds rounds in the same way.
    """
    highest = tl.maximum(m, part_lse)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    keep, weight = tl.exp2(m - base), tl.exp2(part_lse - base)
    acc = tl.fma(acc, tl.broadcast_to(keep[:, None], acc.shape), part * weight[:, None])
    return highest, tl.fma(l, keep, weight), acc
