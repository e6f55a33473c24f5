"""attn.varlen: FlashAttention over keys and values in tensors, for latent attention in its expanded form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers import DTYPES, spec_of
from triton import next_power_of_2

from llmcore_triton import launch, tuned
from llmcore_triton.attention.stored import inside_of
from llmcore_triton.attention.tile import LN_2, LOG2_E
from llmcore_triton.launch import Box, release, wait
from llmcore_triton.linear_shapes import TMA_ALIGNED

KERNEL = "flash_varlen"

Config = Mapping[str, Any]
"""The keys of a launch configuration:
- `block_m`: queries of a tile
- `block_n`: keys of a block
- `warps`, and `stages` of the pipeline
- `tma`: blocks come by the tensor memory accelerator where they can"""


_LEAST_SIDE = 16
"""The smallest side of a block in `tl.dot`."""

_MOST_SHARED = 222 << 10
"""Bytes that a program's blocks may take on Hopper."""


class Varlen:
    """The op, bound to an AttnSpec. `config` is its launch configuration."""

    def __init__(self, context: OpContext, config: Config) -> None:
        spec = spec_of(context)
        self._heads, self._value = spec.heads, spec.value_size
        self._block_m, self._block_n = config["block_m"], config["block_n"]
        self._parts = low, high = parts(spec.key_size)
        whole = low + high == spec.key_size and _padded(spec.value_size) == spec.value_size
        # TMA loads whole boxes, so it needs half types and parts without padding
        self._tma = bool(config["tma"]) and context.dtype != "f32" and whole
        pdl = launch.overlaps(context)
        self._launch = launch.Bound(
            varlen,
            HEADS=spec.heads,
            GROUP=spec.heads // spec.kv_heads,
            VALUE=spec.value_size,
            LOW=min(low, spec.key_size),
            HIGH=max(spec.key_size - low, 0),
            PAD_LOW=low,
            PAD_HIGH=high or _LEAST_SIDE,
            PAD_V=_padded(spec.value_size),
            SCALE=spec.scale,
            CAUSAL=spec.mask == "causal",
            BLOCK_M=self._block_m,
            BLOCK_N=self._block_n,
            STAGES=config["stages"],
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=config["warps"],
            num_stages=config["stages"],
        )

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_start: torch.Tensor,
        k_start: torch.Tensor,
        longest: tuple[int, int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See llmcore.ops.attn_varlen. Tokens and heads of q, k and v may be strided."""
        tokens, heads = q.shape[0], self._heads
        out = q.new_empty(tokens, heads, self._value)
        lse = q.new_empty((tokens, heads), dtype=torch.float32)
        rows, tiles = q_start.shape[0] - 1, -(-longest[0] // self._block_m)
        if rows and tiles and tokens:
            (q_stride, q_head, _), (k_stride, k_head, _), (v_stride, v_head, _) = q.stride(), k.stride(), v.stride()
            self._launch(
                (tiles * rows * heads,),
                *(q, k, v, *self._boxes(k, v), q_start, k_start, out, lse, rows, tiles),
                *(q_stride, q_head, k_stride, k_head, v_stride, v_head),
            )
        return out, lse

    def _boxes(self, k: torch.Tensor, v: torch.Tensor) -> tuple[Box | None, ...]:
        """Returns TMA descriptors of k's two parts and of v, or None if TMA cannot read them."""
        length, heads, key = k.shape
        (k_stride, k_head, _), (v_stride, v_head, _) = k.stride(), v.stride()
        bytes_apart = (k_stride | k_head | v_stride | v_head) * k.element_size()
        if not self._tma or not length or (bytes_apart | k.data_ptr() | v.data_ptr()) % TMA_ALIGNED:
            return None, None, None
        (low, high), block, value = self._parts, self._block_n, self._value
        # all elements of a token, from its first head to its last
        k_shape, k_strides = [length, (heads - 1) * k_head + key], [k_stride, 1]
        return (
            Box(k, k_shape, k_strides, [block, low]),
            Box(k, k_shape, k_strides, [block, high]) if high else None,
            Box(v, [length, (heads - 1) * v_head + value], [v_stride, 1], [block, value]),
        )


def _padded(size: int) -> int:
    return max(int(next_power_of_2(size)), _LEAST_SIDE)


def parts(key: int) -> tuple[int, int]:
    """Returns `key` elements as two blocks that tensor cores take. The second is 0 if one block is as good."""
    whole = _padded(key)
    if whole <= max(key, _LEAST_SIDE):
        return whole, 0
    low = whole // 2
    high = _padded(key - low)
    return (low, high) if low >= _LEAST_SIDE and low + high < whole else (whole, 0)


def default(context: OpContext) -> dict[str, Any]:
    """Returns a configuration that fits the device's shared memory and registers."""
    if context.dtype == "f32":
        return {"block_m": 32, "block_n": 32, "warps": 4, "stages": 1, "tma": False}
    if (context.device.capability or 0) != launch.HOPPER:
        return {"block_m": 64, "block_n": 32, "warps": 4, "stages": 2, "tma": False}
    # two programs per multiprocessor: the softmax of one runs beside the products of the other
    return {"block_m": 64, "block_n": 64, "warps": 4, "stages": 2, "tma": True}


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configurations worth timing on Hopper."""
    base = default(context)
    yield base
    if context.dtype == "f32":
        return
    spec = spec_of(context)
    row = (sum(parts(spec.key_size)) + _padded(spec.value_size)) * DTYPES[context.dtype].itemsize
    for block_m, block_n, warps, stages in (
        *((128, 128, 8, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4)),
        *((64, 64, 4, 3), (64, 32, 4, 4), (128, 32, 8, 4)),
    ):
        config = {**base, "block_m": block_m, "block_n": block_n, "warps": warps, "stages": stages}
        if config != base and (stages * block_n + block_m // 2) * row <= _MOST_SHARED:
            yield config
    yield {**base, "tma": False}


def make_with(context: OpContext, config: Config) -> Varlen:
    """The kernel in the configuration `config`."""
    return Varlen(context, config)


def make(context: OpContext) -> Varlen:
    """The kernel. `context.shape` is an AttnSpec."""
    config = default(context)
    return make_with(context, config if context.deterministic else tuned.choose(KERNEL, context, config))


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
