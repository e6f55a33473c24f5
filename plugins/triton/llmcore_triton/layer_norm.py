"""layer_norm: one program per row. It keeps the row in registers for mean, variance and product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers import Op

from llmcore_triton.launch import release, wait
from llmcore_triton.rms_norm import as_rows, candidates, default, launcher
from llmcore_triton.rows import choose

__all__ = ["candidates", "default", "make", "make_with"]


@triton.jit(do_not_specialize=["n_rows"])
def norm_rows(  # type: ignore[no-untyped-def]
    x,
    residual,
    weight,
    bias,
    out,
    n_rows,
    outer_stride,
    inner_stride,
    residual_stride,
    out_stride,
    eps,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    OWN: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norms the rows of x, [n_rows / INNER, INNER, SIZE]. With ADD, residual += x first, and the sum is normed.

    OWN: each of the INNER rows has a weight and a bias of its own.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    keep = (rows < n_rows)[:, None] & inside[None, :]
    places = columns[None, :] + (rows % INNER * SIZE)[:, None] if OWN else columns[None, :]
    gain = tl.load(weight + places, mask=inside[None, :], other=0.0).to(tl.float32)
    starts = (rows // INNER) * outer_stride + (rows % INNER) * inner_stride
    wait(PDL)
    release(PDL)
    value = tl.load(x + starts[:, None] + columns[None, :], mask=keep, other=0.0)
    if ADD:
        sums = residual + (rows * residual_stride)[:, None] + columns[None, :]
        # the op rounds to the residual's type before it norms
        value = (tl.load(sums, mask=keep, other=0.0).to(tl.float32) + value.to(tl.float32)).to(value.dtype)
        tl.store(sums, value, mask=keep)
    wide = value.to(tl.float32)
    # a plain division is off by an ulp or two; a row of one number and a small eps make that a thousand times as large
    mean = tl.div_rn(tl.sum(wide, axis=1), tl.full([ROWS], SIZE, tl.float32))
    # not the mean of squares minus the square of the mean: that cancels for rows far from zero
    wide = tl.where(inside[None, :], wide - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / SIZE + eps)
    normed = wide * scale[:, None] * gain
    if BIAS:
        normed += tl.load(bias + places, mask=inside[None, :], other=0.0).to(tl.float32)
    tl.store(out + (rows * out_stride)[:, None] + columns[None, :], normed.to(value.dtype), mask=keep)


def make_with(context: OpContext, config: Mapping[str, Any]) -> Op:
    """The kernel in the configuration `config`. It takes x of two or three dimensions; any other x is reshaped to
    two."""
    launch, rows = launcher(norm_rows, context, config, ADD=False)

    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        """x [..., size] -> [..., size]."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        x, inner, n, strides = as_rows(x)
        variant = launch.but(INNER=inner, OWN=weight.dim() == 2, BIAS=bias is not None)
        variant(((n + rows - 1) // rows,), x, x, weight, weight if bias is None else bias, out, n, *strides, eps)
        return out

    return run


def make(context: OpContext) -> Op:
    """The kernel in the measured configuration, or in the default one."""
    return make_with(context, choose(context, default(context)))
