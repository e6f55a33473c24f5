"""Comparing a kernel with the meaning of its op, on the op's own samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from llmcore.ops import OpModule
from llmcore.ops.attention import AttnCase, Uploads, reference
from llmcore.protocols import AttentionKernel, AttnLimits
from llmcore.specs import OpContext


def check(module: OpModule, kernel: Any, context: OpContext, device: torch.device | None = None) -> int:
    """Compare `kernel`, made for `context`, with the op of `module`; returns how many samples were compared.

    Raises AssertionError that names the first sample and output that differ, also for tensors changed in place.
    """
    tolerance = module.TOLERANCE[context.dtype]
    where = device or torch.device("cpu")
    count = 0
    for count, sample in enumerate(module.samples(context), 1):
        if isinstance(sample[0], AttnCase):
            pairs = _attention(kernel, sample[0], where)
        else:
            pairs = _function(module, kernel, sample, where)
        for index, (name, got, expected) in enumerate(pairs):
            _compare(f"{context.op}, sample {count}, {name} {index}", got, expected, tolerance)
    if count == 0:
        raise AssertionError(f"{context.op} has no samples for {context}")
    return count


def _function(
    module: OpModule, kernel: Any, sample: tuple[Any, ...], where: torch.device
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    ours, theirs = _moved(sample, torch.device("cpu")), _moved(sample, where)
    expected, got = module.reference(*ours), kernel(*theirs)
    for name, left, right in (("output", got, expected), ("written pool", _pools(theirs), _pools(ours))):
        yield from ((name, a, b) for a, b in zip(_flat(left), _flat(right), strict=True))


def _attention(
    kernel: AttentionKernel, case: AttnCase, where: torch.device
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    expected, expected_lse = reference(case)
    meta = {name: tensor.to(where) for name, tensor in case.meta.items()}
    kernel.workspace(AttnLimits(rows=len(case.rows.n_query), tokens=len(case.q), kv_len=int(case.rows.kv_len.max())))
    kernel.plan(case.rows, Uploads(meta))
    q, k_new, v_new, kv = (_moved(part, where) for part in (case.q, case.k_new, case.v_new, case.kv))
    yield "output", kernel.run(q, k_new, v_new, kv, meta, case.out().to(where)), expected
    lse = torch.full_like(expected_lse, torch.nan, device=where)
    yield "output beside lse", kernel.run(q, k_new, v_new, kv, meta, case.out().to(where), lse), expected
    yield "lse", lse, expected_lse


def _moved(value: Any, where: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(where, copy=True)
    if isinstance(value, tuple):
        return tuple(_moved(item, where) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _moved(getattr(value, f.name), where) for f in fields(value)})
    return value


def _pools(sample: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(tensor for item in sample if isinstance(item, tuple) for tensor in item)


def _flat(value: Any) -> tuple[torch.Tensor, ...]:
    if is_dataclass(value):
        columns = [getattr(value, f.name) for f in fields(value)]
        return tuple(column for column in columns if column is not None)
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)


def _compare(name: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    got, expected = got.detach().cpu().float(), expected.float()
    if got.shape != expected.shape:
        raise AssertionError(f"{name}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    if not torch.equal(got.isnan(), expected.isnan()):
        raise AssertionError(f"{name}: NaN where the reference has none; something was read that must not be")
    finite = expected[expected.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    error = float((got - expected)[expected.isfinite()].abs().max()) if finite.numel() else 0.0
    if not error <= tolerance * max(scale, 1.0):
        raise AssertionError(f"{name}: off by {error:.3g}, allowed {tolerance * max(scale, 1.0):.3g}")
