"""The part that all kernels share that write rows as codes and scales: each rounds to the grid of its row or group.

Kernels take CODES, "i8" or "e4m3", and GROUP: the neighbours that share a scale, or 0 for a whole row. A scale is the
largest magnitude divided by 127 or 448, and 1 where all values are 0. A row with a NaN or an infinity gets a NaN.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext

from llmcore_triton.quantized_kv import ROUNDING, largest, quotient, spread, to_e4m3
from llmcore_triton.rows import size

TYPES = {"i8": torch.int8, "e4m3": torch.float8_e4m3fn}


def form(context: OpContext) -> dict[str, Any]:
    """Returns the constants CODES and GROUP of the context's shape."""
    return {"CODES": context.shape["codes"], "GROUP": size(context, "group")}


class Outputs:
    """Makes the tensors that a kernel of `context` writes."""

    def __init__(self, context: OpContext) -> None:
        width = size(context, "size")
        self._width, self._marks = width, width // (size(context, "group") or width)
        self._type = TYPES[str(context.shape["codes"])]

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns codes [T, size] and scales [T, size / group] f32 (group 0: [T, 1]) without content."""
        codes = x.new_empty(len(x), self._width, dtype=self._type)
        return codes, x.new_empty(len(x), self._marks, dtype=torch.float32)


@triton.jit
def store_rows(  # type: ignore[no-untyped-def]
    value, codes, scales, rows, first, n_rows,
    SIZE: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Stores the elements [R, B] from column `first` of `rows` [R]. Elements outside of [n_rows, SIZE] are 0.

    A block has whole groups. With GROUP 0 it is the whole row.
    """
    R: tl.constexpr = value.shape[0]
    B: tl.constexpr = value.shape[1]
    SHARED: tl.constexpr = GROUP if GROUP > 0 else B
    MARKS: tl.constexpr = SIZE // GROUP if GROUP > 0 else 1
    wide = value.to(tl.float32)
    size = tl.where(wide == wide, tl.abs(wide), float("inf"))
    scale = tl.div_rn(tl.max(tl.reshape(size, [R, B // SHARED, SHARED]), 2), largest(CODES))
    scale = tl.where(scale == 0.0, 1.0, scale)
    part = first // SHARED + tl.arange(0, B // SHARED)
    here = (rows < n_rows)[:, None] & (part < MARKS)[None, :]
    known = tl.where(scale < float("inf"), scale, float("nan"))
    tl.store(scales + (rows * MARKS)[:, None] + part[None, :], known, mask=here)
    store_codes(wide, codes, rows, first, n_rows, scale, SIZE, CODES)


@triton.jit
def store_codes(  # type: ignore[no-untyped-def]
    wide, codes, rows, first, n_rows, scale, SIZE: tl.constexpr, CODES: tl.constexpr
):
    """Stores the codes of `wide` [R, B] f32 under `scale` [R, P]: each is for B / P neighbours. Values beyond the last
    code become it."""
    B: tl.constexpr = wide.shape[1]
    steps, exact = quotient(wide, spread(scale, B), spread(tl.div_rn(1.0, scale), B))
    if CODES == "e4m3":
        made = to_e4m3(steps, exact)
    else:
        bounded = tl.minimum(tl.maximum(exact, -128.0), 127.0)
        # the last byte of the sum's bits is the nearest integer
        made = (bounded + ROUNDING).to(tl.int32, bitcast=True).to(tl.int8)
    columns = first + tl.arange(0, B)
    keep = (rows < n_rows)[:, None] & (columns < SIZE)[None, :]
    tl.store(codes + (rows * SIZE)[:, None] + columns[None, :], made, mask=keep)
