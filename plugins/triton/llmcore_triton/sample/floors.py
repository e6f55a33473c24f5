"""The least score of each row that top-k, top-p and min-p keep, found without sorting the vocabulary.

`_survey` counts the tokens of each chunk at some depths below the best, and sums their mass. The least depth that
holds everything that the filters can keep bounds the candidates. `_gather` writes them side by side. `_select` finds
the floor among them by bisection over the ordered bits of scores. The k-th best is the least score with fewer than k
scores above it. The last one of top-p is the least score with less than its share of mass above it. If there are too
many candidates, the bisection reads the whole row, which is slower and as exact. Counts and depths are of scores
before the temperature, since dividing by it keeps their order. Masses are of tempered scores, summed in f64 as in the
reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from llmcore.layers.sampling import SampleRows
from torch import Tensor

from llmcore_triton.launch import release, wait
from llmcore_triton.sample.numbers import COLUMNS, exp, rank, ranked, tempered
from llmcore_triton.sample.peaks import CHUNK, Peaks, peak_of, width_of

CANDIDATES = 8192
"""Candidates of a row that are gathered."""

TILE = 2048
"""Candidates read at once."""

DEPTHS = 8
"""Depths that are surveyed: 1, 1.5, 2, 3, 4, 6, 8 and 12 times the temperature below the best."""

_ZERO_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Low bits that are zero in the f32 form of all numbers of a type."""


@triton.jit
def depth_of(index):  # type: ignore[no-untyped-def]
    """Returns the surveyed depth of an index, in temperatures."""
    return ((2 + (index & 1)) * (1 << (index >> 1))).to(tl.float32) * 0.5


