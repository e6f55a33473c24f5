"""The last launch of linears over codes that have sums of products in memory: it adds parts and applies scales."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext

from llmcore_triton.launch import Bound, overlaps, release, wait

MOST = 8
"""The most parts of a sum."""


@triton.jit(do_not_specialize=["tokens", "parts", "apart"])
def finish(  # type: ignore[no-untyped-def]
    sums, x_scale, scale, bias, out, tokens, outputs, scale_stride, parts, apart,
    LINES: tl.constexpr, COLUMNS: tl.constexpr, MOST: tl.constexpr, SCALED: tl.constexpr, HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [tokens, outputs] = the sum of `parts` tensors in `sums`, each [apart, outputs].

    SCALED: times x_scale [tokens, 1] and scale [outputs, 1]. MOST: the most parts. If it is 1, `out` may be `sums`,
    else LINES is 1.
    """
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < outputs
    if SCALED:
        by_w = tl.load(scale + at, mask=inside, other=0.0)[None, :]
    wait(PDL)
    release(PDL)
    lines = tl.program_id(0) * LINES + tl.arange(0, LINES)
    here = (lines < tokens)[:, None] & inside[None, :]
    places = lines.to(tl.int64)[:, None] * outputs + at[None, :]
    if MOST == 1:
        acc = tl.load(sums + places, mask=here, other=0)
    else:
        # one load for all parts, because the compiler would let each of several loads wait for the one before
        part = tl.arange(0, MOST)[:, None]
        acc = tl.load(sums + (part * apart).to(tl.int64) * outputs + places, mask=here & (part < parts), other=0)
        acc = tl.sum(acc, axis=0, keep_dims=True)
    y = acc.to(tl.float32)
    if SCALED:
        y *= by_w
        y *= tl.load(x_scale + lines * scale_stride, mask=lines < tokens, other=0.0)[:, None]
    if HAS_BIAS:
        y += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(out + places, y.to(out.dtype.element_ty), mask=here)


class Finish:
    """`finish`, bound to a device. `most`: the most parts. `scaled`: the sums lack scales, which are those of rows."""

    def __init__(self, context: OpContext, most: int, scaled: bool) -> None:
        overlap = overlaps(context)
        # a thread loads eight numbers of one part, or four of each
        self._lines, self._columns = (4, 1024) if most == 1 else (1, 512)
        self._launch = Bound(
            finish,
            **{"LINES": self._lines, "COLUMNS": self._columns, "MOST": most, "SCALED": scaled},
            **{"PDL": overlap, "num_warps": 4 * self._lines, "launch_pdl": overlap},
        )

    def __call__(
        self,
        sums: torch.Tensor,
        x_scale: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        parts: int = 1,
        apart: int = 0,
    ) -> None:
        """Writes out [T, outputs]. sums: `parts` times [apart, outputs]. x_scale [T, 1 or groups]; scale [outputs, 1]
        or one of groups, which is not read."""
        tokens, outputs = out.shape
        self._launch.but(HAS_BIAS=bias is not None)(
            (-(-tokens // self._lines), -(-outputs // self._columns)),
            *(sums, x_scale, scale, out if bias is None else bias, out),
            *(tokens, outputs, x_scale.stride(0), parts, apart),
        )
