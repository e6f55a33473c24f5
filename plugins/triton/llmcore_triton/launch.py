"""What every kernel needs to be launched: where it runs, and how it overlaps with the one before it.

With programmatic dependent launch a kernel may start while the one before it in the stream is finishing. Up to
`wait` it may only read what no kernel writes (weights); after it, everything the kernels before have written is
there. `release` lets the next kernel start; it changes nothing about what that one may read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


class Bound:
    """A kernel with its compile-time arguments and options: ``bound(grid, *runtime_arguments)`` launches it.

    Triton's own launch examines and looks up every argument anew, which costs more than the GPU needs for a small
    kernel. What it compiles depends on the types of arguments, on whether addresses are multiples of 16 bytes, and on
    integers (unless `do_not_specialize`); this looks up the compiled kernel by just that. Runtime arguments come first
    in a kernel's signature, compile-time ones last.
    """

    def __init__(self, kernel: Any, **fixed: Any) -> None:
        self._kernel, self._fixed = kernel, fixed
        self._variants: dict[tuple[tuple[str, Any], ...], Bound] = {}
        self._compiled: dict[tuple[Any, ...], Callable[..., None]] = {}
        if not INTERPRETED:
            first = next((i for i, p in enumerate(kernel.params) if p.is_constexpr), len(kernel.params))
            if any(not p.is_constexpr for p in kernel.params[first:]):
                raise TypeError(f"{kernel.__name__}: runtime arguments must come before compile-time ones")
            self._plain = tuple(p.do_not_specialize for p in kernel.params[:first])
            self._names = [p.name for p in kernel.params[first:]]

    def but(self, **more: Any) -> Bound:
        """The same kernel with further compile-time arguments."""
        key = tuple(more.items())
        found = self._variants.get(key)
        if found is None:
            found = self._variants[key] = Bound(self._kernel, **self._fixed, **more)
        return found

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Enqueue it on the current stream."""
        if INTERPRETED:
            self._kernel[grid](*arguments, **self._fixed)
            return
        key = tuple([_kind(a, plain) for a, plain in zip(arguments, self._plain, strict=True)])
        launch = self._compiled.get(key)
        if launch is None:
            self._compile(key, grid, arguments)
        else:
            launch(*grid, *_ONES[len(grid)], _stream(_device()), arguments)

    def _compile(self, key: tuple[Any, ...], grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        """The first launch, by Triton; the next of its kind need only its compiled kernel."""
        compiled = self._kernel[grid](*arguments, **self._fixed)
        constants = tuple(self._fixed[name] for name in self._names)
        run, function, packed = compiled.run, compiled.function, compiled.packed_metadata

        def launch(x: int, y: int, z: int, stream: int, arguments: tuple[Any, ...]) -> None:
            run(x, y, z, stream, function, packed, None, None, None, *arguments, *constants)

        self._compiled[key] = launch


def _kind(argument: Any, plain: bool) -> Any:
    """What of a runtime argument decides the compiled kernel."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() & 15
    if isinstance(argument, int):
        return argument.bit_length() > 31 if plain else argument
    return None if argument is None else type(argument)


_ONES = {1: (1, 1), 2: (1,), 3: ()}


def _device() -> int:
    return torch.cuda.current_device()


def _stream(device: int) -> int:
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return stream


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
