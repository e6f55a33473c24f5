"""linear.w8a8 and linear.fp8_block of float8 codes, kernel cublas: torch's own, so that measurements decide.

torch passes scales of rows and of blocks to cuBLAS from CUDA 12.9, and scales of rows to CUTLASS before. For blocks it
wants (aten/src/ATen/native/cuda/ScaledBlas.cpp):
- x_scale [T, groups] with tokens adjacent, and T a multiple of 4 (16 bytes)
- of the weight either a scale per output and group, outputs adjacent, or one per block of 128 outputs and group, with
  adjacent groups, a multiple of 4
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from llmcore.api import OpContext
from llmcore.layers import DTYPES

from llmcore_triton import tuned
from llmcore_triton.quantized.blocks import Packs, group_of, spread_of

KERNEL = "cublas"

MOST = 2048
"""With more tokens cuBLAS is faster than other kernels for codes that scale rows. A bucket has one kernel, so they
call it then."""

_TOKENS = 4
"""f32 scales of this many tokens have 16 bytes."""


class Cublas(Packs):
    """The op, for any number of tokens."""

    def __init__(self, context: OpContext) -> None:
        super().__init__(context)
        self._dtype, self._group = DTYPES[context.dtype], group_of(context)

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
        if self._group:
            return self._blocks(x, x_scale, codes, scale, bias)
        return torch._scaled_mm(
            *(x, codes.t(), x_scale.contiguous(), scale.t(), bias),
            out_dtype=self._dtype,
            use_fast_accum=True,
        )

    def _blocks(
        self,
        x: torch.Tensor,
        x_scale: torch.Tensor,
        codes: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        tokens = len(x)
        beyond = -tokens % _TOKENS
        if beyond:
            # as integers, because torch does not pad float8
            x = F.pad(x.view(torch.int8), (0, 0, 0, beyond)).view(x.dtype)
            x_scale = F.pad(x_scale, (0, 0, 0, beyond))
        single = spread_of(codes, scale) == 1
        y = F.scaled_mm(
            x,
            codes.t(),
            x_scale.t().contiguous().t(),
            F.ScalingType.BlockWise1x128,
            scale.t().contiguous().t() if single else scale.t(),
            F.ScalingType.BlockWise1x128 if single else F.ScalingType.BlockWise128x128,
            output_dtype=self._dtype,
        )
        if bias is not None:
            y += bias
        return y[:tokens]


def make(context: OpContext) -> Cublas:
    """Returns the op."""
    return Cublas(context)


def for_most(context: OpContext) -> Cublas | None:
    """Returns the op for more than MOST tokens. None if scales are of groups, or cuBLAS has not been measured."""
    return None if group_of(context) or tuned.find(KERNEL, context) is None else Cublas(context)


def make_with(context: OpContext, config: Mapping[str, Any]) -> Cublas:
    """The same as `make`: torch chooses the configuration."""
    return make(context)


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """The only configuration."""
    yield {}
