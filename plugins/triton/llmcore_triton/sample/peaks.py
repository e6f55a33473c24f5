"""The best score of each chunk of each row, and whether all of them are finite."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmcore_triton.launch import release, wait
from llmcore_triton.sample.numbers import exp

CHUNK = 4096
"""Tokens of a chunk. It is the same for every batch, so sums over chunks have one order."""


@triton.jit
def _peak(  # type: ignore[no-untyped-def]
    logits,
    stride,
    best,
    first,
    masses,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    RAW: tl.constexpr,
    MASS: tl.constexpr,
    PDL: tl.constexpr,
):
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    mine = at < VOCAB
    wait(PDL)
    score = tl.load(logits + row * stride + at, mask=mine, other=float("-inf")).to(tl.float32)
    release(PDL)
    high = tl.max(score, 0)
    out = row * tl.num_programs(0) + chunk
    tl.store(first + out, tl.min(tl.where(score == high, at, VOCAB - 1), 0))
    if MASS:
        tl.store(masses + out, tl.sum(exp(score - high), 0))
    if RAW:
        bad = tl.max(tl.where(mine & ~(tl.abs(score) < float("inf")), 1, 0), 0)
        high = tl.where(bad != 0, float("inf"), high)
    tl.store(best + out, high)


@triton.jit
def peak_of(best, row, PARTS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns a row's best score."""
    part = tl.arange(0, WIDTH)
    return tl.max(tl.load(best + row * PARTS + part, mask=part < PARTS, other=float("-inf")), 0)


@triton.jit
def first_of(best, first, row, VOCAB: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns a row's best score, and the first token that has it."""
    part = tl.arange(0, WIDTH)
    score = tl.load(best + row * PARTS + part, mask=part < PARTS, other=float("-inf"))
    token = tl.load(first + row * PARTS + part, mask=part < PARTS, other=VOCAB - 1)
    high = tl.max(score, 0)
    return high, tl.min(tl.where(score == high, token, VOCAB - 1), 0)


@dataclass(frozen=True)
class Peaks:
    """The peaks of scores [S, V]: `best` [S, P] f32 of each chunk, `first` [S, P] int32 the first token that has it.

    Of raw logits, `best` is infinite if one of the chunk is NaN or infinite. `masses` [S, P] f32, if requested: the
    sum of e to the (score - the chunk's best).
    """

    best: Tensor
    first: Tensor
    masses: Tensor


def peaks(
    scores: Tensor, pdl: bool, *, raw: bool = True, mass: bool = False, chunk: int = CHUNK, num_warps: int = 8
) -> Peaks:
    """Returns the peaks of scores [S, V], raw logits unless `raw` is False. Rows of no score have one empty chunk."""
    count, vocabulary = scores.shape
    parts = max(1, -(-vocabulary // chunk))
    best = torch.empty((count, parts), dtype=torch.float32, device=scores.device)
    first = torch.empty((count, parts), dtype=torch.int32, device=scores.device)
    masses = torch.empty_like(best) if mass else best
    _peak[(parts, count)](
        scores,
        scores.stride(0),
        best,
        first,
        masses,
        VOCAB=vocabulary,
        CHUNK=chunk,
        RAW=raw,
        MASS=mass,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=num_warps,
    )
    return Peaks(best, first, masses)


def width_of(parts: int) -> int:
    """Returns the power of two that holds `parts`."""
    return 1 << (parts - 1).bit_length()
