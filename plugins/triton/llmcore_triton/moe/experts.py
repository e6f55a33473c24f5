"""moe.experts: two launches over tiles of the experts' pairs: gate and up with their activation, then down.

The number of tiles depends on the routes, which the host does not know. The grid is for the largest number, and each
program finds its expert from the places where the experts' pairs begin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from llmcore.api import TOKEN_BUCKETS, OpContext
from llmcore.layers import Dispatched
from triton.tools.tensor_descriptor import TensorDescriptor

from llmcore_triton import tuned
from llmcore_triton.launch import HOPPER, Bound, overlaps
from llmcore_triton.linear_shapes import TMA_ALIGNED, element_bytes, power_of_two, shared_bytes
from llmcore_triton.moe.experts_kernels import grouped, outputs_of
from llmcore_triton.quantized.packing import BITS
from llmcore_triton.rows import size
from llmcore_triton.specs.rows import NAME

LONG = 64
"""Tiles of at least this many pairs are the rows of the matrix product, and come by TMA if they are adjacent."""

_SPARE = 4096
"""Bytes of shared memory that a program needs beside its tiles, at most."""

_WORD = 2
"""Bytes of a word of codes."""

_MARKS = 16
"""Bytes of the marks of a row's block, at most."""

Weight = torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Of all experts: [experts, rows, inputs], or (words, marks, None) as llmcore_triton.quantized.experts packs them."""


def of(weight: Weight) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the numbers or words of a weight, and its marks or None."""
    return weight[:2] if isinstance(weight, tuple) else (weight, None)


def numbers_in(context: OpContext) -> int:
    """Returns the weights that an element holds: 1, or the codes in a word of 16 bits."""
    codes = context.shape.get("codes")
    return 16 // BITS[str(codes)] if codes else 1


def form(context: OpContext, gated: bool) -> dict[str, Any]:
    """Returns the compile-time arguments that tell how the weights of gate and up (`gated`) or of down are held."""
    shape = context.shape
    group, zeros = size(context, "group") if "group" in shape else 0, shape.get("zeros")
    if zeros and not group:
        group = size(context, "size" if gated else "inner")  # zeros are beside the scales of groups
    return {"CODES": shape.get("codes", ""), "GROUP": group, "ZEROS": shape["scale_type"] if zeros else ""}


class Tile(NamedTuple):
    """A launch: pairs, outputs (of gate and of up each) and inputs of a tile, warps, and tiles in flight."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int

    def options(self, context: OpContext, gated: bool) -> dict[str, Any]:
        """Returns the options of the launch of gate and up (`gated`) or of down, and the kernel's PDL."""
        stages, overlap = min(self.stages, most_stages(context, self, gated)), overlaps(context)
        return {"PDL": overlap, "num_warps": self.warps, "num_stages": stages, "launch_pdl": overlap}


def width(context: OpContext, tile: Tile, gated: bool) -> int:
    """Returns the outputs of a tile."""
    return int(outputs_of(tile.block_n, gated, context.shape.get("codes", "")))


