"""Launching kernels: where they run, and how a kernel overlaps with the one before it.

With programmatic dependent launch a kernel may start before the previous one in the stream has finished. Before `wait`
it may only read data that no kernel writes (weights). After `wait` it sees all writes of the kernels before it.
`release` lets the next kernel start. It does not change what that kernel may read.

Kernels here release after their `wait`. So a kernel that starts early sees everything that was written before the
kernel just ahead of it began. Data that is known to be that old (a step's lengths and lists) is read before `wait`,
bypassing the L1 cache.
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
"""True if kernels run in Triton's interpreter, on CPU tensors."""

HOPPER = 90


def overlaps(context: OpContext) -> bool:
    """True if the device can start a kernel before the previous one has ended (the constexpr PDL of kernels)."""
    return not INTERPRETED and (context.device.capability or 0) >= HOPPER


def place(context: OpContext) -> torch.device:
    """Returns the device of the tensors of a kernel made for `context`."""
    return torch.device("cpu" if INTERPRETED else context.device.type)


class Bound:
    """A kernel with its compile-time arguments and options: ``bound(grid, *runtime_arguments)`` launches it.

    Triton's own launch examines every argument again, which takes longer than the GPU needs for a small kernel. A
    compiled kernel depends on the types of arguments, on whether addresses are multiples of 16 bytes, and on integers
    (unless `do_not_specialize`). This class looks up the compiled kernel by these alone. A kernel's signature has
    runtime arguments first and compile-time ones last.
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
        """Returns the same kernel with further compile-time arguments."""
        key = tuple(more.items())
        found = self._variants.get(key)
        if found is None:
            found = self._variants[key] = Bound(self._kernel, **self._fixed, **more)
        return found

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Enqueue the kernel on the current stream."""
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
        """Lets Triton do the first launch. Later launches of the same form reuse its compiled kernel."""
        compiled = self._kernel[grid](*arguments, **self._fixed)
        return launch_of(compiled, form.boxes, tuple(self._fixed[name] for name in self._names))


class _Form:
    """Arguments of the same types: the places of tensors, descriptors and numbers, and what was compiled for them.

    `numbers` picks the numbers that Triton compiles for. For those at `plain` only the size counts.
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
    """Returns a function that picks the arguments at `places`."""
    if len(places) > 1:
        return itemgetter(*places)
    # itemgetter with a single place would not return a tuple
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
    """Wait until the kernels before this one have ended and their writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel start."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
