"""linear and linear_silu_and_mul, kernel small_rows: weights once through the tensor cores for up to 64 tokens.

A call's work is cut into equal shares for a fixed number of programs, whatever the shape (see linear_kernels). What
is added up across programs is added in one order, so equal calls give equal bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from llmcore.api import OpContext

from llmcore_triton import tuned
from llmcore_triton.launch import Bound, overlaps, place
from llmcore_triton.linear_kernels import small_rows
from llmcore_triton.linear_shapes import (
    GATED,
    Sizes,
    buffer,
    element_bytes,
    known_sizes,
    many_rows,
    power_of_two,
    processors,
    shared_bytes,
)

KERNEL = "small_rows"

DEFAULT = {"block_n": 64, "block_k": 128, "warps": 4, "stages": 8, "per_processor": 2, "prefetch": 1}
"""`stages`: tiles on their way at most, fewer where shared memory ends. `per_processor`: programs on each
multiprocessor; 0 gives every tile one program. `prefetch`: weights set out for the L2 cache before `wait`."""

PADDED = (16, 32, 64)
"""Token counts that kernels are compiled for."""

_LEAST = 16
"""The smallest side of a tile in `tl.dot`."""

_IN_FLIGHT = 24 * 1024
"""Bytes of weights on their way to each multiprocessor without which memory is not kept busy."""

_RESIDENT = 2
"""Programs that share a multiprocessor's memory where every tile has one."""

_F32_BLOCK_K = 32
"""f32 has no tensor cores that round as it should; longer blocks only make more instructions."""


class Plan(NamedTuple):
    """One shape's launch: positional arguments by name, and the kernel with its compile-time ones."""

    programs: int
    partials: torch.Tensor
    arrivals: torch.Tensor
    sizes: Sizes
    steps: int
    launch: Bound


