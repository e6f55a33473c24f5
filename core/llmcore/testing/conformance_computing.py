"""Conformance of what computes: ops, kernels, layouts and model families, on the device at hand."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

from llmcore import specs
from llmcore.layers.layout import Layout
from llmcore.models import KVGroupSpec
from llmcore.ops import Shape
from llmcore.ops.attention_stored import OverPool, StoredSamples, unknown_layout
from llmcore.ops.check import check
from llmcore.plugins import load
from llmcore.protocols import Checkpoint, Device, QuantMethod
from llmcore.registry import Registry
from llmcore.resolve import REFERENCE, why_not
from llmcore.specs import TOKEN_BUCKETS, DeviceInfo, DType, KernelSpec, OpContext, OpSpec
from llmcore.testing.conformance import contributed, loaded
from llmcore.testing.conformance_contributions import check_checkpoint
from llmcore.testing.conformance_observing import CONFIG
from llmcore.weights.source import open_checkpoint

CPU = DeviceInfo("cpu")
DTYPES: tuple[DType, ...] = get_args(DType)

_SHAPES = 16
"""Most shapes that one kernel is tried with per type and bucket."""


def check_register_ops(registry: Registry, plugin: str, samples: Sequence[Path] = ()) -> int:
    """Every op's module is whole, its `make` agrees with its `reference`, its cost is a number, its parts exist."""
    ops = contributed(registry, plugin, OpSpec)
    for op in ops:
        module = _module(op)
        for part in op.expands_to:
            registry.find(OpSpec, part)
        assert not op.expands_to or callable(getattr(module, "expand", None)), f"composite {op.name} has no expand()"
        for dtype in DTYPES:
            for shape in _shapes(module):
                layout = next(iter(getattr(module, "LAYOUTS", ())), None)
                context = OpContext(op=op.name, device=CPU, dtype=dtype, layout=layout, shape=shape)
                check(module, module.make(context), context)
        _check_cost(op, module)
    return len(ops)


def _module(op: OpSpec) -> Any:
    module = importlib.import_module(op.module)
    for name in ("make", "samples", "TOLERANCE", "cost"):
        assert hasattr(module, name), f"op {op.name}: {op.module} has no {name}"
    meant = hasattr(module, "reference") or hasattr(module, "meaning")
    assert meant, f"op {op.name}: {op.module} has neither reference nor meaning"
    missing = [dtype for dtype in DTYPES if dtype not in module.TOLERANCE]
    assert not missing, f"op {op.name}: TOLERANCE has no {', '.join(missing)}"
    return module


class _Sizes(dict[str, Any]):
    """A shape in which every size is 8."""

    def __missing__(self, name: str) -> int:
        return 8

    def get(self, name: str, default: Any = None) -> Any:
        return self[name]


def _check_cost(op: OpSpec, module: Any) -> None:
    moved, flops = module.cost(_Sizes())
    assert math.isfinite(moved) and math.isfinite(flops), f"op {op.name}: cost() is not finite"
    assert moved > 0 and flops >= 0, f"op {op.name}: cost() says {moved} bytes, {flops} flops"


def _shapes(module: Any) -> Sequence[Shape]:
    shapes: Sequence[Shape] = getattr(module, "SHAPES", ({},))
    return shapes


def check_register_kernels(registry: Registry, plugin: str, samples: Sequence[Path] = ()) -> int:
    """Every kernel agrees with its op's reference wherever it fits, on the devices that are here.

    A kernel for a device that is not here is loaded from its spec but not run.
    """
    kernels = contributed(registry, plugin, KernelSpec)
    devices = list(_devices(registry))
    for kernel in kernels:
        assert kernel.name != REFERENCE, f"{kernel.op}: the name {REFERENCE!r} is the reference's"
        op = registry.find(OpSpec, kernel.op)
        here = [device for device in devices if kernel.when.device in (None, device.info.type)]
        if here:
            _check_kernel(registry, kernel, _module(op), here)
    return len(kernels)


def _devices(registry: Registry) -> Iterator[Device]:
    for spec, _ in registry.specs(specs.DeviceSpec):
        if load(spec.available)() is None:
            yield load(spec.make)()


def _check_kernel(registry: Registry, kernel: KernelSpec, module: Any, devices: Sequence[Device]) -> None:
    compared, declined = 0, set()
    for device, dtype, bucket in itertools.product(devices, DTYPES, range(len(TOKEN_BUCKETS))):
        for context in _contexts(kernel, module, device.info, dtype, bucket):
            misfit = why_not(kernel, context)
            if misfit is not None:
                declined.add(misfit)
                continue
            made = loaded(kernel.make, f"make of {kernel.name}")(context)
            tried, layout = module, unknown_layout(registry, module, context)
            if layout is not None:
                tried, made = StoredSamples(module, layout), OverPool(made, layout)
            compared += check(tried, made, context, device.torch_device)
    assert compared, f"kernel {kernel.name} for {kernel.op} fits nothing that was tried: {'; '.join(sorted(declined))}"


def _contexts(kernel: KernelSpec, module: Any, device: DeviceInfo, dtype: DType, bucket: int) -> Iterator[OpContext]:
    when = kernel.when
    # a batch-invariant kernel may be for deterministic steps alone
    invariant = kernel.batch_invariant
    base = OpContext(op=kernel.op, device=device, dtype=dtype, bucket=bucket, deterministic=invariant)
    layouts: Sequence[str | None] = sorted(when.layouts) or ("token",)
    values = [[(name, value) for value in sorted(allowed, key=repr)] for name, allowed in when.shape.items()]
    shapes = itertools.islice(itertools.product(*values), _SHAPES)
    granules = sorted(when.granules) or (1, 4)
    for layout, granule, shape, known in itertools.product(layouts, granules, shapes, _shapes(module)):
        yield replace(base, layout=layout, granule=granule, shape={**known, **dict(shape)})


