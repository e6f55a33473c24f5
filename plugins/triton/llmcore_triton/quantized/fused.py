"""moe.fused.w4a16 and moe.fused.w8a16 for few tokens, over weights in words of 16 bits: the launches of moe.fused.

One token has two ways. One multiplies without tensor cores, as moe.fused does. The other one is a tile, as for more
tokens, with room for MOST of them. `scripts/tune.py` times both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from llmcore.api import OpContext

from llmcore_triton import tuned
from llmcore_triton.launch import Bound, overlaps
from llmcore_triton.linear_shapes import power_of_two
from llmcore_triton.moe import fused
from llmcore_triton.moe.experts import Weight, form, of
from llmcore_triton.moe.fused import MOST, FewTokens, Fused, part
from llmcore_triton.quantized import experts
from llmcore_triton.quantized.experts import Packed, of_rows
from llmcore_triton.quantized.packing import Blocks
from llmcore_triton.quantized.token_kernels import CHUNK, down_of_token, gate_up_of_token
from llmcore_triton.rows import size
from llmcore_triton.specs.rows import NAME


class OneToken:
    """Gate and up of the token's choices, and the weighted sum of their downs, without tensor cores."""

    def __init__(self, context: OpContext, config: Mapping[str, Any]) -> None:
        self._width, self._inner, self._top_k = (size(context, name) for name in ("size", "inner", "top_k"))
        blocks = _blocks(context)
        self._outputs = config["gate_up"][0], config["down"][0]
        self._gate_up = self._bound(gate_up_of_token, context, config["gate_up"], blocks["gate_up"], 1)
        down = self._bound(down_of_token, context, config["down"], blocks["down"], self._top_k)
        steps = -(-self._top_k * blocks["down"].total // config["down"][1])
        self._down = down.but(TOP_K=self._top_k, AHEAD=min(config["ahead"], steps))

    def _bound(self, kernel: Any, context: OpContext, block: Sequence[int], blocks: Blocks, rows: int) -> Bound:
        """Returns a launch in blocks of these outputs, over `rows` rows of these blocks of inputs."""
        overlap, gated, (block_n, together, warps) = overlaps(context), kernel is gate_up_of_token, block
        inputs = self._width if gated else self._inner
        return Bound(
            kernel,
            **{"BLOCK_N": block_n, "TOGETHER": together, "BLOCKS": blocks.total, "BLOCK_K": blocks.inputs},
            **{"EVEN": inputs % blocks.inputs == 0 and rows * blocks.total % together == 0},
            **{"WHOLE": inputs % CHUNK.value == 0, **form(context, gated)},
            **{"PDL": overlap, "num_warps": warps, "launch_pdl": overlap},
        )

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        extra: torch.Tensor | None,
        shared: fused.Shared | None,
    ) -> torch.Tensor:
        """x [1, size], words -> [1, size]. Fused has added the `shared` expert to `extra`."""
        (first, first_marks), (second, second_marks) = of(gate_up), of(down)
        width, inner = self._width, self._inner
        programs, last_programs = (-(-n // block) for n, block in zip((inner, width), self._outputs, strict=True))
        middle, out = x.new_empty(self._top_k * inner), x.new_empty(1, width)
        self._gate_up((self._top_k * programs,), x, first, first_marks, chosen, middle, inner, width)
        added = x if extra is None else extra
        self._down.but(EXTRA=extra is not None)(
            (last_programs,), middle, second, second_marks, chosen, weights, added, out, width, inner
        )
        return out


class Coded(Fused, Packed):
    """The op."""

    def __init__(self, context: OpContext, one: Any, few: FewTokens) -> None:
        Fused.__init__(self, context, one, few, experts.make(part(context, "moe.experts")))
        Packed.__init__(self, context)

    def __call__(
        self,
        x: torch.Tensor,
        router: torch.Tensor,
        bias: torch.Tensor | None,
        gate_up: Weight,
        down: Weight,
        extra: torch.Tensor | None = None,
        shared: fused.Shared | None = None,
    ) -> torch.Tensor:
        """As that of Fused, with (codes, scale, zero or None) for gate_up and down, canonical or from `pack`."""
        return super().__call__(x, router, bias, self.words(gate_up), self.words(down), extra, shared)


def _blocks(context: OpContext) -> dict[str, Blocks]:
    return {name: of_rows(context, inputs).blocks for name, inputs in (("gate_up", "size"), ("down", "inner"))}


def _part(context: OpContext) -> OpContext:
    return replace(part(context, "moe.experts"), bucket=1)


def _few(context: OpContext) -> dict[str, Any]:
    """One tile of MOST tokens."""
    return experts.tiles(_part(context), MOST)


def _together(context: OpContext, name: str) -> tuple[int, int]:
    """Returns the blocks in a step of gate and up or of down, and the steps. Steps divide the blocks, if that gives
    two warps enough to do."""
    blocks = _blocks(context)[name]
    total, chunks = blocks.total * (size(context, "top_k") if name == "down" else 1), blocks.words // CHUNK.value
    together = min(max(total & -total, 2 * _LANES // chunks), power_of_two(total), _CHUNKS[name] // chunks)
    return together, -(-total // together)


_LANES = 32
"""Threads of a warp. Each has a chunk."""

_CHUNKS = {"gate_up": 128, "down": 64}
"""The most chunks of a row in a step. Its inputs take two or four times as many registers as its words."""

_WORDS = (64, 96)
"""Registers of a thread for the words of the steps that down loads ahead: usual, and the most. Those of gate and up,
which all load at once, have the latter."""


def _registers(context: OpContext, name: str, block: Sequence[int]) -> int:
    """Returns the registers of a thread for the words of a step."""
    outputs, together, warps = block
    rows = outputs * (2 if name == "gate_up" else 1)
    return int(-(-rows * together * _blocks(context)[name].words // (2 * _LANES * warps)))


def _config(context: OpContext, gate_up: Sequence[int], down: Sequence[int], words: int) -> dict[str, Any]:
    """Returns the configuration of these outputs and warps. `words`: registers for the steps that down loads ahead.

    More warps than the chunks of a step fill would exchange words through shared memory.
    """
    made = {}
    for name, (outputs, warps) in (("gate_up", gate_up), ("down", down)):
        together = _together(context, name)[0]
        most = together * _blocks(context)[name].words // (CHUNK.value * _LANES)
        made[name] = [outputs, together, min(warps, max(most, 1))]
    ahead = max(words // _registers(context, "down", made["down"]), 1)
    return {**made, "ahead": min(ahead, _together(context, "down")[1])}


def _fits(context: OpContext, config: Mapping[str, Any]) -> bool:
    """Returns whether registers have room for the words of gate and up."""
    return _together(context, "gate_up")[1] * _registers(context, "gate_up", config["gate_up"]) <= max(_WORDS)


_GATE_UP = ((2, 2), (1, 1), (2, 1), (4, 2), (8, 2), (8, 4), (4, 4), (2, 4))
_DOWN = ((4, 2), (2, 1), (2, 2), (8, 2), (4, 4), (8, 4), (2, 4))
"""Outputs of a program, and its warps."""

_LONG = (1, 4)
"""The same for gate and up if no other pair fits."""


def _ones(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configurations for one token, the usual one first."""
    fitting = [up for up in _GATE_UP if _fits(context, _config(context, up, _DOWN[0], _WORDS[0]))]
    seen = []
    for given in product(fitting or [_LONG], _DOWN, _WORDS):
        if (config := _config(context, *given)) not in seen:
            seen.append(config)
            yield config


def default(context: OpContext) -> dict[str, Any]:
    """For one token `gate_up` and `down` are outputs of a program, blocks of inputs in a step, and warps. `ahead`: the
    steps whose words down loads before gate and up have ended. For more tokens they are Tiles."""
    return next(_ones(context)) if context.bucket == 0 else _few(context)


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configurations worth timing: for one token of both ways."""
    if context.bucket == 0:
        yield from _ones(context)
    for config in experts.candidates(_part(context)):
        yield {name: [MOST, *tile[1:]] if isinstance(tile, list) else tile for name, tile in config.items()}


def around(context: OpContext, one: Any) -> Coded:
    """The op in which `one` computes the experts of one token."""
    return Coded(context, one, FewTokens(context, _few(context)))


def make_with(context: OpContext, config: Mapping[str, Any]) -> Coded:
    """The op in the configuration `config`, which is for the context's own bucket. One with `tma` has tiles."""
    tiles = context.bucket > 0 or "tma" in config
    few = FewTokens(context, {**_few(context), **(config if tiles else {})})
    if context.bucket == 0 and tiles:
        return Coded(context, few, few)
    return Coded(context, OneToken(context, {**next(_ones(context)), **({} if tiles else config)}), few)


def make(context: OpContext) -> Coded:
    """The op in the fastest measured configuration. Without a measurement one token is a tile too."""
    return make_with(context, tuned.choose(NAME, context, {}) or _few(context))
