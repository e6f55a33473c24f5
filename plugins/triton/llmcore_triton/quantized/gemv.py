"""linear.w8a8 and linear.fp8_block, kernel gemv: one token at a time, without tensor cores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from llmcore.api import OpContext
from llmcore.layers import DTYPES

from llmcore_triton import tuned
from llmcore_triton.launch import Bound, overlaps
from llmcore_triton.linear_gemv import KERNEL
from llmcore_triton.linear_shapes import power_of_two
from llmcore_triton.quantized.blocks import Packs, group_of, spread_of
from llmcore_triton.quantized.gemv_kernel import CHUNK, gemv_codes

DEFAULT = {"block_n": 4, "block_k": 1024, "warps": 2}


class Codes(Packs):
    """The linear, bound to a configuration.

    Tensors start at multiples of 4 bytes, and inputs are a multiple of 16. More tokens than one are right, but each
    reads all weights again.
    """

    def __init__(self, context: OpContext, config: Mapping[str, Any]) -> None:
        super().__init__(context)
        inputs = int(context.shape["inputs"] or 0)
        if inputs % CHUNK.value:
            raise ValueError(f"{context.op}={KERNEL} needs inputs to be a multiple of {CHUNK.value}, has {inputs}")
        self._config, self._dtype, overlap = config, DTYPES[context.dtype], overlaps(context)
        self._bound = Bound(
            gemv_codes,
            **{"GROUP": group_of(context), "CODES": context.shape["codes"]},
            **{"PDL": overlap, "num_warps": config["warps"], "launch_pdl": overlap},
        )

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
        (outputs, inputs), block_n = codes.shape, self._config["block_n"]
        block_k = min(self._config["block_k"], power_of_two(inputs))
        out = x.new_empty(len(x), outputs, dtype=self._dtype)
        launch = self._bound.but(
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            HAS_BIAS=bias is not None,
            EVEN_N=outputs % block_n == 0,
            EVEN_K=inputs % block_k == 0,
            SPREAD=spread_of(codes, scale),
        )
        launch(
            (-(-outputs // block_n), len(x)),
            *(x, x_scale, codes, scale, out if bias is None else bias, out),
            *(inputs, x.stride(0), x_scale.stride(0), scale.shape[1], outputs),
        )
        return out


def make_with(context: OpContext, config: Mapping[str, Any]) -> Codes:
    """The op in the configuration `config`."""
    return Codes(context, {**DEFAULT, **config})


def make(context: OpContext) -> Codes:
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
            for block_n in (2, 4):
                chunks = block_k // (32 * CHUNK.value * warps)
                if chunks and 32 <= block_n * chunks * CHUNK.value <= 64 * min(warps, 2):
                    yield {"block_n": block_n, "block_k": block_k, "warps": warps}
