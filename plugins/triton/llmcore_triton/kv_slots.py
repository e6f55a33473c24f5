"""kv_slots: one thread per token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers import Op

from llmcore_triton.launch import Bound, overlaps, release, wait

BLOCK = 128


@triton.jit(do_not_specialize=["n_tokens"], do_not_specialize_on_alignment=["owner", "positions"])
def _slots(  # type: ignore[no-untyped-def]
    table, owner, positions, slots, n_tokens, stride, GRANULE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    tokens = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = tokens < n_tokens
    wait(PDL)
    release(PDL)
    row = tl.load(owner + tokens, mask=keep, other=0).to(tl.int64)
    position = tl.load(positions + tokens, mask=keep, other=0)
    granule = tl.load(table + row * stride + position // GRANULE, mask=keep, other=0).to(tl.int64)
    tl.store(slots + tokens, granule * GRANULE + position % GRANULE, mask=keep)


def make(context: OpContext) -> Op:
    """The kernel."""
    pdl = overlaps(context)
    fixed = {"GRANULE": context.granule, "BLOCK": BLOCK, "PDL": pdl, "launch_pdl": pdl, "num_warps": 4}
    launch = Bound(_slots, **fixed)

    def run(table: torch.Tensor, owner: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """table [N, places], owner [T], positions [T] -> slots [T] int64."""
        n = owner.shape[0]
        slots = torch.empty((n,), dtype=torch.int64, device=owner.device)
        launch(((n + BLOCK - 1) // BLOCK,), table, owner, positions, slots, n, table.stride(0))
        return slots

    return run
