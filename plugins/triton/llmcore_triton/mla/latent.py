"""AttentionKernels over latent rows, and their launch configurations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers import DTYPES, spec_of
from triton import next_power_of_2

from llmcore_triton.attention.listed import Config, Listed
from llmcore_triton.attention.stored import inside_of, rows_of
from llmcore_triton.attention.tile import LN_2, capped, fold, normalized, reach, row_of, slots_of
from llmcore_triton.launch import HOPPER, Bound, release, wait
from llmcore_triton.quantized_kv import of_layout
from llmcore_triton.specs.layouts import QUANTIZED_LATENT

NARROW, WIDE = 16, 64
"""Rows of a tile: the fewest that tensor cores take, and those of Hopper's, whose operands need no registers."""

_LEAST_SIDE = 16
"""The smallest side of a block in `tl.dot`."""

_MOST_SHARED = 222 << 10
"""Bytes that a program's blocks may take on Hopper. The compiler needs some of the rest."""


class Latents(Listed):
    """Tiles of `config.block_m` rows: query tokens x heads, or a part of the heads if there are more.

    With `decode`, each row has one query token, and so has each tile.
    """

    def __init__(self, context: OpContext, config: Config, *, decode: bool, fixed: int | None = None) -> None:
        spec = spec_of(context)
        padded = min(next_power_of_2(spec.heads), config.block_m)
        tokens = None if decode else config.block_m // padded
        # the tiles of one token's heads are adjacent programs
        super().__init__(context, config, programs=-(-spec.heads // padded), tokens=tokens, fixed=fixed)
        self._kernel = Bound(
            over_latents,
            HEADS=spec.heads,
            LATENT=spec.value_size,
            ROTATED=spec.key_size - spec.value_size,
            **of_layout(QUANTIZED_LATENT.get(str(context.layout)), spec.value_size),
            SCALE=spec.scale,
            SOFT_CAP=spec.soft_cap or 0.0,
            GRANULE=context.granule,
            TOKENS=tokens or 1,
            HEADS_PADDED=padded,
            BLOCK_M=config.block_m,
            BLOCK_L=_padded(spec.value_size),
            BLOCK_R=_padded(spec.key_size - spec.value_size),
            BLOCK_N=config.block_n,
            STAGES=config.stages,
            FIXED=fixed or 0,
            num_warps=config.warps,
            num_stages=config.stages,
            **self.options,
        )

    def read(self, q: torch.Tensor, kv: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        """Queries may lie apart in memory. Quantized latents have marks, and a pool of rotated parts beside them."""
        latents, rotated = kv[0], kv[-1]
        marks = kv[1] if len(kv) > 1 else None
        return q, latents, marks, rotated, q.stride(0), q.stride(1), latents.stride(0), rotated.stride(0)


def _padded(size: int) -> int:
    return max(int(next_power_of_2(size)), _LEAST_SIDE)


def narrow(context: OpContext) -> Config:
    """The Config for tiles of 16 rows. They are bound by memory: two programs per multiprocessor, two blocks in flight
    each."""
    if context.dtype == "f32":
        # exact f32 products do not use tensor cores, and their operands are in registers
        return Config(block_n=16, warps=8, stages=1, per_processor=1)
    if (context.device.capability or 0) < HOPPER:
        return Config(block_n=32, warps=4, stages=3, per_processor=1)
    # a token's row is as long as two KV heads' keys and values, so half of `attention`'s tokens are worth a program
    return Config(block_n=32, warps=4, stages=5, per_processor=2, least=64)


def wide(context: OpContext) -> Config:
    """The Config for tiles of 64 rows, whose queries stay in shared memory. Devices without such tiles get
    `narrow`."""
    if context.dtype == "f32" or (context.device.capability or 0) != HOPPER:
        return narrow(context)
    return Config(block_m=WIDE, block_n=32, warps=8, stages=5, per_processor=1)


def fitting(context: OpContext, configs: Iterable[Config]) -> Iterator[Config]:
    """Yields the Configs that fit into a Hopper's shared memory."""
    spec = spec_of(context)
    row = _padded(spec.value_size) + _padded(spec.key_size - spec.value_size)
    for config in configs:
        # slots are read one level ahead of their rows; tensor cores still read one block
        blocks = (config.stages - 1) // 2 + 1
        rows = blocks * config.block_n + (config.block_m if config.block_m >= WIDE else 0)
        if rows * row * DTYPES[context.dtype].itemsize <= _MOST_SHARED:
            yield config


@triton.jit
def attend_latent(  # type: ignore[no-untyped-def]
    q_latent, q_rotated, query, latents, marks, rotateds, places, first, last, latent_stride, rotated_stride,
    SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, CAUSAL: tl.constexpr, GRANULE: tl.constexpr,
    LATENT: tl.constexpr, ROTATED: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attention of queries in two parts, [M, >= LATENT] and [M, >= ROTATED], zero beyond, over KV tokens first to
    last. `stored.rows_of` says how latents and their marks are stored.

    Returns the same as `tile.attend`. Without CAUSAL all queries see up to `last`.
    """
    M: tl.constexpr = q_latent.shape[0]
    BLOCK_L: tl.constexpr = q_latent.shape[1]
    BLOCK_R: tl.constexpr = q_rotated.shape[1]
    r_at = tl.arange(0, BLOCK_R)
    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)  # noqa: E741 - the usual name
    acc = tl.zeros([M, BLOCK_L], tl.float32)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        token = start + tl.arange(0, BLOCK_N)
        there = token < last
        slot = slots_of(places, token, there, GRANULE)
        latent = rows_of(
            latents, marks, 0, slot, there, latent_stride, BLOCK_L, 1, LATENT, CODES, GROUP, q_latent.dtype
        )
        rotated = tl.load(
            rotateds + slot[:, None] * rotated_stride + r_at[None, :], mask=inside_of(there, r_at, ROTATED), other=0.0
        )
        scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(q_rotated, tl.trans(rotated), scores, input_precision="ieee")
        scores = capped(scores, SCALE, SOFT_CAP)
        seen = there[None, :]
        if CAUSAL:
            seen = seen & (token[None, :] <= query[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(m, tl.max(scores, 1))
        # a row that has seen nothing yet has no finite maximum to subtract
        base = tl.where(highest == float("-inf"), 0.0, highest)
        p = tl.exp2(scores - base[:, None])
        keep = tl.exp2(m - base)
        l = l * keep + tl.sum(p, 1)  # noqa: E741
        acc = tl.dot(p.to(latent.dtype), latent, acc * keep[:, None], input_precision="ieee")
        m = highest
    return m, l, acc


@triton.jit(
    do_not_specialize=["room"],
    do_not_specialize_on_alignment=["request", "q_start", "kv_len", "items", "lse"],
)
def over_latents(  # type: ignore[no-untyped-def]
    q, latents, marks, rotateds, q_stride, q_head_stride, latent_stride, rotated_stride,
    out, lse, table, request, q_start, kv_len, items, partial, room, table_stride, out_stride,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROTATED: tl.constexpr,
    CODES: tl.constexpr, GROUP: tl.constexpr,
    SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, GRANULE: tl.constexpr,
    TOKENS: tl.constexpr, HEADS_PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, LISTED: tl.constexpr,
    FIXED: tl.constexpr, LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of heads, item). Without a list (LISTED) the item is the row, which has one query token.

    The M rows of a tile are TOKENS query tokens x HEADS_PADDED heads. FIXED is that of `attention.grouped_kernel`:
    tokens of a chunk that is computed by itself. Bits then depend neither on the tile nor on how the work was cut.
    """
    row = tl.program_id(1)
    tile = 0
    place = 0
    at = 0
    chunk = 0
    if LISTED:
        record = items + (row + 1) * 4
        row = tl.load(record, cache_modifier=".cg")
        tile = tl.load(record + 1, cache_modifier=".cg")
        place = tl.load(record + 2, cache_modifier=".cg")
        at = tl.load(record + 3, cache_modifier=".cg")
        chunk = tl.load(items, cache_modifier=".cg")
    length, token, n_query, index = row_of(row, request, q_start, kv_len)
    places = table + index.to(tl.int64) * table_stride
    first, end = reach(length, n_query, tile, TOKENS, 0, 1)
    from_token, to_token = first, end
    if LISTED:  # noqa: SIM102 - known when compiling
        if place >= 0:
            from_token = first + place * chunk
            to_token = tl.minimum(from_token + chunk, end)
    wait(PDL)
    if (row < 0) | (n_query <= 0) | (from_token >= to_token):
        return

    m_at = tl.arange(0, BLOCK_M)
    own = m_at // HEADS_PADDED
    heads = tl.program_id(0) * HEADS_PADDED + m_at % HEADS_PADDED
    tokens = tl.minimum(n_query - tile * TOKENS, TOKENS)
    real = (own < tokens) & (heads < HEADS)
    query = length - n_query + tile * TOKENS + own
    into = (token + tile * TOKENS + own).to(tl.int64)
    l_at = tl.arange(0, BLOCK_L)
    r_at = tl.arange(0, BLOCK_R)
    from_q = q + into[:, None] * q_stride + heads[:, None] * q_head_stride
    q_latent = tl.load(from_q + l_at[None, :], mask=inside_of(real, l_at, LATENT), other=0.0)
    q_rotated = tl.load(from_q + LATENT + r_at[None, :], mask=inside_of(real, r_at, ROTATED), other=0.0)
    release(PDL)
    if CODES == "":
        # a row is a latent and then its rotated part
        rotateds += LATENT
    if FIXED > 0:
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
        acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
        for start in tl.range(from_token, to_token, FIXED, num_stages=1):
            part_m, part_l, part = attend_latent(
                q_latent, q_rotated, query, latents, marks, rotateds, places, start,
                tl.minimum(start + FIXED, to_token), latent_stride, rotated_stride,
                SCALE, SOFT_CAP, True, GRANULE, LATENT, ROTATED, CODES, GROUP, BLOCK_N, STAGES,
            )  # fmt: skip
            part, part_lse = normalized(part_m, part_l, part)
            m, l, acc = fold(m, l, acc, part, part_lse)  # noqa: E741
    else:
        m, l, acc = attend_latent(  # noqa: E741
            q_latent, q_rotated, query, latents, marks, rotateds, places, from_token, to_token, latent_stride,
            rotated_stride, SCALE, SOFT_CAP, TOKENS > 1, GRANULE, LATENT, ROTATED, CODES, GROUP, BLOCK_N, STAGES,
        )  # fmt: skip
    y, y_lse = normalized(m, l, acc)

    inside = inside_of(real, l_at, LATENT)
    if LISTED:  # noqa: SIM102 - known when compiling
        if (from_token > first) | (to_token < end):
            # one chunk of several
            if FIXED > 0:
                # folding a single chunk returns it bit for bit
                y = acc
            to = (at + own).to(tl.int64) * HEADS + heads
            tl.store(partial + to[:, None] * LATENT + l_at[None, :], y, mask=inside)
            tl.store(partial + room.to(tl.int64) * (HEADS * LATENT) + to, y_lse, mask=real)
            return
    tl.store(
        out + into[:, None] * out_stride + heads[:, None] * LATENT + l_at[None, :],
        y.to(out.dtype.element_ty),
        mask=inside,
    )
    if LSE:
        tl.store(lse + into * HEADS + heads, y_lse * LN_2, mask=real)
