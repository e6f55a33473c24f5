"""linear.w8a8 and linear.fp8_block, kernel small_rows: reads codes once, with tensor cores, for up to 256 tokens.

The kernel is that of `linear`. Its accumulators are those of codes, and the scales come afterwards: a row's when its
sum is complete, a group's after each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from llmcore.api import OpContext
from llmcore.layers import DTYPES

from llmcore_triton import linear, tuned
from llmcore_triton.launch import HOPPER
from llmcore_triton.linear_shapes import known_sizes, processors
from llmcore_triton.quantized.blocks import BLOCK, Packs, group_of, spread_of

MANY_PADDED = (*linear.PADDED, 128, 256)
"""Token counts that kernels for more than 64 tokens are compiled for."""

_FEW_BUCKETS = 2
"""The last bucket of up to 64 tokens."""


class SmallRows(Packs):
    """The op, bound to a device and a configuration. More tokens than it is compiled for are done in several parts."""

    def __init__(self, context: OpContext, config: Mapping[str, Any]) -> None:
        super().__init__(context)
        group = group_of(context)
        if group:
            config = {**config, "block_k": min(config["block_k"], group), "block_n": min(config["block_n"], BLOCK)}
        many = context.bucket > _FEW_BUCKETS and context.device.capability == HOPPER
        padded = MANY_PADDED if many else linear.PADDED
        self.kernel = linear.SmallRows(context, config, padded)
        self._dtype, self._most = DTYPES[context.dtype], padded[-1]

    def __call__(
        self,
        x: torch.Tensor,
        x_scale: torch.Tensor,
        codes: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, inputs], x_scale [T, groups], codes [outputs, inputs], scale [outputs, groups] or that of blocks of
        outputs -> [T, outputs]. Rows without groups have one scale."""
        parts = [
            self.kernel.launch(some, codes, bias, by, scale, self._dtype, spread_of(codes, scale))
            for some, by in zip(torch.split(x, self._most), torch.split(x_scale, self._most), strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def make_with(context: OpContext, config: Mapping[str, Any]) -> SmallRows:
    """The op in the configuration `config`."""
    return SmallRows(context, {**linear.DEFAULT, **config})


def make(context: OpContext) -> SmallRows:
    """The op in the fastest measured configuration, or in the default one."""
    return make_with(context, tuned.choose(linear.KERNEL, context, default(context)))


def default(context: OpContext) -> dict[str, Any]:
    """Returns the configuration for shapes that have not been measured.

    A step has 16 KiB of codes, as that of `linear` has of weights.
    """
    if context.device.capability != HOPPER:
        return {**linear.DEFAULT, "block_k": 256}
    if context.bucket > _FEW_BUCKETS:
        return {**linear.DEFAULT, "warps": 8, "tma": True, "per_processor": 1}
    sizes = known_sizes(context)
    many = sizes is None or 2 * sizes.outputs >= processors(context) * linear.DEFAULT["block_n"]
    shares = {} if group_of(context) or not many else {"per_processor": 0}
    return {**linear.DEFAULT, "block_k": 256, "tma": True, "early": "registers", **shares}


_FEW: linear.Tiled = (
    (False, "", ((64, 256, 4, 2),)),
    (False, "registers", ((64, 256, 4, 2),)),
    (True, "", ((64, 256, 4, 0),)),
    (True, "registers", ((64, 256, 4, 0), (64, 256, 4, 2), (64, 512, 4, 1), (128, 128, 8, 0))),
    (True, "shared", ((64, 256, 4, 2),)),
)
_FEW_GROUPS: linear.Tiled = (
    (False, "", ((64, 128, 4, 4),)),
    (True, "", ((64, 128, 4, 0), (64, 128, 4, 3))),
    (True, "registers", ((64, 128, 4, 0), (64, 128, 4, 3), (64, 128, 4, 4), (128, 128, 8, 0))),
    (True, "shared", ((64, 128, 4, 3),)),
)
_MORE: linear.Tiled = ((True, "", ((64, 128, 8, 1), (64, 128, 4, 0))),)
_OTHERS: linear.Tiled = (
    (False, "", tuple((64, 128, 4, programs) for programs in range(4))),
    (False, "", ((64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (64, 256, 4, 0), (64, 256, 4, 1), (64, 256, 4, 2))),
    (False, "", ((128, 128, 8, 0), (128, 128, 8, 1))),
)
"""(`tma`, `early`, the tiles to time with them), as in `linear`."""


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configurations worth timing."""
    if context.device.capability != HOPPER:
        tiled = _OTHERS
    elif context.bucket > _FEW_BUCKETS:
        tiled = _MORE
    else:
        tiled = _FEW_GROUPS if group_of(context) else _FEW
    for config in linear.configs(tiled):
        fits = not group_of(context) or config["block_k"] <= group_of(context)
        padded = linear.padded_of(context) if tiled is not _MORE else MANY_PADDED[-1]
        if fits and linear.worthwhile(context, config, 0, padded):
            yield config
