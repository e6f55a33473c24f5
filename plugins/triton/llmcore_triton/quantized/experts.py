"""moe.experts.w4a16 and moe.experts.w8a16: the launches of moe.experts over weights in words of 16 bits.

Weights are always the rows of the matrix product, whose operands are made in registers. Tokens are its columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import repeat
from typing import Any

import torch
from llmcore.api import OpContext
from llmcore.layers import Dispatched

from llmcore_triton import tuned
from llmcore_triton.launch import HOPPER
from llmcore_triton.moe import experts
from llmcore_triton.moe.experts import LONG, Tile, Weight, most_stages, usual
from llmcore_triton.quantized.packing import Packing
from llmcore_triton.rows import size
from llmcore_triton.specs.rows import NAME


def of_rows(context: OpContext, inputs: str) -> Packing:
    """The packing of rows of gate and up (`inputs` "size") or of down ("inner")."""
    return Packing(replace(context, shape={**context.shape, "inputs": size(context, inputs)}))


class Packed:
    """The packing of both stacks."""

    def __init__(self, context: OpContext) -> None:
        self._packings = {size(context, name): of_rows(context, name) for name in ("size", "inner")}
        self.packing = " and ".join(one.name for one in self._packings.values())

    def pack(
        self, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, order: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Canonical tensors of all experts, stacked, in the packed form. One expert after the other, so that
        intermediate results stay small."""
        one = self._packings[codes.shape[-1] * (2 if codes.dtype == torch.uint8 else 1)]
        zeros = repeat(None) if zero is None else zero
        made = [one.pack(*each, None)[:2] for each in zip(codes, scale, zeros, strict=False)]
        words, marks = (torch.stack(stack) for stack in zip(*made, strict=True))
        return words, marks, None, order

    def words(self, weight: Weight) -> Weight:
        """`weight`, packed if its codes are canonical."""
        assert isinstance(weight, tuple)
        return weight if weight[0].dtype == torch.int16 else self.pack(*weight)[:3]


class Coded(experts.Experts, Packed):
    """The op for any number of tokens."""

    def __init__(self, context: OpContext, config: Mapping[str, Any]) -> None:
        experts.Experts.__init__(self, context, config, tiles)
        Packed.__init__(self, context)

    def __call__(
        self, tokens: Dispatched, gate_up: Weight, down: Weight, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """gate_up, down: (codes, scale, zero or None) of all experts, canonical or from `pack` -> [N top_k, size]."""
        return super().__call__(tokens, self.words(gate_up), self.words(down), into)


def _config(context: OpContext, gate_up: tuple[int, ...], down: tuple[int, ...], tma: bool) -> dict[str, Any]:
    """The configuration of these pairs, rows of weights, warps and stages."""
    made = {}
    for name, inputs, (block_m, block_n, *more) in (("gate_up", "size", gate_up), ("down", "inner", down)):
        made[name] = [block_m, block_n, of_rows(context, inputs).blocks.inputs, *more]
    return {**made, "tma": tma}


def tiles(context: OpContext, block_m: int) -> dict[str, Any]:
    """Returns tiles of `block_m` pairs."""
    tma = context.device.capability == HOPPER and context.dtype != "f32"
    if context.dtype == "f32":
        return _config(context, (min(block_m, 32), 32, 4, 2), (min(block_m, 32), 32, 4, 2), tma)
    if block_m < LONG:
        return _config(context, (block_m, 64, 4, 4), (block_m, 64, 4, 4), tma)
    if block_m == LONG:
        return _config(context, (64, 128, 8, 3), (64, 128, 8, 3), tma)
    return _config(context, (128, 128, 8, 2), (128, 128, 8, 2), tma)


def default(context: OpContext) -> dict[str, Any]:
    """By the pairs per expert, as for plain weights."""
    return tiles(context, usual(context))


_DECODE = (
    ((64, 4, 3), (64, 4, 3)),
    ((64, 4, 6), (64, 4, 6)),
    ((128, 4, 3), (128, 4, 3)),
    ((128, 4, 4), (64, 4, 4)),
    ((128, 8, 3), (128, 8, 3)),
    ((128, 8, 5), (128, 8, 5)),
    ((256, 8, 3), (128, 4, 4)),
    ((32, 2, 4), (32, 2, 4)),
    ((32, 1, 3), (16, 1, 4)),
)
"""Rows of weights, warps and stages of gate_up and down."""

_PREFILL = (
    ((64, 64, 4, 3), (64, 64, 4, 3)),
    ((64, 128, 8, 3), (64, 128, 8, 3)),
    ((64, 128, 4, 3), (64, 64, 4, 4)),
    ((128, 64, 8, 3), (128, 64, 8, 3)),
    ((128, 128, 8, 2), (128, 128, 8, 2)),
    ((128, 128, 8, 3), (128, 128, 8, 3)),
    ((128, 256, 8, 2), (128, 256, 8, 2)),
)
"""Pairs, rows of weights, warps and stages of gate_up and down."""


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configurations worth timing: sizes of tiles, and down by TMA and by pointers."""
    base = default(context)
    yield base
    if context.dtype == "f32" or context.deterministic:
        return
    pairs = usual(context)
    # a tile of 128 pairs is for experts that have more than LONG of them
    found = [tile for tile in _PREFILL if pairs > LONG or (pairs >= LONG // 2 and tile[0][0] == LONG)]
    if pairs < LONG:
        found += [((pairs, *up), (pairs, *down)) for up, down in _DECODE]
    hopper = context.device.capability == HOPPER
    for gate_up, down in found:
        for tma in (hopper, False) if hopper and gate_up[0] < LONG else (hopper,):
            config = _config(context, gate_up, down, tma)
            fits = (
                most_stages(context, Tile(*config["gate_up"]), True) >= 2,
                most_stages(context, Tile(*config["down"]), False) >= 2,
            )
            if config != base and all(fits):
                yield config


def make_with(context: OpContext, config: Mapping[str, Any]) -> Coded:
    """The op in the configuration `config`."""
    return Coded(context, {**default(context), **config})


def make(context: OpContext) -> Coded:
    """The op in the fastest measured configuration, or in the default one."""
    return Coded(context, default(context) if context.deterministic else tuned.choose(NAME, context, default(context)))
