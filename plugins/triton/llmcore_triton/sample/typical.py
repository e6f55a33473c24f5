"""Typical-p: the least and the greatest tempered score of each row that it keeps, on both sides of the mean score.

`_moments` sums, per chunk, the mass that the other filters keep, and mass times score. Their quotient is the mean. The
rest works like `floors`, with distances from the mean instead of ranks. `_survey` counts the tokens within some
distances and sums their mass. `_gather` writes the candidates side by side. `_select` finds the least distance that
holds enough mass, by bisection over the bits of f32 numbers that are not negative. If there are too many candidates,
the bisection reads the whole row, which is slower and as exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from llmcore.layers.sampling import SampleRows
from torch import Tensor

from llmcore_triton.launch import release, wait
from llmcore_triton.sample.floors import CANDIDATES, DEPTHS, TILE, depth_of
from llmcore_triton.sample.numbers import COLUMNS, exp, tempered
from llmcore_triton.sample.peaks import CHUNK, Peaks, peak_of, width_of


@triton.jit
def _wanted(temperature, typical_p, row):  # type: ignore[no-untyped-def]
    """Returns (temperature, share or 1) of a row's filter."""
    warm = tl.load(temperature + row)
    return warm, tl.where(warm > 0, tl.load(typical_p + row), 1.0)


@triton.jit
def _kept(source, at, mine, warm, floor):  # type: ignore[no-untyped-def]
    """Returns (tempered scores, which of them the other filters keep)."""
    score = tempered(tl.load(source + at, mask=mine, other=float("-inf")).to(tl.float32), warm)
    return score, mine & (score >= floor) & (score > float("-inf"))


