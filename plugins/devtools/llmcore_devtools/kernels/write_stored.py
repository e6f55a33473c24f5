"""Cases for kernels that write KV in a layout that the op's samples do not know: the same calls over its pool."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from llmcore.api.errors import ConfigError
from llmcore.api.models import KVGroupSpec
from llmcore.api.specs import KVLayoutSpec, OpContext, OpSpec
from llmcore.ops import Op, Shape
from llmcore.registry.loader import load
from llmcore.registry.registry import Registry

KV = tuple[torch.Tensor, ...]

_UNWRITTEN = 255
"""Every byte of a slot that no call has written."""


class Stores(Protocol):
    """The part of a llmcore.layers.Layout that these cases use."""

    granule: int
    joined: bool

    def tensors(self, granules: int, device: torch.device) -> Mapping[int, KV]: ...
    def pool(self, kv: KV) -> KV: ...
    def write(self, kv: KV, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None: ...
    def gather(self, kv: KV, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


class DoesNotFit(ConfigError):
    """A layout does not take heads of some size."""


def layout_of(registry: Registry, context: OpContext, heads: int, key: int, value: int) -> Stores:
    """The layout of `context`, made for such heads. Raises ConfigError if no plugin brings it, and DoesNotFit."""
    name = str(context.layout)
    make = load(registry.find(KVLayoutSpec, name).make)
    group = KVGroupSpec(name="kv", layers=(0,), layout=name, kv_heads=heads, key_size=key, value_size=value)
    try:
        layout: Stores = make(group, context.granule, context.dtype)
    except ConfigError as misfit:
        raise DoesNotFit(str(misfit)) from misfit
    return layout


class StoredWrites:
    """The samples of the composite `module` with pools of the layout of `context`. The reference is its expansion.

    The layout is made for the heads of the samples. Raises ConfigError if no plugin brings it, and DoesNotFit if it
    does not take these heads.
    """

    def __init__(self, registry: Registry, module: Any, context: OpContext) -> None:
        self.module, self.IN_PLACE = module, module.IN_PLACE
        self._places = list(inspect.signature(module.reference).parameters)
        plain = self._named(next(module.samples(context)))["kv"]
        _, self.heads, key = plain[0].shape
        value = plain[1].shape[2] if len(plain) > 1 else int(context.shape["latent"] or 0)
        self.layout = layout_of(registry, context, self.heads, key, value)
        spec = registry.find(KVLayoutSpec, str(context.layout))
        # a number near the middle between two codes may round to either, a whole step apart
        self.TOLERANCE = {dtype: allowed + 2 * spec.tolerance for dtype, allowed in module.TOLERANCE.items()}
        self.reference = _expanded(registry, self.layout, context)

    def samples(self, context: OpContext) -> Iterator[tuple[Any, ...]]:
        """The op's samples."""
        return map(self._over_pool, self.module.samples(context))

    def long_samples(self, context: OpContext) -> Iterator[tuple[Any, ...]]:
        """The op's long samples."""
        return map(self._over_pool, self.module.long_samples(context))

    def cost(self, shape: Shape) -> tuple[float, float]:
        """The op's, as if the layout did not quantize."""
        cost: tuple[float, float] = self.module.cost(shape)
        return cost

    def written(self, result: Any, arguments: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """The keys and values that a call has stored, as the layout reads them.

        Raises AssertionError if the call has left other keys or values than these, or has written other slots.
        """
        given = self._named(arguments)
        kv, slots = given["kv"], given["slots"]
        keys, values = self.layout.gather(kv, slots)
        left = result[1].unsqueeze(1) if self.layout.joined else result[:, -self.heads :]
        assert torch.equal(left, keys), "the keys that the call leaves are not those that it stores"
        if not self.layout.joined:
            assert torch.equal(given["v"], values), "the values that the call leaves are not those that it stores"
        for part in self.layout.pool(kv):
            others = torch.ones(len(part), dtype=torch.bool, device=part.device).index_fill_(0, slots, False)
            assert (part.view(torch.uint8)[others] == _UNWRITTEN).all(), "the call writes other slots"
        return keys, values

    def _named(self, arguments: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(self._places, arguments, strict=True))

    def _over_pool(self, sample: tuple[Any, ...]) -> tuple[Any, ...]:
        given = self._named(sample)
        plain = given["kv"][0]
        kv = self.layout.tensors(-(-len(plain) // self.layout.granule), plain.device)[0]
        for part in self.layout.pool(kv):
            part.view(torch.uint8).fill_(_UNWRITTEN)
        return tuple((given | {"kv": kv}).values())


def _expanded(registry: Registry, layout: Stores, context: OpContext) -> Op:
    """The reference of the context's op: of a composite, its expansion into references and the write of `layout`."""
    module = importlib.import_module(registry.find(OpSpec, context.op).module)

    def part(op: str, **shape: Any) -> Op:
        return layout.write if op == "kv_write" else _expanded(registry, layout, replace(context, op=op, shape=shape))

    made: Op = module.expand(context, part) if hasattr(module, "expand") else module.reference
    return made
