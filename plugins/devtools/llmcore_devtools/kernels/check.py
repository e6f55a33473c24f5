"""Comparison of every kernel that fits a device with its op's torch reference: `llmcore kernels --check`.

For small shapes the reference runs on the CPU. For real shapes and an op's long samples it runs on the device. Every
seed draws other inputs, and memory that a kernel allocates is full of NaN before the kernel writes. Attention over a
plugin's layout gets pools of that layout. A composite without a kernel is checked as its parts. Under `deterministic`,
rows are also compared, to the bit, with themselves computed alone.
"""

from __future__ import annotations

import importlib
import itertools
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from llmcore.api.errors import ConfigError, LlmcoreError, reraise_if_stopping
from llmcore.api.protocols import Device
from llmcore.api.specs import TOKEN_BUCKETS, DType, KernelSpec, OpContext, OpSpec
from llmcore.ops import Shape, drawing, made, packing
from llmcore.registry.registry import Registry
from llmcore.registry.resolve import REFERENCE, Candidate, bucket_text, candidates_for, why_not

from llmcore_devtools.kernels.attention_cases import cases_of
from llmcore_devtools.kernels.attention_stored import over_its_layout
from llmcore_devtools.kernels.bench import PARTS, parts
from llmcore_devtools.kernels.compare import as_packed, check_invariance, compare
from llmcore_devtools.kernels.write_stored import DoesNotFit

Shapes = Callable[[str], Sequence[Shape]]
"""Op -> further shapes to check, besides the op's own."""

FEW = 3
"""Most layouts of a kernel that are all checked in every bucket."""

HELD = 3
"""Most failures that are shown for one kernel in one dtype."""


@dataclass
class CheckRow:
    """One kernel in one dtype.

    `worst`: the largest error as a share of the allowed one, or None if nothing ran. `declined`: why no context of
    this device and dtype fits the kernel. `failures`: the first HELD failures. `failed`: the number of all.
    """

    op: str
    kernel: str
    plugin: str
    dtype: DType
    cases: int = 0
    worst: float | None = None
    seconds: float = 0.0
    declined: str | None = None
    failures: list[str] = field(default_factory=list)
    failed: int = 0


class Unit(NamedTuple):
    """The subject of one row."""

    op: OpSpec
    candidate: Candidate
    dtype: DType


def units(
    registry: Registry, ops: Collection[str], pins: Mapping[str, str], dtypes: Collection[DType], deterministic: bool
) -> list[Unit]:
    """The units to check: of `ops`, or of all if it is empty, the pinned kernel or all except the reference.

    A composite without a kernel that may run has one as well, its parts.
    """
    found = []
    for spec, plugin in registry.specs(OpSpec):
        if spec.name not in (ops or pins or (spec.name,)):
            continue
        wanted = []
        for candidate in candidates_for(registry, spec.name):
            name = candidate[0].name
            if name == pins[spec.name] if spec.name in pins else name != REFERENCE:
                wanted.append(candidate)
        served = any(kernel.batch_invariant or not deterministic for kernel, _ in wanted)
        if not served and spec.expands_to and "kv_write" not in spec.name:  # whose other part is the layout's
            refuses = partial(_without_parts, registry)
            wanted.append(
                (KernelSpec(op=spec.name, name=PARTS, make="", refuses=refuses, batch_invariant=True), plugin)
            )
        found += [Unit(spec, candidate, dtype) for candidate in wanted for dtype in dtypes]
    return sorted(found, key=lambda unit: (unit.op.name, unit.candidate[0].name, unit.dtype))


def _without_parts(registry: Registry, context: OpContext) -> str | None:
    """Why a composite cannot run as its parts, or None."""
    try:
        parts(registry, context)
    except LlmcoreError as error:
        return _first_line(error).partition(" on ")[0]  # the context is the composite's
    return None


@dataclass(frozen=True)
class Bench:
    """The device and the parameters of the check. `shapes`: real shapes, by op."""

    registry: Registry
    device: Device
    shapes: Shapes
    seed: int
    deterministic: bool = False


def check_units(todo: Iterable[Unit], bench: Bench) -> Iterator[CheckRow]:
    """A row per unit, as soon as it is checked."""
    broken: str | None = None
    for unit in todo:
        spec, plugin = unit.candidate
        row = CheckRow(unit.op.name, spec.name, plugin.name, unit.dtype)
        started = time.monotonic()
        if broken is None:
            try:
                _check_unit(row, unit, bench)
            except _DeviceLost as lost:
                broken = f"not checked: the device failed in {spec.op}={spec.name}"
                _note(row, str(lost))
        elif why_not(spec, OpContext(op=spec.op, device=bench.device.info, dtype=unit.dtype)) is None:
            _note(row, broken)
        row.seconds = time.monotonic() - started
        yield row


class _DeviceLost(Exception):
    """Nothing more can run on the device in this process."""


