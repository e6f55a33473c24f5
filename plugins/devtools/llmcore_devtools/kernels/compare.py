"""Comparison of a kernel with its op's reference, on the op's own samples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from llmcore.api.protocols import AttentionKernel, AttnLimits
from llmcore.api.specs import OpContext
from llmcore.ops import Bound, Op, OpModule
from llmcore.ops.attention_cases import AttnCase, Uploads, reference

Pairs = Iterator[tuple[str, torch.Tensor, torch.Tensor]]
"""(what, got, expected)."""


SHARED = 256 << 20
"""A tensor with more bytes counts as a weight: the kernel gets the sample's own tensor, without a copy."""

Tolerance = Mapping[str, float]
"""dtype -> the largest error, relative to the largest expected value."""

NO_TOLERANCE: Tolerance = {}
"""For a kernel without a tolerance of its own: the op's tolerance holds."""


def check(
    module: OpModule,
    kernel: Any,
    context: OpContext,
    device: torch.device | None = None,
    *,
    tolerance: Tolerance = NO_TOLERANCE,
) -> int:
    """Compare `kernel`, made for `context`, with the op of `module`. Returns the number of compared samples.

    `tolerance`: a KernelSpec's, which replaces the op's. Raises AssertionError that names the first sample in which an
    output differs in value, shape or dtype, or in which the kernel changed an input that it must not overwrite.
    """
    count = 0
    for count, sample in enumerate(module.samples(context), 1):
        name = f"sample {count}"
        compare(module, kernel, context, sample, device or torch.device("cpu"), name=name, tolerance=tolerance)
    if count == 0:
        raise AssertionError(f"{context.op} has no samples for {context}")
    return count


def compare(
    module: OpModule,
    kernel: Any,
    context: OpContext,
    sample: tuple[Any, ...],
    device: torch.device,
    *,
    name: str = "sample",
    long: bool = False,
    tolerance: Tolerance = NO_TOLERANCE,
) -> float:
    """The worst error of one sample, as a share of the allowed error. Raises AssertionError above 1.

    `tolerance`: a KernelSpec's, which replaces the op's. The reference of a `long` sample runs on the sample's device,
    with half types as f32. The error of attention is then relative to each token's own result, because values over a
    long context are small.
    """
    allowed, worst = tolerance.get(context.dtype, module.TOLERANCE[context.dtype]), 0.0
    if isinstance(sample[0], AttnCase):
        pairs = _attention(kernel, sample[0], device)
        measure = _error_by_token if long else _error
    else:
        pairs = _function(module, kernel, context, sample, device, name, long)
        measure = _error
    for index, (what, got, expected) in enumerate(pairs):
        worst = max(worst, measure(f"{context.op}, {name}, {what} {index}", got, expected, allowed))
    return worst


def _function(
    module: OpModule,
    kernel: Any,
    context: OpContext,
    sample: tuple[Any, ...],
    where: torch.device,
    name: str,
    long: bool,
) -> Pairs:
    meaning: Op = module.meaning(context) if isinstance(module, Bound) else module.reference
    ours = moved(sample, where if long else torch.device("cpu"), widen=long)
    theirs = moved(sample, where)
    expected, got = meaning(*ours), kernel(*theirs)
    returned, wanted = _flat(got), _flat(expected)
    if len(returned) != len(wanted):
        raise AssertionError(
            f"{context.op}, {name}: the kernel returns {len(returned)} tensors, the reference {len(wanted)}"
        )
    outputs = list(zip(returned, wanted, strict=True))
    for a, b in [] if long else outputs:
        if a.dtype != b.dtype:
            raise AssertionError(f"{context.op}, {name}: the kernel returns {a.dtype}, the reference {b.dtype}")
    yield from (("output", a, b) for a, b in outputs)
    yield from (("written pool", a, b) for a, b in zip(_pools(theirs), _pools(ours), strict=True))
    free = getattr(module, "IN_PLACE", ())
    arguments = zip(inspect.signature(meaning).parameters, theirs, sample, strict=False)
    _unchanged({name: (a, b) for name, a, b in arguments if name not in free and not isinstance(b, tuple)})


def _unchanged(inputs: Mapping[str, tuple[Any, Any]]) -> None:
    """Raises AssertionError that names the first input whose tensors, (after, before), differ in a bit."""
    for name, (after, before) in inputs.items():
        for a, b in zip(_tensors(after), _tensors(before), strict=True):
            a = a.to(b.device)
            if not bool(((a == b) | (a.isnan() & b.isnan())).all()):
                raise AssertionError(f"the kernel writes into its input {name}, which others read after it")


