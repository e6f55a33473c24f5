"""AttentionKernels over latent rows, and their launch configurations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from llmcore.api import OpContext
from llmcore.layers import DTYPES, spec_of
from triton import next_power_of_2

from llmcore_triton.attention.listed import Config, Listed
from llmcore_triton.launch import HOPPER, Bound
from llmcore_triton.mla.latent_kernel import over_latents

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
        self._tiles = -(-spec.heads // padded)
        super().__init__(context, config, programs=self._tiles, tokens=tokens, fixed=fixed)
        self._kernel = Bound(
            over_latents,
            HEADS=spec.heads,
            LATENT=spec.value_size,
            ROTATED=spec.key_size - spec.value_size,
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

    def launch(self, arguments: tuple[Any, ...], items: int | None, rows: int, lse: bool) -> None:
        """The tiles of one token's heads are adjacent programs: they read the same rows."""
        q, pool, _, *others, q_stride, row_stride, _, table_stride, out_stride = arguments
        strides = (q_stride, q.stride(1), row_stride, table_stride, out_stride)
        grid = (self._tiles, rows if items is None else items)
        self._kernel.but(LISTED=items is not None, LSE=lse)(grid, q, pool, *others, *strides)


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
