"""attn.varlen: FlashAttention over keys and values in tensors, for latent attention in its expanded form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from llmcore.api import OpContext
from llmcore.layers import DTYPES, spec_of
from triton import next_power_of_2

from llmcore_triton import launch, tuned
from llmcore_triton.entry import Box
from llmcore_triton.mla.varlen_kernel import varlen

KERNEL = "flash_varlen"

Config = Mapping[str, Any]
"""The keys of a launch configuration:
- `block_m`: queries of a tile
- `block_n`: keys of a block
- `warps`, and `stages` of the pipeline
- `tma`: blocks come by the tensor memory accelerator where they can"""

_ALIGNED = 16
"""Alignment in bytes that TMA requires of addresses and row strides."""

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
        if not self._tma or not length or (bytes_apart | k.data_ptr() | v.data_ptr()) % _ALIGNED:
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
