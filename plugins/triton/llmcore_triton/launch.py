"""What every kernel needs to be launched: where it runs, and how it overlaps with the one before it.

With programmatic dependent launch a kernel may start while the one before it in the stream is finishing. Up to
`wait` it may only read what no kernel writes (weights); after it, everything the kernels before have written is
there. `release` lets the next kernel start; it changes nothing about what that one may read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, on CPU tensors."""

HOPPER = 90


def overlaps(context: OpContext) -> bool:
    """Whether the device can start a kernel before its predecessor has ended (the constexpr PDL of kernels)."""
    return not INTERPRETED and (context.device.capability or 0) >= HOPPER


def place(context: OpContext) -> torch.device:
    """Where a kernel made for `context` finds its tensors."""
    return torch.device("cpu" if INTERPRETED else context.device.type)


@triton.jit
def wait(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Until the kernels before this one have ended and their writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel start."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
