"""linear.w4a16, linear.w8a16 and both with silu_and_mul, kernel scratch: dequantizes the packed weight into a buffer
that all layers share, and multiplies it by cuBLAS. For many tokens, whose product takes far longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers import DTYPES, Op

from llmcore_triton import silu_and_mul, tuned
from llmcore_triton.launch import Bound, overlaps, place, release, wait
from llmcore_triton.quantized.codes import numbers, parts
from llmcore_triton.quantized.packing import Packed
from llmcore_triton.quantized.weight_only_kernels import as_operands, marks_at

KERNEL = "scratch"

DEFAULT: dict[str, Any] = {"block_n": 32, "warps": 4}
"""A program dequantizes one block of inputs of `block_n` outputs."""


@triton.jit
def dequantize(  # type: ignore[no-untyped-def]
    words, scale, out, outputs, inputs,
    BLOCK_N: tl.constexpr, WORDS: tl.constexpr, CODES: tl.constexpr, GROUP_SIZE: tl.constexpr, ZEROS: tl.constexpr,
    SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [outputs, inputs] = the packed weight, each number rounded once."""
    PARTS: tl.constexpr = parts(CODES)
    KIND: tl.constexpr = out.dtype.element_ty
    lines = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    block = tl.program_id(1)
    columns = tl.arange(0, WORDS)
    inside = (lines < outputs)[:, None]
    row = lines.to(tl.int64)[:, None]
    held = tl.load(words + (row * tl.num_programs(1) + block) * WORDS + columns[None, :], mask=inside, other=0)
    # the products before this kernel may still read the buffer
    wait(PDL)
    release(PDL)
    for part in tl.static_range(PARTS):
        marks = marks_at(scale, tl.program_id(0), block, part, outputs, inputs, BLOCK_N, WORDS, PARTS, GROUP_SIZE)
        z, _, s, _ = as_operands(marks, GROUP_SIZE, ZEROS, SCALE, tl.float32)
        zero = z[:, None] if GROUP_SIZE > 0 else z
        found = numbers(held, zero, part, CODES, KIND, ZEROS).to(tl.float32) * s[:, None]
        at = (block * PARTS + part) * WORDS + columns
        tl.store(out + row * inputs + at[None, :], found.to(KIND), mask=inside & (at < inputs)[None, :])


class Shared:
    """The buffer of each device and type, as large as the largest weight. Smaller ones that it replaces stay: a
    captured graph may write them."""

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}

    def of(self, where: torch.device, dtype: torch.dtype, size: int) -> torch.Tensor:
        """The largest buffer so far, of at least `size` elements."""
        kept = self._kept.setdefault((where, dtype), [])
        if not kept or kept[-1].numel() < size:
            kept.append(torch.empty(size, dtype=dtype, device=where))
        return kept[-1]


_shared = Shared()


class Scratch(Packed):
    """The op, bound to a configuration."""

    def __init__(self, context: OpContext, config: Mapping[str, Any]) -> None:
        super().__init__(context)
        self._activation: Op | None = None
        outputs, inputs = self._sizes
        if self._gated:
            self._activation = silu_and_mul.make(replace(context, op="silu_and_mul", shape={"size": outputs}))
        self._rows, self._inputs = outputs * (1 + self._gated), inputs
        self._block_n = int(config["block_n"])
        self._buffer = place(context), DTYPES[context.dtype]
        _shared.of(*self._buffer, self._rows * self._inputs)
        overlap = overlaps(context)
        self._launch = Bound(
            dequantize,
            **{"BLOCK_N": self._block_n, "WORDS": self._form.blocks.words, "CODES": context.shape["codes"]},
            **{"GROUP_SIZE": self._form.group, "ZEROS": bool(context.shape["zeros"]), "SCALE": context.shape["scale"]},
            **{"PDL": overlap, "num_warps": config["warps"], "launch_pdl": overlap},
        )

    def multiply(
        self, x: torch.Tensor, words: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See Packed."""
        rows, inputs = self._rows, self._inputs
        weight = _shared.of(*self._buffer, rows * inputs)[: rows * inputs].view(rows, inputs)
        grid = -(-rows // self._block_n), self._form.blocks.total
        self._launch(grid, words, scale, weight, rows, inputs)
        y: torch.Tensor = F.linear(x, weight, bias)
        return y if self._activation is None else self._activation(y)


def make_with(context: OpContext, config: Mapping[str, Any]) -> Scratch:
    """The op in the configuration `config`."""
    return Scratch(context, {**DEFAULT, **config})


def make(context: OpContext) -> Scratch:
    """The op in the fastest measured configuration, or in the default one."""
    return make_with(context, tuned.choose(KERNEL, context, DEFAULT))


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configurations worth timing."""
    for block_n in (16, 32, 64):
        for warps in (4, 8):
            yield {"block_n": block_n, "warps": warps}
