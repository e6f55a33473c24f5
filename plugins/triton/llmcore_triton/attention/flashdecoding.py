"""attn.gqa.decode: splits the KV of long rows over programs, one query head per program, without matrix products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers import spec_of

from llmcore_triton import tuned
from llmcore_triton.attention.listed import Config, Listed, fitting, sizes, timed
from llmcore_triton.attention.stored import rows_of, stored_as
from llmcore_triton.attention.tile import LN_2, capped, reach, row_of, slots_of
from llmcore_triton.launch import Bound, release, wait

KERNEL = "flashdecoding"


class PerHead(Listed):
    """One program per query head and item."""

    def __init__(self, context: OpContext, config: Config) -> None:
        spec = spec_of(context)
        super().__init__(context, config, programs=spec.heads)
        compiled = {
            **sizes(spec, context.granule),
            **stored_as(context),
            "HEADS": spec.heads,
            "GROUP": spec.heads // spec.kv_heads,
            **self.options,
        }
        self._kernel = Bound(per_head, **compiled)


def make(context: OpContext) -> PerHead:
    """Returns an AttentionKernel. `context.shape` is an AttnSpec."""
    return make_with(context, tuned.choose(KERNEL, context, vars(_default(context))))


def make_with(context: OpContext, config: Mapping[str, Any]) -> PerHead:
    """The kernel with this Config, given as a mapping."""
    return PerHead(context, Config(**config))


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configs worth timing."""
    for config in timed(context, ((16, 1, 5), (32, 2, 3), (32, 4, 3), (32, 4, 4), (64, 4, 2), (64, 8, 3))):
        for per_processor in (4, 8):
            yield vars(replace(config, per_processor=per_processor))


def _default(context: OpContext) -> Config:
    return fitting(context, Config(block_n=32, stages=3, per_processor=4))


@triton.jit(
    do_not_specialize=["room"],
    do_not_specialize_on_alignment=["request", "q_start", "kv_len", "items", "lse"],
)
def per_head(  # type: ignore[no-untyped-def]
    q,
    keys,
    values,
    k_marks,
    v_marks,
    q_stride,
    k_stride,
    v_stride,
    out,
    lse,
    table,
    request,
    q_start,
    kv_len,
    items,
    partial,
    room,
    table_stride,
    out_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    K_CODES: tl.constexpr,
    K_GROUP: tl.constexpr,
    V_CODES: tl.constexpr,
    V_GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    GRANULE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    LISTED: tl.constexpr,
    LSE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (query head, item). Without a list (LISTED) the item is the row."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    place = 0
    at = 0
    chunk = 0
    if LISTED:
        record = items + (row + 1) * 4
        row = tl.load(record, cache_modifier=".cg")
        place = tl.load(record + 2, cache_modifier=".cg")
        at = tl.load(record + 3, cache_modifier=".cg")
        chunk = tl.load(items, cache_modifier=".cg")
    length, token, n_query, index = row_of(row, request, q_start, kv_len)
    places = table + index.to(tl.int64) * table_stride
    first, end = reach(length, n_query, 0, 1, WINDOW, BLOCK_N)
    from_token, to_token = first, end
    if LISTED:
        from_token = first + place * chunk
        to_token = tl.minimum(from_token + chunk, end)
    wait(PDL)
    if (row < 0) | (n_query <= 0) | (from_token >= to_token):
        return

    k_at = tl.arange(0, BLOCK_K)
    v_at = tl.arange(0, BLOCK_V)
    x = tl.load(q + token.to(tl.int64) * q_stride + head * K_SIZE + k_at, mask=k_at < K_SIZE, other=0.0)
    DTYPE: tl.constexpr = x.dtype
    x = x.to(tl.float32)
    release(PDL)
    kv_head = head // GROUP
    KV_HEADS: tl.constexpr = HEADS // GROUP
    m = tl.full([1], float("-inf"), tl.float32)
    l = tl.zeros([1], tl.float32)  # noqa: E741
    acc = tl.zeros([BLOCK_V], tl.float32)
    for start in tl.range(from_token, to_token, BLOCK_N, num_stages=STAGES):
        there = start + tl.arange(0, BLOCK_N) < to_token
        slot = slots_of(places, start + tl.arange(0, BLOCK_N), there, GRANULE)
        k = rows_of(keys, k_marks, kv_head, slot, there, k_stride, BLOCK_K, KV_HEADS, K_SIZE, K_CODES, K_GROUP, DTYPE)
        v = rows_of(
            values, v_marks, kv_head, slot, there, v_stride, BLOCK_V, KV_HEADS, V_SIZE, V_CODES, V_GROUP, DTYPE
        )
        scores = capped(tl.sum(k.to(tl.float32) * x[None, :], 1), SCALE, SOFT_CAP)
        seen = there
        if WINDOW > 0:
            seen = seen & (start + tl.arange(0, BLOCK_N) >= length - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(m, tl.max(scores, 0)[None])
        base = tl.where(highest == float("-inf"), 0.0, highest)
        p = tl.exp2(scores - base)
        keep = tl.exp2(m - base)
        l = l * keep + tl.sum(p, 0)[None]  # noqa: E741
        acc = acc * keep + tl.sum(v.to(tl.float32) * p[:, None], 0)
        m = highest

    some = tl.where(l > 0, l, 1.0)
    y = acc / some
    y_lse = tl.where(l > 0, m + tl.log2(some), float("-inf"))
    one = tl.zeros([1], tl.int64)
    if LISTED:  # noqa: SIM102 - known when compiling
        if (from_token > first) | (to_token < end):
            to = one + at * HEADS + head
            tl.store(partial + to * V_SIZE + v_at, y, mask=v_at < V_SIZE)
            tl.store(partial + room.to(tl.int64) * (HEADS * V_SIZE) + to, y_lse)
            return
    tl.store(
        out + token.to(tl.int64) * out_stride + head * V_SIZE + v_at, y.to(out.dtype.element_ty), mask=v_at < V_SIZE
    )
    if LSE:
        tl.store(lse + token.to(tl.int64) * HEADS + head + one, y_lse * LN_2)
