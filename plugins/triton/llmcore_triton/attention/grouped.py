"""AttentionKernels whose programs process all query heads of a KV head together."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from llmcore.api import AttnLimits, AttnRows, MetaWriter, OpContext
from llmcore.layers import spec_of
from triton import next_power_of_2

from llmcore_triton.attention.codes import LEAST, attend_codes, half
from llmcore_triton.attention.listed import Config, Listed, reserve, sizes
from llmcore_triton.attention.stored import inside_of, numbers_at, stored_as
from llmcore_triton.attention.tile import LN_2, attend, fold, normalized, nothing, reach, row_of, seen, slots_of
from llmcore_triton.launch import Bound, here, release, wait
from llmcore_triton.specs.layouts import QUANTIZED


class Grouped(Listed):
    """Tiles of `config.block_m` rows (more for larger groups): query tokens x the heads of a group.

    With `decode`, each row has one query token, and so has each tile.
    """

    def __init__(self, context: OpContext, config: Config, *, decode: bool, fixed: int | None = None) -> None:
        spec = spec_of(context)
        group = spec.heads // spec.kv_heads
        padded = next_power_of_2(group)
        halved = half(context)
        rows = max(LEAST if halved and decode else config.block_m, padded)
        tokens = None if decode else rows // padded
        super().__init__(context, config, programs=spec.kv_heads, tokens=tokens, fixed=fixed)
        compiled = {
            **sizes(spec, context.granule),
            **stored_as(context),
            "EARLY": config.early and decode and fixed is None and context.layout not in QUANTIZED,
            "HALF": halved,
            "KV_HEADS": spec.kv_heads,
            "GROUP": group,
            "TOKENS": tokens or 1,
            "HEADS_PADDED": padded,
            "BLOCK_M": rows,
            "FIXED": fixed or 0,
            **self.options,
        }
        self._kernel, self._decode = Bound(grouped, **compiled), decode and fixed is None

    def known(self, rows: int) -> dict[str, Any]:
        """See Listed."""
        return {"ONE": self._decode and rows == 1}


class Whole(Grouped):
    """One program for each row and KV head, whatever the row's length."""

    def __init__(self, context: OpContext, config: Config) -> None:
        super().__init__(context, config, decode=True)

    def workspace(self, limits: AttnLimits) -> None:
        """Reserves nothing: no row is split."""
        self._scratch = reserve(self.device, 1)

    def plan(self, rows: AttnRows, into: MetaWriter) -> str:
        """Uploads nothing."""
        return "1"


