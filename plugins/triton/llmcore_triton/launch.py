"""What every kernel needs to be launched: where it runs, and how it overlaps with the one before it.

With programmatic dependent launch a kernel may start while the one before it in the stream is finishing. Up to
`wait` it may only read what no kernel writes (weights); after it, everything the kernels before have written is
there. `release` lets the next kernel start; it changes nothing about what that one may read.

Kernels here release after they have waited. So one that starts early finds all that was written before the kernel
just ahead of it began: what is known to be as old (a step's lengths and lists) is read before `wait`, past the L1
cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import attrgetter, itemgetter, or_
from typing import Any

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext
from triton.tools.tensor_descriptor import TensorDescriptor

from llmcore_triton.entry import Launch, launch_of

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
        self._forms: dict[tuple[type, ...], _Form] = {}
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
        types = tuple(map(type, arguments))
        form = self._forms.get(types)
        if form is None:
            form = self._forms[types] = _Form(types, self._plain)
        tensors = form.tensors(arguments)
        addresses = [*map(_ADDRESS, tensors)]
        aligned = not reduce(or_, addresses, 0) & 15
        beside = () if aligned else tuple([address & 15 for address in addresses])
        wide = [arguments[place].bit_length() > 31 for place in form.plain]
        key = (form.numbers(arguments), beside, *wide, *map(_DTYPE, tensors))
        launch = form.compiled.get(key)
        if launch is None:
            form.compiled[key] = self._compile(form, grid, arguments)
            return
        numbers = list(arguments)
        for place, address in zip(form.places, addresses, strict=True):
            numbers[place] = address
        launch((*grid, *_ONES[len(grid)], _stream(_device())), arguments, numbers)

    def _compile(self, form: _Form, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> Launch:
        """The first launch, by Triton; the next of its kind need only its compiled kernel."""
        compiled = self._kernel[grid](*arguments, **self._fixed)
        return launch_of(compiled, form.boxes, tuple(self._fixed[name] for name in self._names))


class _Form:
    """Arguments of the same types: where there are tensors, descriptors and numbers, and what was compiled for them.

    `numbers`: takes those that Triton compiles for; of the ones at `plain` only the size counts.
    """

    def __init__(self, types: tuple[type, ...], plain: tuple[bool, ...]) -> None:
        whole = [issubclass(kind, int) for kind in types]
        self.places = tuple(i for i, kind in enumerate(types) if issubclass(kind, torch.Tensor))
        self.boxes = tuple(i for i, kind in enumerate(types) if issubclass(kind, TensorDescriptor))
        self.tensors = _picked(self.places)
        self.numbers = _picked([i for i, here in enumerate(whole) if here and not plain[i]])
        self.plain = tuple(i for i, here in enumerate(whole) if here and plain[i])
        self.compiled: dict[tuple[Any, ...], Launch] = {}


def _picked(places: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Takes what is at `places`."""
    if len(places) > 1:
        return itemgetter(*places)
    # itemgetter of one place would give no tuple
    return lambda arguments: tuple([arguments[place] for place in places])


_ADDRESS, _DTYPE = torch.Tensor.data_ptr, attrgetter("dtype")
_ONES = {1: (1, 1), 2: (1,), 3: ()}


def _device() -> int:
    device: int = torch._C._cuda_getDevice()
    return device


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
