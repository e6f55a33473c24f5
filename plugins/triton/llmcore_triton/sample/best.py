"""sample.best: the best of chunks, then of the part, in two launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers import Op

from llmcore_triton.launch import Bound, overlaps, release, wait
from llmcore_triton.sample.greedy import DEFAULTS
from llmcore_triton.sample.peaks import first_of, peaks, width_of


@triton.jit(do_not_specialize=["begin"])
def _column(  # type: ignore[no-untyped-def]
    best, first, out, begin, VOCAB: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    release(PDL)
    high, token = first_of(best, first, row, VOCAB, PARTS, WIDTH)
    tl.store(out + 2 * row, high)
    tl.store(out + 2 * row + 1, (begin + token).to(tl.float32))


def make(context: OpContext) -> Op:
    """The kernels, in the default configuration of the greedy sampler."""
    pdl, config = overlaps(context), DEFAULTS[min(context.bucket, 2)]
    launch = Bound(_column, PDL=pdl, launch_pdl=pdl, num_warps=1)

    def best(logits: torch.Tensor, first: int) -> torch.Tensor:
        """logits [S, N], tokens from `first` on -> [S, 2] f32."""
        found = peaks(logits, pdl, chunk=config["chunk"], num_warps=config["num_warps"])
        parts = found.best.shape[1]
        out = torch.empty((len(logits), 2), dtype=torch.float32, device=logits.device)
        sizes = {"VOCAB": logits.shape[1], "PARTS": parts, "WIDTH": width_of(parts)}
        launch.but(**sizes)((len(logits),), found.best, found.first, out, first)
        return out

    return best
