"""Linears with weights of 8 bits, kernel gemv: one token at a time, without tensor cores.

linear.w8a8 and linear.fp8_block have inputs of 8 bits, linear.w8a16 and linear.w8a16_silu_and_mul plain inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from llmcore.api import OpContext
from llmcore.layers import DTYPES

from llmcore_triton import tuned
from llmcore_triton.launch import Bound, overlaps
from llmcore_triton.linear_gemv import KERNEL
from llmcore_triton.linear_shapes import EIGHT_BITS, is_gated, power_of_two
from llmcore_triton.quantized.blocks import Packs, group_of, spread_of
from llmcore_triton.quantized.gemv_kernel import CHUNK, gemv_codes
from llmcore_triton.quantized.packing import Packing

DEFAULT = {"block_n": 4, "block_k": 1024, "warps": 2}


class _Launch:
    """The kernel, bound to a configuration.

    `words`: see the kernel. Tensors start at multiples of 4 bytes, and inputs are a multiple of 16. More tokens than
    one are right, but each reads all weights again.
    """

    def __init__(self, context: OpContext, config: Mapping[str, Any], words: int) -> None:
        inputs = int(context.shape["inputs"] or 0)
        if inputs % CHUNK.value:
            raise ValueError(f"{context.op}={KERNEL} needs inputs to be a multiple of {CHUNK.value}, has {inputs}")
        self._gated, self._config, self._inputs = is_gated(context), config, inputs
        overlap = overlaps(context)
        self._bound = Bound(
            gemv_codes,
            **{"GATED": self._gated, "GROUP": group_of(context), "WORDS": words, "CODES": context.shape["codes"]},
            **{"PDL": overlap, "num_warps": config["warps"], "launch_pdl": overlap},
        )

    def __call__(
        self,
        x: torch.Tensor,
        x_scale: torch.Tensor | None,
        codes: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        strides: tuple[int, int],
        spread: int,
    ) -> torch.Tensor:
        """`strides`: the distance between scales of rows, and of groups. `spread`: the rows that share a scale."""
        rows, length = codes.shape[0], codes.shape[1] * codes.element_size()
        outputs, block_n = rows // (1 + self._gated), self._config["block_n"]
        block_k = min(self._config["block_k"], power_of_two(length))
        out = x.new_empty(len(x), outputs, dtype=dtype)
        launch = self._bound.but(
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            HAS_BIAS=bias is not None,
            EVEN_N=outputs % block_n == 0,
            EVEN_K=length == self._inputs and length % block_k == 0,
            SPREAD=spread,
        )
        launch(
            (-(-outputs // block_n), len(x)),
            *(x, x_scale, codes, scale, out if bias is None else bias, out),
            *(outputs, self._inputs, length, x.stride(0), None if x_scale is None else x_scale.stride(0), *strides),
        )
        return out


class Codes(Packs):
    """linear.w8a8 or linear.fp8_block, bound to a configuration."""

    def __init__(self, context: OpContext, config: Mapping[str, Any]) -> None:
        super().__init__(context)
        self._launch, self._dtype = _Launch(context, config, 0), DTYPES[context.dtype]

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
        strides, spread = (scale.shape[1], 1), spread_of(codes, scale)
        return self._launch(x, x_scale, codes, scale, bias, self._dtype, strides, spread)


class WeightOnly:
    """linear.w8a16, alone or with silu_and_mul, bound to a configuration. It takes canonical and packed tensors.

    Raises ValueError for groups that are not whole blocks, and for zeros.
    """

    def __init__(self, context: OpContext, config: Mapping[str, Any]) -> None:
        form = self._form = Packing(context)
        if context.shape["zeros"] or form.alike < form.blocks.parts:
            raise ValueError(f"{context.op}={KERNEL} needs whole blocks to share a scale, and no zeros")
        self.packing, self.pack = form.name, form.pack
        self._launch = _Launch(context, config, form.blocks.words)

    def __call__(
        self,
        x: torch.Tensor,
        codes: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor | None = None,
        order: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, inputs], a weight in the canonical or the packed form -> [T, outputs], or half of that if gated."""
        x, codes, scale = self._form.arranged(x, codes, scale, zero, order)
        return self._launch(x, None, codes, scale, bias, x.dtype, (1, len(codes)), 1)


def make_with(context: OpContext, config: Mapping[str, Any]) -> Codes | WeightOnly:
    """The op in the configuration `config`."""
    kind = Codes if context.op in EIGHT_BITS else WeightOnly
    return kind(context, {**DEFAULT, **config})


def make(context: OpContext) -> Codes | WeightOnly:
    """The op in the fastest measured configuration, or in the default one."""
    return make_with(context, tuned.choose(KERNEL, context, DEFAULT))


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configurations worth timing: 32 to 128 codes per thread and step, and all warps on the same rows.

    Codes of x are as dear to convert as those of the weight, so several rows share them. If warps had different rows,
    x would move between threads through shared memory in each step. Programs of one warp with more than 64 codes per
    thread spill registers.
    """
    for warps in (1, 2, 4):
        for block_k in (512, 1024, 2048, 4096):
            for block_n in (1, 2, 4):
                rows = (1 + is_gated(context)) * block_n
                chunks = block_k // (32 * CHUNK.value * warps)
                if rows > 1 and chunks and 32 <= rows * chunks * CHUNK.value <= 64 * min(warps, 2):
                    yield {"block_n": block_n, "block_k": block_k, "warps": warps}