@triton.jit
def _mean(totals, firsts, row, PARTS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns (mass f64, mean score f32) of a row."""
    part = tl.arange(0, WIDTH)
    total = tl.sum(tl.load(totals + row * PARTS + part, mask=part < PARTS, other=0.0), 0)
    first = tl.sum(tl.load(firsts + row * PARTS + part, mask=part < PARTS, other=0.0), 0)
    return total, (first / total).to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _moments(  # type: ignore[no-untyped-def]
    scores,
    stride,
    best,
    floors,
    temperature,
    typical_p,
    totals,
    firsts,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    wait(PDL)
    release(PDL)
    warm, p = _wanted(temperature, typical_p, row)
    if p < 1.0:
        score, kept = _kept(scores + row * stride, at, at < VOCAB, warm, tl.load(floors + row))
        high = tempered(peak_of(best, row, PARTS, WIDTH), warm)
        mass = tl.where(kept, exp(score - high), 0.0).to(tl.float64)
        out = row * PARTS + chunk
        tl.store(totals + out, tl.sum(mass, 0))
        tl.store(firsts + out, tl.sum(mass * tl.where(kept, score, 0.0).to(tl.float64), 0))


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _survey(  # type: ignore[no-untyped-def]
    scores,
    stride,
    best,
    floors,
    temperature,
    typical_p,
    totals,
    firsts,
    counts,
    masses,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTHS: tl.constexpr,
    PDL: tl.constexpr,
):
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    wait(PDL)
    release(PDL)
    warm, p = _wanted(temperature, typical_p, row)
    if p < 1.0:
        score, kept = _kept(scores + row * stride, at, at < VOCAB, warm, tl.load(floors + row))
        high = tempered(peak_of(best, row, PARTS, WIDTH), warm)
        _, mean = _mean(totals, firsts, row, PARTS, WIDTH)
        mass = tl.where(kept, exp(score - high), 0.0)
        out = row * PARTS + chunk
        for index in tl.static_range(DEPTHS):
            near = kept & (tl.abs(score - mean) <= depth_of(tl.full((), index, tl.int32)))
            tl.store(counts + out * DEPTHS + index, tl.sum(near.to(tl.int32), 0))
            tl.store(masses + out * DEPTHS + index, tl.sum(tl.where(near, mass, 0.0), 0))


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _gather(  # type: ignore[no-untyped-def]
    scores,
    stride,
    best,
    floors,
    temperature,
    typical_p,
    totals,
    firsts,
    counts,
    masses,
    candidates,
    sizes,
    reaches,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTHS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
):
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    wait(PDL)
    release(PDL)
    warm, p = _wanted(temperature, typical_p, row)
    if p < 1.0:
        part, index = tl.arange(0, WIDTH), tl.arange(0, DEPTHS)
        from_here = (row * PARTS + part[:, None]) * DEPTHS + index[None, :]
        count = tl.load(counts + from_here, mask=part[:, None] < PARTS, other=0)
        mass = tl.load(masses + from_here, mask=part[:, None] < PARTS, other=0.0)
        total, mean = _mean(totals, firsts, row, PARTS, WIDTH)
        # a little more than the share, because the surveyed masses are sums of f32
        enough = tl.sum(mass, 0) >= (p * total).to(tl.float32) * 1.0001
        depth = tl.min(tl.where(enough, index, DEPTHS), 0)
        chosen = index[None, :] == depth
        size = tl.sum(tl.sum(tl.where(chosen, count, 0), 1), 0)
        before = tl.sum(tl.sum(tl.where(chosen & (part[:, None] < chunk), count, 0), 1), 0)
        here = tl.sum(tl.sum(tl.where(chosen & (part[:, None] == chunk), count, 0), 1), 0)
        size = tl.where(depth < DEPTHS, size, CANDIDATES + 1)
        reach = tl.where(depth < DEPTHS, depth_of(depth), float("inf"))
        if chunk == 0:
            tl.store(sizes + row, size)
            tl.store(reaches + row, reach)
        if (here > 0) & (size <= CANDIDATES):
            score, kept = _kept(scores + row * stride, at, at < VOCAB, warm, tl.load(floors + row))
            near = kept & (tl.abs(score - mean) <= reach)
            place = before + tl.cumsum(near.to(tl.int32), 0) - 1
            raw = tl.load(scores + row * stride + at, mask=at < VOCAB, other=float("-inf"))
            tl.store(candidates + row * CANDIDATES + place, raw, mask=near)


@triton.jit
def _mass_within(source, size, reach, mean, floor, high, warm, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the mass of the scores that lie at most `reach` from the mean."""
    found = tl.zeros([TILE], tl.float64)
    for start in range(0, size, TILE):
        at = start + tl.arange(0, TILE)
        score, kept = _kept(source, at, at < size, warm, floor)
        near = kept & (tl.abs(score - mean) <= reach)
        found += tl.where(near, exp(score - high), 0.0).to(tl.float64)
    return tl.sum(found, 0)


@triton.jit
def _ends(source, size, reach, mean, floor, warm, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the least and the greatest of the scores that lie at most `reach` from the mean."""
    least = tl.full([TILE], float("inf"), tl.float32)
    most = tl.full([TILE], float("-inf"), tl.float32)
    for start in range(0, size, TILE):
        at = start + tl.arange(0, TILE)
        score, kept = _kept(source, at, at < size, warm, floor)
        near = kept & (tl.abs(score - mean) <= reach)
        least = tl.minimum(least, tl.where(near, score, float("inf")))
        most = tl.maximum(most, tl.where(near, score, float("-inf")))
    return tl.min(least, 0), tl.max(most, 0)


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _select(  # type: ignore[no-untyped-def]
    scores,
    stride,
    best,
    floors,
    temperature,
    typical_p,
    totals,
    firsts,
    candidates,
    sizes,
    reaches,
    least,
    most,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    CANDIDATES: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    release(PDL)
    warm, p = _wanted(temperature, typical_p, row)
    peak = peak_of(best, row, PARTS, WIDTH)
    floor = tl.load(floors + row)
    low, up = floor, float("inf")
    if (p < 1.0) & (tl.abs(peak) < float("inf")):
        size = tl.load(sizes + row)
        source = candidates + row * CANDIDATES
        if size > CANDIDATES:
            source = scores + row * stride
            size = VOCAB
        high = tempered(peak, warm)
        total, mean = _mean(totals, firsts, row, PARTS, WIDTH)
        share = p.to(tl.float64) * total
        # within `far` there is enough mass, within `near` there is not; both are bits, in the order of the distances
        far = tl.load(reaches + row).to(tl.int32, bitcast=True).to(tl.int64)
        near = far * 0 - 1
        while far - near > 1:
            middle = near + (far - near) // 2
            reach = middle.to(tl.int32).to(tl.float32, bitcast=True)
            if _mass_within(source, size, reach, mean, floor, high, warm, TILE) >= share:
                far = middle
            else:
                near = middle
        reach = far.to(tl.int32).to(tl.float32, bitcast=True)
        low, up = _ends(source, size, reach, mean, floor, warm, TILE)
    tl.store(least + row, low)
    tl.store(most + row, up)


def typical(scores: Tensor, found: Peaks, floors: Tensor, rows: SampleRows, pdl: bool) -> tuple[Tensor, Tensor]:
    """Returns (least, most) [S] f32 of the tempered scores that typical-p keeps, out of those that `floors` [S] leave.

    `found` are the peaks of scores [S, V]. Rows that keep everything have their floor and infinity.
    """
    count, vocabulary = scores.shape
    parts, where = found.best.shape[1], scores.device
    totals = torch.empty((count, parts), dtype=torch.float64, device=where)
    firsts = torch.empty_like(totals)
    counts = torch.empty((count, parts, DEPTHS), dtype=torch.int32, device=where)
    masses = torch.empty((count, parts, DEPTHS), dtype=torch.float32, device=where)
    candidates = torch.empty((count, CANDIDATES), dtype=scores.dtype, device=where)
    sizes = torch.empty(count, dtype=torch.int32, device=where)
    reaches = torch.empty(count, dtype=torch.float32, device=where)
    least, most = torch.empty_like(reaches), torch.empty_like(reaches)
    fixed = {"VOCAB": vocabulary, "PARTS": parts, "WIDTH": width_of(parts), "PDL": pdl, "launch_pdl": pdl}
    # all must find the same distances, so a fused multiply-add in only one of them would be wrong
    exact = {"enable_fp_fusion": False, "num_warps": 8}
    source = (scores, scores.stride(0), found.best, floors, rows.temperature, rows.typical_p, totals, firsts)
    _moments[(parts, count)](*source, CHUNK=CHUNK, **fixed, **exact)
    _survey[(parts, count)](*source, counts, masses, CHUNK=CHUNK, DEPTHS=DEPTHS, **fixed, **exact)
    _gather[(parts, count)](
        *(*source, counts, masses, candidates, sizes, reaches),
        CHUNK=CHUNK,
        DEPTHS=DEPTHS,
        CANDIDATES=CANDIDATES,
        **fixed,
        **exact,
    )
    _select[(count,)](
        *(*source, candidates, sizes, reaches, least, most), CANDIDATES=CANDIDATES, TILE=TILE, **fixed, **exact
    )
    return least, most