@triton.jit
def _wanted(temperature, top_k, top_p, row, VOCAB: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns (temperature, k or 0, p or 1) of a row's filters."""
    warm = tl.load(temperature + row)
    k = tl.load(top_k + row)
    k = tl.where((k >= VOCAB) | (k < 0) | (warm <= 0), 0, k)
    return warm, k, tl.where(warm > 0, tl.load(top_p + row), 1.0)


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _survey(  # type: ignore[no-untyped-def]
    scores,
    stride,
    best,
    temperature,
    top_k,
    top_p,
    counts,
    masses,
    totals,
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
    warm, k, p = _wanted(temperature, top_k, top_p, row, VOCAB)
    if (k > 0) | (p < 1.0):
        score = tl.load(scores + row * stride + at, mask=at < VOCAB, other=float("-inf")).to(tl.float32)
        high = peak_of(best, row, PARTS, WIDTH)
        out = row * PARTS + chunk
        mass = exp(tempered(score, warm) - tempered(high, warm))
        tl.store(totals + out, tl.sum(mass.to(tl.float64), 0))
        for index in tl.static_range(DEPTHS):
            inside = score >= high - depth_of(tl.full((), index, tl.int32)) * warm
            tl.store(counts + out * DEPTHS + index, tl.sum(inside.to(tl.int32), 0))
            tl.store(masses + out * DEPTHS + index, tl.sum(tl.where(inside, mass, 0.0), 0))


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _gather(  # type: ignore[no-untyped-def]
    scores,
    stride,
    best,
    temperature,
    top_k,
    top_p,
    counts,
    masses,
    totals,
    kept,
    sizes,
    edges,
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
    warm, k, p = _wanted(temperature, top_k, top_p, row, VOCAB)
    if (k > 0) | (p < 1.0):
        part, index = tl.arange(0, WIDTH), tl.arange(0, DEPTHS)
        from_here = (row * PARTS + part[:, None]) * DEPTHS + index[None, :]
        count = tl.load(counts + from_here, mask=part[:, None] < PARTS, other=0)
        mass = tl.load(masses + from_here, mask=part[:, None] < PARTS, other=0.0)
        total = tl.sum(tl.load(totals + row * PARTS + part, mask=part < PARTS, other=0.0), 0)
        # a little more than the share, because the surveyed masses are sums of f32
        share = (p * total).to(tl.float32) * 1.0001
        enough = (k > 0) & (tl.sum(count, 0) >= k) | (k == 0) & (tl.sum(mass, 0) >= share)
        depth = tl.min(tl.where(enough, index, DEPTHS), 0)
        chosen = index[None, :] == depth
        size = tl.sum(tl.sum(tl.where(chosen, count, 0), 1), 0)
        before = tl.sum(tl.sum(tl.where(chosen & (part[:, None] < chunk), count, 0), 1), 0)
        here = tl.sum(tl.sum(tl.where(chosen & (part[:, None] == chunk), count, 0), 1), 0)
        size = tl.where(depth < DEPTHS, size, CANDIDATES + 1)
        edge = peak_of(best, row, PARTS, WIDTH) - depth_of(depth) * warm
        if chunk == 0:
            tl.store(sizes + row, size)
            tl.store(edges + row, tl.where(depth < DEPTHS, edge, float("-inf")))
        if (here > 0) & (size <= CANDIDATES):
            score = tl.load(scores + row * stride + at, mask=at < VOCAB, other=float("-inf"))
            inside = score.to(tl.float32) >= edge
            place = before + tl.cumsum(inside.to(tl.int32), 0) - 1
            tl.store(kept + row * CANDIDATES + place, score, mask=inside)


@triton.jit
def _beyond(  # type: ignore[no-untyped-def]
    source, size, than, high, warm, SHIFT: tl.constexpr, TILE: tl.constexpr, MASS: tl.constexpr
):
    """Returns the number of `size` scores that rank above `than`, or their mass."""
    if MASS:
        found = tl.zeros([TILE], tl.float64)
    else:
        found = tl.zeros([TILE], tl.int32)
    for start in range(0, size, TILE):
        at = start + tl.arange(0, TILE)
        score = tl.load(source + at, mask=at < size, other=float("-inf")).to(tl.float32)
        above = (at < size) & (rank(score, SHIFT) > than)
        if MASS:
            found += tl.where(above, exp(tempered(score, warm) - high), 0.0).to(tl.float64)
        else:
            found += above.to(tl.int32)
    return tl.sum(found, 0)


@triton.jit
def _mass_from(source, size, floor, high, warm, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the mass of tempered scores from `floor` on."""
    found = tl.zeros([TILE], tl.float64)
    for start in range(0, size, TILE):
        at = start + tl.arange(0, TILE)
        score = tl.load(source + at, mask=at < size, other=float("-inf")).to(tl.float32)
        score = tempered(score, warm)
        found += tl.where((at < size) & (score >= floor), exp(score - high), 0.0).to(tl.float64)
    return tl.sum(found, 0)


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _select(  # type: ignore[no-untyped-def]
    scores,
    stride,
    best,
    temperature,
    top_k,
    top_p,
    min_p,
    totals,
    kept,
    sizes,
    edges,
    floors,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    CANDIDATES: tl.constexpr,
    SHIFT: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    release(PDL)
    warm, k, p = _wanted(temperature, top_k, top_p, row, VOCAB)
    peak = peak_of(best, row, PARTS, WIDTH)
    high = tempered(peak, tl.where(warm > 0, warm, 1.0))
    floor = high + tl.log(tl.load(min_p + row))
    if ((k > 0) | (p < 1.0)) & (tl.abs(peak) < float("inf")):
        size = tl.load(sizes + row)
        source = kept + row * CANDIDATES
        if size > CANDIDATES:
            source = scores + row * stride
            size = VOCAB
        top = rank(peak, SHIFT).to(tl.int64)
        bottom = rank(tl.load(edges + row), SHIFT).to(tl.int64) - 1
        part = tl.arange(0, WIDTH)
        total = tl.sum(tl.load(totals + row * PARTS + part, mask=part < PARTS, other=0.0), 0)
        # the condition holds at `least` and above, and does not hold at `below`
        below, least = bottom, top
        if k > 0:
            while least - below > 1:
                middle = below + (least - below) // 2
                if _beyond(source, size, middle.to(tl.int32), high, warm, SHIFT, TILE, False) < k:
                    least = middle
                else:
                    below = middle
            last = tempered(ranked(least.to(tl.int32), SHIFT), warm)
            floor = tl.maximum(floor, last)
            if p < 1.0:
                total = _mass_from(source, size, last, high, warm, TILE)
        if p < 1.0:
            share = p.to(tl.float64) * total
            least = top
            while least - below > 1:
                middle = below + (least - below) // 2
                if _beyond(source, size, middle.to(tl.int32), high, warm, SHIFT, TILE, True) < share:
                    least = middle
                else:
                    below = middle
            floor = tl.maximum(floor, tempered(ranked(least.to(tl.int32), SHIFT), warm))
    tl.store(floors + row, floor)


def floors(scores: Tensor, found: Peaks, rows: SampleRows, pdl: bool) -> Tensor:
    """[S] f32: the least tempered score of each row that its filters keep. `found` are the peaks of `scores`."""
    count, vocabulary = scores.shape
    parts, where = found.best.shape[1], scores.device
    counts = torch.empty((count, parts, DEPTHS), dtype=torch.int32, device=where)
    masses = torch.empty((count, parts, DEPTHS), dtype=torch.float32, device=where)
    totals = torch.empty((count, parts), dtype=torch.float64, device=where)
    kept = torch.empty((count, CANDIDATES), dtype=scores.dtype, device=where)
    sizes = torch.empty(count, dtype=torch.int32, device=where)
    edges = torch.empty(count, dtype=torch.float32, device=where)
    out = torch.empty(count, dtype=torch.float32, device=where)
    fixed = {"VOCAB": vocabulary, "PARTS": parts, "WIDTH": width_of(parts), "PDL": pdl, "launch_pdl": pdl}
    # `_gather` must find exactly what `_survey` counted, so a fused multiply-add in only one of them would be wrong
    exact = {"enable_fp_fusion": False, "num_warps": 8}
    source = (scores, scores.stride(0), found.best, rows.temperature, rows.top_k, rows.top_p)
    _survey[(parts, count)](*source, counts, masses, totals, CHUNK=CHUNK, DEPTHS=DEPTHS, **fixed, **exact)
    _gather[(parts, count)](
        *source,
        counts,
        masses,
        totals,
        kept,
        sizes,
        edges,
        CHUNK=CHUNK,
        DEPTHS=DEPTHS,
        CANDIDATES=CANDIDATES,
        **fixed,
        **exact,
    )
    shift = _ZERO_BITS[scores.dtype]
    options = {"CANDIDATES": CANDIDATES, "SHIFT": shift, "TILE": TILE, "num_warps": 8}
    _select[(count,)](*source, rows.min_p, totals, kept, sizes, edges, out, **options, **fixed)
    return out
