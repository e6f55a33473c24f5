"""moe.dispatch: one program per expert finds the expert's pairs among all, in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from llmcore.api import TOKEN_BUCKETS, OpContext
from llmcore.layers import Dispatched, Op

from llmcore_triton.launch import Bound, overlaps, release, wait
from llmcore_triton.linear_shapes import power_of_two
from llmcore_triton.rows import choose, size

MOST = 8192
"""Pairs that a program examines at a time."""


@triton.jit(do_not_specialize=["count"])
def _sort(  # type: ignore[no-untyped-def]
    chosen, pairs, starts, count, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr, PDL: tl.constexpr
):
    """pairs [count]: numbers of choices, by expert. starts [EXPERTS + 1]. Each expert's program reads all choices,
    first to count those of the experts before it, then to find its own. ONE: they fit into one block, and are read
    once."""
    expert = tl.program_id(0)
    numbers = tl.arange(0, BLOCK)
    wait(PDL)
    release(PDL)
    own = tl.load(chosen + numbers, mask=numbers < count, other=EXPERTS)
    before = tl.sum((own < expert).to(tl.int32), axis=0)
    if not ONE:
        for first in range(BLOCK, count, BLOCK):
            some = tl.load(chosen + first + numbers, mask=first + numbers < count, other=EXPERTS)
            before += tl.sum((some < expert).to(tl.int32), axis=0)
    tl.store(starts + expert, before)
    if expert == EXPERTS - 1:
        tl.store(starts + EXPERTS, count)
    mine = (own == expert).to(tl.int32)
    tl.store(pairs + before + tl.cumsum(mine, axis=0) - 1, numbers, mask=mine != 0)
    if not ONE:
        before += tl.sum(mine, axis=0)
        for first in range(BLOCK, count, BLOCK):
            some = tl.load(chosen + first + numbers, mask=first + numbers < count, other=EXPERTS)
            mine = (some == expert).to(tl.int32)
            tl.store(pairs + before + tl.cumsum(mine, axis=0) - 1, first + numbers, mask=mine != 0)
            before += tl.sum(mine, axis=0)


def default(context: OpContext) -> Mapping[str, Any]:
    """The default: more warps for long lists."""
    return {"num_warps": (1, 4, 4, 8, 16)[context.bucket], "block": MOST}


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Numbers of warps, and blocks if there are many pairs."""
    for warps in (1, 2, 4, 8) if context.bucket < 3 else (4, 8, 16):
        for block in (MOST,) if context.bucket < 4 else (2048, 4096, MOST):
            yield {"num_warps": warps, "block": block}


def make_with(context: OpContext, config: Mapping[str, Any]) -> Op:
    """The kernel in the configuration `config`."""
    experts, pdl = size(context, "experts"), overlaps(context)
    # the bucket's limit, not the step's size: every size of its own would be compiled while requests wait
    _, last = TOKEN_BUCKETS[context.bucket]
    block = min(power_of_two(last * size(context, "top_k")), config["block"]) if last else config["block"]
    launch = Bound(_sort, EXPERTS=experts, PDL=pdl, launch_pdl=pdl, num_warps=config["num_warps"])

    def run(x: torch.Tensor, chosen: torch.Tensor) -> Dispatched:
        """x [T, size], chosen [T, top_k] int32 -> Dispatched, its x the same tensor."""
        count = chosen.numel()
        pairs = torch.empty(count, dtype=torch.int32, device=x.device)
        starts = torch.empty(experts + 1, dtype=torch.int32, device=x.device)
        launch.but(BLOCK=block, ONE=count <= block)((experts,), chosen, pairs, starts, count)
        return Dispatched(x, pairs, starts)

    return run


def make(context: OpContext) -> Op:
    """The kernel in the measured configuration, or in the default one."""
    return make_with(context, choose(context, default(context)))
