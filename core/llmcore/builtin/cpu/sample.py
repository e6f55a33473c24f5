"""Kernel `cpu` of op `sample`: random numbers only for tokens that can win, filters without a full sort.

Gumbel numbers are bounded, so a token whose score lies further below the best than their spread is never drawn. Rows
are filtered one at a time: what a row gets does not depend on the batch, down to the last bit.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmcore.api import OpContext
from llmcore.layers.sampling import (
    GUMBEL_MAX,
    GUMBEL_MIN,
    Sampled,
    Sampler,
    SampleRows,
    adjusted,
    gumbel,
    token_bits,
    with_logprobs,
)

Float32 = NDArray[np.float32]
Indices = NDArray[np.intp]

_SPREAD = np.float32(GUMBEL_MAX - GUMBEL_MIN)
_NOBODY = (np.float32(-np.inf), 0)
_FRONT = np.float32(3.0)
"""Tokens this close to the best are drawn first; what they reach rules most of the others out."""


def make(context: OpContext) -> Sampler:
    """One function serves every variant: what a row does not ask for costs it nothing."""
    return sample


def sample(logits: Tensor, rows: SampleRows) -> Sampled:
    """Draw from logits [S, V] f32 in host memory."""
    raw: Float32 = logits.numpy()
    every = np.arange(raw.shape[0])
    best = raw.argmax(axis=1)
    # argmax finds NaN and +infinity, min finds NaN and -infinity.
    finite = np.isfinite(raw[every, best]) & np.isfinite(raw.min(axis=1))
    scores = raw
    if rows.adjust is not None:
        scores = adjusted(logits, rows, rows.adjust).numpy()
        best = scores.argmax(axis=1)
    tokens = best.astype(np.int32)
    hot = np.flatnonzero((rows.temperature.numpy() > 0) & finite)
    if hot.size:
        tokens[hot] = _draw(scores, best, hot, rows)
    return with_logprobs(logits, torch.from_numpy(tokens), torch.from_numpy(finite), rows.logprobs)


def _draw(scores: Float32, best: Indices, hot: Indices, rows: SampleRows) -> NDArray[np.int32]:
    temperature, top_k, top_p = rows.temperature.numpy(), rows.top_k.numpy(), rows.top_p.numpy()
    depth = torch.log(rows.min_p).numpy()
    tempered = [scores[row] / temperature[row] for row in hot]
    peaks = [row[best[at]] for row, at in zip(tempered, hot, strict=True)]
    least = [
        _floor(row, peak, int(top_k[at]), float(top_p[at]), depth[at])
        for row, peak, at in zip(tempered, peaks, hot, strict=True)
    ]
    front = [np.maximum(floor, peak - _FRONT) for floor, peak in zip(least, peaks, strict=True)]
    first = _best_of(tempered, [np.flatnonzero(row >= at) for row, at in zip(tempered, front, strict=True)], hot, rows)
    behind = [
        np.flatnonzero((row < at) & (row >= max(floor, reached - GUMBEL_MAX)))
        for row, at, floor, (reached, _) in zip(tempered, front, least, first, strict=True)
    ]
    second = _best_of(tempered, behind, hot, rows)
    # The higher score wins, the lower id of equals.
    winners = (max(pair, key=lambda drawn: (drawn[0], -drawn[1])) for pair in zip(first, second, strict=True))
    return np.array([token for _, token in winners], dtype=np.int32)


def _best_of(
    tempered: list[Float32], ids: list[Indices], hot: Indices, rows: SampleRows
) -> list[tuple[np.float32, int]]:
    """The best noisy score of each row among its `ids`, with its token; minus infinity where there are none."""
    counts = np.array([len(found) for found in ids])
    if not counts.any():
        return [_NOBODY] * len(ids)
    row = torch.from_numpy(np.repeat(hot, counts))
    bits = token_bits(rows.seed[row], rows.choice[row], rows.position[row], torch.from_numpy(np.concatenate(ids)))
    parts = np.split(gumbel(bits).numpy(), np.cumsum(counts)[:-1])
    drawn = []
    for scores, found, noise in zip(tempered, ids, parts, strict=True):
        noisy = scores[found] + noise
        drawn.append((noisy[at := int(noisy.argmax())], int(found[at])) if len(found) else _NOBODY)
    return drawn


def _floor(tempered: Float32, peak: np.float32, top_k: int, top_p: float, depth: np.float32) -> np.float32:
    """The least score that the filters keep and that can win."""
    last = np.float32(-np.inf)
    if 0 < top_k < tempered.size:
        last = np.partition(tempered, tempered.size - top_k)[tempered.size - top_k]
    floor = np.max((last, peak - _SPREAD, peak + depth))
    if top_p >= 1.0:
        return np.float32(floor)
    total = np.exp(tempered[tempered >= last] - peak).sum(dtype=np.float64)
    best_first = np.sort(tempered[tempered >= floor])[::-1]
    mass = np.exp(best_first - peak).astype(np.float64)
    within = int(np.count_nonzero(np.cumsum(mass) - mass < np.float64(np.float32(top_p)) * total))
    return np.float32(best_first[max(within, 1) - 1])
