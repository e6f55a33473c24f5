"""Philox4x32-10: random bits as a pure function of a key and a counter.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC'11). A draw is the same number in every
kernel, on every rank and after every preemption: it depends only on the seed, the choice, the position and the index.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four random words per element. All tensors are int64, hold unsigned 32-bit words and broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The int64 product wraps around, but has the same 64 bits as the unsigned product.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((p1 >> 32) & _WORD) ^ c1 ^ k0, p1 & _WORD
        c2, c3 = ((p0 >> 32) & _WORD) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def bits(seed: Tensor, choice: Tensor, position: Tensor, index: Tensor, level: int) -> Tensor:
    """One word per index: word `index % 4` of the counter (index // 4, position, choice, level) under key `seed`.

    All tensors are int64 and broadcast together. `seed` is any 64-bit pattern. `position` is the number of the output
    token to draw. `level` separates the kinds of indices within one draw: tokens and blocks.
    """
    counter = (index >> 2, position, choice, torch.full_like(position, level))
    words = philox4x32(counter, (seed & _WORD, (seed >> 32) & _WORD))
    lane = index & 3
    return torch.where(
        lane < 2, torch.where(lane == 0, words[0], words[1]), torch.where(lane == 2, words[2], words[3])
    )


def gumbel(words: Tensor) -> Tensor:
    """Standard Gumbel numbers in f32 from 32-bit words: -log(-log(u)) with u = (2 * (word >> 9) + 1) / 2**24.

    The value of u is exact in f32 and never 0 or 1, so the result is between -2.82 and 16.64.
    """
    u = ((words >> 9) * 2 + 1).to(torch.float32) * 2.0**-24
    return -torch.log(-torch.log(u))
