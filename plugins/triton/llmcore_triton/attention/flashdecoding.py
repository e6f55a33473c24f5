"""attn.gqa.decode: splits the KV of long rows over programs, one query head per program, without matrix products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from llmcore.api import OpContext
from llmcore.layers import spec_of

from llmcore_triton import tuned
from llmcore_triton.attention.flashdecoding_kernel import per_head
from llmcore_triton.attention.listed import Config, Listed, fitting, sizes, timed
from llmcore_triton.launch import Bound

KERNEL = "flashdecoding"


class PerHead(Listed):
    """One program per query head and item."""

    def __init__(self, context: OpContext, config: Config) -> None:
        spec = spec_of(context)
        super().__init__(context, config, programs=spec.heads)
        compiled = {
            **sizes(spec, context.granule),
            "HEADS": spec.heads,
            "GROUP": spec.heads // spec.kv_heads,
            "BLOCK_N": config.block_n,
            "STAGES": config.stages,
            "num_warps": config.warps,
            "num_stages": config.stages,
            **self.options,
        }
        self._kernel = Bound(per_head, **compiled)

    def launch(self, arguments: tuple[Any, ...], items: int | None, rows: int, lse: bool) -> None:
        """The heads of a group are adjacent programs: they read the same KV."""
        grid = (self.spec.heads, rows if items is None else items)
        self._kernel.but(LISTED=items is not None, LSE=lse)(grid, *arguments)


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
