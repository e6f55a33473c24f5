"""AttentionKernels whose programs process all query heads of a KV head together."""

from __future__ import annotations

from typing import Any

from llmcore.api import AttnLimits, AttnRows, MetaWriter, OpContext
from llmcore.layers import spec_of
from triton import next_power_of_2

from llmcore_triton.attention.grouped_kernel import grouped
from llmcore_triton.attention.listed import Config, Listed, sizes
from llmcore_triton.attention.scratch import reserve
from llmcore_triton.launch import Bound


class Grouped(Listed):
    """Tiles of `config.block_m` rows (more for larger groups): query tokens x the heads of a group.

    With `decode`, each row has one query token, and so has each tile.
    """

    def __init__(self, context: OpContext, config: Config, *, decode: bool, fixed: int | None = None) -> None:
        spec = spec_of(context)
        group = spec.heads // spec.kv_heads
        padded = next_power_of_2(group)
        rows = max(config.block_m, padded)
        tokens = None if decode else rows // padded
        super().__init__(context, config, programs=spec.kv_heads, tokens=tokens, fixed=fixed)
        compiled = {
            **sizes(spec, context.granule),
            "KV_HEADS": spec.kv_heads,
            "GROUP": group,
            "TOKENS": tokens or 1,
            "HEADS_PADDED": padded,
            "BLOCK_M": rows,
            "BLOCK_N": config.block_n,
            "STAGES": config.stages,
            "FIXED": fixed or 0,
            "num_warps": config.warps,
            "num_stages": config.stages,
            **self.options,
        }
        self._kernel = Bound(grouped, **compiled)

    def launch(self, arguments: tuple[Any, ...], items: int | None, rows: int, lse: bool) -> None:
        """KV heads are adjacent programs: the KV of a token is one piece of memory."""
        grid = (self.spec.kv_heads, rows if items is None else items)
        self._kernel.but(LISTED=items is not None, LSE=lse)(grid, *arguments)


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
