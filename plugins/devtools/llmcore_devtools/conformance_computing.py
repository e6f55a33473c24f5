"""Conformance of ops, kernels, layouts, quantization methods and model families, on this machine's devices."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from llmcore.api import specs
from llmcore.api.models import KVGroupSpec
from llmcore.api.protocols import Checkpoint, Device, QuantMethod
from llmcore.api.specs import DeviceInfo, DType, KernelSpec, OpContext, OpSpec
from llmcore.layers import Build, Linear, LinearMethod, Rows, create_linears
from llmcore.layers.layout import Layout
from llmcore.ops import Shape, made
from llmcore.registry.loader import load
from llmcore.registry.registry import Registry
from llmcore.registry.resolve import REFERENCE, candidates_for, describe, why_not
from llmcore.weights.load import dummy_weights
from llmcore.weights.source import open_checkpoint

from llmcore_devtools.conformance import Nonconformance, Problems, all_problems, check_each, check_readers, loaded
from llmcore_devtools.conformance_contributions import check_checkpoint
from llmcore_devtools.conformance_observing import CONFIG
from llmcore_devtools.kernels.attention_stored import over_its_layout
from llmcore_devtools.kernels.check import contexts
from llmcore_devtools.kernels.compare import check
from llmcore_devtools.kernels.write_stored import DoesNotFit

CPU = DeviceInfo("cpu")
DTYPES: tuple[DType, ...] = get_args(DType)

_SHAPES = 16
"""Most shapes per kernel, type and bucket."""

HELD = 6
"""Most listed mismatches of one kernel."""


def check_register_ops(registry: Registry, plugin: str, samples: Sequence[Path] = ()) -> int:
    """Every op's module is complete, its kernel `torch` is right, its cost is finite, its parts exist."""
    return check_each(registry, plugin, OpSpec, "op", partial(_check_op, registry))


def _check_op(registry: Registry, op: OpSpec) -> None:
    module, (reference, _) = _module(op), candidates_for(registry, op.name)[0]
    layout = next(iter(getattr(module, "LAYOUTS", ())), None)
    with all_problems() as problems:
        for part in op.expands_to:
            with problems.of("expands_to"):
                registry.find(OpSpec, part)
        with problems.of("expand"):
            assert not op.expands_to or callable(getattr(module, "expand", None)), "a composite needs this function"
        with problems.of("cost"):
            _check_cost(module)
        for dtype, shape in itertools.product(DTYPES, _shapes(module)):
            context = OpContext(op=op.name, device=CPU, dtype=dtype, layout=layout, shape=shape)
            with problems.of(describe(context)):
                check(module, made(reference, context), context)


def _module(op: OpSpec) -> Any:
    module = importlib.import_module(op.module)
    lacks = [name for name in ("samples", "TOLERANCE", "cost") if not hasattr(module, name)]
    lacks += [] if hasattr(module, "reference") or hasattr(module, "make") else ["reference (or make)"]
    assert not lacks, f"{op.module} lacks {', '.join(lacks)}"
    missing = [dtype for dtype in DTYPES if dtype not in module.TOLERANCE]
    assert not missing, f"TOLERANCE lacks {', '.join(missing)}"
    return module


class _Sizes(dict[str, Any]):
    """A shape in which every size that it does not name is 8."""

    def __missing__(self, name: str) -> int:
        return 8

    def get(self, name: str, default: Any = None) -> Any:
        return self[name]


def _check_cost(module: Any) -> None:
    moved, flops = module.cost(_Sizes(_shapes(module)[0]))
    assert math.isfinite(moved) and math.isfinite(flops), "it is not finite"
    assert moved > 0 and flops >= 0, f"it says {moved} bytes, {flops} flops"


def _shapes(module: Any) -> Sequence[Shape]:
    shapes: Sequence[Shape] = getattr(module, "SHAPES", ({},))
    return shapes


