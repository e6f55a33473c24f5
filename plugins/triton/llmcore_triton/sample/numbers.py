"""The numbers of a draw, random ones and scores, with the bits of the torch reference.

On a GPU, Triton's `exp` and `/` of f32 are approximations. This module uses the exponential of CUDA's math library, as
torch does, and a quotient that is rounded once. Triton's `log` already is the library's.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from llmcore_triton.launch import INTERPRETED

COLUMNS = ["temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "choice", "position"]
"""Arguments that are columns of a step's tables. Their addresses depend on the number of rows."""

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def exp(x):  # type: ignore[no-untyped-def]
    """e to the x, as accurate as torch's."""
    if _INTERPRETED:
        y = tl.exp(x)
    else:
        y = libdevice.exp(x)
    return y


@triton.jit
def gumbel(seed, choice, position, index, LEVEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns standard Gumbel numbers of a block of indices. The other arguments are a row's scalars. See
    llmcore.ops.philox."""
    zero = (index * 0).to(tl.uint32)
    word0, word1, word2, word3 = tl.philox(
        seed,
        (index >> 2).to(tl.uint32),
        zero + position.to(tl.uint32),
        zero + choice.to(tl.uint32),
        zero + LEVEL,
    )
    lane = index & 3
    word = tl.where(lane < 2, tl.where(lane == 0, word0, word1), tl.where(lane == 2, word2, word3))
    uniform = ((word >> 9) * 2 + 1).to(tl.float32) * (1.0 / 16777216)
    return -tl.log(-tl.log(uniform))


@triton.jit
def tempered(score, temperature):  # type: ignore[no-untyped-def]
    """Returns scores over the temperature, rounded once."""
    return tl.div_rn(score, temperature)


@triton.jit
def rank(score, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns int32 numbers in the order of the f32 scores. `SHIFT`: low bits of the scores that are always zero."""
    bits = score.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def ranked(rank, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the score of a rank."""
    low: tl.constexpr = (1 << SHIFT) - 1
    bits = (rank << SHIFT) | tl.where(rank < 0, low, 0)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
