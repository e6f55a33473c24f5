"""rope_angles: one program for a few tokens. Triton's sine reduces large angles exactly, unlike the hardware's own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers import Op

from llmcore_triton.launch import Bound, overlaps, release, wait
from llmcore_triton.rows import power, size

TOKENS = 2
"""Tokens per program. It is small because a step needs the angles soon, and only once."""


@triton.jit(do_not_specialize=["n_tokens"], do_not_specialize_on_alignment=["positions"])
def _angles(  # type: ignore[no-untyped-def]
    positions,
    frequencies,
    cos,
    sin,
    n_tokens,
    amplitude,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    pairs = tl.arange(0, BLOCK)
    frequency = tl.load(frequencies + pairs, mask=pairs < HALF, other=0.0)
    wait(PDL)
    release(PDL)
    position = tl.load(positions + tokens, mask=tokens < n_tokens, other=0).to(tl.float32)
    angle = position[:, None] * frequency[None, :]
    c, s = tl.cos(angle) * amplitude, tl.sin(angle) * amplitude
    keep = (tokens < n_tokens)[:, None] & (pairs < HALF)[None, :]
    at = tokens[:, None] * (2 * HALF) + pairs[None, :]
    tl.store(cos + at, c, mask=keep)
    tl.store(cos + at + HALF, c, mask=keep)
    tl.store(sin + at, -s, mask=keep)
    tl.store(sin + at + HALF, s, mask=keep)


def make(context: OpContext) -> Op:
    """The kernel. It has no choices worth measuring: a step needs it once."""
    rotated, pdl = size(context, "rotated"), overlaps(context)
    half = rotated // 2
    fixed = {"HALF": half, "BLOCK": power(half), "TOKENS": TOKENS, "PDL": pdl, "launch_pdl": pdl, "num_warps": 2}
    launch = Bound(_angles, **fixed)

    def run(positions: torch.Tensor, frequencies: torch.Tensor, amplitude: float) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [T], frequencies [rotated / 2] -> cos, sin [T, rotated] f32."""
        n = positions.shape[0]
        cos = torch.empty((n, rotated), dtype=torch.float32, device=positions.device)
        sin = torch.empty_like(cos)
        launch(((n + TOKENS - 1) // TOKENS,), positions, frequencies, cos, sin, n, float(amplitude))
        return cos, sin

    return run
