"""sample.part: a block of the part by its mass, then a token in it, in two launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers import Op
from llmcore.layers.sampling import BLOCK, SampleRows

from llmcore_triton.launch import Bound, overlaps, release, wait
from llmcore_triton.sample.draw import heaviest, heaviest_of, loudest
from llmcore_triton.sample.numbers import COLUMNS, exp, tempered
from llmcore_triton.sample.peaks import CHUNK, width_of


@triton.jit(do_not_specialize=["first", "count"], do_not_specialize_on_alignment=COLUMNS)
def _weigh(  # type: ignore[no-untyped-def]
    scores,
    stride,
    first,
    best,
    count,
    temperature,
    seed,
    choice,
    position,
    weights,
    blocks,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    RANKS_WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Writes the best of a chunk's blocks: its noisy log mass and its index in the part."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    block = chunk * (CHUNK // BLOCK) + tl.arange(0, CHUNK // BLOCK)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    wait(PDL)
    warm = tl.load(temperature + row)
    weight, chosen = float("-inf"), chunk * (CHUNK // BLOCK)
    if warm > 0:
        score = tl.load(scores + row * stride + at, mask=at < VOCAB, other=float("-inf")).to(tl.float32)
        rank = tl.arange(0, RANKS_WIDTH)
        high = tl.max(tl.load(best + (rank * count + row) * 2, mask=rank < RANKS, other=float("-inf")), 0)
        mass = exp(tempered(score, warm) - tempered(high, warm)).to(tl.float64)
        # where all are NaN, a block that is not negative: an empty part has none
        weight, chosen = heaviest(mass, seed, choice, position, row, block, first // BLOCK, VOCAB // BLOCK)
    release(PDL)
    tl.store(weights + row * PARTS + chunk, weight)
    tl.store(blocks + row * PARTS + chunk, chosen)


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=COLUMNS)
def _choose(  # type: ignore[no-untyped-def]
    scores,
    stride,
    first,
    temperature,
    seed,
    choice,
    position,
    weights,
    blocks,
    out,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    release(PDL)
    warm = tl.load(temperature + row)
    weight, token = float("-inf"), first
    if warm > 0:
        weight, chosen = heaviest_of(weights, blocks, row, VOCAB // BLOCK, PARTS, WIDTH)
        at = chosen * BLOCK + tl.arange(0, BLOCK)
        score = tl.load(scores + row * stride + at, mask=at < VOCAB, other=float("-inf")).to(tl.float32)
        token = loudest(tempered(score, warm), seed, choice, position, row, at, first, VOCAB)
        token = first + tl.minimum(token, VOCAB - 1)
    tl.store(out + 2 * row, weight)
    tl.store(out + 2 * row + 1, token.to(tl.float32))


def make(context: OpContext) -> Op:
    """The kernels. A block's mass is summed in the order of the variants of `sample`."""
    pdl = overlaps(context)
    fixed = {"BLOCK": BLOCK, "PDL": pdl, "launch_pdl": pdl}
    weigh = Bound(_weigh, CHUNK=CHUNK, num_warps=8, **fixed)
    choose = Bound(_choose, num_warps=1, **fixed)

    def part(logits: torch.Tensor, first: int, best: torch.Tensor, rows: SampleRows) -> torch.Tensor:
        """logits [S, N], tokens from `first` on, best [ranks, S, 2] -> [S, 2] f32."""
        count, vocabulary = logits.shape
        chunks, ranks = max(1, -(-vocabulary // CHUNK)), len(best)
        weights = torch.empty((count, chunks), dtype=torch.float32, device=logits.device)
        blocks = torch.empty((count, chunks), dtype=torch.int32, device=logits.device)
        out = torch.empty((count, 2), dtype=torch.float32, device=logits.device)
        source, noise = (logits, logits.stride(0), first), (rows.temperature, rows.seed, rows.choice, rows.position)
        sizes = {"VOCAB": vocabulary, "PARTS": chunks}
        launch = weigh.but(**sizes, RANKS=ranks, RANKS_WIDTH=width_of(ranks))
        launch((chunks, count), *source, best.contiguous(), count, *noise, weights, blocks)
        choose.but(**sizes, WIDTH=width_of(chunks))((count,), *source, *noise, weights, blocks, out)
        return out

    return part
