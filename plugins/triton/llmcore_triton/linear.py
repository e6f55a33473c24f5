"""linear and linear_silu_and_mul, kernel small_rows: reads weights once, with tensor cores, for up to 64 tokens.

The work of a call is cut into equal shares for a fixed number of programs, or into whole tiles (see linear_kernels).
Sums across programs have a fixed order, so equal calls give equal bits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from llmcore.api import OpContext
from triton.tools.tensor_descriptor import TensorDescriptor

from llmcore_triton import tuned
from llmcore_triton.launch import HOPPER, Bound, overlaps, place
from llmcore_triton.linear_kernels import small_rows
from llmcore_triton.linear_shapes import (
    BARRIERS,
    TMA_ALIGNED,
    Sizes,
    buffer,
    by_torch,
    element_bytes,
    is_gated,
    known_sizes,
    power_of_two,
    processors,
    shared_bytes,
)

KERNEL = "small_rows"

DEFAULT: dict[str, Any] = {
    **{"block_n": 64, "block_k": 128, "warps": 4, "stages": 8, "per_processor": 2},
    **{"tma": False, "early": ""},
}
"""The configuration beside tile sizes and warps:
- `stages`: tiles in flight at most. There are fewer if shared memory ends.
- `per_processor`: programs on each multiprocessor. 0 gives every tile one program.
- `tma`: tiles come by the tensor memory accelerator, where alignment allows.
- `early`: each program loads one step's weights before `wait`, into "registers" or "shared" memory. "": none."""

PADDED = (16, 32, 64)
"""Token counts that kernels are compiled for."""

_LEAST = 16
"""The smallest side of a tile in `tl.dot`."""

_LEAST_CODES = 32
"""The fewest inputs of a tile of codes of 8 bits."""

_IN_FLIGHT = 24 * 1024
"""The least bytes of weights in flight to each multiprocessor that keep memory busy."""

_RESIDENT = 2
"""Programs that share a multiprocessor's memory if every tile has a program and not all fit at once with a whole one
each."""

_F32_BLOCK_K = 32
"""f32 does not use tensor cores, which round differently. Longer blocks would only mean more instructions."""


class Plan(NamedTuple):
    """One shape's launch: positional arguments by name, and the kernel with its compile-time ones.

    `boxes` and `weights`: see `descriptors`.
    """

    programs: int
    partials: torch.Tensor
    arrivals: torch.Tensor
    sizes: Sizes
    steps: int
    boxes: tuple[list[int], list[int]] | None
    weights: dict[int, TensorDescriptor]
    launch: Bound


class SmallRows:
    """The op, bound to a device and a configuration. More than 64 tokens go to torch.

    `padded`: the token counts that kernels are compiled for, in ascending order.
    """

    def __init__(self, context: OpContext, config: Mapping[str, Any], padded: tuple[int, ...] = PADDED) -> None:
        self._context, self._config, self.padded = context, config, padded
        self._gated = is_gated(context)
        self._plans: dict[tuple[int, int, int], Plan] = {}
        sizes = known_sizes(context)
        # all buffers are made here: a call may be captured into a CUDA graph, and must not own memory
        if sizes is not None:
            for most in padded:
                self._plan((1 + self._gated) * sizes.outputs, sizes.inputs, most)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, inputs], weight [outputs, inputs] -> [T, outputs], or half of that if the op is gated."""
        if len(x) > self.padded[-1]:
            return by_torch(x, weight, bias, self._gated)
        return self.launch(x, weight, bias)

    def launch(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        x_scale: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        spread: int = 1,
    ) -> torch.Tensor:
        """The op of at most padded[-1] tokens. Scales are those of codes in x and weight, and `dtype` is the result's
        (None: that of x). `spread`: the weight's rows that share a scale."""
        tokens = len(x)
        rows, inputs = weight.shape
        padded = self.padded[bisect_left(self.padded, tokens)]
        plan = self._plans.get((rows, inputs, padded)) or self._plan(rows, inputs, padded)
        out = x.new_empty(tokens, plan.sizes.outputs, dtype=dtype)
        has_bias = bias is not None
        plan.launch.but(HAS_BIAS=has_bias, SPREAD=spread)(
            (plan.programs,),
            *(x, weight, *descriptors(x, weight, plan.boxes, plan.weights), x_scale, scale),
            *(bias if has_bias else weight, out, plan.partials, plan.arrivals),
            *(tokens, plan.sizes.outputs, inputs, x.stride(0)),
            *(None if x_scale is None else x_scale.stride(0), plan.steps),
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
            ([padded, block_k], [block_n, block_k]) if takes_tma(context, config) else None,
            {},
            Bound(
                small_rows,
                TOKENS=padded,
                BLOCK_N=block_n,
                BLOCK_K=block_k,
                GATED=self._gated,
                EVEN_N=sizes.outputs % block_n == 0,
                EVEN_K=inputs % block_k == 0,
                SHARED=shared,
                ONE=steps == k_steps,
                EARLY=config["early"],
                PDL=overlap,
                GROUP=int(context.shape.get("group") or 0),
                num_warps=config["warps"],
                num_stages=stages,
                launch_pdl=overlap,
            ),
        )
        self._plans[rows, inputs, padded] = plan
        return plan


