"""embedding: one program for each token and block of columns copies its part of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers import Op

from llmcore_triton.launch import Bound, overlaps, release, wait
from llmcore_triton.rows import power, size, warps

BLOCK_COLUMNS = 1024


@triton.jit
def _rows_of(ids, table, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = columns < SIZE
    wait(PDL)
    release(PDL)
    chosen = tl.load(ids + row).to(tl.int64)
    value = tl.load(table + chosen * SIZE + columns, mask=keep)
    tl.store(out + row * SIZE + columns, value, mask=keep)


def make(context: OpContext) -> Op:
    """The kernel. It has no choices worth measuring: a step needs it once."""
    width, pdl = size(context, "size"), overlaps(context)
    block = min(power(width), BLOCK_COLUMNS)
    blocks = -(-width // block)
    fixed = {"SIZE": width, "BLOCK": block, "PDL": pdl, "launch_pdl": pdl, "num_warps": warps(context, block, 1)}
    launch = Bound(_rows_of, **fixed)

    def run(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """ids [T], table [vocabulary, size] -> [T, size]."""
        n = ids.shape[0]
        out = torch.empty((n, width), dtype=table.dtype, device=table.device)
        launch((n, blocks), ids, table, out)
        return out

    return run