@triton.jit(
    do_not_specialize=["room"],
    do_not_specialize_on_alignment=["request", "q_start", "kv_len", "items", "lse"],
)
def grouped(  # type: ignore[no-untyped-def]
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
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    K_CODES: tl.constexpr,
    K_GROUP: tl.constexpr,
    V_CODES: tl.constexpr,
    V_GROUP: tl.constexpr,
    HALF: tl.constexpr,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    GRANULE: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    LISTED: tl.constexpr,
    ONE: tl.constexpr,
    FIXED: tl.constexpr,
    EARLY: tl.constexpr,
    LSE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (KV head, item). Without a list (LISTED) the item is the row, which has one query token. ONE: the items
    are the chunks of the only row.

    The M rows of a tile are TOKENS query tokens x HEADS_PADDED heads (GROUP real ones, the rest padding). FIXED:
    tokens of a chunk, or 0. With it each chunk is computed by itself and chunks are folded in order. The bits of a
    result then depend neither on its tile nor on the number of programs.

    EARLY: the first block of KV is read before `wait`, except for the token of this step. Earlier steps wrote it.
    """
    kv_head = tl.program_id(0)
    row = tl.program_id(1)
    tile = 0
    place = 0
    at = 0
    chunk = 0
    if LISTED:
        chunk = tl.load(items, cache_modifier=".cg")
        if ONE:
            place, at, row = row, row, row * 0
        else:
            record = items + (row + 1) * 4
            row = tl.load(record, cache_modifier=".cg")
            tile = tl.load(record + 1, cache_modifier=".cg")
            place = tl.load(record + 2, cache_modifier=".cg")
            at = tl.load(record + 3, cache_modifier=".cg")
    length, token, n_query, index = row_of(row, request, q_start, kv_len)
    places = table + index.to(tl.int64) * table_stride
    first, end = reach(length, n_query, tile, TOKENS, WINDOW, FIXED if FIXED > 0 else BLOCK_N)
    from_token, to_token = first, end
    if LISTED:  # noqa: SIM102 - known when compiling
        if place >= 0:
            from_token = first + place * chunk
            to_token = tl.minimum(from_token + chunk, end)
    busy = (row >= 0) & (n_query > 0) & (from_token < to_token)
    k_at = tl.arange(0, BLOCK_K)
    v_at = tl.arange(0, BLOCK_V)
    if EARLY:
        n_at = from_token + tl.arange(0, BLOCK_N)
        there = (n_at < to_token) & busy
        slot = slots_of(places, n_at, there, GRANULE, True)
        from_k = numbers_at(keys, kv_head, slot, k_stride, k_at, K_SIZE)
        from_v = numbers_at(values, kv_head, slot, v_stride, v_at, V_SIZE)
        # the step's own token, which is the row's last one, is still being written
        old = there & (n_at < length - 1)
        k = tl.load(from_k, mask=inside_of(old, k_at, K_SIZE), other=0.0, cache_modifier=".cg")
        v = tl.load(from_v, mask=inside_of(old, v_at, V_SIZE), other=0.0, cache_modifier=".cg")
    wait(PDL)
    if not busy:
        return

    m_at = tl.arange(0, BLOCK_M)
    own = m_at // HEADS_PADDED
    head = m_at % HEADS_PADDED
    tokens = tl.minimum(n_query - tile * TOKENS, TOKENS)
    real = (own < tokens) & (head < GROUP)
    query = length - n_query + tile * TOKENS + own
    rows = (token + tile * TOKENS + own).to(tl.int64)
    heads = kv_head * GROUP + head
    if EARLY:
        new = n_at == length - 1
        k = tl.load(from_k, mask=inside_of(new, k_at, K_SIZE), other=k)
        v = tl.load(from_v, mask=inside_of(new, v_at, V_SIZE), other=v)
    x = tl.load(
        q + rows[:, None] * q_stride + (heads * K_SIZE)[:, None] + k_at[None, :],
        mask=real[:, None] & (k_at < K_SIZE)[None, :],
        other=0.0,
    )
    release(PDL)
    if EARLY:
        # all loads are on their way before the compiler waits for one
        k, v = here(k, PDL), here(v, PDL)
    m, l, acc = nothing(BLOCK_M, BLOCK_V)  # noqa: E741
    if FIXED > 0:
        for start in tl.range(from_token, to_token, FIXED, num_stages=1):
            none_m, none_l, none = nothing(BLOCK_M, BLOCK_V)
            part_m, part_l, part = attend(
                none_m, none_l, none, x, query, keys, values, k_marks, v_marks, kv_head, places, start,
                tl.minimum(start + FIXED, to_token), k_stride, v_stride, SCALE, SOFT_CAP, WINDOW, True, GRANULE,
                KV_HEADS, K_SIZE, V_SIZE, K_CODES, K_GROUP, V_CODES, V_GROUP, BLOCK_N, STAGES,
            )  # fmt: skip
            part, part_lse = normalized(part_m, part_l, part)
            m, l, acc = fold(m, l, acc, part, part_lse)  # noqa: E741
    elif HALF:
        m, l, acc = attend_codes(  # noqa: E741
            x, query, keys, values, k_marks, v_marks, kv_head, places, from_token, to_token, k_stride, v_stride,
            SCALE, SOFT_CAP, WINDOW, TOKENS > 1, GRANULE, KV_HEADS, K_SIZE, V_SIZE,
            K_CODES, K_GROUP, V_CODES, V_GROUP, BLOCK_N, STAGES,
        )  # fmt: skip
    else:
        begin = from_token
        if EARLY:
            m, l, acc = seen(m, l, acc, x, query, k, v, n_at, there, SCALE, SOFT_CAP, WINDOW, False)  # noqa: E741
            begin += BLOCK_N
        m, l, acc = attend(  # noqa: E741
            m, l, acc, x, query, keys, values, k_marks, v_marks, kv_head, places, begin,
            to_token, k_stride, v_stride, SCALE, SOFT_CAP, WINDOW, TOKENS > 1, GRANULE,
            KV_HEADS, K_SIZE, V_SIZE, K_CODES, K_GROUP, V_CODES, V_GROUP, BLOCK_N, STAGES,
        )  # fmt: skip
    y, y_lse = normalized(m, l, acc)

    inside = real[:, None] & (v_at < V_SIZE)[None, :]
    if LISTED:  # noqa: SIM102 - known when compiling
        if (from_token > first) | (to_token < end):
            # one chunk of several
            if FIXED > 0:
                # folding a single chunk returns it bit for bit
                y = acc
            to = (at + own).to(tl.int64) * (KV_HEADS * GROUP) + heads
            tl.store(partial + to[:, None] * V_SIZE + v_at[None, :], y, mask=inside)
            tl.store(partial + room.to(tl.int64) * (KV_HEADS * GROUP * V_SIZE) + to, y_lse, mask=real)
            return
    tl.store(
        out + rows[:, None] * out_stride + (heads * V_SIZE)[:, None] + v_at[None, :],
        y.to(out.dtype.element_ty),
        mask=inside,
    )
    if LSE:
        tl.store(lse + rows * (KV_HEADS * GROUP) + heads, y_lse * LN_2, mask=real)