class Boxes:
    """TMA descriptors of weights. Each is made once, because weights do not move."""

    def __init__(self, context: OpContext, tile: Tile, tma: bool) -> None:
        self._box = [tile.block_n, tile.block_k // numbers_in(context)]
        self._takes = tma and (context.device.capability or 0) >= HOPPER and element_bytes(context) == 2
        self._made: dict[int, TensorDescriptor] = {}

    def __call__(self, weight: torch.Tensor) -> TensorDescriptor | None:
        """The descriptor of all rows of weight [experts, rows, inputs]. None if TMA cannot or should not read them."""
        if not self._takes:
            return None
        address, inputs = weight.data_ptr(), weight.shape[2]
        found = self._made.get(address)
        if found is None and (address | inputs * weight.element_size()) % TMA_ALIGNED == 0:
            rows = weight.shape[0] * weight.shape[1]
            found = self._made[address] = TensorDescriptor(weight, [rows, inputs], [inputs, 1], self._box)
        return found


class Half:
    """One of the two launches. `gated`: gate and up, from tokens to sorted pairs. Else down, to the pairs' own
    places."""

    def __init__(self, context: OpContext, tile: Tile, tma: bool, gated: bool) -> None:
        self._tile, self._gated, self._coded = tile, gated, numbers_in(context) > 1
        self._experts = size(context, "experts")
        # the rows of gate and up of one tile of words are not adjacent
        self._weights = Boxes(context, tile, tma and not (gated and self._coded))
        self._width = width(context, tile, gated)
        self._launch = Bound(
            grouped,
            EXPERTS=self._experts,
            PADDED=power_of_two(self._experts),
            TOP_K=size(context, "top_k"),
            GATED=gated,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            SWAP=tile.block_m < LONG or numbers_in(context) > 1,
            **form(context, gated),
            **tile.options(context, gated),
        )

    def __call__(self, x: torch.Tensor, weight: Weight, out: torch.Tensor, tokens: Dispatched) -> None:
        """x [rows, inputs], weight [experts, outputs or twice as many, inputs] -> out [rows, outputs]."""
        held, marks = of(weight)
        pairs, (outputs, inputs) = len(tokens.pairs), (out.shape[1], x.shape[1])
        tile = self._tile
        # the last tile of every expert may hold a single pair
        some = min(self._experts, pairs)
        tiles = some + (pairs - some) // tile.block_m
        even = inputs % tile.block_k == 0
        self._launch.but(EVEN_K=even)(
            (tiles * -(-outputs // self._width),),
            *(x, *self._boxes(x, held), marks, out),
            *(tokens.pairs, tokens.starts, outputs, inputs, x.stride(0)),
        )

    def _boxes(
        self, x: torch.Tensor, weight: torch.Tensor
    ) -> tuple[TensorDescriptor | None, torch.Tensor, TensorDescriptor | None]:
        """The TMA box of x, the weight, and the weight's descriptor. The TMA values are None if TMA is not used."""
        tile, found = self._tile, self._weights(weight)
        if found is None or self._gated or tile.block_m < LONG or self._coded:
            return None, weight, found
        inputs = x.shape[1]
        return TensorDescriptor(x, [len(x), inputs], [inputs, 1], [tile.block_m, tile.block_k]), weight, found


class Experts:
    """The op for any number of tokens. `tiles`: returns the configuration with tiles of that number of pairs."""

    def __init__(
        self, context: OpContext, config: Mapping[str, Any], tiles: Callable[[OpContext, int], Mapping[str, Any]]
    ) -> None:
        self._top_k, self._experts = size(context, "top_k"), size(context, "experts")
        self._width, self._inner = size(context, "size"), size(context, "inner")
        self._many = self._halves(context, config)
        self._few = None
        if TOKEN_BUCKETS[context.bucket][1] is None and not context.deterministic:
            self._few = self._halves(context, tiles(context, LONG))

    def _halves(self, context: OpContext, config: Mapping[str, Any]) -> tuple[Half, Half]:
        tma = bool(config["tma"])
        return (
            Half(context, Tile(*config["gate_up"]), tma, gated=True),
            Half(context, Tile(*config["down"]), tma, gated=False),
        )

    def __call__(
        self, tokens: Dispatched, gate_up: Weight, down: Weight, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """gate_up [experts, 2 inner, size], each expert's gate first, down [experts, size, inner] -> [N top_k, size]:
        the result of each pair at the pair's own place. `into`: where to write it; the rows of other pairs stay."""
        x, pairs = tokens.x, len(tokens.pairs)
        few = self._few is not None and pairs < LONG * self._experts
        first, second = self._few if few and self._few is not None else self._many
        middle = x.new_empty(pairs, self._inner)
        y = x.new_empty(len(x) * self._top_k, self._width) if into is None else into
        first(x, gate_up, middle, tokens)
        second(middle, down, y, tokens)
        return y


def most_stages(context: OpContext, tile: Tile, gated: bool) -> int:
    """Returns the number of tiles in flight that shared memory has room for."""
    element = element_bytes(context)
    if (numbers := numbers_in(context)) > 1:
        rows = tile.block_n * (tile.block_k // numbers * _WORD + _MARKS)
    else:
        rows = (1 + gated) * tile.block_n * tile.block_k * element
    held = tile.block_m * tile.block_k * element + rows
    return max((shared_bytes(context) - _SPARE) // held, 1)


def _tiles(context: OpContext, block_m: int) -> dict[str, Any]:
    """Returns tiles of `block_m` pairs, and as many outputs as registers and shared memory allow."""
    hopper = context.device.capability == HOPPER
    if context.dtype == "f32":
        block_m = min(block_m, 32)
        gate_up, down = (block_m, 64, 32, 4, 2), (block_m, 64, 32, 4, 2)
    elif block_m < LONG:
        # two programs per multiprocessor, each with half of its memory
        deep = 128 if block_m == 16 else 64
        gate_up, down = (block_m, 64, deep, 4, 3 * 128 // deep), (block_m, 64, deep, 4, 5)
    elif not hopper:
        gate_up, down = (64, 64, 64, 4, 3), (64, 128, 64, 4, 3)
    elif block_m == LONG:
        gate_up, down = (64, 64, 64, 4, 4), (64, 128, 64, 4, 4)
    else:
        gate_up, down = (128, 128, 64, 8, 4), (128, 256, 64, 8, 4)
    return {"gate_up": list(gate_up), "down": list(down), "tma": hopper}


def usual(context: OpContext) -> int:
    """Returns the pairs of a tile such that most experts of a step need only one tile."""
    if context.deterministic:
        return LONG
    _, most = TOKEN_BUCKETS[context.bucket]
    if most is None:
        return 2 * LONG
    pairs = most * size(context, "top_k")
    return min(max(power_of_two(pairs * 5 // (4 * size(context, "experts"))), 16), LONG)


def default(context: OpContext) -> dict[str, Any]:
    """Chooses by the pairs per expert if all experts are equally popular. Under `deterministic` there is one tile for
    all."""
    return _tiles(context, usual(context))


_DECODE = (
    ((64, 64, 4, 4), (64, 64, 4, 6)),
    ((64, 64, 4, 6), (64, 128, 4, 4)),
    ((64, 128, 4, 3), (64, 128, 4, 5)),
    ((64, 128, 4, 5), (128, 128, 8, 5)),
    ((64, 128, 8, 5), (128, 64, 8, 6)),
    ((128, 64, 8, 3), (128, 64, 4, 6)),
    ((128, 64, 8, 5), (64, 256, 4, 3)),
    ((32, 128, 4, 5), (32, 128, 4, 6)),
)
"""Tiles of gate_up and down, without their pairs."""

_PREFILL = (
    ((64, 64, 64, 4, 4), (64, 128, 64, 4, 4)),
    ((64, 128, 64, 4, 3), (64, 256, 64, 4, 3)),
    ((64, 128, 64, 8, 4), (64, 256, 64, 8, 4)),
    ((128, 64, 64, 4, 3), (128, 128, 64, 4, 3)),
    ((128, 64, 64, 8, 3), (128, 128, 64, 8, 3)),
    ((128, 64, 128, 8, 3), (128, 128, 128, 8, 3)),
    ((128, 128, 64, 8, 3), (128, 256, 64, 8, 3)),
    ((128, 128, 64, 8, 4), (128, 256, 64, 8, 4)),
    ((256, 64, 64, 8, 4), (256, 128, 64, 8, 4)),
)
"""Tiles of gate_up and down."""


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configurations worth timing: by TMA and by pointers, two sizes of tiles."""
    base = default(context)
    yield base
    if context.dtype == "f32" or context.deterministic:
        return
    pairs = usual(context)
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    if pairs >= LONG:
        found += _PREFILL
    elif pairs >= LONG // 2:
        found += [tiles for tiles in _PREFILL if tiles[0][0] == LONG]
    if TOKEN_BUCKETS[context.bucket][1] is not None:
        for block_m in sorted({min(pairs, 32), min(2 * pairs, 32)}):
            found += [((block_m, *up), (block_m, *down)) for up, down in _DECODE]
    hopper = context.device.capability == HOPPER
    for gate_up, down in found:
        for tma in (True, False) if hopper else (False,):
            config = {"gate_up": list(gate_up), "down": list(down), "tma": tma}
            fits = (
                most_stages(context, Tile(*gate_up), True) >= 2,
                most_stages(context, Tile(*down), False) >= 2,
            )
            if config != base and all(fits):
                yield config


def make_with(context: OpContext, config: Mapping[str, Any]) -> Experts:
    """The op in the configuration `config`."""
    return Experts(context, {**default(context), **config}, _tiles)


def make(context: OpContext) -> Experts:
    """The op in the fastest measured configuration, or in the default one."""
    base = default(context)
    return Experts(context, base if context.deterministic else tuned.choose(NAME, context, base), _tiles)