def descriptors(
    x: torch.Tensor,
    weight: torch.Tensor,
    boxes: tuple[list[int], list[int]] | None,
    known: dict[int, TensorDescriptor],
) -> tuple[TensorDescriptor, TensorDescriptor] | tuple[None, None]:
    """Returns TMA descriptors of x and weight, or None if TMA cannot or should not read them.

    `boxes`: their tiles, or None. `known`: descriptors of weights by address. They are made once, because weights do
    not move.
    """
    if boxes is None:
        return None, None
    tokens, inputs = x.shape
    # the stride of a single row may be anything
    stride = x.stride(0) if tokens > 1 else inputs
    place, address = x.data_ptr(), weight.data_ptr()
    rows = stride * x.element_size() | weight.shape[1] * weight.element_size()
    if (place | address | rows) % TMA_ALIGNED or stride < inputs:
        return None, None
    found = known.get(address)
    if found is None:
        found = known[address] = TensorDescriptor(weight, list(weight.shape), [weight.shape[1], 1], boxes[1])
    return TensorDescriptor(x, [tokens, inputs], [stride, 1], boxes[0]), found


def takes_tma(context: OpContext, config: Mapping[str, Any]) -> bool:
    """True if tiles should come by TMA, which is not for f32 here."""
    return bool(config["tma"]) and (context.device.capability or 0) >= HOPPER and element_bytes(context) <= 2


