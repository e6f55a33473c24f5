"""Ops: what is computed, one file each. A module named by an OpSpec holds

- `reference`: a short torch function, the meaning of the op;
- `make(context) -> callable`: the reference bound to one context, the kernel `torch` of every op;
- `samples(context) -> iterator of argument tuples`: seeded inputs that hurt, with NaN in what must not be read;
- `TOLERANCE`: dtype -> largest allowed error, relative to the largest expected value;
- `cost(shape) -> (bytes, flops)` of one call, where `shape` also holds `tokens`, `element` (bytes per element) and,
  for attention, `kv_len`;
- `SHAPES`, where kernels are made for shapes: a few to check them in;
- `IN_PLACE`, optional: the names of the reference's arguments that a kernel may overwrite. Tuples of tensors (KV
  pools, tables) are written as the reference writes them. Every other argument stays as it is, to the bit;
- `LAYOUTS`, where it reads or writes KV: the layouts that its samples know;
- `meaning(context) -> callable`, in place of `reference` where what is right depends on the context;
- `long_samples(context)`, optional: samples of real sizes for `llmcore kernels --check`, made where `draw` draws;
- `timed(context, tokens)`, optional: iterator of the arguments that `llmcore kernels --bench` times, made where `draw`
  draws; without it, the first of `samples` whose tokens are as many as SAMPLE_TOKENS then says;
- for a composite, `expand(context, part) -> callable`, where `part(op, **shape)` gives the op's chosen kernel.

Attention ops make `protocols.AttentionKernel`s: what they mean is in `llmcore.ops.attention`, their `reference` and
samples are in `llmcore.ops.attention_cases`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from llmcore.specs import OpContext

Op = Callable[..., Any]
"""A bound op: tensors in, tensors out."""

Shape = Mapping[str, int | float | str | bool | None]

DTYPES: Mapping[str, torch.dtype] = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
"""The types that weights and activations may have."""

ROUNDING: Mapping[str, float] = {"f32": 1e-5, "f16": 4e-3, "bf16": 2e-2}
"""The tolerance of an op that rounds a few times."""


class OpModule(Protocol):
    """What the module of an op holds."""

    TOLERANCE: Mapping[str, float]

    def reference(self, *args: Any) -> Any:
        """The meaning of the op."""

    def make(self, context: OpContext) -> Any:
        """The reference bound to `context`."""

    def samples(self, context: OpContext) -> Iterator[tuple[Any, ...]]:
        """Argument tuples, in the context's dtype."""

    def cost(self, shape: Shape) -> tuple[float, float]:
        """(bytes, flops) of one call."""


@runtime_checkable
class Bound(Protocol):
    """The module of an op that means something else in every context."""

    def meaning(self, context: OpContext) -> Op:
        """What a kernel made for `context` must compute."""


def size(shape: Shape, name: str, default: int = 1) -> int:
    """One whole number of a shape."""
    value = shape.get(name, default)
    if isinstance(value, (int, float)):
        return int(value)
    raise TypeError(f"shape[{name!r}] is {value!r}, not a number")


@dataclass
class _Source:
    """Where `draw` takes its numbers from."""

    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    tokens: int | None = None


_source = _Source()


@contextmanager
def drawing(seed: int, device: torch.device, tokens: int | None = None) -> Iterator[None]:
    """Within it `draw` draws on `device`, other numbers for every `seed`; SAMPLE_TOKENS says `tokens` if given."""
    before = _source.seed, _source.device, _source.tokens
    _source.seed, _source.device, _source.tokens = seed, device, tokens
    try:
        yield
    finally:
        _source.seed, _source.device, _source.tokens = before


def draws_on() -> torch.device:
    """Where `draw` makes its tensors."""
    return _source.device


def draw(context: OpContext, *shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers in the context's dtype; outside `drawing` on the CPU, the same on every machine."""
    generator = torch.Generator(_source.device).manual_seed(_source.seed + seed)
    return torch.randn(*shape, generator=generator, device=_source.device).to(DTYPES[context.dtype])


class _SampleTokens(dict[int, tuple[int, ...]]):
    """By bucket, unless `drawing` was told how many."""

    def __getitem__(self, bucket: int) -> tuple[int, ...]:
        return super().__getitem__(bucket) if _source.tokens is None else (_source.tokens,)


SAMPLE_TOKENS: Mapping[int, tuple[int, ...]] = _SampleTokens(
    {0: (1,), 1: (2, 7, 16), 2: (17, 64), 3: (65,), 4: (257,)}
)
"""Token counts worth a sample per bucket: the borders, and odd ones."""