def check_register_kv_layouts(registry: Registry, plugin: str, samples: Sequence[Path] = ()) -> int:
    """What a layout writes it gathers again; copies take whole granules and touch nothing else."""
    layouts = contributed(registry, plugin, specs.KVLayoutSpec)
    for spec in layouts:
        make = loaded(spec.make, f"make of {spec.name}")
        for dtype, granule in itertools.product(DTYPES, (1, 4)):
            group = KVGroupSpec(name="kv", layers=(0, 1), kv_heads=2, key_size=16, value_size=16, layout=spec.name)
            _check_layout(make(group, granule, dtype), spec.name)
    return len(layouts)


def _check_layout(layout: Layout, name: str) -> None:
    granules, heads, width = 8, layout.group.kv_heads, layout.group.key_size
    pools = layout.tensors(granules, torch.device("cpu"))
    assert set(pools) == set(layout.group.layers), f"layout {name}: pools for other layers than the group's"
    held = sum(tensor.numel() * tensor.element_size() for pool in pools.values() for tensor in pool)
    assert held == layout.bytes * granules, f"layout {name}: {held} bytes in {granules} granules of {layout.bytes}"
    pool = pools[0]
    every = torch.arange(granules * layout.granule)
    fresh, _ = layout.gather(pool, every)
    assert bool(fresh.isfinite().all()), f"layout {name}: a slot that was never written is not finite"
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(len(every), generator=generator)[: len(every) // 2]
    k, v = (torch.randn(len(slots), heads, width, generator=generator).to(layout.dtype) for _ in range(2))
    if layout.joined:
        v = k[..., : layout.group.value_size]
    layout.write(pool, slots, k, v)
    _close(layout.gather(pool, slots), (k, v), f"layout {name}: gather")
    before = layout.gather(pool, every)
    src, dst = torch.tensor([0, 3]), torch.tensor([6, 7])
    layout.copy(pool, src, dst)
    expected = tuple(_granules(part, layout).index_copy(0, dst, _granules(part, layout)[src]) for part in before)
    after = tuple(_granules(part, layout) for part in layout.gather(pool, every))
    assert all(torch.equal(a, b) for a, b in zip(after, expected, strict=True)), f"layout {name}: copy is not exact"
    layout.scatter(pool, slots, *layout.gather(pool, slots))
    after_scatter = layout.gather(pool, every)
    _close(after_scatter, tuple(part.flatten(0, 1) for part in expected), f"layout {name}: scatter")


def _granules(part: torch.Tensor, layout: Layout) -> torch.Tensor:
    return part.view(-1, layout.granule, *part.shape[1:])


def _close(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], what: str) -> None:
    for left, right in zip(got, expected, strict=True):
        error = float((left.float() - right.float()).abs().max())
        # a layout may quantize: a hundredth of the largest value is what 8 bits allow
        assert error <= 0.01 * max(float(right.float().abs().max()), 1.0), f"{what} is off by {error:.3g}"


def check_register_models(registry: Registry, plugin: str, samples: Sequence[Path] = ()) -> int:
    """Every family answers as transformers does where transformers knows the architecture, on small random models.

    Of other architectures only the code is loaded.
    """
    import transformers

    from llmcore.testing.family import assert_family_matches_transformers

    families = contributed(registry, plugin, specs.ModelSpec)
    for family in families:
        assert family.architectures, f"family {family.name} claims no architecture"
        for part in (family.read_config, family.build, family.weights):
            loaded(part, f"family {family.name}")
        for architecture in family.architectures:
            assert registry.model_for([architecture]) is family
            if hasattr(transformers, architecture):
                assert_family_matches_transformers(architecture, registry=registry)
    return len(families)


def check_register_quant_methods(registry: Registry, plugin: str, samples: Sequence[Path] = ()) -> int:
    """Every method can be chosen, reads no other's config, and makes whole checkpoints of the samples it reads."""
    found = contributed(registry, plugin, specs.QuantMethodSpec)
    checked = 0
    for spec in found:
        make = loaded(spec.make, f"make of {spec.name}")
        assert spec.reads is not None or spec.plain, f"method {spec.name} reads nothing, plain weights neither"
        reads = (lambda quantization: False) if spec.reads is None else loaded(spec.reads, f"reads of {spec.name}")
        for other in ({"quant_method": "nobody's"}, {"bits": 4}):
            assert not reads(other), f"method {spec.name} reads {other}, which is no config of its own"
        for sample in samples:
            checkpoint = open_checkpoint(registry, sample)
            quantization = checkpoint.config().get("quantization_config") or {}
            if reads(quantization) if quantization else spec.plain:
                _check_quant_method(make(quantization, CONFIG), checkpoint, spec.name)
                checked += 1
    assert checked or not samples, f"no method of plugin {plugin!r} reads {list(map(str, samples))}"
    return len(found)


def _check_quant_method(method: QuantMethod, checkpoint: Checkpoint, name: str) -> None:
    check_checkpoint(method.checkpoint(checkpoint), name)
    linears = method.linear_method
    if linears is not None:
        assert callable(linears.create), f"{name}: its linear_method cannot create"
        assert isinstance(linears.activations, frozenset), f"{name}: activations of its linear_method is no frozenset"
