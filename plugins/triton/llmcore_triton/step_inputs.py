"""step_inputs: one thread per token, and one per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers import Op

from llmcore_triton.launch import Bound, overlaps, release, wait

BLOCK = 128


@triton.jit(
    do_not_specialize=["n_tokens", "n_rows"],
    do_not_specialize_on_alignment=["request", "n_query", "row", "offset"],
)
def _inputs(  # type: ignore[no-untyped-def]
    history,
    computed,
    prompt_len,
    request,
    n_query,
    row,
    offset,
    tokens,
    positions,
    owners,
    prompts,
    kv_len,
    n_tokens,
    n_rows,
    stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wait(PDL)
    release(PDL)
    is_token = index < n_tokens
    owner = tl.load(request + tl.load(row + index, mask=is_token, other=0), mask=is_token, other=0)
    step = tl.load(offset + index, mask=is_token, other=0)
    is_row = index < n_rows
    mine = tl.load(request + index, mask=is_row, other=0)
    new = tl.load(n_query + index, mask=is_row, other=0)
    position = tl.load(computed + owner, mask=is_token, other=0) + step
    tl.store(positions + index, position, mask=is_token)
    tl.store(owners + index, owner, mask=is_token)
    tl.store(prompts + index, tl.load(prompt_len + owner, mask=is_token, other=0), mask=is_token)
    token = tl.load(history + owner.to(tl.int64) * stride + position, mask=is_token, other=0)
    tl.store(tokens + index, token.to(tl.int64), mask=is_token)
    tl.store(kv_len + index, tl.load(computed + mine, mask=is_row, other=0) + new, mask=is_row)


def make(context: OpContext) -> Op:
    """The kernel."""
    pdl = overlaps(context)
    fixed = {"BLOCK": BLOCK, "PDL": pdl, "launch_pdl": pdl, "num_warps": 4}
    launch = Bound(_inputs, **fixed)

    def run(
        state: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        request: torch.Tensor,
        n_query: torch.Tensor,
        row: torch.Tensor,
        offset: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """request, n_query [R], row, offset [T] -> tokens, positions, owner, prompt_len [T], kv_len [R]."""
        n_tokens, n_rows, where = row.shape[0], request.shape[0], row.device
        tokens = torch.empty((n_tokens,), dtype=torch.int64, device=where)
        positions, owner, prompts = (torch.empty((n_tokens,), dtype=torch.int32, device=where) for _ in range(3))
        kv_len = torch.empty((n_rows,), dtype=torch.int32, device=where)
        out = (tokens, positions, owner, prompts, kv_len)
        grid = ((max(n_tokens, n_rows) + BLOCK - 1) // BLOCK,)
        launch(grid, *state, request, n_query, row, offset, *out, n_tokens, n_rows, state[0].stride(0))
        return out

    return run