def check_register_kernels(registry: Registry, plugin: str, samples: Sequence[Path] = ()) -> int:
    """Every kernel agrees with its op's reference wherever it fits, on this machine's devices.

    A kernel for another device is neither run nor counted; `check_interpreted` can run it.
    """
    here = [(device.info, device.torch_device) for device in _devices(registry)]
    return _check_kernels(registry, plugin, here, DTYPES)


def check_interpreted(registry: Registry, plugin: str, device: str) -> int:
    """As `check_register_kernels`, for kernels of a device that this machine does not have, on tensors of the CPU.

    The kernels must run in an interpreter (docs/authors/kernel.md shows it). `device` is a name that `--device` takes.
    The types are f32 and f16, because an interpreter on numpy has no bfloat16.
    """
    named = (load(spec.named)(device) for spec, _ in registry.specs(specs.DeviceSpec) if spec.named is not None)
    info = next((info for info in named if info is not None), None)
    assert info is not None, f"{device} is not a name that --device takes"
    tried = _check_kernels(registry, plugin, [(info, torch.device("cpu"))], ("f32", "f16"))
    assert tried, f"no kernel of plugin {plugin!r} is for {device}"
    return tried


Where = tuple[DeviceInfo, torch.device]
"""(the device that a kernel is made for, the device of its tensors)."""


def _check_kernels(registry: Registry, plugin: str, devices: Sequence[Where], dtypes: Sequence[DType]) -> int:
    def tried(kernel: KernelSpec) -> bool:
        assert kernel.name != REFERENCE, "this name is the reference's"
        module = _module(registry.find(OpSpec, kernel.op))
        here = [where for where in devices if kernel.when.device in (None, where[0].type)]
        return bool(here) and _check_kernel(registry, kernel, module, here, dtypes)

    return check_each(registry, plugin, KernelSpec, "kernel", tried)


def _devices(registry: Registry) -> Iterator[Device]:
    for spec, _ in registry.specs(specs.DeviceSpec):
        if load(spec.available)() is None:
            yield load(spec.make)(0)


def _check_kernel(
    registry: Registry, kernel: KernelSpec, module: Any, devices: Sequence[Where], dtypes: Sequence[DType]
) -> bool:
    """True if the kernel ran. Raises Nonconformance with the first mismatches."""
    compared, declined, problems = 0, set(), Problems()
    for (info, where), dtype, shape in itertools.product(devices, dtypes, _required_shapes(kernel, module)):
        # a batch-invariant kernel may be for deterministic steps only
        base = OpContext(op=kernel.op, device=info, dtype=dtype, shape=shape, deterministic=kernel.batch_invariant)
        for context in contexts(kernel, module, base):
            misfit = why_not(kernel, context)
            if misfit is not None:
                declined.add(misfit)
                continue
            with problems.of(describe(context)):
                try:
                    samples, _ = over_its_layout(registry, module, context)
                except DoesNotFit as misfit:
                    declined.add(str(misfit))
                    continue
                compared += 1
                check(samples, loaded(kernel.make, "make")(context), context, where, tolerance=kernel.tolerance)
    assert compared, f"it fits nothing that was tried: {'; '.join(sorted(declined))}"
    left = len(problems.found) - HELD
    if left > 0:
        problems.found[HELD:] = [f"{left} contexts more are wrong"]
    if problems.found:
        raise Nonconformance(problems.found) from problems.cause
    return True


def _required_shapes(kernel: KernelSpec, module: Any) -> list[Shape]:
    """The op's own shapes, with the sizes that the kernel requires."""
    values = [[(name, value) for value in sorted(allowed, key=repr)] for name, allowed in kernel.when.shape.items()]
    required = itertools.islice(itertools.product(*values), _SHAPES)
    return [{**known, **dict(sizes)} for sizes, known in itertools.product(required, _shapes(module))]


def check_register_kv_layouts(registry: Registry, plugin: str, samples: Sequence[Path] = ()) -> int:
    """A layout gathers the values that it wrote and left to the step; copies and transfers change no bit."""
    return check_each(registry, plugin, specs.KVLayoutSpec, "layout", _check_layout_spec)


