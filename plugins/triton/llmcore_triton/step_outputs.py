"""step_outputs: one thread per row, and one per sample.

Programs need no order, because requests are distinct: no program reads what another writes. Only filling rows and
samples share a request. There every row writes back what it read. Whatever length a sample reads there, it never
writes a length beyond the history.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers import Op

from llmcore_triton.launch import Bound, overlaps, release, wait

BLOCK = 128


@triton.jit(
    do_not_specialize=["n_rows", "n_samples"],
    do_not_specialize_on_alignment=["request", "n_query", "sample_request", "tokens", "finite"],
)
def _outputs(  # type: ignore[no-untyped-def]
    history,
    lengths,
    computed,
    request,
    n_query,
    sample_request,
    tokens,
    finite,
    out,
    n_rows,
    n_samples,
    stride,
    length,
    vocabulary,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wait(PDL)
    release(PDL)
    is_row, is_sample = index < n_rows, index < n_samples
    mine = tl.load(request + index, mask=is_row, other=0)
    new = tl.load(n_query + index, mask=is_row, other=0)
    sampled = tl.load(sample_request + index, mask=is_sample, other=0)
    token = tl.load(tokens + index, mask=is_sample, other=0)
    done = tl.load(computed + mine, mask=is_row, other=0)
    at = tl.minimum(tl.load(lengths + sampled, mask=is_sample, other=0), length - 1)
    # all filling samples of a request read its length before this program changes it
    tl.debug_barrier()
    tl.store(computed + mine, done + new, mask=is_row)
    fine = tl.load(finite + index, mask=is_sample, other=0) != 0
    read = tl.where(fine & (token >= 0) & (token < vocabulary), token, -1)
    tl.store(history + sampled.to(tl.int64) * stride + at, tl.maximum(read, 0), mask=is_sample)
    tl.store(lengths + sampled, at + 1, mask=is_sample)
    tl.store(out + index, read, mask=is_sample)


def make(context: OpContext) -> Op:
    """The kernel."""
    pdl = overlaps(context)
    fixed = {"BLOCK": BLOCK, "PDL": pdl, "launch_pdl": pdl, "num_warps": 4}
    launch = Bound(_outputs, **fixed)

    def run(
        state: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        request: torch.Tensor,
        n_query: torch.Tensor,
        sample_request: torch.Tensor,
        tokens: torch.Tensor,
        finite: torch.Tensor,
        vocabulary: int,
    ) -> torch.Tensor:
        """Changes state, (history [N, L], lengths [N], computed [N]) -> tokens [S] for the host."""
        history = state[0]
        n_rows, n_samples = request.shape[0], sample_request.shape[0]
        grid = ((max(n_rows, n_samples) + BLOCK - 1) // BLOCK,)
        counts = (n_rows, n_samples, history.stride(0), history.shape[1], vocabulary)
        out = torch.empty_like(tokens)
        launch(grid, *state, request, n_query, sample_request, tokens, finite, out, *counts)
        return out

    return run
