"""Memory for partial results. All kernels of a model share one buffer per device, because they run one after another.

A buffer in use may be part of a captured CUDA graph, so it is never replaced. A kernel that then needs a larger one
gets a new buffer, which later kernels share. The old one lives as long as its kernels.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch


class Scratch:
    """A buffer of f32 numbers that any kernel may overwrite."""

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(0, dtype=torch.float32, device=device)
        self.used = False

    def __len__(self) -> int:
        return self._buffer.numel()

    def grow(self, numbers: int) -> None:
        """Make room for at least `numbers` numbers."""
        if numbers > len(self):
            self._buffer = torch.empty(numbers, dtype=torch.float32, device=self._buffer.device)

    def buffer(self) -> torch.Tensor:
        """Returns the buffer, which does not change from now on."""
        self.used = True
        return self._buffer


_CURRENT: WeakValueDictionary[torch.device, Scratch] = WeakValueDictionary()


def reserve(device: torch.device, numbers: int) -> Scratch:
    """Returns a Scratch of at least `numbers` numbers, shared if possible."""
    scratch = _CURRENT.get(device)
    if scratch is None or (scratch.used and numbers > len(scratch)):
        scratch = _CURRENT[device] = Scratch(device)
    scratch.grow(numbers)
    return scratch
