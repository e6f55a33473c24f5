"""Launching kernels: where they run, and how a kernel overlaps with the one before it.

With programmatic dependent launch a kernel may start before the previous one in the stream has finished. Before `wait`
it may only read data that no kernel writes (weights). After `wait` it sees all writes of the kernels before it.
`release` lets the next kernel start. It does not change what that kernel may read.

Large kernels release after their `wait`. So a kernel behind them sees everything that was written before they began.
Some short ones (RMS norms, rope with its KV, merges, choices and sums of experts) release at once. The kernel behind
them then reads its weights while the one ahead of them still runs. It may not read what that one writes.

Some kernels read data that is known to be old enough before `wait`, bypassing the L1 cache. Attention reads a step's
lengths and lists so, and the KV of earlier tokens, because the linear that makes queries lies between. All kernels of
both kinds are listed in tests/triton/test_overlap.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import reduce
from operator import attrgetter, itemgetter, or_
from typing import Any

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRETED: bool = triton.knobs.runtime.interpret
"""True if kernels run in Triton's interpreter, on CPU tensors."""

HOPPER = 90

APART = False
"""True: no kernel starts before the one ahead has ended, except in a kernel's first launch. For comparisons."""


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
        # those of Triton and those of Gluon, which share no class
        self.boxes = tuple(i for i, kind in enumerate(types) if hasattr(kind, "from_tensor"))
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
    """Let the next kernel start as soon as all programs of this one have begun."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def here(x, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns x. The compiler uses the result here or later, in the order of the source."""
    if PDL:
        PACK: tl.constexpr = 32 // x.dtype.primitive_bitwidth
        x = tl.inline_asm_elementwise("", "=r,0", [x], dtype=x.dtype, is_pure=False, pack=PACK)
    return x


_KNOWN = "3.6."
"""The version of Triton whose launcher this code enters. Any other version is called through its public launcher."""

_PARTS = ("launch", "launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")

Launch = Callable[[tuple[int, ...], Sequence[Any], list[Any]], None]
"""((x, y, z, stream), arguments, the same with addresses in place of tensors). The function may change the last
list."""


class Box(TensorDescriptor):  # type: ignore[misc]
    """A TMA descriptor whose maker has checked alignment already. Triton's own class checks it again."""

    def __post_init__(self) -> None:
        """Checks nothing."""


def launch_of(compiled: Any, boxes: tuple[int, ...], constants: tuple[Any, ...]) -> Launch:
    """Returns a function that launches a compiled kernel. `boxes`: places of the arguments that are descriptors."""
    if APART:
        compiled.run.launch_pdl = False
    found = _entry(compiled.run, bool(boxes))
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    if found is None:

        def usual(where: tuple[int, ...], arguments: Sequence[Any], numbers: list[Any]) -> None:
            run(*where, function, packed, None, None, None, *arguments, *constants)

        return usual
    enter, encodings = found
    head = (function, run.launch_cooperative_grid, run.launch_pdl, None, None, packed, None, None, None)
    # in reverse order: each descriptor is replaced by more than one argument
    described = tuple(zip(boxes, encodings, strict=True))[::-1]

    def direct(where: tuple[int, ...], arguments: Sequence[Any], numbers: list[Any]) -> None:
        for at, how in described:
            numbers[at : at + 1] = _encoded(numbers[at], how, enter)
        enter(*where, *head, *numbers, *constants)

    return direct


def _entry(run: Any, boxes: bool) -> tuple[Callable[..., None], Sequence[Any]] | None:
    """The C function, and how it wants descriptors to be encoded. None: this is not the launcher that we know."""
    if not triton.__version__.startswith(_KNOWN) or not all(hasattr(run, part) for part in _PARTS):
        return None
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    if not boxes:
        return run.launch, ()
    within = inspect.getclosurevars(run.launch).nonlocals
    if "launcher" not in within or "tensordesc_meta" not in within:
        return None
    return within["launcher"], within["tensordesc_meta"]


def _encoded(box: TensorDescriptor, how: Any, kernel: object) -> list[Any]:
    """Returns the arguments by which `kernel` takes a descriptor. The box keeps them, since it never changes."""
    kept: dict[object, list[Any]] = vars(box).setdefault("encoded", {})
    found = kept.get(kernel)
    if found is None:
        found = kept[kernel] = make_tensordesc_arg(box, how)
    return found
