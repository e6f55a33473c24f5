"""linear.w4a16, linear.w8a16 and both with silu_and_mul, kernel warpgroups: packed weights on Hopper, in Gluon.

The next weights are converted while the tensor cores multiply (see warpgroups_kernel). Equal calls give equal bits.

Each tile of tokens converts the weights again. Calls with more tokens than MOST go to kernel scratch, which converts
once, for cuBLAS, and is faster there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from llmcore.api import OpContext

from llmcore_triton import tuned
from llmcore_triton.launch import Bound, overlaps, place
from llmcore_triton.linear_shapes import (
    BARRIERS,
    TMA_ALIGNED,
    buffer,
    power_of_two,
    processors,
    shared_bytes,
)
from llmcore_triton.quantized import scratch
from llmcore_triton.quantized.in_gluon import Tiles
from llmcore_triton.quantized.packing import BITS, Packed
from llmcore_triton.quantized.warpgroups_kernel import SHARED_TILES, WORDS, words_times_rows

KERNEL = "warpgroups"

DEFAULT: dict[str, Any] = {
    **{"rows": 128, "tokens": 128, "warps": 8, "flight": 2, "depth": 16, "joined": 2, "x_stages": 3, "w_stages": 6},
    **{"per_processor": 1, "step": 256, "joining": 1792, "group": 16},
}
"""A step multiplies `step` inputs of `rows` rows of the weight with at most `tokens` tokens. With at most 128 of 256
tokens, it multiplies twice as many rows.
- `warps`: those that multiply. Four more have a place, and two of them copy.
- `per_processor`: programs on each multiprocessor.
- `joining`: the inputs whose products take as long as adding parts of tiles. If equal shares of the steps save more,
  programs take those. Else they take whole tiles.
