"""Variant `greedy`: the best token of each row, in two launches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers.sampling import Sampled, Sampler, SampleRows
from torch import Tensor

from llmcore_triton import tuned
from llmcore_triton.launch import overlaps, release, wait
from llmcore_triton.sample.peaks import first_of, peaks, width_of

KERNEL = "triton_greedy"

DEFAULTS = ({"chunk": 1024, "num_warps": 4}, {"chunk": 2048, "num_warps": 4}, {"chunk": 8192, "num_warps": 8})
"""For one row, for few, and for many. Each gives every multiprocessor programs."""


@triton.jit
def _pick(  # type: ignore[no-untyped-def]
    best, first, tokens, finite, VOCAB: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    release(PDL)
    high, token = first_of(best, first, row, VOCAB, PARTS, WIDTH)
    tl.store(tokens + row, token)
    tl.store(finite + row, tl.abs(high) < float("inf"))


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Chunks that give from a hundred programs per row to one wave of a large batch."""
    for chunk in (512, 1024, 2048, 4096, 8192, 16384):
        for num_warps in (4, 8):
            yield {"chunk": chunk, "num_warps": num_warps}


def make_with(context: OpContext, config: Mapping[str, Any]) -> Sampler:
    """The kernels in `config`."""
    pdl, chunk, num_warps = overlaps(context), config["chunk"], config["num_warps"]

    def sample(logits: Tensor, rows: SampleRows) -> Sampled:
        """logits [S, V]. `rows` is not read."""
        count, vocabulary = logits.shape
        found = peaks(logits, pdl, chunk=chunk, num_warps=num_warps)
        parts = found.best.shape[1]
        tokens = torch.empty(count, dtype=torch.int32, device=logits.device)
        finite = torch.empty(count, dtype=torch.bool, device=logits.device)
        _pick[(count,)](
            found.best,
            found.first,
            tokens,
            finite,
            VOCAB=vocabulary,
            PARTS=parts,
            WIDTH=width_of(parts),
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=1,
        )
        return Sampled(tokens=tokens, finite=finite)

    return sample


def make(context: OpContext) -> Sampler:
    """The kernel in the measured configuration, or in the default one."""
    return make_with(context, tuned.choose(KERNEL, context, DEFAULTS[min(context.bucket, 2)]))
