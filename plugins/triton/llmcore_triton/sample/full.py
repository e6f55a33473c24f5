"""Variant `full`: penalties, biases and masks, then the filters of `filtered`, typical-p, and log-probabilities."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers.sampling import Sampled, Sampler, SampleRows
from torch import Tensor

from llmcore_triton.launch import overlaps, release, wait
from llmcore_triton.sample.adjust import adjusted, masked
from llmcore_triton.sample.draw import draw
from llmcore_triton.sample.floors import floors
from llmcore_triton.sample.numbers import exp
from llmcore_triton.sample.peaks import Peaks, peaks, width_of
from llmcore_triton.sample.typical import typical


@triton.jit(do_not_specialize_on_alignment=["logprobs", "normalizers"])
def _report(  # type: ignore[no-untyped-def]
    logits,
    stride,
    best,
    masses,
    tokens,
    logprobs,
    normalizers,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, WIDTH)
    wait(PDL)
    release(PDL)
    high = tl.load(best + row * PARTS + part, mask=part < PARTS, other=float("-inf"))
    mass = tl.load(masses + row * PARTS + part, mask=part < PARTS, other=0.0)
    peak = tl.max(high, 0)
    normalizer = peak + tl.log(tl.sum(mass * exp(high - peak), 0))
    drawn = tl.load(logits + row * stride + tl.load(tokens + row)).to(tl.float32)
    tl.store(logprobs + row, drawn - normalizer)
    tl.store(normalizers + row, normalizer)


def make(context: OpContext) -> Sampler:
    """The kernels. Rows that ask for nothing draw the same tokens as in every variant."""
    pdl = overlaps(context)

    def sample(logits: Tensor, rows: SampleRows) -> Sampled:
        """logits [S, V] and their rows."""
        raw = peaks(logits, pdl, mass=rows.logprobs is not None)
        scores, found = logits, raw
        if rows.adjust is not None:
            scores = adjusted(logits, rows.adjust, rows.position, pdl)
        if rows.masks is not None:
            scores = masked(scores, rows.masks, pdl)
        if scores is not logits:
            found = peaks(scores, pdl, raw=False)
        least, most = floors(scores, found, rows, pdl), None
        if rows.typical_p is not None:
            least, most = typical(scores, found, least, rows, pdl)
        tokens, finite = draw(scores, found, raw.best, rows, least, pdl, most)
        if rows.logprobs is None:
            return Sampled(tokens=tokens, finite=finite)
        return _reported(logits, raw, tokens, finite, rows.logprobs, pdl)

    return sample


def _reported(logits: Tensor, raw: Peaks, tokens: Tensor, finite: Tensor, k: int, pdl: bool) -> Sampled:
    """Returns the outcome with log-probabilities of the raw logits."""
    count, parts = raw.best.shape
    logprobs, normalizers = torch.empty((2, count), dtype=torch.float32, device=logits.device).unbind(0)
    _report[(count,)](
        logits,
        logits.stride(0),
        raw.best,
        raw.masses,
        tokens,
        logprobs,
        normalizers,
        PARTS=parts,
        WIDTH=width_of(parts),
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=1,
    )
    top = torch.topk(logits, k, dim=-1)
    return Sampled(
        tokens=tokens,
        finite=finite,
        logprobs=logprobs,
        top_ids=top.indices.int(),
        top_logprobs=top.values.float() - normalizers[:, None],
    )
