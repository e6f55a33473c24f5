"""Ops: the computations that kernels implement, one file for each op.

An OpSpec names a module with these attributes:

`reference`: a short torch function that defines the op.
`make(context) -> callable`: the op's kernel `torch`, made for one context. Without it, this kernel is `reference`. A
  module without `reference` is an op whose right result depends on the context; what `make` returns defines it.
`samples(context) -> iterator of argument tuples`: seeded inputs with difficult values, and with NaN in places that
  a kernel must not read.
`TOLERANCE`: dtype -> largest allowed error, relative to the largest expected value.
`compared(got, expected) -> iterator of (what, got, expected)`, optional: the tensors that TOLERANCE is for, from the
  outputs of a kernel and of the reference, if it is not for the outputs themselves.
`cost(shape) -> (bytes, flops)` of one call. Here `shape` also has `tokens`, `element` (bytes per element) and, for
  attention, `kv_len`.
`SHAPES`, if kernels are made for shapes: some shapes to check kernels with.
`IN_PLACE`, optional: the names of the reference's arguments that a kernel may overwrite. A kernel writes tuples of
  tensors (KV pools, tables) as the reference does. It leaves every other argument as it is, to the bit.
`LAYOUTS`, if the op reads or writes KV: the layouts that its samples know.
`JOINED`, for attention: True if these layouts are joined, so that a token's value is the first part of its key.
`long_samples(context)`, optional: samples of real sizes for `llmcore kernels --check`, on the device of `draw`.
`timed(context, tokens)`, optional: iterator of the arguments that `llmcore kernels --bench` times, on the device of
  `draw`. Without it, the bench times the first of `samples`, for which SAMPLE_TOKENS gives `tokens`.
`expand(context, part) -> callable`, for a composite. `part(op, **shape)` returns the op's chosen kernel.

Attention ops make `protocols.AttentionKernel`s, as `llmcore.ops.attention` defines them. Their samples are `AttnRows`,
for which the check makes queries and KV.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from inspect import signature
from typing import Any

import torch

from llmcore.api.specs import KernelSpec, OpContext
from llmcore.registry.loader import load
from llmcore.registry.resolve import REFERENCE

Op = Callable[..., Any]
"""A bound op: tensors in, tensors out."""

Shape = Mapping[str, int | float | str | bool | None]

DTYPES: Mapping[str, torch.dtype] = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
"""The types that weights and activations may have."""

ROUNDING: Mapping[str, float] = {"f32": 1e-5, "f16": 4e-3, "bf16": 2e-2}
"""The tolerance of an op that rounds a few times."""


def made(kernel: KernelSpec, context: OpContext) -> Any:
    """`kernel`, made for `context`: a callable, or an AttentionKernel."""
    if kernel.name == REFERENCE:
        module = import_module(kernel.make.partition(":")[0])
        return module.make(context) if hasattr(module, "make") else module.reference
    return load(kernel.make)(replace(context, kernel=kernel.name))


def packing(kernels: Sequence[Any]) -> Callable[..., Any] | None:
    """`pack` of the kernels of one linear, if all have the same `packing`; else None. See llmcore.ops.linear."""
    names = {getattr(kernel, "packing", None) for kernel in kernels}
    return None if None in names or len(names) > 1 else kernels[0].pack


def packed(pack: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a linear by name, with those that `pack` takes as `pack` returns them."""
    names = tuple(signature(pack).parameters)
    made = pack(*(given.get(name) for name in names))
    forms = zip(names, made if isinstance(made, tuple) else (made,), strict=True)
    return {**given, **{name: form for name, form in forms if name in given}}


def size(shape: Shape, name: str, default: int = 1) -> int:
    """The number `name` of a shape, as an int. Raises TypeError if the value is not a number."""
    value = shape.get(name, default)
    if isinstance(value, (int, float)):
        return int(value)
    raise TypeError(f"shape[{name!r}] is {value!r}, not a number")


@dataclass
class _Source:
    """The seed and the device of `draw`, and the token count of SAMPLE_TOKENS if one was set."""

    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    tokens: int | None = None


_source = _Source()


@contextmanager
def drawing(seed: int, device: torch.device, tokens: int | None = None) -> Iterator[None]:
    """Inside this context `draw` draws on `device`, with other numbers for each `seed`.

    If `tokens` is given, SAMPLE_TOKENS has only this count, for every bucket.
    """
    before = _source.seed, _source.device, _source.tokens
    _source.seed, _source.device, _source.tokens = seed, device, tokens
    try:
        yield
    finally:
        _source.seed, _source.device, _source.tokens = before


def draws_on() -> torch.device:
    """The device on which `draw` makes its tensors."""
    return _source.device


def draw(context: OpContext, *shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers in the context's dtype. Outside `drawing` they are on the CPU, and equal on every machine."""
    generator = torch.Generator(_source.device).manual_seed(_source.seed + seed)
    return torch.randn(*shape, generator=generator, device=_source.device).to(DTYPES[context.dtype])


class _SampleTokens(dict[int, tuple[int, ...]]):
    """Token counts by bucket, or the one count that `drawing` was given."""

    def __getitem__(self, bucket: int) -> tuple[int, ...]:
        return super().__getitem__(bucket) if _source.tokens is None else (_source.tokens,)


SAMPLE_TOKENS: Mapping[int, tuple[int, ...]] = _SampleTokens(
    {0: (1,), 1: (2, 7, 16), 2: (17, 64), 3: (65,), 4: (257,)}
)
"""Token counts to sample for each bucket: its borders, and odd counts."""