def _check_layout_spec(spec: specs.KVLayoutSpec) -> None:
    make = loaded(spec.make, "make")
    group = KVGroupSpec(name="kv", layers=(0, 1), kv_heads=2, key_size=16, value_size=16, layout=spec.name)
    with all_problems() as problems:
        for dtype, granule in itertools.product(DTYPES, (1, 4)):
            with problems.of(f"{dtype}, granule {granule}"):
                _check_layout(make(group, granule, dtype), spec.tolerance)


def _check_layout(layout: Layout, tolerance: float) -> None:
    granules, heads, width = 8, layout.group.kv_heads, layout.group.key_size
    pools = layout.tensors(granules, torch.device("cpu"))
    assert set(pools) == set(layout.group.layers), "pools for other layers than the group's"
    held = sum(tensor.nbytes for pool in pools.values() for tensor in layout.pool(pool))
    assert held == layout.bytes * granules, f"{held} bytes in {granules} granules of {layout.bytes}"
    pool, other = pools[0], pools[1]
    every = torch.arange(granules * layout.granule)
    fresh, _ = layout.gather(pool, every)
    assert bool(fresh.isfinite().all()), "a slot that was never written is not finite"
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(len(every), generator=generator)[: len(every) // 2]
    k, v = (torch.randn(len(slots), heads, width, generator=generator).to(layout.dtype) for _ in range(2))
    if layout.joined:
        v = k[..., : layout.group.value_size]
    plain = k.clone(), v.clone()
    constants = [tensor.clone() for tensor in pool[len(layout.pool(pool)) :]]
    layout.write(pool, slots, k, v)
    with all_problems() as problems:
        with problems.of("gather"):
            _close(layout.gather(pool, slots), plain, tolerance)
        with problems.of("write"):
            left = zip((k, v), layout.gather(pool, slots), strict=True)
            assert all(torch.equal(a, b) for a, b in left), "it leaves other numbers in k and v than gather returns"
        before = layout.gather(pool, every)
        src, dst = torch.tensor([0, 3]), torch.tensor([6, 7])
        layout.copy(pool, src, dst)
        expected = tuple(_granules(part, layout).index_copy(0, dst, _granules(part, layout)[src]) for part in before)
        after = tuple(_granules(part, layout) for part in layout.gather(pool, every))
        with problems.of("copy"):
            assert all(torch.equal(a, b) for a, b in zip(after, expected, strict=True)), "it is not exact"
        layout.scatter(pool, slots, *layout.gather(pool, slots))
        with problems.of("scatter"):
            _close(layout.gather(pool, every), tuple(part.flatten(0, 1) for part in expected), tolerance)
        with problems.of("export"):
            raw, places = layout.export(pool, slots), slots.flip(0)
            layout.restore(other, places, raw)
            assert all(map(_equal, layout.export(other, places), raw)), "restore changes bits"
            untouched = torch.tensor(sorted(set(every.tolist()) - set(places.tolist())))
            assert not any(part.any() for part in layout.gather(other, untouched)), "restore writes other slots"
        with problems.of("constants"):
            assert all(map(_equal, pool[len(layout.pool(pool)) :], constants)), "they change"
            assert layout.identity.startswith(f"{layout.group.layout}/{layout.group.name}/"), layout.identity


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def _granules(part: torch.Tensor, layout: Layout) -> torch.Tensor:
    return part.view(len(part) // layout.granule, layout.granule, *part.shape[1:])


def _close(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], tolerance: float) -> None:
    for left, right in zip(got, expected, strict=True):
        error, allowed = (
            float((left.float() - right.float()).abs().max()),
            tolerance * float(right.float().abs().max()),
        )
        assert left.dtype == right.dtype, f"it gives {left.dtype}, the model computes in {right.dtype}"
        assert error <= allowed, f"off by {error:.3g}, allowed {allowed:.3g}"


def check_register_models(registry: Registry, plugin: str, samples: Sequence[Path] = ()) -> int:
    """Every family answers as transformers does, on small random models.

    If transformers does not know the architecture, only the family's code is loaded.
    """
    import transformers

    from llmcore_devtools.family import assert_family_matches_transformers

    def check_family(family: specs.ModelSpec) -> None:
        assert family.architectures, "it claims no architecture"
        for part in ("read_config", "build", "weights"):
            loaded(getattr(family, part), part)
        with all_problems() as problems:
            for architecture in family.architectures:
                with problems.of(architecture):
                    assert registry.model_for([architecture]) is family, "another family claims it too"
                    if hasattr(transformers, architecture):
                        assert_family_matches_transformers(architecture, registry=registry)

    return check_each(registry, plugin, specs.ModelSpec, "family", check_family)


def check_register_quant_methods(registry: Registry, plugin: str, samples: Sequence[Path] = ()) -> int:
    """Every method can be chosen, reads no other method's config, and makes complete checkpoints of its samples."""

    def check_method(spec: specs.QuantMethodSpec) -> list[Path]:
        make = loaded(spec.make, "make")
        assert spec.reads is not None or spec.plain, "it reads nothing, plain weights neither"
        reads = (lambda quantization: False) if spec.reads is None else loaded(spec.reads, "reads")
        for other in ({"quant_method": "unknown"}, {"bits": 4}):
            assert not reads(other), f"it reads {other}, which is another method's config"
        read = []
        for sample in samples:
            checkpoint = open_checkpoint(registry, sample)
            quantization = checkpoint.config().get("quantization_config") or {}
            if reads(quantization) if quantization else spec.plain:
                read.append(sample)
                _check_quant_method(registry, make(quantization, CONFIG), checkpoint)
        return read

    return check_readers(registry, plugin, specs.QuantMethodSpec, "method", samples, check_method)


_INPUTS, _OUTPUTS = 256, 128
"""Sizes of a linear that all usual groups and blocks divide."""


def _check_quant_method(registry: Registry, method: QuantMethod, checkpoint: Checkpoint) -> None:
    """The wrapped checkpoint is complete, and has for every linear the tensors that its LinearMethod names."""
    build = Build(registry=registry, config=CONFIG, device=CPU, torch_device=torch.device("cpu"))
    read = method.checkpoint(checkpoint, build.torch_device)
    linears: dict[str, LinearMethod] = {}
    for module in {name.rpartition(".")[0] for name in checkpoint.sizes()}:
        if (linear_method := method.method_for((module,))) is not None:
            linears[module] = linear_method
    check_checkpoint(read)
    with all_problems() as problems:
        for module, linear_method in linears.items():
            with problems.of(f"the linear of {module}"):
                stored = {name.rpartition(".")[2] for name in read.sizes() if name.rpartition(".")[0] == module}
                _check_linear(build, linear_method, module, stored)


def _check_linear(build: Build, method: LinearMethod, module: str, stored: set[str]) -> None:
    assert isinstance(method.activations, frozenset), "activations of its LinearMethod is not a frozenset"
    assert len(method.multiples) == 2 and min(method.multiples) >= 1, "multiples of its LinearMethod are not two sizes"
    linear = Linear(build, _INPUTS, _OUTPUTS, bias="bias" in stored)
    create_linears(linear, lambda modules: method)
    named = {name for name, _ in linear.named_parameters()}
    assert named == stored, f"it has {sorted(named)}, and the checkpoint {sorted(stored)}"
    dummy_weights(linear)
    found = linear(torch.ones(3, _INPUTS, dtype=build.dtype), Rows(1))
    assert found.shape == (3, _OUTPUTS), f"3 tokens give {list(found.shape)} instead of {[3, _OUTPUTS]}"
    assert bool(found.isfinite().all()), "drawn weights give numbers that are not finite: see its fill_dummy"
