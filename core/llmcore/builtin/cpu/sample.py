"""Kernels `cpu` of ops `sample` and `sample.part`: filters without a full sort, and only of the rows that draw.

They filter one row at a time, so a row's result does not depend on the rest of the batch, to the bit. A part of a row
draws with the same bits as the whole row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmcore.api import OpContext
from llmcore.layers.sampling import BLOCK, Sampled, Sampler, SampleRows, adjusted, masked, noise, with_logprobs

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Indices = NDArray[np.intp]

_DEPTHS = (4.0, 12.0, 30.0)
"""Distances below the best score in which to look for the last token of top-p: sorting few scores is cheaper.

All scores below the last distance together have less mass than the smallest step of an f32 top_p below 1.
"""


def make(context: OpContext) -> Sampler:
    """The same function for every variant: a filter that no row asks for costs nothing."""
    return sample


def sample(logits: Tensor, rows: SampleRows) -> Sampled:
    """Draw one token from each row of logits [S, V], of any float type and in host memory."""
    logits = logits.float()
    raw: Float32 = logits.numpy()
    every = np.arange(raw.shape[0])
    best = raw.argmax(axis=1)
    # argmax finds NaN and +infinity, min finds NaN and -infinity.
    finite = np.isfinite(raw[every, best]) & np.isfinite(raw.min(axis=1))
    scores = raw
    if rows.adjust is not None:
        scores = adjusted(logits, rows, rows.adjust).numpy()
    if rows.masks is not None:
        scores = masked(torch.from_numpy(scores), rows.masks).numpy()
    if scores is not raw:
        best = scores.argmax(axis=1)
    tokens = best.astype(np.int32)
    hot = np.flatnonzero((rows.temperature.numpy() > 0) & finite)
    if hot.size:
        tokens[hot] = _draw(scores, best, hot, rows)
    return with_logprobs(logits, torch.from_numpy(tokens), torch.from_numpy(finite), rows.logprobs)


def _draw(scores: Float32, best: Indices, hot: Indices, rows: SampleRows) -> NDArray[np.int32]:
    temperature, top_k, top_p = rows.temperature.numpy(), rows.top_k.numpy(), rows.top_p.numpy()
    depth = torch.log(rows.min_p).numpy()
    vocabulary = scores.shape[1]
    starts = np.arange(0, vocabulary, BLOCK)
    kept = np.full((hot.size, starts.size * BLOCK), -np.inf, np.float32)
    mass: Float64 = np.empty((hot.size, starts.size))
    for i, row in enumerate(hot):
        tempered = np.divide(scores[row], temperature[row], out=kept[i, :vocabulary])
        peak = tempered[best[row]]
        floor = _floor(tempered, peak, int(top_k[row]), float(top_p[row]), depth[row])
        if floor > -np.inf:
            tempered[tempered < floor] = -np.inf
        if rows.typical_p is not None and rows.typical_p[row] < 1.0:
            _keep_typical(tempered, peak, float(rows.typical_p[row]))
        mass[i] = np.add.reduceat(np.exp(tempered - peak), starts, dtype=np.float64)
    return _heaviest(kept, mass, hot, rows)[1]


def make_part(context: OpContext) -> Callable[[Tensor, int, Tensor, SampleRows], Tensor]:
    """The same function for every context."""
    return part


def part(logits: Tensor, first: int, best: Tensor, rows: SampleRows) -> Tensor:
    """[S, 2], as op `sample.part` has it, of logits [S, N] in host memory."""
    columns = torch.tensor([-torch.inf, 0.0]).repeat(len(logits), 1)
    temperature, peaks = rows.temperature.numpy(), best[..., 0].amax(0).numpy()
    hot = np.flatnonzero((temperature > 0) & np.isfinite(peaks))
    if not hot.size or not logits.shape[1]:
        return columns
    scores, warm = logits.float().numpy()[hot], temperature[hot, None]
    vocabulary = scores.shape[1]
    starts = np.arange(0, vocabulary, BLOCK)
    kept = np.full((hot.size, starts.size * BLOCK), -np.inf, np.float32)
    tempered = np.divide(scores, warm, out=kept[:, :vocabulary])
    mass = np.add.reduceat(np.exp(tempered - peaks[hot, None] / warm), starts, axis=1, dtype=np.float64)
    found = _heaviest(kept, mass, hot, rows, first)
    columns[torch.from_numpy(hot)] = torch.from_numpy(np.stack(found, axis=1).astype(np.float32))
    return columns


def _heaviest(
    kept: Float32, mass: Float64, hot: Indices, rows: SampleRows, first: int = 0
) -> tuple[Float32, NDArray[np.int32]]:
    """Of the rows `hot`, the greatest noisy log mass of a block, and a token drawn from that block.

    `kept`: their tempered scores [H, blocks * BLOCK] from token `first` on. `mass`: those of the blocks.
    """
    index = torch.from_numpy(hot)
    chosen = replace(rows, seed=rows.seed[index], choice=rows.choice[index], position=rows.position[index])
    with np.errstate(divide="ignore"):
        weight = np.log(mass).astype(np.float32)
    blocks = torch.arange(first // BLOCK, first // BLOCK + mass.shape[1])
    noisy = weight + noise(chosen, blocks, 1).numpy()
    block = noisy.argmax(axis=1)[:, None]
    token = block * BLOCK + np.arange(BLOCK)
    loud = np.take_along_axis(kept, token, axis=1) + noise(chosen, torch.from_numpy(first + token), 0).numpy()
    drawn = np.take_along_axis(token, loud.argmax(axis=1)[:, None], axis=1)[:, 0] + first
    return np.take_along_axis(noisy, block, axis=1)[:, 0], drawn.astype(np.int32)


def _floor(tempered: Float32, peak: np.float32, top_k: int, top_p: float, depth: np.float32) -> np.float32:
    """The lowest score that top-k, top-p and min-p keep."""
    last = np.float32(-np.inf)
    if 0 < top_k < tempered.size:
        last = np.partition(tempered, tempered.size - top_k)[tempered.size - top_k]
    floor = np.float32(max(last, peak + depth))
    if top_p >= 1.0:
        return floor
    weights = np.exp(tempered - peak)
    share = np.float64(np.float32(top_p)) * weights[tempered >= last].sum(dtype=np.float64)
    for below in _DEPTHS:
        near = tempered >= max(floor, peak - np.float32(below))
        if weights[near].sum(dtype=np.float64) >= share:
            break
    best_first = np.sort(tempered[near])[::-1]
    mass = np.exp(best_first - peak).astype(np.float64)
    within = int(np.count_nonzero(np.cumsum(mass) - mass < share))
    return np.float32(best_first[max(within, 1) - 1])


def _keep_typical(tempered: Float32, peak: np.float32, typical_p: float) -> None:
    """Set the scores that typical-p does not keep to minus infinity, in place."""
    at = np.flatnonzero(tempered > -np.inf)
    if at.size == 0:
        return
    scores = tempered[at]
    mass = np.exp(scores - peak).astype(np.float64)
    distance = np.abs(scores - np.float32((mass * scores).sum() / mass.sum()))
    enough = np.float64(np.float32(typical_p)) * mass.sum()
    for reach in _DEPTHS:
        near = distance <= reach
        if mass[near].sum() >= enough:
            break
    else:
        near[:] = True
    order = distance[near].argsort()
    last = int(np.count_nonzero(mass[near][order].cumsum() < enough))
    tempered[at[distance > distance[near][order[min(last, order.size - 1)]]]] = -np.inf
