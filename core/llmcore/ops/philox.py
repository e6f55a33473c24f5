"""Philox4x32-10: random bits as a pure function of a key and a counter.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC'11). A draw is the same number in every
kernel, on every rank and after every preemption, because it depends on nothing but what it is a draw for.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

GUMBEL_MIN = -2.8116
"""Just below the least value `gumbel` returns."""

GUMBEL_MAX = 16.6356
"""Just above the greatest value `gumbel` returns; a score further below the best than the two are apart never wins."""


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four random words per element. All tensors are int64 that hold unsigned 32-bit words and broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # An int64 product wraps, but its 64 bits are those of the unsigned product.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((p1 >> 32) & _WORD) ^ c1 ^ k0, p1 & _WORD
        c2, c3 = ((p0 >> 32) & _WORD) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def token_bits(seed: Tensor, choice: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """One word per token: word `token % 4` of the counter (token // 4, position, choice, 0) under key `seed`.

    All are int64 and broadcast together; `seed` is any 64-bit pattern, `position` the index of the output token that
    is drawn, `token` an index into the vocabulary.
    """
    words = philox4x32(
        (token >> 2, position, choice, torch.zeros_like(position)), (seed & _WORD, (seed >> 32) & _WORD)
    )
    lane = token & 3
    return torch.where(
        lane < 2, torch.where(lane == 0, words[0], words[1]), torch.where(lane == 2, words[2], words[3])
    )


def gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel numbers, f32, from 32-bit words: -log(-log(u)), u = (2 * (bits >> 9) + 1) / 2**24.

    u is exact in f32 and never 0 or 1, so the result lies in (GUMBEL_MIN, GUMBEL_MAX).
    """
    u = ((bits >> 9) * 2 + 1).to(torch.float32) * 2.0**-24
    return -torch.log(-torch.log(u))
