"""linear.w8a8 of float8 codes, kernel cublas_unscaled: cuBLAS multiplies codes, and a launch of ours applies scales.

cuBLAS is faster with one scale for a whole tensor than torch is with those of rows: 6,144 outputs of 4,096 inputs take
13.7 us instead of 15.0, the mean of 128 and 256 tokens on an H200 (`scripts/tune.py`). The products are bf16 in
between, whose range holds the largest sums of products of codes. So results are rounded twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from llmcore.api import OpContext
from llmcore.layers import DTYPES

from llmcore_triton.launch import place
from llmcore_triton.quantized.codes_finish import Finish


class CublasUnscaled:
    """The op, for any number of tokens."""

    def __init__(self, context: OpContext) -> None:
        self._dtype, self._finish = DTYPES[context.dtype], Finish(context, most=1, scaled=True)
        # made here: a call may be captured into a CUDA graph, and must not own memory
        self._one = torch.ones((), device=place(context))

    def __call__(
        self,
        x: torch.Tensor,
        x_scale: torch.Tensor,
        codes: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, inputs], x_scale [T, 1], codes [outputs, inputs], scale [outputs, 1] -> [T, outputs]."""
        out = torch._scaled_mm(x, codes.t(), self._one, self._one, out_dtype=self._dtype, use_fast_accum=True)
        self._finish(out, x_scale, scale, bias, out)
        return out


def make(context: OpContext) -> CublasUnscaled:
    """Returns the op."""
    return CublasUnscaled(context)


def make_with(context: OpContext, config: Mapping[str, Any]) -> CublasUnscaled:
    """The same as `make`: torch chooses the configuration."""
    return make(context)


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """The only configuration."""
    yield {}
