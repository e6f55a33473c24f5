"""linear.w4a16, linear.w8a16 and both with silu_and_mul: weights in 4 and 8 bits that stay packed until they are used.

Kernel small_rows is for up to 64 tokens, and many_rows for more. Both are one function with other tiles (see
weight_only_kernels), and equal calls give equal bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from llmcore.api import OpContext
from triton.tools.tensor_descriptor import TensorDescriptor

from llmcore_triton import tuned
from llmcore_triton.launch import Bound, overlaps, place
from llmcore_triton.linear import descriptors, takes_tma
from llmcore_triton.linear_shapes import (
    BARRIERS,
    MOST_REGISTERS,
    Sizes,
    buffer,
    element_bytes,
    is_gated,
    known_sizes,
    power_of_two,
    processors,
    registers_of,
    shared_bytes,
)
from llmcore_triton.quantized.packing import Packed, Packing
from llmcore_triton.quantized.weight_only_kernels import words_times_rows

DEFAULT: dict[str, Any] = {
    **{"block_n": 64, "block_w": 64, "tokens": 64, "group": 16, "warps": 4, "stages": 6, "per_processor": 3},
    **{"tma": False, "scaled": "sums"},
}
"""A step multiplies `block_w` words of `block_n` outputs with at most `tokens` tokens. `group` tiles of tokens use the
same weights before the next weights come. `scaled`: see the kernel. For the others see llmcore_triton.linear."""

_WIDE: dict[str, Any] = {"block_n": 128, "warps": 8, "per_processor": 1, "tma": True}
_LONG: dict[str, Any] = {"block_w": 32, "tokens": 128, "scaled": "weights"}
"""Better choices for more than 16 tokens, and for more than 64."""

PADDED = (16, 32, 64, 128, 256)
"""Token counts of a tile that kernels are compiled for."""

_LEAST = 16
"""The smallest side of a tile in `tl.dot`."""


class Plan(NamedTuple):
    """The launch for a number of tokens, rounded up. `boxes` and `weights`: see llmcore_triton.linear.descriptors."""

    programs: int
    steps: int
    partials: torch.Tensor
    arrivals: torch.Tensor
    boxes: tuple[list[int], list[int]] | None
    weights: dict[int, TensorDescriptor]
    launch: Bound


class WeightOnly(Packed):
    """The op, bound to a configuration."""

    def __init__(self, context: OpContext, config: Mapping[str, Any]) -> None:
        super().__init__(context)
        self._config = config
        self._weights: dict[int, dict[int, TensorDescriptor]] = defaultdict(dict)
        """By the token count of a tile, on which the weight's box depends, too."""
        self._plans: dict[tuple[int, int], Plan] = {}
        if config["per_processor"]:
            # shared tiles need buffers, which are made here: a call may be captured into a CUDA graph
            for tokens in PADDED:
                self._plan(tokens)

    def multiply(
        self, x: torch.Tensor, words: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See Packed."""
        tokens = x.shape[0]
        plan = self._plan(tokens)
        out = x.new_empty(tokens, self._sizes.outputs)
        plan.launch.but(HAS_BIAS=bias is not None)(
            (plan.programs,),
            *(x, words, *descriptors(x, words, plan.boxes, plan.weights), scale),
            *(out if bias is None else bias, out, plan.partials, plan.arrivals),
            *(tokens, *self._sizes, x.stride(0), plan.steps),
        )
        return out

    def _plan(self, tokens: int) -> Plan:
        config = self._config
        padded = next((count for count in PADDED if count >= tokens), PADDED[-1])
        padded = min(padded, config["tokens"])
        key = padded, -(-tokens // padded)
        return self._plans.get(key) or self._planned(*key)

    def _planned(self, padded: int, turns: int) -> Plan:
        context, config, blocks = self._context, self._config, self._form.blocks
        block_n, block_w, stages = tile_of(context, config, padded)
        k_steps = blocks.total * blocks.words // block_w
        alike = self._form.alike
        joined = 2 if block_w == blocks.words and alike > 1 else 1
        tiles = -(-self._sizes.outputs // block_n) * turns
        steps = k_steps
        if config["per_processor"]:
            steps = -(-tiles * k_steps // (processors(context) * config["per_processor"]))
        programs = -(-tiles * k_steps // steps)
        shared = steps % k_steps != 0
        where = place(context)
        parts = 2 * programs * (1 + self._gated) * block_n * padded if shared else 1
        overlap = overlaps(context)
        most = registers(config)
        plan = self._plans[padded, turns] = Plan(
            programs,
            steps,
            buffer(where, torch.float32, power_of_two(parts)),
            buffer(where, torch.int32, power_of_two(tiles) if shared else 1),
            ([padded, joined * block_w], [block_n, block_w]) if takes_tma(context, config) else None,
            self._weights[padded],
            Bound(
                words_times_rows,
                **{"TOKENS": padded, "BLOCK_N": block_n, "WORDS": blocks.words, "BLOCK_W": block_w},
                **{"CODES": context.shape["codes"], "GROUP_SIZE": self._form.group, "SCALED": config["scaled"]},
                **{"ZEROS": bool(context.shape["zeros"]), "GATED": self._gated, "SCALE": context.shape["scale"]},
                EVEN_N=self._sizes.outputs % block_n == 0,
                EVEN_K=self._sizes.inputs % blocks.inputs == 0,
                **{"SHARED": shared, "ONE": steps == k_steps, "K_STEPS": k_steps},
                **{"ALIKE": alike, "JOINED": joined, "GROUP": config["group"] if turns > 1 else 0, "PDL": overlap},
                **{"num_warps": config["warps"], "num_stages": stages, "launch_pdl": overlap},
                **({"maxnreg": most} if most < MOST_REGISTERS else {}),
            ),
        )
        return plan


def tile_of(context: OpContext, config: Mapping[str, Any], padded: int) -> tuple[int, int, int]:
    """Returns (block_n, block_w, stages) of a configuration, reduced to the shape and to the shared memory.

    Raises ValueError if not even one stage fits.
    """
    form, gated = Packing(context), is_gated(context)
    sizes = known_sizes(context) or Sizes(0, 0)
    block_n = max(min(config["block_n"], power_of_two(sizes.outputs)), _LEAST)
    block_w = min(config["block_w"], form.blocks.words)
    resident = config["per_processor"] or max(8 // config["warps"], 1)
    room = shared_bytes(context, resident) - BARRIERS
    if config["per_processor"]:
        # a tile that ends while others are in flight moves between threads through shared memory, for 4 warps in turns
        room -= (min(block_n, 64) if config["warps"] == 4 and padded >= 64 else block_n) * padded * 4
    rows = (1 + gated) * block_n
    while True:
        words = rows * block_w * 2 + (rows * 4 * form.blocks.parts // form.alike if form.group else 0)
        beside = padded * form.blocks.parts * block_w * element_bytes(context)
        # words become numbers at the start of a round, so their place is free one stage before that of inputs
        stages = min((room + words) // (words + beside), config["stages"])
        if stages >= 2 or block_w <= _LEAST:
            break
        block_w //= 2
    if stages < 1:
        raise ValueError(f"{config} needs more shared memory than a device of capability {context.device.capability}")
    return block_n, block_w, stages


def registers(config: Mapping[str, Any]) -> int:
    """Returns the registers that a thread can have if `per_processor` programs share a multiprocessor."""
    return registers_of(32 * config["warps"] * max(config["per_processor"], 1))


def default(context: OpContext) -> dict[str, Any]:
    """Returns the configuration for shapes that have not been measured."""
    if context.bucket <= 1:
        return dict(DEFAULT)
    if context.bucket == 2:
        return {**DEFAULT, **_WIDE, "scaled": "weights" if is_gated(context) else "sums"}
    # gate's and up's sums leave no registers for tiles that are scaled while others are in flight
    shared = context.bucket == 3 and not (is_gated(context) and not context.shape["group"])
    return {**DEFAULT, **_WIDE, **_LONG, "per_processor": int(shared)}


def make_with(context: OpContext, config: Mapping[str, Any]) -> WeightOnly:
    """The op in the configuration `config`."""
    return WeightOnly(context, {**default(context), **config})


def make(context: OpContext) -> WeightOnly:
    """The op in the fastest measured configuration, or in the default one."""
    return make_with(context, tuned.choose(context.kernel, context, default(context)))


_NAMES = ("block_n", "block_w", "warps", "per_processor", "tma")
_FEW = (
    (64, 64, 4, 3, True),
    (64, 64, 4, 3, False),
    (64, 64, 4, 4, False),
    (64, 64, 4, 4, True),
    (64, 32, 4, 5, False),
    (128, 64, 4, 2, False),
    (128, 64, 4, 2, True),
    (128, 64, 4, 3, True),
)
"""Tiles for up to 16 tokens, by _NAMES."""

_SOME = (
    (64, 64, 4, 2, True, "sums"),
    (64, 32, 4, 3, True, "sums"),
    (128, 32, 4, 2, True, "weights"),
    (128, 64, 4, 1, True, "weights"),
    (128, 64, 8, 1, True, "weights"),
    (128, 64, 8, 1, True, "sums"),
    (256, 32, 8, 1, True, "weights"),
    (256, 64, 8, 1, True, "weights"),
    (64, 64, 4, 2, True, "weights"),
    (64, 32, 4, 3, True, "weights"),
)
"""Tiles for 17 to 64 tokens, by _NAMES and `scaled`. Wide ones, since x is read once for each tile of outputs."""

_MANY = (
    (128, 16, 4, 2, 128, "weights"),
    (128, 16, 4, 0, 128, "weights"),
    (128, 64, 8, 1, 128, "weights"),
    (128, 32, 8, 1, 128, "weights"),
    (128, 32, 8, 1, 128, "sums"),
    (64, 32, 4, 0, 128, "weights"),
    (64, 16, 4, 2, 128, "weights"),
    (128, 16, 8, 1, 256, "weights"),
    (256, 16, 8, 0, 128, "weights"),
    (128, 32, 8, 0, 256, "weights"),
    (128, 64, 8, 0, 128, "weights"),
    (128, 32, 8, 0, 128, "weights"),
    (128, 32, 8, 0, 128, "sums"),
)
"""Tiles for more tokens: (`block_n`, `block_w`, `warps`, `per_processor`, `tokens`, `scaled`)."""

_MOST = 8


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configurations worth timing."""
    seen: list[dict[str, Any]] = []
    for config in _few(context) if context.bucket <= 2 else _many(context):
        whole = {**default(context), **config}
        padded = min(whole["tokens"], 16 if context.bucket <= 1 else 64 if context.bucket == 2 else 256)
        try:
            block_n, block_w, stages = tile_of(context, whole, padded)
        except ValueError:
            continue
        fitted = {**config, "block_w": block_w}
        if stages >= 2 and block_n == config["block_n"] and _fit(context, whole, padded) and fitted not in seen:
            seen.append(fitted)
            yield fitted
        if len(seen) == _MOST:
            return


def _fit(context: OpContext, config: Mapping[str, Any], padded: int) -> bool:
    """Returns False for tiles that would make the compiler move registers to memory, as compiling for sm_90 showed."""
    gated, threads, group = is_gated(context), 32 * config["warps"], int(context.shape["group"] or 0)
    sums = (1 + gated) * config["block_n"] * padded // threads
    words = (1 + gated) * config["block_n"] * config["block_w"] // (2 * threads)
    if config["scaled"] == "sums" and group:
        # those of the group, and those of all; gate and up have one factor each, and short groups more than one
        sums = 2 * sums + 32 * gated + 16 * (group < 128)
    programs = config["per_processor"]
    most = registers(config) // 2 if gated and (words >= 64 or (config["warps"] == 4 and programs)) else 128
    if programs and not group:
        # a tile that ends while others are in flight is scaled beside its sums
        most = min(most, 64)
    return bool(sums <= most)


def _few(context: OpContext) -> Iterable[dict[str, Any]]:
    for tile in _FEW if context.bucket <= 1 else _SOME:
        *config, scaled = (*tile, "sums")[:6]
        yield {**dict(zip(_NAMES, config, strict=True)), "scaled": _scaled(context, scaled), "stages": 8}


def _many(context: OpContext) -> Iterable[dict[str, Any]]:
    for block_n, block_w, warps, per_processor, tokens, scaled in _MANY:
        if context.bucket == 3 or not per_processor:
            config = dict(zip(_NAMES, (block_n, block_w, warps, per_processor, True), strict=True))
            yield {**config, "tokens": tokens, "scaled": _scaled(context, scaled), "stages": 6}


def _scaled(context: OpContext, way: Any) -> Any:
    """Returns `scaled`, or "sums" for scales of whole rows, which are applied at the end."""
    return way if context.shape["group"] else "sums"
