"""What the attention kernels have in common on the host: they plan a list of items, run it, and merge its parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from llmcore.api import AttnLimits, AttnRows, AttnSpec, MetaWriter, OpContext
from llmcore.layers import DTYPES, spec_of
from triton import next_power_of_2

from llmcore_triton import launch
from llmcore_triton.attention.merge import merge_row, merge_tile
from llmcore_triton.attention.scratch import Scratch, reserve
from llmcore_triton.attention.work import Planner

Meta = Mapping[str, torch.Tensor]

_WHOLE, _SPLIT = "items", "split_items"
"""Names of the uploaded list: the second where some items have partial results to merge."""

BLOCKS = ((32, 2, 4), (32, 4, 4), (64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 8, 3))
"""`block_n`, `warps` and `stages` worth timing where KV is read once for a group."""

_SHARED = {True: 96 << 10, False: 64 << 10}
"""Bytes of shared memory for tiles in flight, on Hopper (two programs per processor) and before."""


@dataclass(frozen=True)
class Config:
    """How an attention kernel is launched.

    `block_n`: KV tokens of an inner step. `stages`: inner steps in flight, plus one. `per_processor`: programs that
    the work is cut into, per multiprocessor. `least`: tokens of a chunk worth a program. `block_m`: rows of a tile.
    """

    block_n: int = 64
    warps: int = 4
    stages: int = 3
    per_processor: int = 2
    least: int = 128
    block_m: int = 16


def fitting(context: OpContext, config: Config) -> Config:
    """`config` with as many stages, then as large a block as shared memory has room for."""
    if config.stages * config.block_n * token_bytes(context) <= _SHARED[(context.device.capability or 0) >= 90]:
        return config
    changed = {"stages": config.stages - 1} if config.stages > 2 else {"block_n": config.block_n // 2}
    return config if config.block_n <= 16 else fitting(context, Config(**{**vars(config), **changed}))


def token_bytes(context: OpContext) -> int:
    """Bytes of a KV head's key and value of one token, padded as in a tile."""
    spec = spec_of(context)
    padded: int = next_power_of_2(spec.key_size) + next_power_of_2(spec.value_size)
    return padded * DTYPES[context.dtype].itemsize


class Listed(ABC):
    """An AttentionKernel over the token layout whose programs take items from a list.

    `tokens`: query tokens of a tile, None where every row has one. `programs`: programs per item. `fixed`: tokens of a
    chunk where results may not depend on how the work was cut.
    """

    def __init__(
        self, context: OpContext, config: Config, *, programs: int, tokens: int | None = None, fixed: int | None = None
    ) -> None:
        spec = spec_of(context)
        self.spec, self.config, self.fixed = spec, config, fixed
        self.device = launch.place(context)
        wanted = max(context.device.processors, 1) * config.per_processor
        self.planner = Planner(
            items=max(wanted // programs, 1),
            block=config.block_n,
            least=config.least,
            tokens=tokens,
            window=spec.window,
            fixed=fixed,
        )
        self._pdl = launch.overlaps(context)
        self.options: dict[str, Any] = {"PDL": self._pdl, "launch_pdl": self._pdl}
        self._scratch: Scratch | None = None
        merging = {
            "HEADS": spec.heads,
            "V_SIZE": spec.value_size,
            "BLOCK_V": max(next_power_of_2(spec.value_size), 16),
            "WINDOW": spec.window or 0,
            "ALIGN": fixed or config.block_n,
            "num_warps": 4,
            **self.options,
        }
        self._merging = merging | ({"BLOCK_C": 64} if tokens is None else {"TOKENS": tokens, "AHEAD": 4})
        self._merge = merge_row if tokens is None else merge_tile

    @abstractmethod
    def launch(self, arguments: tuple[Any, ...], items: int | None, rows: int, lse: bool) -> None:
        """Enqueue the kernel over `items` items, None where each row is one."""

    def workspace(self, limits: AttnLimits) -> None:
        """Room for partial results, shared with the model's other kernels."""
        room = self.planner.reserve(limits)
        self._scratch = reserve(self.device, room * self.spec.heads * (self.spec.value_size + 1))

    def plan(self, rows: AttnRows, into: MetaWriter) -> str:
        """See protocols.AttentionKernel. The key is the list's size, with a + where there is something to merge."""
        work = self.planner.plan(rows)
        if work is None:
            return "1"
        into.put(_SPLIT if work.split else _WHOLE, work.items)
        return f"{work.size}+" if work.split else f"{work.size}"

    def run(
        self,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor | None,
        kv: tuple[torch.Tensor, ...],
        meta: Meta,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See protocols.AttentionKernel."""
        if self._scratch is None:
            raise RuntimeError("run before workspace")
        partial, room = self._scratch.buffer(), self.planner.room
        split = meta.get(_SPLIT)
        items = meta.get(_WHOLE) if split is None else split
        keys, values = kv
        kv_len, q_start = meta["kv_len"], meta["q_start"]
        summed = partial if lse is None else lse
        size = None if items is None else items.shape[0] // 4 - 1
        arguments = (
            q, keys, values, out, summed, meta["table"], meta["request"], q_start, kv_len,
            kv_len if items is None else items, partial, room,
            q.stride(0), keys.stride(0), values.stride(0), meta["table"].stride(0), out.stride(0),
        )  # fmt: skip
        self.launch(arguments, size, kv_len.shape[0], lse is not None)
        if split is not None:
            self._merge[(self.spec.heads, size)](
                partial, split, q_start, kv_len, out, summed, room, out.stride(0), LSE=lse is not None, **self._merging
            )
        return out


def sizes(spec: AttnSpec, granule: int) -> dict[str, Any]:
    """What a kernel is compiled for, whatever its tiles."""
    return {
        "K_SIZE": spec.key_size,
        "V_SIZE": spec.value_size,
        "SCALE": spec.scale,
        "SOFT_CAP": spec.soft_cap or 0.0,
        "WINDOW": spec.window or 0,
        "GRANULE": granule,
        "BLOCK_K": max(next_power_of_2(spec.key_size), 16),
        "BLOCK_V": max(next_power_of_2(spec.value_size), 16),
    }
