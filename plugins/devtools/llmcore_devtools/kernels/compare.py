"""Comparison of a kernel with its op's reference on the op's own samples, and of its rows with themselves alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from llmcore.api.protocols import AttentionKernel, AttnLimits, AttnRows
from llmcore.api.specs import OpContext
from llmcore.ops import Op, Shape, packed, packing

from llmcore_devtools.kernels.attention_cases import AttnCase, Uploads, cases_of


class OpModule(Protocol):
    """The attributes that every op's module has (see llmcore.ops)."""

    TOLERANCE: Mapping[str, float]

    def samples(self, context: OpContext) -> Iterator[tuple[Any, ...]]:
        """Argument tuples, in the context's dtype."""

    def cost(self, shape: Shape) -> tuple[float, float]:
        """(bytes, flops) of one call."""


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
    for count, sample in enumerate(cases_of(module, context, module.samples(context)), 1):
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
    module: Any,
    kernel: Any,
    context: OpContext,
    sample: tuple[Any, ...],
    where: torch.device,
    name: str,
    long: bool,
) -> Pairs:
    meaning = _meaning(module, context)
    # a layout's pool has types of its own, and the reference rounds as its layout does
    written = getattr(module, "written", None)
    ours = moved(sample, where if long else torch.device("cpu"), widen=long and written is None)
    theirs = moved(sample, where)
    expected, got = meaning(*ours), kernel(*theirs)
    returned, wanted = tensors(got), tensors(expected)
    if len(returned) != len(wanted):
        raise AssertionError(
            f"{context.op}, {name}: the kernel returns {len(returned)} tensors, the reference {len(wanted)}"
        )
    outputs = list(zip(returned, wanted, strict=True))
    for a, b in [] if long else outputs:
        if a.dtype != b.dtype:
            raise AssertionError(f"{context.op}, {name}: the kernel returns {a.dtype}, the reference {b.dtype}")
    if hasattr(module, "compared"):
        yield from module.compared(tuple(returned), tuple(wanted))
    else:
        yield from (("output", a, b) for a, b in outputs)
    read = written or _pools
    yield from (("written pool", a, b) for a, b in zip(read(got, theirs), read(expected, ours), strict=True))
    free = getattr(module, "IN_PLACE", ())
    arguments = zip(inspect.signature(meaning).parameters, theirs, sample, strict=False)
    _unchanged({name: (a, b) for name, a, b in arguments if name not in free and not isinstance(b, tuple)})


