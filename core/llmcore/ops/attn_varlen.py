"""attn.varlen: attention of rows with varying lengths over packed keys and values, not over a KV pool.

Latent attention uses it in its expanded form: for this step's tokens among themselves (mask "causal"), and over a
bounded piece of the cached tokens (mask "full"). `attn.merge` joins these parts by their lse.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from llmcore.api.models import AttnSpec
from llmcore.api.specs import OpContext
from llmcore.ops import Shape, draw, draws_on, size
from llmcore.ops.attention import TOLERANCE, attend, shape_of, spec_of

__all__ = ["SHAPES", "TOLERANCE", "cost", "long_samples", "make", "samples", "timed"]

SHAPES: tuple[Shape, ...] = tuple(
    shape_of(AttnSpec(heads=heads, kv_heads=heads, key_size=key, value_size=value, scale=0.2, mask=mask))
    for heads, key, value in ((3, 24, 16), (4, 48, 32))
    for mask in ("causal", "full")
)
"""Keys wider than values, because keys have a rotated part too."""

Longest = tuple[int, int]
"""(most query tokens, most keys) of a row: upper bounds that the host knows."""

Arguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Longest]


class Varlen:
    """The reference: one row after the other."""

    def __init__(self, context: OpContext) -> None:
        self.spec = spec_of(context)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_start: torch.Tensor,
        k_start: torch.Tensor,
        longest: Longest,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [T, heads, key_size], k [L, kv_heads, key_size], v [L, kv_heads, value_size], and the borders of R rows in
        both, [R + 1] int32 -> out [T, heads, value_size] and lse [T, heads] f32 (natural logarithm).

        With a causal mask, a row's queries belong to the last of its keys. A row without keys gives zeros and an lse
        of -inf. The strides of tokens and heads may be larger than their sizes: q is a part of a wider projection, and
        so is v. Keys and values past the last border belong to no row and must not be used.
        """
        out = q.new_zeros(len(q), self.spec.heads, self.spec.value_size)
        lse = torch.full(out.shape[:2], -torch.inf, device=q.device)
        for (first, last), (start, end) in zip(pairwise(q_start.tolist()), pairwise(k_start.tolist()), strict=True):
            if end > start and last > first:
                part, lse[first:last] = attend(q[first:last], k[start:end], v[start:end], self.spec)
                out[first:last] = part.to(out.dtype)
        return out, lse


make = Varlen


def samples(context: OpContext) -> Iterator[Arguments]:
    """One row, rows of one token beside long ones, and with the full mask a row without keys."""
    yield _sample(context, (5,), (5,))
    yield _sample(context, (37, 1, 20), (37, 1, 20) if _causal(context) else (12, 90, 0))
    yield _apart(_sample(context, (7, 66, 2), (19, 70, 130)))


def long_samples(context: OpContext) -> Iterator[Arguments]:
    """Prompts and pieces of a prefix with real lengths."""
    if context.bucket == 4:
        yield _sample(context, (1000, 31, 700), (1000, 31, 700) if _causal(context) else (3000, 0, 8100))


def timed(context: OpContext, tokens: int) -> Iterator[Arguments]:
    """One prompt, over itself (causal) or over a prefix of the same length (full)."""
    yield _sample(context, (tokens,), (tokens,))


def cost(shape: Shape) -> tuple[float, float]:
    """(bytes, flops): keys and values of `kv_len` tokens are read once; a causal mask needs half of the scores."""
    kv_len, tokens, heads = size(shape, "kv_len"), size(shape, "tokens"), size(shape, "heads")
    width = size(shape, "key_size") + size(shape, "value_size")
    flops = 2.0 * tokens * kv_len * heads * width
    moved = (kv_len + tokens) * heads * width * size(shape, "element", 2)
    return float(moved), flops / 2 if shape.get("mask", "causal") == "causal" else flops


def _causal(context: OpContext) -> bool:
    return spec_of(context).mask == "causal"


def _apart(arguments: Arguments) -> Arguments:
    """The same values in wider tensors: gaps between q's tokens and between v's heads, extra keys at the end."""
    q, k, v, *rest = arguments
    wide = q.new_full((len(q), q.shape[1] * q.shape[2] + 24), torch.nan)
    wide[:, : q[0].numel()] = q.flatten(1)
    beside = v.new_full((len(v) + 3, v.shape[1], v.shape[2] + 16), torch.nan)
    beside[: len(v), :, 16:] = v
    longer = k.new_full((len(k) + 3, *k.shape[1:]), torch.nan)
    longer[: len(k)] = k
    return wide[:, : q[0].numel()].view(q.shape), longer, beside[..., 16:], *rest  # type: ignore[return-value]


def _sample(context: OpContext, queries: tuple[int, ...], keys: tuple[int, ...]) -> Arguments:
    spec = spec_of(context)
    q_start, k_start = (
        torch.tensor([0, *counts], device=draws_on()).cumsum(0).to(torch.int32) for counts in (queries, keys)
    )
    q = draw(context, sum(queries), spec.heads, spec.key_size)
    k = draw(context, sum(keys), spec.kv_heads, spec.key_size, seed=1)
    v = draw(context, sum(keys), spec.kv_heads, spec.value_size, seed=2)
    return q, k, v, q_start, k_start, (max(queries), max(keys))
