"""sample.pick: one program per row reads two numbers of every rank."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers import Op

from llmcore_triton.launch import Bound, overlaps, release, wait
from llmcore_triton.sample.numbers import COLUMNS
from llmcore_triton.sample.peaks import width_of


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=COLUMNS)
def _pick(  # type: ignore[no-untyped-def]
    best,
    drawn,
    temperature,
    tokens,
    finite,
    count,
    RANKS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, WIDTH)
    place = (rank * count + row) * 2
    wait(PDL)
    release(PDL)
    score = tl.load(best + place, mask=rank < RANKS, other=float("-inf"))
    token = tl.load(best + place + 1, mask=rank < RANKS, other=0.0)
    tl.store(finite + row, tl.abs(tl.max(score, 0)) < float("inf"))
    if tl.load(temperature + row) > 0:
        score = tl.load(drawn + place, mask=rank < RANKS, other=float("-inf"))
        token = tl.load(drawn + place + 1, mask=rank < RANKS, other=0.0)
    winner = tl.min(tl.where(score == tl.max(score, 0), rank, WIDTH), 0)
    tl.store(tokens + row, tl.sum(tl.where(rank == winner, token, 0.0), 0).to(tl.int32))


def make(context: OpContext) -> Op:
    """The kernel. A row that is not finite may get token 0."""
    pdl = overlaps(context)
    launch = Bound(_pick, PDL=pdl, launch_pdl=pdl, num_warps=1)

    def pick(best: torch.Tensor, drawn: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """best, drawn [ranks, S, 2] -> tokens [S] int32, finite [S] bool."""
        ranks, count = best.shape[:2]
        tokens = torch.empty(count, dtype=torch.int32, device=best.device)
        finite = torch.empty(count, dtype=torch.bool, device=best.device)
        chosen = launch.but(RANKS=ranks, WIDTH=width_of(ranks))
        chosen((count,), best.contiguous(), drawn.contiguous(), temperature, tokens, finite, count)
        return tokens, finite

    return pick