def _check_unit(row: CheckRow, unit: Unit, bench: Bench) -> None:
    spec, module = unit.candidate[0], importlib.import_module(unit.op.module)
    reasons: set[str] = set()
    own: Sequence[Shape] = getattr(module, "SHAPES", ({},))
    base = OpContext(op=spec.op, device=bench.device.info, dtype=unit.dtype, deterministic=bench.deterministic)
    for shape, large in [*((shape, False) for shape in own), *((shape, True) for shape in bench.shapes(unit.op.name))]:
        for context in contexts(spec, module, replace(base, shape=dict(shape)), 1 if large else None):
            reason = why_not(spec, context)
            if reason is not None:
                reasons.add(reason)
                continue
            try:
                stored, context = over_its_layout(bench.registry, module, context)
            except DoesNotFit as misfit:
                reasons.add(str(misfit))
            except ConfigError as error:
                _note(row, str(error))
            else:
                _check_context(row, spec, stored, context, bench, large)
    if not row.cases and not row.failed:
        row.declined = "; ".join(sorted(reasons))


def contexts(
    kernel: KernelSpec, module: Any, base: OpContext, most_granules: int | None = None
) -> Iterator[OpContext]:
    """`base` in every bucket, with every layout and granule that `kernel` requires.

    If it requires none, these are the layouts that the op's `module` knows, and the granules 1 and 4. An op without KV
    computes the same for every granule. `most_granules`: only that many, the smallest ones. A kernel for more than FEW
    layouts gets the others in one bucket each, by turns.
    """
    stored: Sequence[str] = getattr(module, "LAYOUTS", ())
    layouts: Sequence[str | None] = sorted(kernel.when.layouts) or stored or (None,)
    granules = sorted(kernel.when.granules) or ((1, 4) if stored else (1,))
    every = range(len(TOKEN_BUCKETS))
    own = sorted(kernel.when.buckets) or every
    for number, layout in enumerate(layouts):
        shared = len(layouts) > FEW and layout not in stored
        buckets = [own[number % len(own)]] if shared else every
        for granule, bucket in itertools.product(granules[:most_granules], buckets):
            yield replace(base, layout=layout, granule=granule, bucket=bucket)


def _check_context(
    row: CheckRow, spec: KernelSpec, module: Any, context: OpContext, bench: Bench, large: bool
) -> None:
    """Check the samples of one context. Those of real shapes are drawn on the device, and include the long ones."""
    kinds = ["samples", "long_samples"] if large and hasattr(module, "long_samples") else ["samples"]
    name, device = "", bench.device
    try:
        make = partial(parts, bench.registry) if spec.name == PARTS else partial(made, spec)
        kernel, alone = (make(where) for where in (context, replace(context, bucket=0)))
        for kind in kinds:
            with drawing(bench.seed, device.torch_device if large else torch.device("cpu")), _uninitialized_is_nan():
                samples = cases_of(module, context, getattr(module, kind)(context), long=kind == "long_samples")
                for number, sample in enumerate(samples, 1):
                    name = f"{kind} {number}"
                    for form in _forms(kernel, module, context):
                        worst = compare(
                            *(module, form, context, sample, device.torch_device),
                            name=name,
                            long=large,
                            tolerance=spec.tolerance,
                        )
                        row.cases, row.worst = row.cases + 1, max(row.worst or 0.0, worst)
                    if context.deterministic:
                        check_invariance(context.op, kernel, alone, sample, device.torch_device)
    except AssertionError as error:
        _note(row, f"{_words(context)}: {error}")
    except BaseException as error:
        reraise_if_stopping(error)
        what = f"{_words(context)}, {name or 'make'}: {type(error).__name__}: {_first_line(error)}"
        try:
            device.synchronize()
        except BaseException as lost:
            reraise_if_stopping(lost)
            raise _DeviceLost(what) from lost
        if device.sticky(error):
            raise _DeviceLost(what) from error
        _note(row, what)


@contextmanager
def _uninitialized_is_nan() -> Iterator[None]:
    """Make torch fill new memory with NaN (or the largest integer)."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before)


def _forms(kernel: Any, module: Any, context: OpContext) -> Iterator[Any]:
    """The kernel on weights as they are, and on packed weights if it can pack them."""
    yield kernel
    if packing([kernel]) is not None:
        yield lambda *sample: kernel(*as_packed(kernel, module, context, sample))


def _note(row: CheckRow, text: str) -> None:
    row.failed += 1
    if len(row.failures) < HELD:
        row.failures.append(text)


def _words(context: OpContext) -> str:
    shape = ", ".join(f"{name}={value}" for name, value in context.shape.items() if value not in (None, False))
    granule = f", granule {context.granule}" if context.granule != 1 else ""
    return f"{bucket_text(context.bucket)} tokens{granule}" + (f", {shape}" if shape else "")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")