def as_packed(kernel: Any, module: Any, context: OpContext, sample: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an op that is a function, with its weight as `kernel`, made for `context`, packs it.

    A module of an op that takes several weights, each as a tuple of tensors, names these arguments in `STACKS`."""
    if (pack := packing([kernel])) is None:
        return sample
    names = inspect.signature(_meaning(module, context)).parameters
    if stacks := getattr(module, "STACKS", ()):
        given = zip(names, sample, strict=True)
        return tuple(pack(*part)[: len(part)] if name in stacks else part for name, part in given)
    return tuple(packed(pack, dict(zip(names, sample, strict=False))).values())


def _meaning(module: Any, context: OpContext) -> Op:
    """The function that defines the op in `context`."""
    return module.reference if hasattr(module, "reference") else module.make(context)  # type: ignore[no-any-return]


def _unchanged(inputs: Mapping[str, tuple[Any, Any]]) -> None:
    """Raises AssertionError that names the first input whose tensors, (after, before), differ in a bit."""
    for name, (after, before) in inputs.items():
        for a, b in zip(tensors(after), tensors(before), strict=True):
            a = a.to(b.device)
            if a.dtype.itemsize == 1:  # torch compares no float8
                a, b = a.view(torch.uint8), b.view(torch.uint8)
            if not bool(((a == b) | (a.isnan() & b.isnan())).all()):
                raise AssertionError(f"the kernel writes into its input {name}, which others read after it")


def _attention(kernel: AttentionKernel, case: AttnCase, where: torch.device) -> Pairs:
    expected, expected_lse = case.expected()
    meta = {name: tensor.to(where, copy=True) for name, tensor in case.meta.items()}
    planned(kernel, case, meta)
    inputs = (case.q, case.k_new, case.v_new, case.kv)
    q, k_new, v_new, kv = (moved(part, where) for part in inputs)
    lse = torch.full_like(expected_lse, torch.nan, device=where)
    # The queries of latent attention may lie apart in memory: the second run has other elements between its heads.
    apart = q if v_new is not None else torch.nn.functional.pad(q, (0, 8), value=torch.nan)[..., : q.shape[-1]]
    for name, queries, beside in (("output", q, None), ("output beside lse", apart, lse)):
        out = case.out().to(where)
        if kernel.run(queries, k_new, v_new, kv, meta, out, beside).data_ptr() != out.data_ptr():
            raise AssertionError(f"{case.context.op}: run() returns another tensor than `out`")
        yield name, out, expected
    yield "lse", lse, expected_lse
    named = zip(("q", "k_new", "v_new", "kv"), zip((q, k_new, v_new, kv), inputs, strict=True), strict=True)
    _unchanged({**dict(named), **{name: (meta[name], tensor) for name, tensor in case.meta.items()}})


def planned(kernel: AttentionKernel, case: AttnCase, meta: dict[str, torch.Tensor]) -> None:
    """Prepare `kernel` to run `case`. `meta` gets the metadata that it uploads."""
    kernel.workspace(AttnLimits(rows=len(case.rows.n_query), tokens=len(case.q), kv_len=int(case.rows.kv_len.max())))
    kernel.plan(case.rows, Uploads(meta))


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


def _pools(result: Any, sample: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    return tensors([item for item in sample if isinstance(item, tuple)])


def tensors(value: Any) -> tuple[torch.Tensor, ...]:
    """The tensors in an argument or a result, in order."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, f.name) for f in fields(value)]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return ()
    return tuple(found for item in value for found in tensors(item))


Measure = Callable[[str, torch.Tensor, torch.Tensor, float], float]


def _error(name: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> float:
    # near the largest number of a half type, a result may round to infinity
    most = 0.99 * torch.finfo(got.dtype).max if got.is_floating_point() else torch.inf
    got, expected = _comparable(name, got, expected)
    known = expected.abs() < most
    if not known.any():
        return 0.0
    # to pick the known ones takes four times as long as to put zeros into the places of the others
    scale, error = (float(torch.where(known, each, 0.0).abs().max()) for each in (expected, got - expected))
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


ROW_ARGUMENTS: Mapping[str, int] = {
    "linear": 1,
    "linear_silu_and_mul": 1,
    "linear.w4a16": 1,
    "linear.w8a16": 1,
    "linear.w4a16_silu_and_mul": 1,
    "linear.w8a16_silu_and_mul": 1,
    "linear.w8a8": 2,
    "linear.fp8_block": 2,
    "quantize_rows": 1,
    "rms_norm_quant": 1,
    "add_rms_norm_quant": 2,
    "silu_and_mul_quant": 1,
    "rms_norm": 1,
    "add_rms_norm": 2,
    "layer_norm": 1,
    "add_layer_norm": 2,
    "silu_and_mul": 1,
    "gelu_tanh": 1,
    "gelu_and_mul": 1,
    "rope": 3,
}
"""Op of plain rows -> the number of its first arguments that have one row per token."""

MOST = 6
"""Most rows of a sample that are computed again, beside the last one."""


def check_invariance(op: str, kernel: Any, alone: Any, sample: tuple[Any, ...], device: torch.device) -> None:
    """Compare the rows of a sample with themselves computed alone. `alone`: the kernel made for one token.

    Raises AssertionError that names the first row that differs. Ops without plain rows pass.
    """
    if isinstance(sample[0], AttnCase):
        _attention_alone(kernel, alone, moved(sample[0], device))
    elif op in ROW_ARGUMENTS:
        _rows_alone(kernel, alone, sample, ROW_ARGUMENTS[op], device)


def _rows_alone(kernel: Any, alone: Any, sample: tuple[Any, ...], count: int, device: torch.device) -> None:
    whole = tensors(kernel(*moved(sample, device)))
    tokens = len(sample[0])
    for row in sorted({*range(0, tokens, -(-tokens // MOST)), tokens - 1}):
        part = (*(argument[row : row + 1] for argument in sample[:count]), *sample[count:])
        for together, single in zip(whole, tensors(alone(*moved(part, device))), strict=True):
            _same(f"token {row} of {tokens}", together[row : row + 1], single)


def _attention_alone(kernel: AttentionKernel, alone: AttentionKernel, case: AttnCase) -> None:
    whole = _run(kernel, case)
    for row, first, count in _parts(case):
        start = int(case.meta["q_start"][row]) + first
        got = _run(kernel if count > 1 else alone, _part(case, row, first, count, start))
        _same(f"row {row}, query {first} of {case.rows.n_query[row]}", whole[start : start + count], got)


def _parts(case: AttnCase) -> Iterator[tuple[int, int, int]]:
    """(row, first query, queries): some rows as a whole, their first halves, and their last queries."""
    rows = [row for row, n in enumerate(case.rows.n_query) if n]
    for row in sorted({*rows[:2], *rows[-2:]}):
        n = int(case.rows.n_query[row])
        yield row, 0, n
        if n > 1:
            yield row, 0, n // 2
            yield row, n - 1, 1


def _part(case: AttnCase, row: int, first: int, count: int, start: int) -> AttnCase:
    """A case of some queries of one row, as in a chunk of a prompt or in a decode step."""
    kv_len = int(case.rows.kv_len[row]) - int(case.rows.n_query[row]) + first + count
    tokens, where = slice(start, start + count), case.q.device
    ints = {"q_start": [0, count], "kv_len": [kv_len]}
    meta = {name: torch.tensor(values, dtype=torch.int32, device=where) for name, values in ints.items()}
    return replace(
        case,
        q=case.q[tokens],
        k_new=case.k_new[tokens],
        v_new=None if case.v_new is None else case.v_new[tokens],
        meta={"table": case.meta["table"], "request": case.meta["request"][row : row + 1], **meta},
        rows=AttnRows(n_query=np.array([count], np.int32), kv_len=np.array([kv_len], np.int32)),
    )


def _run(kernel: AttentionKernel, case: AttnCase) -> torch.Tensor:
    meta = dict(case.meta)
    planned(kernel, case, meta)
    return kernel.run(case.q, case.k_new, case.v_new, case.kv, meta, case.out())


def _same(what: str, together: torch.Tensor, alone: torch.Tensor) -> None:
    if together.dtype.itemsize == 1:  # torch compares no float8
        together, alone = together.float(), alone.float()
    if not torch.equal(together.nan_to_num(), alone.nan_to_num()):
        error = float((together.float() - alone.float()).abs().max())
        raise AssertionError(f"{what} has other bits alone, up to {error:.3g} off")