- `group`: tiles of tokens that use the same weights before the next weights come.
- `flight`, `depth`, `joined` and the stages: see the kernel."""

MOST = 2048
"""The most tokens that are multiplied here."""

PADDED = (32, 64, 128, 256)
"""Token counts of a tile that kernels are compiled for."""

_GRAPH = 512
"""The most tokens of a step that may be captured into a CUDA graph. Its buffers are made in advance, because a graph
must not own them."""

_LAST = 4
"""The bucket without a largest number of tokens."""

_COPYING = 4
"""Warps that have a place beside those that multiply."""

_SCRATCH = 2048
"""Bytes of shared memory in which a warp turns results."""

_REGISTERS, _MOST_REGISTERS = 65536, 168
"""Those of a multiprocessor. And the most that a thread starts with: those that multiply get what others give up."""


class Plan(NamedTuple):
    """The launch for a number of tokens, rounded up."""

    programs: int
    steps: int
    partials: torch.Tensor
    arrivals: torch.Tensor
    padded: int
    rows: int
    launch: Bound


class Warpgroups(Packed):
    """The op, bound to a configuration."""

    def __init__(self, context: OpContext, config: Mapping[str, Any]) -> None:
        super().__init__(context)
        self._config = config
        if self._form.blocks.words != WORDS.value:
            raise ValueError(f"needs blocks of {WORDS.value} words, and {self._form.name} fit the shape")
        if config["flight"] * config["depth"] > config["joined"] * WORDS.value:
            raise ValueError(
                f"{config} has more products in flight than a stage of inputs has, and would never free one"
            )
        self._weights: dict[tuple[int, int], Tiles] = {}
        self._plans: dict[tuple[int, int], Plan] = {}
        self._scratch = scratch.make(context) if context.bucket == _LAST else None
        for tokens in range(PADDED[0], _GRAPH + 1, PADDED[0]):
            self._plan(tokens)

    def multiply(
        self, x: torch.Tensor, words: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See Packed."""
        if self._scratch is not None and len(x) > MOST:
            return self._scratch.multiply(x, words, scale, bias)
        tokens, inputs = x.shape
        # the stride of a single row may be anything
        stride = x.stride(0) if tokens > 1 else inputs
        if (x.data_ptr() | stride * x.element_size()) % TMA_ALIGNED:
            x, stride = x.clone(memory_format=torch.contiguous_format), inputs
        plan = self._plan(tokens)
        out = x.new_empty(tokens, self._sizes.outputs)
        tiles = Tiles(x, [tokens, inputs], [stride, 1], [plan.padded, WORDS.value], SHARED_TILES)
        plan.launch.but(HAS_BIAS=bias is not None)(
            (plan.programs,),
            *(tiles, self._tiles(words, plan.rows), scale, out if bias is None else bias, out),
            *(plan.partials, plan.arrivals, tokens, *self._sizes, plan.steps),
        )
        return out

    def _tiles(self, words: torch.Tensor, rows: int) -> Tiles:
        """The descriptor of a weight. It is made once, because weights do not move."""
        found = self._weights.get((words.data_ptr(), rows))
        if found is None:
            box = [rows // (1 + self._gated), WORDS.value]
            found = Tiles(words, list(words.shape), [words.shape[1], 1], box, SHARED_TILES)
            self._weights[words.data_ptr(), rows] = found
        return found

    def _plan(self, tokens: int) -> Plan:
        padded = next((count for count in PADDED if count >= tokens), PADDED[-1])
        padded = min(padded, self._config["tokens"])
        key = padded, -(-tokens // padded)
        return self._plans.get(key) or self._planned(*key)

    def _planned(self, padded: int, turns: int) -> Plan:
        context, config, form = self._context, self._config, self._form
        gated, rows = self._gated, rows_of(config, padded)
        x_stages, w_stages = stages_of(context, config, padded)
        k_steps = -(-form.blocks.total * form.blocks.inputs // config["step"])
        tiles = -(-self._sizes.outputs // (rows // (1 + gated))) * turns
        most = processors(context) * config["per_processor"]
        whole, shares = -(-tiles // most) * k_steps, -(-tiles * k_steps // most)
        steps = shares if shares + config["joining"] // config["step"] < whole else whole
        programs = -(-tiles * k_steps // steps)
        shared = steps % k_steps != 0
        where = place(context)
        overlap = overlaps(context)
        plan = self._plans[padded, turns] = Plan(
            programs,
            steps,
            buffer(where, torch.float32, power_of_two(programs * rows * padded if shared else 1)),
            buffer(where, torch.int32, power_of_two(tiles if shared else 1)),
            padded,
            rows,
            Bound(
                words_times_rows,
                **{"TOKENS": padded, "ROWS": rows, "CODES": context.shape["codes"]},
                **{"GROUP_SIZE": form.group, "ALIKE": form.alike, "ZEROS": bool(context.shape["zeros"])},
                **{"SCALE": context.shape["scale"], "GATED": gated},
                **{"PARTS": config["step"] // WORDS.value, "K_STEPS": k_steps},
                **{"GROUP": config["group"], "JOINED": config["joined"], "X_STAGES": x_stages, "W_STAGES": w_stages},
                **{"FLIGHT": config["flight"], "DEPTH": config["depth"], "PDL": overlap},
                **{"num_warps": config["warps"], "launch_pdl": overlap, "maxnreg": registers(config)},
            ),
        )
        return plan


def rows_of(config: Mapping[str, Any], padded: int) -> int:
    """Returns the rows of the weight that a step multiplies with `padded` tokens."""
    return int(config["rows"]) * max(1, int(config["tokens"]) // max(padded, 128))


def stages_of(context: OpContext, config: Mapping[str, Any], padded: int) -> tuple[int, int]:
    """Returns the stages of inputs and of words that fit into shared memory, at least two each.

    Raises ValueError if they do not fit.
    """
    room = shared_bytes(context, config["per_processor"]) - BARRIERS - _SCRATCH * config["warps"]
    x = config["joined"] * padded * WORDS.value * 2
    w = rows_of(config, padded) * config["step"] * BITS[str(context.shape["codes"])] // 8
    x_stages, w_stages = config["x_stages"], config["w_stages"]
    while x_stages * x + w_stages * w > room and w_stages > 2:
        w_stages -= 1
    while x_stages * x + w_stages * w > room and x_stages > 2:
        x_stages -= 1
    if x_stages * x + w_stages * w > room:
        raise ValueError(f"{config} needs more shared memory than a device of capability {context.device.capability}")
    return x_stages, w_stages


def registers(config: Mapping[str, Any]) -> int:
    """Returns the registers that a thread starts with if `per_processor` programs share a multiprocessor."""
    threads = 32 * (config["warps"] + _COPYING) * config["per_processor"]
    return int(min(_REGISTERS // threads // 8 * 8, _MOST_REGISTERS))


_NAMES = ("rows", "tokens", "warps", "flight", "depth", "joined", "x_stages", "w_stages", "per_processor")

_SOME = (
    (256, 64, 8, 1, 32, 2, 4, 3, 1),
    (128, 64, 8, 1, 64, 2, 3, 3, 2),
    (64, 64, 4, 1, 32, 2, 3, 4, 2),
    (64, 64, 4, 1, 32, 2, 2, 3, 3),
)
"""Configurations for 17 to 64 tokens, by _NAMES. With weights in 8 bits, shorter steps leave room for more stages."""

_MANY = (
    (128, 256, 8, 1, 16, 1, 4, 4, 1),
    (128, 256, 8, 1, 32, 1, 4, 4, 1),
    (128, 128, 8, 2, 16, 2, 3, 6, 1),
    (64, 128, 4, 1, 32, 1, 4, 4, 2),
)
"""Those for more tokens."""


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configurations worth timing."""
    some = context.bucket == 2
    steps = (128, 256) if some and BITS[str(context.shape["codes"])] == 8 else (256,)
    for step in steps:
        for values in _SOME if some else _MANY:
            yield dict(zip(_NAMES, values, strict=True), step=step)


def make_with(context: OpContext, config: Mapping[str, Any]) -> Warpgroups:
    """The op in the configuration `config`."""
    return Warpgroups(context, {**DEFAULT, **config})


def make(context: OpContext) -> Warpgroups:
    """The op in the fastest measured configuration, or in the default one."""
    return make_with(context, tuned.choose(KERNEL, context, DEFAULT))