class SmallRows:
    """The op, bound to a device and a configuration. More than 64 tokens go to torch."""

    def __init__(self, context: OpContext, config: Mapping[str, Any]) -> None:
        self._context, self._config = context, config
        self._gated = context.op == GATED
        self._plans: dict[tuple[int, int, int], Plan] = {}
        sizes = known_sizes(context)
        # all buffers are made here: a call may be captured into a graph, and must not own memory
        for padded in PADDED if sizes is not None else ():
            rows = (1 + self._gated) * sizes.outputs if sizes else 0
            self._plan(rows, sizes.inputs if sizes else 0, padded)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, inputs], weight [outputs, inputs] -> [T, outputs], or half of that where the op is gated."""
        tokens = len(x)
        if tokens > PADDED[-1]:
            return many_rows(x, weight, bias, self._gated)
        rows, inputs = weight.shape
        padded = PADDED[0] if tokens <= PADDED[0] else PADDED[1] if tokens <= PADDED[1] else PADDED[2]
        plan = self._plans.get((rows, inputs, padded)) or self._plan(rows, inputs, padded)
        out = x.new_empty(tokens, plan.sizes.outputs)
        has_bias = bias is not None
        plan.launch.but(HAS_BIAS=has_bias)(
            (plan.programs,),
            *(x, weight, bias if has_bias else weight, out, plan.partials, plan.arrivals),
            *(tokens, plan.sizes.outputs, inputs, x.stride(0), plan.steps),
        )
        return out

    def _plan(self, rows: int, inputs: int, padded: int) -> Plan:
        context, config = self._context, self._config
        sizes = Sizes(rows // (1 + self._gated), inputs)
        block_n, block_k, stages = tile_of(context, config, sizes, padded)
        k_steps, tiles = -(-inputs // block_k), -(-sizes.outputs // block_n)
        steps = k_steps
        if config["per_processor"]:
            steps = -(-tiles * k_steps // (processors(context) * config["per_processor"]))
        programs = -(-tiles * k_steps // steps)
        shared = steps % k_steps != 0
        where = place(context)
        parts = 2 * programs * (1 + self._gated) * block_n * padded if shared else 1
        overlap = overlaps(context)
        plan = Plan(
            programs,
            buffer(where, torch.float32, power_of_two(parts)),
            buffer(where, torch.int32, power_of_two(tiles)),
            sizes,
            steps,
            Bound(
                small_rows,
                TOKENS=padded,
                BLOCK_N=block_n,
                BLOCK_K=block_k,
                GATED=self._gated,
                EVEN_N=sizes.outputs % block_n == 0,
                EVEN_K=inputs % block_k == 0,
                SHARED=shared,
                DEPTH=(stages - 1) * config["prefetch"],
                PDL=overlap,
                num_warps=config["warps"],
                num_stages=stages,
                launch_pdl=overlap,
            ),
        )
        self._plans[rows, inputs, padded] = plan
        return plan


def tile_of(context: OpContext, config: Mapping[str, Any], sizes: Sizes, padded: int) -> tuple[int, int, int]:
    """(block_n, block_k, stages) of a configuration, cut down to the shape and to the shared memory there is."""
    gated, element = context.op == GATED, element_bytes(context)
    block_n = max(min(config["block_n"], power_of_two(sizes.outputs)), _LEAST)
    block_k = max(min(config["block_k"], power_of_two(sizes.inputs)), _LEAST)
    if context.dtype == "f32":
        block_k = min(block_k, _F32_BLOCK_K)
    # besides the tiles: the accumulator on its way to another arrangement of threads
    room = shared_bytes(context, config["per_processor"] or _RESIDENT) - block_n * padded * 4
    stages = 0
    while stages < 2:
        stages = room // (((1 + gated) * block_n + padded) * block_k * element)
        if stages >= 2 or block_k <= _LEAST:
            break
        block_k //= 2
    if stages < 1:
        raise ValueError(f"{config} needs more shared memory than a device of capability {context.device.capability}")
    return block_n, block_k, min(stages, config["stages"])


def make_with(context: OpContext, config: Mapping[str, Any]) -> SmallRows:
    """The op with one configuration."""
    return SmallRows(context, {**DEFAULT, **config})


def make(context: OpContext) -> SmallRows:
    """The op with the configuration that was fastest, or the default."""
    return make_with(context, tuned.choose(KERNEL, context, DEFAULT))


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configurations worth timing."""
    # two accumulators of 128 rows do not fit into four warps' registers
    for block_n, warps in ((64, 4), (128, 8)) if context.op == GATED else ((64, 4), (128, 4), (128, 8)):
        for block_k in (64, 128, 256) if context.dtype != "f32" else (_F32_BLOCK_K,):
            for per_processor in (0, 1, 2, 3, 4):
                config = {**DEFAULT, "block_n": block_n, "block_k": block_k, "warps": warps}
                config["per_processor"] = per_processor
                if _worthwhile(context, config):
                    yield config
                    if block_n == 64 and block_k >= 128 and per_processor in (1, 2):
                        yield {**config, "prefetch": 0}


def _worthwhile(context: OpContext, config: Mapping[str, Any]) -> bool:
    """Whether it fits as it stands, with enough on its way to keep memory busy."""
    padded = PADDED[-1] if context.bucket >= 2 else PADDED[0]
    sizes = known_sizes(context) or Sizes(4096, 4096)
    try:
        block_n, block_k, stages = tile_of(context, config, sizes, padded)
    except ValueError:
        return False
    weights = (1 + (context.op == GATED)) * block_n * block_k * element_bytes(context)
    in_flight = (config["per_processor"] or _RESIDENT) * (stages - 1) * weights
    return block_n == config["block_n"] and block_k == config["block_k"] and stages >= 3 and in_flight >= _IN_FLIGHT


def cost(context: OpContext) -> float | None:
    """Measured microseconds."""
    return tuned.microseconds(KERNEL, context)
