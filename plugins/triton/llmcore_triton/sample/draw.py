"""The draw: first a block of the vocabulary by its mass, then a token in it. All variants but the greedy one use
it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from llmcore.layers.sampling import BLOCK, SampleRows
from torch import Tensor

from llmcore_triton.launch import release, wait
from llmcore_triton.sample.numbers import COLUMNS, exp, gumbel, tempered
from llmcore_triton.sample.peaks import CHUNK, Peaks, first_of, peak_of, width_of


@triton.jit
def heaviest(mass, seed, choice, position, row, block, skipped, LAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the greatest noisy log mass of a chunk's blocks, and the first block that has it.

    `mass`: of each token, [blocks, BLOCK]. `skipped`: blocks of the vocabulary before block 0."""
    noise = gumbel(tl.load(seed + row), tl.load(choice + row), tl.load(position + row), block + skipped, 1)
    noisy = tl.log(tl.sum(mass, 1)).to(tl.float32) + noise
    weight = tl.max(noisy, 0)
    return weight, tl.min(tl.where(noisy == weight, block, LAST), 0)


@triton.jit
def heaviest_of(weights, blocks, row, LAST: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the greatest weight of a row's chunks, and the first block that has it."""
    part = tl.arange(0, WIDTH)
    weight = tl.load(weights + row * PARTS + part, mask=part < PARTS, other=float("-inf"))
    block = tl.load(blocks + row * PARTS + part, mask=part < PARTS, other=0)
    most = tl.max(weight, 0)
    return most, tl.min(tl.where((weight == most) & (part < PARTS), block, LAST), 0)


@triton.jit
def loudest(score, seed, choice, position, row, at, skipped, VOCAB: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the first token of a block with the greatest noisy score. `skipped`: tokens before token 0."""
    noise = gumbel(tl.load(seed + row), tl.load(choice + row), tl.load(position + row), at + skipped, 0)
    noisy = score + noise
    return tl.min(tl.where(noisy == tl.max(noisy, 0), at, VOCAB - 1), 0)


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _weigh(  # type: ignore[no-untyped-def]
    scores,
    stride,
    best,
    floors,
    ceilings,
    temperature,
    seed,
    choice,
    position,
    weights,
    blocks,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    FILTERED: tl.constexpr,
    CAPPED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Writes the best of a chunk's blocks: its noisy log mass and its index."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    block = chunk * (CHUNK // BLOCK) + tl.arange(0, CHUNK // BLOCK)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    wait(PDL)
    warm = tl.load(temperature + row)
    floor = float("-inf")
    if FILTERED:
        floor = tl.load(floors + row)
    weight, chosen = float("-inf"), chunk * (CHUNK // BLOCK)
    # the tokens that a filter keeps are mostly in a few chunks
    peak = tempered(tl.load(best + row * PARTS + chunk), tl.where(warm > 0, warm, 1.0))
    if (warm > 0) & (peak >= floor):
        score = tl.load(scores + row * stride + at, mask=at < VOCAB, other=float("-inf")).to(tl.float32)
        high = peak_of(best, row, PARTS, WIDTH)
        score = tempered(score, warm)
        kept = score >= floor
        if CAPPED:
            kept = kept & (score <= tl.load(ceilings + row))
        mass = tl.where(kept, exp(score - tempered(high, warm)), 0.0).to(tl.float64)
        weight, chosen = heaviest(mass, seed, choice, position, row, block, 0, (VOCAB - 1) // BLOCK)
    release(PDL)
    tl.store(weights + row * PARTS + chunk, weight)
    tl.store(blocks + row * PARTS + chunk, chosen)


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _choose(  # type: ignore[no-untyped-def]
    scores,
    stride,
    best,
    first,
    raw_best,
    floors,
    ceilings,
    temperature,
    seed,
    choice,
    position,
    weights,
    blocks,
    tokens,
    finite,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    FILTERED: tl.constexpr,
    CAPPED: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    release(PDL)
    tl.store(finite + row, tl.abs(peak_of(raw_best, row, PARTS, WIDTH)) < float("inf"))
    warm = tl.load(temperature + row)
    _, token = first_of(best, first, row, VOCAB, PARTS, WIDTH)
    if warm > 0:
        _, chosen = heaviest_of(weights, blocks, row, (VOCAB - 1) // BLOCK, PARTS, WIDTH)
        at = chosen * BLOCK + tl.arange(0, BLOCK)
        score = tl.load(scores + row * stride + at, mask=at < VOCAB, other=float("-inf")).to(tl.float32)
        score = tempered(score, warm)
        if FILTERED:
            score = tl.where(score >= tl.load(floors + row), score, float("-inf"))
        if CAPPED:
            score = tl.where(score <= tl.load(ceilings + row), score, float("-inf"))
        token = loudest(score, seed, choice, position, row, at, 0, VOCAB)
    # rows that are not finite also get some token of the vocabulary
    tl.store(tokens + row, tl.minimum(token, VOCAB - 1))


def draw(
    scores: Tensor,
    found: Peaks,
    raw_best: Tensor,
    rows: SampleRows,
    floors: Tensor | None,
    pdl: bool,
    ceilings: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (tokens [S] int32, finite [S]) of scores [S, V] whose peaks are `found`. `floors` and `ceilings` [S]
    f32: the least and the greatest tempered score of a row that may be drawn."""
    count, vocabulary = scores.shape
    parts = found.best.shape[1]
    weights = torch.empty_like(found.best)
    blocks = torch.empty_like(found.first)
    tokens = torch.empty(count, dtype=torch.int32, device=scores.device)
    finite = torch.empty(count, dtype=torch.bool, device=scores.device)
    fixed = {"VOCAB": vocabulary, "BLOCK": BLOCK, "WIDTH": width_of(parts), "PDL": pdl, "launch_pdl": pdl}
    fixed |= {"PARTS": parts, "FILTERED": floors is not None, "CAPPED": ceilings is not None}
    floor = found.best if floors is None else floors
    ceiling = floor if ceilings is None else ceilings
    stride = scores.stride(0)
    noise = (rows.temperature, rows.seed, rows.choice, rows.position)
    _weigh[(parts, count)](
        scores, stride, found.best, floor, ceiling, *noise, weights, blocks, CHUNK=CHUNK, num_warps=8, **fixed
    )
    _choose[(count,)](
        scores,
        stride,
        found.best,
        found.first,
        raw_best,
        floor,
        ceiling,
        *noise,
        weights,
        blocks,
        tokens,
        finite,
        num_warps=1,
        **fixed,
    )
    return tokens, finite
