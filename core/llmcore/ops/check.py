"""Comparing a kernel with the meaning of its op, on the op's own samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from llmcore.ops import Bound, Op, OpModule
from llmcore.ops.attention_cases import AttnCase, Uploads, reference
from llmcore.protocols import AttentionKernel, AttnLimits
from llmcore.specs import OpContext

Pairs = Iterator[tuple[str, torch.Tensor, torch.Tensor]]
"""(what, got, expected)."""


SHARED = 256 << 20
"""Bytes above which a tensor is a weight, which nobody writes: it is not copied for the kernel."""


def check(module: OpModule, kernel: Any, context: OpContext, device: torch.device | None = None) -> int:
    """Compare `kernel`, made for `context`, with the op of `module`; returns how many samples were compared.

    Raises AssertionError that names the first sample and output that differ, also for tensors changed in place.
    """
    count = 0
    for count, sample in enumerate(module.samples(context), 1):
        compare(module, kernel, context, sample, device or torch.device("cpu"), name=f"sample {count}")
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
) -> float:
    """The worst error of one sample, as a share of what is allowed; raises AssertionError above 1.

    A `long` sample's expected values are computed where its tensors are, half types as f32, and attention is held to
    the size of each token's own result: over a long context the values are small.
    """
    tolerance, worst = module.TOLERANCE[context.dtype], 0.0
    if isinstance(sample[0], AttnCase):
        pairs = _attention(kernel, sample[0], device)
        measure = _error_by_token if long else _error
    else:
        meaning = module.meaning(context) if isinstance(module, Bound) else module.reference
        pairs = _function(meaning, kernel, sample, device, long)
        measure = _error
    for index, (what, got, expected) in enumerate(pairs):
        error = measure(f"{context.op}, {name}, {what} {index}", got, expected, tolerance)
        worst = max(worst, error)
    return worst


def _function(meaning: Op, kernel: Any, sample: tuple[Any, ...], where: torch.device, long: bool) -> Pairs:
    ours = moved(sample, where if long else torch.device("cpu"), widen=long)
    theirs = moved(sample, where)
    expected, got = meaning(*ours), kernel(*theirs)
    for name, left, right in (("output", got, expected), ("written pool", _pools(theirs), _pools(ours))):
        yield from ((name, a, b) for a, b in zip(_flat(left), _flat(right), strict=True))


def _attention(kernel: AttentionKernel, case: AttnCase, where: torch.device) -> Pairs:
    expected, expected_lse = reference(case)
    meta = {name: tensor.to(where) for name, tensor in case.meta.items()}
    kernel.workspace(AttnLimits(rows=len(case.rows.n_query), tokens=len(case.q), kv_len=int(case.rows.kv_len.max())))
    kernel.plan(case.rows, Uploads(meta))
    q, k_new, v_new, kv = (moved(part, where) for part in (case.q, case.k_new, case.v_new, case.kv))
    yield "output", kernel.run(q, k_new, v_new, kv, meta, case.out().to(where)), expected
    lse = torch.full_like(expected_lse, torch.nan, device=where)
    yield "output beside lse", kernel.run(q, k_new, v_new, kv, meta, case.out().to(where), lse), expected
    yield "lse", lse, expected_lse


def moved(value: Any, where: torch.device, widen: bool = False) -> Any:
    """A copy on `where` with the same strides (of large tensors only if it must be), half types as f32 if `widen`."""
    if isinstance(value, torch.Tensor):
        half = widen and value.dtype in (torch.float16, torch.bfloat16)
        dtype = torch.float32 if half else value.dtype
        if value.nbytes > SHARED or value.is_contiguous():
            return value.to(where, dtype, copy=value.nbytes <= SHARED)
        # `to` would close the gaps between the rows of a view
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


def _flat(value: Any) -> tuple[torch.Tensor, ...]:
    if is_dataclass(value):
        columns = [getattr(value, f.name) for f in fields(value)]
        return tuple(column for column in columns if column is not None)
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)


Measure = Callable[[str, torch.Tensor, torch.Tensor, float], float]


def _error(name: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> float:
    # near the largest number of a half type, rounding decides whether a result is infinite
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
    """Both as f32 where the expected one is; they have one shape and NaN in the same places."""
    got, expected = got.detach().to(expected.device).float(), expected.float()
    if got.shape != expected.shape:
        raise AssertionError(f"{name}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    if not torch.equal(got.isnan(), expected.isnan()):
        raise AssertionError(f"{name}: NaN where the reference has none; something was read that must not be")
    return got, expected


def _held(name: str, error: float, allowed: float) -> float:
    """The error as a share of what is allowed."""
    if not error <= allowed:
        raise AssertionError(f"{name}: off by {error:.3g}, allowed {allowed:.3g}")
    return error / allowed if allowed else 0.0
