"""linear.w8a8 and linear.fp8_block, kernel warpgroups: more than 64 tokens on Hopper, in Gluon.

Results are written while others are computed (see codes_warpgroups_kernel). Each call chooses the width of tiles, and
how many programs share one. Equal calls give equal bits.

The tensor cores add up e4m3 with their own bits, about 14, as in many_rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from llmcore.api import OpContext
from llmcore.layers import DTYPES
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from llmcore_triton import tuned
from llmcore_triton.launch import Bound, overlaps, place
from llmcore_triton.linear_shapes import (
    BARRIERS,
    buffer,
    known_sizes,
    power_of_two,
    processors,
    registers_of,
    shared_bytes,
)
from llmcore_triton.quantized import codes_cublas
from llmcore_triton.quantized.blocks import BLOCK, Packs, group_of, spread_of
from llmcore_triton.quantized.codes_finish import MOST, Finish
from llmcore_triton.quantized.codes_warpgroups_kernel import BLOCK_K, SHARED_TILES, codes_times_codes
from llmcore_triton.quantized.in_gluon import Tiles

KERNEL = "warpgroups"

DEFAULT: dict[str, Any] = {"m": 64, "n": 256, "stages": 8, "group": 16, "parts": MOST}
"""Each of the two teams of a program has `m` tokens. A tile has `n` outputs, or half of them where that is faster.
- `stages`: steps in shared memory at most. There are fewer if it ends.
- `group`: tiles of tokens that use the same weights before the next weights come.
- `parts`: the most programs that share a tile."""

_STEP: int = BLOCK_K.value
"""Inputs of a step."""

_PRODUCTS, _LOADED = 4096, 48
"""Products that a multiprocessor computes in a cycle, and the bytes that it loads."""

_FINISH, _MOVED = 2500, 20
"""Cycles of the launch that adds parts, and the bytes that it moves in a cycle for each multiprocessor."""

_STARTED = registers_of(3 * 128)
"""Registers that a thread starts with. Those of three groups of 128 threads fit into a multiprocessor."""

_SCRATCH = 8 * 1024
"""Bytes of shared memory in which warps turn results."""


class Choice(NamedTuple):
    """The cut of a call: the outputs of a tile, and the programs that share a tile."""

    n: int
    parts: int


class Warpgroups(Packs):
    """The op, bound to a device, sizes and a configuration, for any number of tokens.

    The first call also launches each kernel that later calls may choose, for one token. So they are compiled at the
    start, and no request waits for the compiler.
    """

    def __init__(self, context: OpContext, config: Mapping[str, Any]) -> None:
        super().__init__(context)
        sizes, group = known_sizes(context), group_of(context)
        if sizes is None:
            raise ValueError(f"{KERNEL} of {context.op} needs a shape with inputs and outputs, has none")
        self._outputs, self._inputs = sizes
        self._dtype, self._programs = DTYPES[context.dtype], processors(context)
        self._m, self._most, self._grouped = int(config["m"]), int(config["parts"]), bool(group)
        # scales of groups need a sum of each step beside that of all
        width = min(int(config["n"]), BLOCK) if group else int(config["n"])
        self._widths = width, width // 2
        self._weights: dict[tuple[int, int], TensorDescriptor] = {}
        self._choices: dict[int, Choice] = {}
        self._first, self._cublas = True, codes_cublas.for_most(context)
        overlap = overlaps(context)
        self._launches: dict[int, Bound] = {}
        for n in self._widths:
            self._launches[n] = Bound(
                codes_times_codes,
                **{"M": self._m, "N": n, "STAGES": stages_of(context, config, n), "TURN": config["group"]},
                **{"PDL": overlap, "num_warps": 4, "launch_pdl": overlap, "maxnreg": _STARTED},
            )
        self._finish = Finish(context, MOST, scaled=not group)
        # made here: a call may be captured into a CUDA graph, and must not own memory
        kind = torch.int32 if context.shape["codes"] == "i8" else torch.float32
        most = self._programs * 2 * self._m * self._widths[0] if self._most > 1 else 1
        self._sums = buffer(place(context), torch.float32, power_of_two(most)).view(kind)

    def __call__(
        self,
        x: torch.Tensor,
        x_scale: torch.Tensor,
        codes: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, inputs], x_scale [T, groups], codes [outputs, inputs], scale [outputs, groups] or that of blocks of
        outputs -> [T, outputs]. Rows without groups have one scale."""
        tokens = len(x)
        if self._cublas is not None and tokens > codes_cublas.MOST:
            return self._cublas(x, x_scale, codes, scale, bias)
        if self._first:
            self._first = False
            for other in {(choice.n, choice.parts > 1): choice for choice in self.choices(1)}.values():
                self._run(other, x[:1], x_scale[:1], codes, scale, bias)
        choice = self._choices.get(tokens) or self._choices.setdefault(tokens, self.choose(tokens))
        return self._run(choice, x, x_scale, codes, scale, bias)

    def _run(
        self,
        choice: Choice,
        x: torch.Tensor,
        x_scale: torch.Tensor,
        codes: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        n, parts = choice
        tokens, outputs, inputs = len(x), self._outputs, self._inputs
        out = x.new_empty(tokens, outputs, dtype=self._dtype)
        alone = parts == 1
        spread = spread_of(codes, scale) if self._grouped else 0
        self._launches[n].but(SUMS=not alone, HAS_BIAS=alone and bias is not None, SPREAD=spread)(
            (min(self.tiles(tokens, n) * parts, self._programs),),
            Tiles(x.contiguous(), [tokens, inputs], [inputs, 1], [self._m, _STEP], SHARED_TILES),
            self._tiles_of(codes, n),
            *(x_scale, scale, out if bias is None else bias, out if alone else self._sums),
            *(tokens, outputs, inputs, x_scale.stride(0), parts),
        )
        if not alone:
            self._finish(self._sums, x_scale, scale, bias, out, parts, tokens)
        return out

    def tiles(self, tokens: int, n: int) -> int:
        """Returns the number of tiles with `n` outputs."""
        return -(-tokens // (2 * self._m)) * -(-self._outputs // n)

    def choices(self, tokens: int) -> list[Choice]:
        """Returns the ways to cut a call. All programs that share tiles run at the same time."""
        found = []
        for n in self._widths:
            most = min(self._most, self._programs // self.tiles(tokens, n), -(-self._inputs // _STEP))
            found += [Choice(n, parts) for parts in range(1, max(most, 1) + 1)]
        return found

    def choose(self, tokens: int) -> Choice:
        """Returns the fastest way to cut a call."""
        return min(self.choices(tokens), key=lambda choice: self._cycles(tokens, choice))

    def _cycles(self, tokens: int, choice: Choice) -> float:
        """Returns about how long a call takes."""
        m, n = 2 * self._m, choice.n
        rounds = -(-self.tiles(tokens, n) * choice.parts // self._programs)
        step = max(m * n / _PRODUCTS, (m + n) / _LOADED) * _STEP
        steps = -(-self._inputs // _STEP // choice.parts)
        cycles = rounds * steps * step
        if choice.parts > 1:
            sums = 4 * tokens * self._outputs * choice.parts
            cycles += _FINISH + 2 * sums / (_MOVED * self._programs)
        return cycles

    def _tiles_of(self, codes: torch.Tensor, n: int) -> TensorDescriptor:
        """Returns the weight's descriptor. It is made once, because weights do not move."""
        key = codes.data_ptr(), n
        found = self._weights.get(key)
        if found is None:
            found = TensorDescriptor(codes, list(codes.shape), [self._inputs, 1], [n, _STEP], SHARED_TILES)
            self._weights[key] = found
        return found


def stages_of(context: OpContext, config: Mapping[str, Any], n: int) -> int:
    """Returns the stages that shared memory has room for if a tile has `n` outputs."""
    rows = 2 * int(config["m"]) + n
    return min(int(config["stages"]), (shared_bytes(context) - BARRIERS - _SCRATCH) // (rows * _STEP))


def make_with(context: OpContext, config: Mapping[str, Any]) -> Warpgroups:
    """The op in the configuration `config`."""
    return Warpgroups(context, {**DEFAULT, **config})


def make(context: OpContext) -> Warpgroups:
    """The op in the fastest measured configuration, or in the default one."""
    return make_with(context, tuned.choose(KERNEL, context, DEFAULT))


_ROWS = ((64, 128, MOST), (64, 256, MOST), (128, 128, MOST), (64, 128, 1), (64, 256, 1))
_GROUPS = ((64, 128, MOST), (64, 128, 1))
"""(m, n, parts) to time. With scales of groups, a thread holds twice as many sums."""


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configurations worth timing."""
    for m, n, parts in _GROUPS if group_of(context) else _ROWS:
        yield {**DEFAULT, "m": m, "n": n, "parts": parts}