def _attention(kernel: AttentionKernel, case: AttnCase, where: torch.device) -> Pairs:
    expected, expected_lse = reference(case)
    meta = {name: tensor.to(where, copy=True) for name, tensor in case.meta.items()}
    kernel.workspace(AttnLimits(rows=len(case.rows.n_query), tokens=len(case.q), kv_len=int(case.rows.kv_len.max())))
    kernel.plan(case.rows, Uploads(meta))
    inputs = (case.q, case.k_new, case.v_new, case.kv)
    q, k_new, v_new, kv = (moved(part, where) for part in inputs)
    lse = torch.full_like(expected_lse, torch.nan, device=where)
    for name, beside in (("output", None), ("output beside lse", lse)):
        out = case.out().to(where)
        if kernel.run(q, k_new, v_new, kv, meta, out, beside).data_ptr() != out.data_ptr():
            raise AssertionError(f"{case.context.op}: run() returns another tensor than `out`")
        yield name, out, expected
    yield "lse", lse, expected_lse
    named = zip(("q", "k_new", "v_new", "kv"), zip((q, k_new, v_new, kv), inputs, strict=True), strict=True)
    _unchanged({**dict(named), **{name: (meta[name], tensor) for name, tensor in case.meta.items()}})


def moved(value: Any, where: torch.device, widen: bool = False) -> Any:
    """`value` on `where` with the same strides, and half types as f32 if `widen`. Large tensors are copied only if
    they must be."""
    if isinstance(value, torch.Tensor):
        half = widen and value.dtype in (torch.float16, torch.bfloat16)
        dtype = torch.float32 if half else value.dtype
        if value.nbytes > SHARED or value.is_contiguous():
            return value.to(where, dtype, copy=value.nbytes <= SHARED)
        # `to` would remove the gaps between the rows of a view
        return torch.empty_strided(value.shape, value.stride(), dtype=dtype, device=where).copy_(value)
    if isinstance(value, tuple):
        return tuple(moved(item, where, widen) for item in value)
    if isinstance(value, dict):
        return {name: moved(item, where, widen) for name, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: moved(getattr(value, f.name), where, widen) for f in fields(value)})
    return value


def _pools(sample: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    inside = (part for item in sample if isinstance(item, tuple) for part in item)
    return tuple(part for part in inside if isinstance(part, torch.Tensor))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in an argument, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            yield from _tensors(getattr(value, f.name))


def _flat(value: Any) -> tuple[torch.Tensor, ...]:
    if is_dataclass(value):
        columns = [getattr(value, f.name) for f in fields(value)]
        return tuple(column for column in columns if column is not None)
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)


Measure = Callable[[str, torch.Tensor, torch.Tensor, float], float]


def _error(name: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> float:
    # near the largest number of a half type, a result may round to infinity
    most = 0.99 * torch.finfo(got.dtype).max if got.is_floating_point() else torch.inf
    got, expected = _comparable(name, got, expected)
    known = expected.abs() < most
    finite = expected[known]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    error = float((got - expected)[known].abs().max()) if finite.numel() else 0.0
    return _held(name, error, tolerance * max(scale, 1.0))


def _error_by_token(name: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> float:
    got, expected = _comparable(name, got, expected)
    errors, scales = (got - expected).flatten(1).abs().amax(1), expected.flatten(1).abs().amax(1)
    worst = int((errors / scales).argmax())
    return _held(f"{name}, token {worst}", float(errors[worst]), tolerance * float(scales[worst]))


def _comparable(name: str, got: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as f32 on the expected one's device. Raises AssertionError unless shapes and places of NaN are equal."""
    got, expected = got.detach().to(expected.device).float(), expected.float()
    if got.shape != expected.shape:
        raise AssertionError(f"{name}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    if not torch.equal(got.isnan(), expected.isnan()):
        raise AssertionError(f"{name}: NaN where the reference has none; something was read that must not be")
    return got, expected


def _held(name: str, error: float, allowed: float) -> float:
    """The error as a share of the allowed error."""
    if not error <= allowed:
        raise AssertionError(f"{name}: off by {error:.3g}, allowed {allowed:.3g}")
    return error / allowed if allowed else 0.0
