"""The division of a product among programs: each step is computed once, and each part is found again."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore_quantization.canonical import Scheme
from llmcore_quantization.ops import shape_of
from llmcore_triton.quantized import warpgroups
from llmcore_triton.quantized.shares import others_of, share, tile_of, turns, work_of

OUTPUTS, K_STEPS = 896, 4


@triton.jit
def count(  # type: ignore[no-untyped-def]
    computed, parts, expected, handed, tokens, outputs, whole, steps,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, K_STEPS: tl.constexpr,
):  # fmt: skip
    """Count how often each step of a tile is computed, and the parts that programs hand over and wait for."""
    work = work_of(tokens, outputs, whole, steps, TOKENS, COLUMNS, K_STEPS)
    begin, end = turns(work, K_STEPS)
    for turn in range(begin, end):
        row, column, k_first, k_end = tile_of(turn, work, TOKENS, COLUMNS, K_STEPS, 2)
        tile = row // TOKENS * tl.cdiv(outputs, COLUMNS) + column
        for k in range(k_first, k_end):
            tl.atomic_add(computed + tile * K_STEPS + k, 1)
        if k_first > 0:
            tl.atomic_add(parts + tile, 1)
            tl.atomic_add(handed + share(), 1)
        else:
            if k_end < K_STEPS:
                tl.store(expected + tile, others_of(turn, steps, K_STEPS))


@pytest.mark.parametrize("tokens", [200, 256, 300, 520, 900, 2000])
def test_each_step_is_computed_once(tokens: int) -> None:
    device = DeviceInfo("cpu", "", capability=90, processors=5)
    scheme = Scheme(codes="u4", group=128, zeros=True, scale="f16")
    shape = shape_of(scheme, 256 * K_STEPS, OUTPUTS, False, None)
    context = OpContext(op="linear.w4a16", dtype="bf16", bucket=4, shape=shape, device=device)
    cuts = set(warpgroups.make_with(context, {"tokens": 256}).cuts(tokens))
    assert any(cut.steps % K_STEPS for cut in cuts)
    for cut in cuts:
        tiles = -(-tokens // cut.tokens) * -(-OUTPUTS // cut.rows)
        computed, parts, expected, handed = (
            torch.zeros(n, dtype=torch.int32) for n in (tiles * K_STEPS, tiles, tiles, cut.programs)
        )
        count[(cut.programs,)](
            *(computed, parts, expected, handed, tokens, OUTPUTS, cut.whole, cut.steps, cut.tokens, cut.rows, K_STEPS)
        )
        assert torch.equal(computed, torch.ones_like(computed)), cut
        assert torch.equal(parts, expected), f"{cut}: a tile's parts are those that its first program waits for"
        assert handed.max() <= 1, f"{cut}: a share has one place for a part"
        assert bool(parts.any()) == bool(cut.steps % K_STEPS), cut
