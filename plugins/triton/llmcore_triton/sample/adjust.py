"""Penalties, rises, biases and masks: scores [S, V] f32 from logits, in up to four launches after counts are
cleared."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from llmcore.layers.sampling import LONGEST_RISE, Adjust, Masks
from torch import Tensor

from llmcore_triton.launch import release, wait
from llmcore_triton.sample.numbers import COLUMNS, exp

BLOCK = 1024

_REPEATED = tl.constexpr(1 << 30)
"""Marks a token that the repetition penalty counts. It is above any count of the presence and frequency penalties."""

_COLUMNS = [
    *COLUMNS,
    *("length", "repeat_from", "count_from", "repetition", "presence", "frequency"),
    *("bias_row", "bias_token", "bias_value", "bias_until"),
    *("rise_row", "rise_token", "rise_start", "rise_rate"),
]


@triton.jit(do_not_specialize=["longest"], do_not_specialize_on_alignment=_COLUMNS)
def _count(  # type: ignore[no-untyped-def]
    ids,
    stride,
    longest,
    length,
    repeat_from,
    count_from,
    counts,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Counts into counts [S, V] int32 how often a row's ids contain each token."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait(PDL)
    release(PDL)
    known = at < tl.minimum(tl.load(length + row), longest)
    token = tl.load(ids + row * stride + at, mask=known, other=0)
    counted = known & (at >= tl.load(count_from + row))
    tl.atomic_add(counts + row * VOCAB + token, tl.full([BLOCK], 1, tl.int32), mask=counted, sem="relaxed")
    repeated = known & (at >= tl.load(repeat_from + row))
    mark = tl.full([BLOCK], _REPEATED, tl.int32)
    tl.atomic_or(counts + row * VOCAB + token, mark, mask=repeated, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=_COLUMNS)
def _penalize(  # type: ignore[no-untyped-def]
    logits,
    stride,
    counts,
    repetition,
    presence,
    frequency,
    scores,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = at < VOCAB
    wait(PDL)
    score = tl.load(logits + row * stride + at, mask=mine, other=0.0).to(tl.float32)
    count = tl.load(counts + row * VOCAB + at, mask=mine, other=0)
    release(PDL)
    factor = tl.load(repetition + row)
    repeated = tl.where(score > 0, tl.div_rn(score, factor), score * factor)
    score = tl.where(count >= _REPEATED, repeated, score)
    count = count & (_REPEATED - 1)
    score = score - tl.load(frequency + row) * count.to(tl.float32)
    score = score - tl.load(presence + row) * (count > 0).to(tl.float32)
    tl.store(scores + row * VOCAB + at, score, mask=mine)


@triton.jit(do_not_specialize=["number"], do_not_specialize_on_alignment=_COLUMNS)
def _bias(  # type: ignore[no-untyped-def]
    scores,
    bias_row,
    bias_token,
    bias_value,
    bias_until,
    position,
    number,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = at < number
    wait(PDL)
    release(PDL)
    row = tl.load(bias_row + at, mask=mine, other=0).to(tl.int64)
    until = tl.load(bias_until + at, mask=mine, other=0)
    mine = mine & (tl.load(position + row, mask=mine, other=0) < until)
    place = scores + row * VOCAB + tl.load(bias_token + at, mask=mine, other=0)
    tl.atomic_add(place, tl.load(bias_value + at, mask=mine, other=0.0), mask=mine, sem="relaxed")


@triton.jit(do_not_specialize=["number"], do_not_specialize_on_alignment=_COLUMNS)
def _raise(  # type: ignore[no-untyped-def]
    scores,
    rise_row,
    rise_token,
    rise_start,
    rise_rate,
    position,
    number,
    VOCAB: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = at < number
    wait(PDL)
    release(PDL)
    row = tl.load(rise_row + at, mask=mine, other=0).to(tl.int64)
    past = tl.load(position + row, mask=mine, other=0) - tl.load(rise_start + at, mask=mine, other=0)
    past = tl.maximum(past, 0).to(tl.float32)
    rate = tl.load(rise_rate + at, mask=mine, other=0.0)
    place = scores + row * VOCAB + tl.load(rise_token + at, mask=mine, other=0)
    score = tl.load(place, mask=mine, other=0.0)
    growth = exp(tl.minimum(rate * past, MOST)) - 1.0
    tl.store(place, score + tl.abs(score) * growth, mask=mine)


@triton.jit(do_not_specialize_on_alignment=["words", "of"])
def _mask(  # type: ignore[no-untyped-def]
    scores,
    stride,
    words,
    of,
    out,
    VOCAB: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = at < VOCAB
    wait(PDL)
    release(PDL)
    score = tl.load(scores + row * stride + at, mask=mine, other=0.0).to(tl.float32)
    which = tl.load(of + row)
    word = tl.load(words + which * WORDS + (at >> 5), mask=mine & (which >= 0), other=-1)
    allowed = ((word >> (at & 31)) & 1) != 0
    tl.store(out + row * VOCAB + at, tl.where(allowed, score, float("-inf")), mask=mine)


def masked(scores: Tensor, masks: Masks, pdl: bool) -> Tensor:
    """Returns scores [S, V] f32 with minus infinity for the tokens that a row's mask forbids."""
    count, vocabulary = scores.shape
    out = torch.empty((count, vocabulary), dtype=torch.float32, device=scores.device)
    _mask[(-(-vocabulary // BLOCK), count)](
        scores,
        scores.stride(0),
        masks.words,
        masks.of,
        out,
        VOCAB=vocabulary,
        WORDS=masks.words.shape[1],
        BLOCK=BLOCK,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
    )
    return out


def adjusted(logits: Tensor, adjust: Adjust, position: Tensor, pdl: bool) -> Tensor:
    """Returns scores [S, V] f32 of logits [S, V] whose rows are at `position` [S]."""
    count, vocabulary = logits.shape
    counts = torch.zeros((count, vocabulary), dtype=torch.int32, device=logits.device)
    scores = torch.empty((count, vocabulary), dtype=torch.float32, device=logits.device)
    longest, biases = adjust.ids.shape[1], adjust.bias_row.shape[0]
    fixed = {"VOCAB": vocabulary, "BLOCK": BLOCK, "PDL": pdl, "launch_pdl": pdl, "num_warps": 4}
    if longest:
        starts = (adjust.repeat_from, adjust.count_from)
        ids = (adjust.ids, adjust.ids.stride(0), longest)
        _count[(-(-longest // BLOCK), count)](*ids, adjust.length, *starts, counts, **fixed)
    penalties = (adjust.repetition, adjust.presence, adjust.frequency)
    # products are rounded before they are subtracted, as in the reference
    _penalize[(-(-vocabulary // BLOCK), count)](
        logits, logits.stride(0), counts, *penalties, scores, enable_fp_fusion=False, **fixed
    )
    if adjust.rises is not None:
        rises = adjust.rises
        number = rises.row.shape[0]
        _raise[(-(-number // BLOCK),)](
            *(scores, rises.row, rises.token, rises.start, rises.rate, position, number),
            MOST=LONGEST_RISE,
            enable_fp_fusion=False,
            **fixed,
        )
    if biases:
        columns = (adjust.bias_row, adjust.bias_token, adjust.bias_value, adjust.bias_until)
        _bias[(-(-biases // BLOCK),)](scores, *columns, position, biases, **fixed)
    return scores
