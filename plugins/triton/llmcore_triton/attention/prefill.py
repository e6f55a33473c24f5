"""attn.gqa.prefill: FlashAttention over rows of any number of query tokens. It reads a cached prefix from its slots.

It reads the step's own keys and values where the projection left them, by the tensor memory accelerator (TMA) if the
GPU has one. The host cuts queries into tiles, since it knows the number of new tokens of each row. The device reads
the rows' lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from llmcore.api import AttnLimits, AttnRows, AttnSpec, MetaWriter, OpContext
from llmcore.layers import spec_of
from numpy.typing import NDArray

from llmcore_triton import launch, tuned
from llmcore_triton.attention.stored import pools, rows_of, stored_as
from llmcore_triton.attention.tile import slots_of
from llmcore_triton.launch import Box, release, wait

KERNEL = "flash"

Config = Mapping[str, Any]
"""The keys of a launch configuration:
- `block_m`: queries of a tile, tokens times heads
- `block_n`: keys of a block
- `warps`, and `stages` of the pipeline
- `pack`: a tile holds all heads of a KV head, else one
- `tma`: new keys come by TMA
- `small`: steps too short to fill the device with tiles of `block_m` are cut into SMALL ones"""

SMALL: Config = {"block_m": 64, "block_n": 64, "warps": 4, "stages": 2}
FILLED = 2
"""A step with this many programs per multiprocessor is long enough for large tiles."""

ALIGNED = 16
"""Alignment in bytes that TMA requires of addresses and row strides."""


@dataclass(frozen=True)
class _Launch:
    """One way to run the kernel, with its fixed arguments. `kernels`: without lse and with it."""

    name: str
    tokens: int
    programs: int
    block_n: int
    kernels: tuple[launch.Bound, launch.Bound]


class Prefill:
    """An AttentionKernel for the token layout. `config` is its launch configuration."""

    def __init__(self, context: OpContext, config: Config) -> None:
        spec, self._granule = spec_of(context), context.granule
        self._spec, self._pdl = spec, launch.overlaps(context)
        self._processors = context.device.processors
        self._sizes = _padded(spec.key_size), _padded(spec.value_size)
        self._stored = stored_as(context)
        # TMA loads whole boxes, so it needs half types and heads without padding.
        self._tma = bool(config["tma"]) and context.dtype != "f32" and self._sizes == (spec.key_size, spec.value_size)
        shapes = [config, {**config, **SMALL}] if config["small"] else [config]
        self._launches = [self._launch(shape) for shape in shapes]

    def _launch(self, config: Config) -> _Launch:
        spec = self._spec
        group = spec.heads // spec.kv_heads
        pack = group if config["pack"] and group <= config["block_m"] // 2 else 1
        options = {
            "HEADS": spec.heads,
            "KV_HEADS": spec.kv_heads,
            "KEY": spec.key_size,
            "VALUE": spec.value_size,
            **self._stored,
            "PAD_K": self._sizes[0],
            "PAD_V": self._sizes[1],
            "GRANULE": self._granule,
            "PACK": pack,
            "CAP": spec.soft_cap,
            "CAUSAL": spec.mask == "causal",
            "WINDOW": spec.window,
            "BLOCK_M": config["block_m"],
            "BLOCK_N": config["block_n"],
            "STAGES": config["stages"],
            "PDL": self._pdl,
            "num_warps": config["warps"],
            "num_stages": config["stages"],
        }
        if self._pdl:
            options["launch_pdl"] = True
        tokens = config["block_m"] // pack
        kernel = launch.Bound(flash, **options)
        return _Launch(
            name=f"tiles{config['block_m']}",
            tokens=tokens,
            programs=spec.heads // pack,
            block_n=config["block_n"],
            kernels=(kernel.but(LSE=False), kernel.but(LSE=True)),
        )

    def workspace(self, limits: AttnLimits) -> None:
        """Reserves nothing."""

    def plan(self, rows: AttnRows, into: MetaWriter) -> str:
        """Cut the rows into tiles. Their number depends on the lengths, so no CUDA graph can hold this step."""
        chosen = self._launches[0]
        if len(self._launches) > 1:
            programs = count_tiles(rows.n_query, chosen.tokens) * chosen.programs
            if programs < FILLED * self._processors:
                chosen = self._launches[1]
        into.put(chosen.name, tiles_of(rows, chosen.tokens, self._spec.window))
        return ""

    def run(
        self,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor | None,
        kv: tuple[torch.Tensor, ...],
        meta: Mapping[str, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See protocols.AttentionKernel. Rows of q, k_new and v_new may be strided. Their heads are contiguous."""
        assert v_new is not None, "attn.gqa.prefill needs values"
        shape = next(each for each in self._launches if each.name in meta)
        tiles, table = meta[shape.name], meta["table"]
        if not tiles.shape[0]:
            return out
        k_tiles, v_tiles = self._boxes(k_new, v_new, shape.block_n)
        shape.kernels[lse is not None](
            (tiles.shape[0] // 2 * shape.programs,),
            q,
            k_new,
            v_new,
            k_tiles,
            v_tiles,
            *pools(kv),
            table,
            meta["request"],
            meta["q_start"],
            meta["kv_len"],
            tiles,
            out,
            lse,
            table.stride(0),
            q.stride(0),
            k_new.stride(0),
            v_new.stride(0),
            kv[0].stride(0),
            kv[1].stride(0),
            self._spec.scale,
        )
        return out

    def _boxes(self, k: torch.Tensor, v: torch.Tensor, block_n: int) -> tuple[Box, Box] | tuple[None, None]:
        """Returns TMA descriptors of k and v [T, KV heads, size], or None if TMA cannot read them."""
        k_stride, v_stride = k.stride(0), v.stride(0)
        bytes_apart = (k_stride | v_stride) * k.element_size()
        if not self._tma or (bytes_apart | k.data_ptr() | v.data_ptr()) % ALIGNED:
            return None, None
        tokens, heads, key = k.shape
        value = v.shape[2]
        return (
            Box(k, [tokens, heads * key], [k_stride, 1], [block_n, key]),
            Box(v, [tokens, heads * value], [v_stride, 1], [block_n, value]),
        )


def _padded(size: int) -> int:
    """Returns the size of a head in a block: a power of two that tensor cores take."""
    return max(16, int(triton.next_power_of_2(size)))


def default(context: OpContext) -> dict[str, Any]:
    """Returns a configuration that fits the device's shared memory and registers."""
    spec: AttnSpec = spec_of(context)
    wide = max(_padded(spec.key_size), _padded(spec.value_size)) > 128
    hopper = context.device.capability == launch.HOPPER
    both: dict[str, Any] = {"pack": True, "tma": hopper, "small": not wide and context.dtype != "f32"}
    if context.dtype == "f32":
        return {**both, "block_m": 32, "block_n": 32, "warps": 4, "stages": 1}
    if wide:
        return {**both, "block_m": 128 if hopper else 64, "block_n": 64 if hopper else 32, "warps": 8, "stages": 2}
    if hopper:
        return {**both, "small": False, "block_m": 64, "block_n": 64, "warps": 4, "stages": 3}
    return {**both, "block_m": 128, "block_n": 64, "warps": 8, "stages": 2}


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configurations worth timing on Hopper, for heads of up to 128 elements."""
    base = default(context)
    yield base
    if context.dtype == "f32" or base["block_n"] != 64:
        return
    for block_m, block_n, warps, stages in ((128, 128, 8, 3), (128, 64, 8, 4), (128, 64, 4, 2), (64, 64, 4, 2)):
        yield {**base, "block_m": block_m, "block_n": block_n, "warps": warps, "stages": stages}
    yield {**base, "tma": False}
    yield {**base, "pack": False}


def make_with(context: OpContext, config: Config) -> Prefill:
    """The kernel in the configuration `config`."""
    return Prefill(context, config)


def make(context: OpContext) -> Prefill:
    """The kernel. `context.shape` is an AttnSpec."""
    return make_with(context, tuned.choose(KERNEL, context, default(context)))


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
    q, k_new, v_new, k_tiles, v_tiles, k_pool, v_pool, k_marks, v_marks,
    table, request, q_start, kv_len, tiles, out, lse,
    table_stride, q_stride, k_stride, v_stride, k_slot, v_slot, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    K_CODES: tl.constexpr, K_GROUP: tl.constexpr, V_CODES: tl.constexpr, V_GROUP: tl.constexpr,
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
            slot = slots_of(entries, position, there, GRANULE)
            k = rows_of(
                k_pool, k_marks, kv_head, slot, there, k_slot, PAD_K, KV_HEADS, KEY, K_CODES, K_GROUP, queries.dtype
            )
            v = rows_of(
                v_pool, v_marks, kv_head, slot, there, v_slot, PAD_V, KV_HEADS, VALUE, V_CODES, V_GROUP, queries.dtype
            )
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


Int32 = NDArray[np.int32]


def count_tiles(n_query: Int32, tokens: int) -> int:
    """Returns the number of tiles of `tokens` query tokens. A tile belongs to one row."""
    return int((-(-n_query // tokens)).sum())


def tiles_of(rows: AttnRows, tokens: int, window: int | None = None) -> Int32:
    """Returns (row, tile of the row) of every tile, [2 * tiles] int32. Tiles with most keys come first.

    The device starts programs in order. With the longest first, none runs alone at the end.
    """
    counts = -(-rows.n_query // tokens)
    row = np.repeat(np.arange(counts.size, dtype=np.int32), counts)
    index = np.arange(row.size, dtype=np.int32) - (np.cumsum(counts, dtype=np.int32) - counts)[row]
    unseen = np.maximum(rows.n_query[row] - (index + 1) * tokens, 0)
    keys = rows.kv_len[row] - unseen
    if window is not None:
        keys = np.minimum(keys, window + tokens)
    order = np.argsort(-keys)
    tiles: Int32 = np.empty((row.size, 2), np.int32)
    tiles[:, 0], tiles[:, 1] = row[order], index[order]
    return tiles.reshape(-1)
