"""rms_norm: one program per row. It keeps the row in registers between the sum and the product."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers import Op

from llmcore_triton.launch import Bound, overlaps, release, wait
from llmcore_triton.quantized.rows import store_rows
from llmcore_triton.rows import choose, power, size, small, warps

SHORT = 1024
"""The least elements of a program. It takes several rows if one has fewer."""

PLAIN = {"CODES": "", "GROUP": 0}
"""The constants of a norm that writes numbers of the model's type."""


@triton.jit(do_not_specialize=["n_rows"])
def norm_rows(  # type: ignore[no-untyped-def]
    x,
    residual,
    weight,
    out,
    n_rows,
    outer_stride,
    inner_stride,
    residual_stride,
    out_stride,
    eps,
    scales,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    CODES: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norms the rows of x, [n_rows / INNER, INNER, SIZE]. With ADD, residual += x first, and the sum is normed.

    With CODES (see quantized.rows) the result is written as codes, beside `scales`.
    """
    release(PDL)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    keep = (rows < n_rows)[:, None] & inside[None, :]
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    starts = (rows // INNER) * outer_stride + (rows % INNER) * inner_stride
    wait(PDL)
    value = tl.load(x + starts[:, None] + columns[None, :], mask=keep, other=0.0)
    if ADD:
        sums = residual + (rows * residual_stride)[:, None] + columns[None, :]
        # the op rounds to the residual's type before it norms
        value = (tl.load(sums, mask=keep, other=0.0).to(tl.float32) + value.to(tl.float32)).to(value.dtype)
        tl.store(sums, value, mask=keep)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / SIZE + eps)
    normed = (wide * scale[:, None] * gain[None, :]).to(value.dtype)
    if CODES != "":
        store_rows(normed, out, scales, rows, 0, n_rows, SIZE, CODES, GROUP)
    else:
        tl.store(out + (rows * out_stride)[:, None] + columns[None, :], normed, mask=keep)


def default(context: OpContext) -> Mapping[str, Any]:
    """The default: two loads per thread, or one if a step has few rows."""
    block = power(size(context, "size"))
    return {"num_warps": warps(context, max(block, SHORT), 1 if small(context) else 2)}


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Numbers of warps."""
    for number in (1, 2, 4, 8, 16, 32):
        if number * 32 <= max(power(size(context, "size")), SHORT) <= number * 32 * 64:
            yield {"num_warps": number}


def launcher(kernel: Any, context: OpContext, config: Mapping[str, Any], **more: Any) -> tuple[Bound, int]:
    """Returns a kernel that norms rows, and the rows per program."""
    width, pdl = size(context, "size"), overlaps(context)
    block = power(width)
    rows = max(1, SHORT // block)
    fixed = {"SIZE": width, "BLOCK": block, "ROWS": rows, "PDL": pdl, "launch_pdl": pdl, **more, **config}
    return Bound(kernel, **fixed), rows


def as_rows(x: torch.Tensor) -> tuple[torch.Tensor, int, int, tuple[int, int, int, int]]:
    """Returns x [..., size] with two or three dimensions, its inner rows per outer row, and the number of all rows.

    The last item has strides as the kernels take them: outer rows, inner rows, a residual (none), the result.
    """
    width = x.shape[-1]
    if x.dim() == 3:
        return x, x.shape[1], x.shape[0] * x.shape[1], (x.stride(0), x.stride(1), 0, width)
    x = x if x.dim() == 2 else x.reshape(-1, width)
    return x, 1, x.shape[0], (x.stride(0), 0, 0, width)


def make_with(context: OpContext, config: Mapping[str, Any]) -> Op:
    """The kernel in the configuration `config`. It takes x of two or three dimensions; any other x is reshaped to
    two."""
    launch, rows = launcher(norm_rows, context, config, ADD=False, **PLAIN)

    def run(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., size] -> [..., size]."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        x, inner, n, strides = as_rows(x)
        launch.but(INNER=inner)(((n + rows - 1) // rows,), x, x, weight, out, n, *strides, eps, out)
        return out

    return run


def make(context: OpContext) -> Op:
    """The kernel in the measured configuration, or in the default one."""
    return make_with(context, choose(context, default(context)))
