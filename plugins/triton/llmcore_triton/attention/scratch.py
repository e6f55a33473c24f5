"""Room for partial results, one buffer per device for all kernels of a model: a step's kernels run one after another.

A buffer that has been used may be part of a captured graph, so it is never replaced: kernels that ask for more after
that share a new one, and the old one lives as long as those that use it.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch


class Scratch:
    """f32 numbers that any kernel may overwrite."""

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(0, dtype=torch.float32, device=device)
        self.used = False

    def __len__(self) -> int:
        return self._buffer.numel()

    def grow(self, numbers: int) -> None:
        """Hold at least so many."""
        if numbers > len(self):
            self._buffer = torch.empty(numbers, dtype=torch.float32, device=self._buffer.device)

    def buffer(self) -> torch.Tensor:
        """The buffer, from now on the same one."""
        self.used = True
        return self._buffer


_CURRENT: WeakValueDictionary[torch.device, Scratch] = WeakValueDictionary()


def reserve(device: torch.device, numbers: int) -> Scratch:
    """A Scratch of at least so many numbers, shared as far as possible."""
    scratch = _CURRENT.get(device)
    if scratch is None or (scratch.used and numbers > len(scratch)):
        scratch = _CURRENT[device] = Scratch(device)
    scratch.grow(numbers)
    return scratch