def resident(context: OpContext, config: Mapping[str, Any], sizes: Sizes) -> int:
    """Returns the number of programs that share a multiprocessor's memory."""
    if config["per_processor"]:
        return int(config["per_processor"])
    return 1 if -(-sizes.outputs // config["block_n"]) <= processors(context) else _RESIDENT


def tile_of(context: OpContext, config: Mapping[str, Any], sizes: Sizes, padded: int) -> tuple[int, int, int]:
    """Returns (block_n, block_k, stages) of a configuration, reduced to the shape and to the shared memory.

    Raises ValueError if not even one stage fits.
    """
    gated, element = is_gated(context), element_bytes(context)
    block_n = max(min(config["block_n"], power_of_two(sizes.outputs)), _LEAST)
    least = _LEAST if element > 1 else _LEAST_CODES
    block_k = max(min(config["block_k"], power_of_two(sizes.inputs)), least)
    if element == 4:
        block_k = min(block_k, _F32_BLOCK_K)
    room = shared_bytes(context, resident(context, config, sizes))
    if config["per_processor"]:
        # a tile that ends while others are in flight: its results move between threads through shared memory
        room -= block_n * padded * 4
    if takes_tma(context, config):
        room -= BARRIERS
    rows, kept = (1 + gated) * block_n, config["early"] == "shared"
    stages = 0
    while stages < 2:
        stages = (room // (block_k * element) - kept * rows) // (rows + padded)
        if stages >= 2 or block_k <= least:
            break
        block_k //= 2
    if stages < 1:
        raise ValueError(f"{config} needs more shared memory than a device of capability {context.device.capability}")
    return block_n, block_k, min(stages, config["stages"])


def make_with(context: OpContext, config: Mapping[str, Any]) -> SmallRows:
    """The op in the configuration `config`."""
    return SmallRows(context, {**DEFAULT, **config})


def make(context: OpContext) -> SmallRows:
    """The op in the fastest measured configuration, or in the default one."""
    return make_with(context, tuned.choose(KERNEL, context, default(context)))


def default(context: OpContext) -> dict[str, Any]:
    """Returns the configuration for shapes that have not been measured: the best one for most measured shapes.

    If tiles of the whole depth would leave half of the multiprocessors idle, the work is cut evenly instead.
    """
    if context.device.capability != HOPPER:
        return DEFAULT
    sizes = known_sizes(context)
    many = sizes is None or 2 * sizes.outputs >= processors(context) * DEFAULT["block_n"]
    return {**DEFAULT, "early": "registers", **({"tma": True, "per_processor": 0} if many else {})}


_Tiles = tuple[tuple[int, int, int, int], ...]
Tiled = tuple[tuple[bool, str, _Tiles], ...]
_NAMES = ("block_n", "block_k", "warps", "per_processor")
_HOPPER: Tiled = (
    (False, "", ((64, 64, 4, 0), (64, 128, 4, 0), (64, 128, 4, 1), (64, 128, 4, 2), (64, 256, 4, 1))),
    (False, "registers", ((64, 128, 4, 2),)),
    (True, "", ((64, 128, 4, 1), (64, 128, 4, 2), (128, 64, 8, 0))),
    (True, "registers", ((64, 64, 4, 0), *((64, 128, 4, programs) for programs in range(3)))),
    (True, "registers", ((64, 256, 4, 1), (128, 64, 8, 0), (128, 64, 8, 1), (128, 128, 8, 1))),
    (True, "registers", ((256, 64, 8, 0), (32, 256, 4, 0), (32, 128, 4, 0))),
    (True, "shared", ((64, 64, 4, 0), (64, 128, 4, 1), (64, 128, 4, 2), (128, 64, 8, 0), (128, 64, 8, 1))),
    (True, "shared", ((128, 64, 8, 2), (256, 64, 8, 0), (32, 256, 4, 0))),
)
"""(`tma`, `early`, the tiles to time with them, by _NAMES)."""

_OTHERS: Tiled = (
    (False, "", tuple((64, 64, 4, programs) for programs in range(5))),
    (False, "", tuple((64, 128, 4, programs) for programs in range(3))),
    (False, "", ((128, 64, 8, 0), (128, 64, 8, 1))),
)

_TILE_BYTES = 16 * 1024
"""Bytes of weights per step. If memory has room for this size, smaller steps only cost more instructions."""


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configurations worth timing."""
    hopper = takes_tma(context, {"tma": True}) and context.device.capability == HOPPER
    seen = []
    for config in configs(_HOPPER if hopper else _OTHERS):
        if context.dtype == "f32":
            config["block_k"] = _F32_BLOCK_K
        if config not in seen and worthwhile(context, config, _TILE_BYTES if hopper else 0, padded_of(context)):
            seen.append(config)
            yield config


def configs(tiled: Tiled) -> Iterator[dict[str, Any]]:
    """Returns all configurations of a list."""
    for tma, early, tiles in tiled:
        for tile in tiles:
            yield {**DEFAULT, **dict(zip(_NAMES, tile, strict=True)), "tma": tma, "early": early}


def padded_of(context: OpContext) -> int:
    """Returns the token count of the slowest kernel of a bucket of up to 64 tokens."""
    return PADDED[-1] if context.bucket >= 2 else PADDED[0]


def worthwhile(context: OpContext, config: Mapping[str, Any], least: int, padded: int) -> bool:
    """True if a configuration fits unchanged and keeps memory and multiprocessors busy. `least`: bytes of weights per
    step. `padded`: the token count that the kernel is compiled for."""
    sizes = known_sizes(context) or Sizes(4096, 4096)
    try:
        block_n, block_k, stages = tile_of(context, config, sizes, padded)
    except ValueError:
        return False
    rows = (1 + is_gated(context)) * block_n
    step = rows * block_k * element_bytes(context)
    if block_n != config["block_n"] or block_k != config["block_k"] or stages < 3 or step < least:
        return False
    if padded > PADDED[-1]:
        # a thread keeps an accumulator of 128 registers, or of 64 if it needs others to write parts or to scale groups
        registers = 64 if config["per_processor"] or context.shape.get("group") else 128
        most = registers * 32 * config["warps"] // padded
    else:
        # registers hold two accumulators; with fewer rows than tokens, x is read more often than weights
        most = 256 if padded <= block_n else 0
    if rows > most or resident(context, config, sizes) * (stages - 1) * step < _IN_FLIGHT:
        return False
    return bool(config["per_processor"]) or 2 * -(-sizes.outputs // block_n) > processors(context)
