"""Times of every kernel that fits a device, beside its alternatives: `llmcore kernels --bench`.

A time is compared with the roofline: the longer of the bytes that the op's `cost` declares over this run's copy
bandwidth, and its flops over this run's matmul rate. The calls use copies of their arguments by turns. Together these
are larger than a cache, so the kernel reads from memory. If the device has graphs, one graph replays the calls, so
that the host's time does not count.
"""

from __future__ import annotations

import importlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from llmcore.api.errors import LlmcoreError, reraise_if_stopping
from llmcore.api.protocols import Device
from llmcore.api.specs import DType, OpContext, OpSpec
from llmcore.ops import DTYPES, Shape, drawing, made
from llmcore.ops.attention import spec_of
from llmcore.registry.loader import load
from llmcore.registry.registry import Registry
from llmcore.registry.resolve import REFERENCE, candidates_for, resolve, why_not

from llmcore_devtools.kernels.attention_cases import AttnCase, cases_of
from llmcore_devtools.kernels.attention_stored import over_its_layout
from llmcore_devtools.kernels.compare import as_packed, moved, planned, tensors
from llmcore_devtools.kernels.write_stored import DoesNotFit, Stores

Call = Callable[[], Any]

_LONG = 10
"""A single run of this many times the least time is precise enough."""

DEFAULT_LAYOUT = "token"
"""The layout that `llmcore kernels` takes if none is given. An op that does not read it is timed over its own."""

PARTS = "parts"
"""The name, among a composite's kernels, of its expansion into other ops, each with its chosen kernel."""


@dataclass(frozen=True)
class Effort:
    """The extent of the measurements."""

    tokens: tuple[int, ...]
    """Tokens of each bucket."""
    cold: int
    """Bytes that the calls read before they use the same arguments again."""
    most: int
    """Most copies of the arguments for that."""
    memory: int
    """Most bytes of these copies."""
    seconds: float
    """Seconds of one measurement, which is made three times."""
    copy: int
    """Bytes of the copy that measures the bandwidth."""
    side: int
    """Side of the square matrices that measure the matmul rate."""


ACCELERATOR = Effort((1, 16, 64, 256, 2048), 192 << 20, 48, 4 << 30, 2e-3, 2 << 30, 8192)
HOST = Effort((1, 4, 32, 80, 300), 64 << 20, 4, 1 << 30, 5e-4, 64 << 20, 512)


@dataclass(frozen=True)
class Ceilings:
    """The best rates of this run, per second: bytes read and written by a copy, and flops of a product in `dtype`."""

    dtype: DType
    copy: float
    matmul: float

    def seconds(self, moved: float, flops: float) -> tuple[float, str]:
        """The shortest time for `moved` bytes and `flops`, and the one that takes it: "compute" or "memory"."""
        memory, compute = moved / self.copy, flops / self.matmul
        return (compute, "compute") if compute > memory else (memory, "memory")


@dataclass
class BenchRow:
    """One kernel on one call."""

    op: str
    kernel: str
    plugin: str
    dtype: DType
    shape: dict[str, Any]
    chosen: bool
    tokens: int = 0
    kv_len: int | None = None
    """KV tokens of all rows, for attention."""
    moved: float = 0.0
    """Bytes that the op declares for the call."""
    flops: float = 0.0
    """Flops that the op declares for the call."""
    bound: str = ""
    us: float | None = None
    """Microseconds; None if the kernel failed, see `failure`."""
    roofline: float | None = None
    """The roofline's time as a share of the measured time."""
    host_time: bool = False
    """The device has graphs, but this kernel could not be captured, so the host's time counts."""
    failure: str | None = None


# --- measuring ---------------------------------------------------------------------------------------------------


@torch.inference_mode()
def ceilings(device: Device, dtype: DType, effort: Effort) -> Ceilings:
    """This run's rates, from a large copy and a square product of random numbers."""
    where, seconds = device.torch_device, 20 * effort.seconds
    source = torch.ones(effort.copy, dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    # Not from a graph: there a copy engine may copy, which is slower than the device's processors.
    copying = seconds_of(device, partial(target.copy_, source), seconds)
    del source, target
    left, right = (torch.randn(effort.side, effort.side, device=where).to(DTYPES[dtype]) for _ in range(2))
    multiplying = seconds_of(device, partial(torch.matmul, left, right), seconds)
    return Ceilings(dtype, 2 * effort.copy / copying, 2 * effort.side**3 / multiplying)


def seconds_per_call(device: Device, calls: Sequence[Call], least: float) -> tuple[float, bool]:
    """As `seconds_of`, per call of `calls`, and True if a graph replayed them.

    If the calls cannot be captured and one takes `least` seconds alone, one is enough: a cache cannot make it fast.
    """

    def work() -> None:
        for call in calls:
            call()

    calls[0]()
    device.synchronize()
    if device.graphs:
        device.forget_graphs()  # nothing holds the last graph any more; this frees its memory
        try:
            graph, _ = device.capture(work)
            return seconds_of(device, graph.replay, least) / len(calls), True
        except BaseException as error:  # noqa: BLE001 - a call that waits for the host, as some references do
            reraise_if_stopping(error)
            device.synchronize()
    alone = seconds_of(device, calls[0], least)
    return (alone if alone >= least or len(calls) == 1 else seconds_of(device, work, least) / len(calls)), False


def seconds_of(device: Device, run: Call, least: float) -> float:
    """Seconds per run: the best of three measurements of at least `least` seconds; a far longer run is timed once."""

    def timed(times: int) -> float:
        device.synchronize()
        started = time.perf_counter()
        for _ in range(times):
            run()
        device.synchronize()
        return time.perf_counter() - started

    timed(1)
    one = timed(1)
    if one > _LONG * least:
        return one
    times = max(1, min(1000, round(least / max(one, 1e-7))))
    return min(timed(times) for _ in range(3)) / times


# --- what is measured --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """A run. `base`: the common part of all contexts. `pins`: op -> the kernel to time, beside the reference.

    `layouts`: layout -> the one that a mode stores instead.
    """

    registry: Registry
    device: Device
    effort: Effort
    best: Ceilings
    base: OpContext
    pins: Mapping[str, str]
    layouts: Mapping[str, str] = field(default_factory=dict)

    def rows(self, op: str, shapes: Sequence[Shape]) -> Iterator[BenchRow]:
        """A row per shape, bucket, call and kernel, as soon as it is measured."""
        module = importlib.import_module(self.registry.find(OpSpec, op).module)
        where, layout, known = self.device.torch_device, self.base.layout, getattr(module, "LAYOUTS", ())
        if layout == DEFAULT_LAYOUT and known and layout not in known:
            layout = known[0]
        layout = None if layout is None else self.layouts.get(layout, layout)
        for shape in shapes:
            for bucket, tokens in enumerate(_tokens(self.effort, module, shape, self.base.dtype)):
                asked = replace(self.base, op=op, shape=dict(shape), bucket=bucket, layout=layout)
                try:
                    samples, context = over_its_layout(self.registry, module, asked)
                except DoesNotFit:
                    continue
                with torch.inference_mode(), drawing(0, where, tokens):
                    for sample in _samples(samples, context, tokens):
                        rotated = _rotated(moved(sample, where), self.effort)
                        for row, make in self._kernels(context, getattr(samples, "layout", None)):
                            self._time(row, make, samples, context, rotated)
                            yield row
                        del rotated

    def _kernels(self, context: OpContext, layout: Stores | None) -> Iterator[tuple[BenchRow, Call]]:
        """(row, make) of every kernel that fits, and of a composite's parts.

        `layout`: the one of which the samples have pools, if the op's own samples do not know it.
        """
        candidates = candidates_for(self.registry, context.op)
        spec = self.registry.find(OpSpec, context.op)
        try:
            chosen = resolve(candidates, context, self.pins, self.registry.order).chosen.name
        except LlmcoreError:
            chosen = ""
        # the engine runs a composite's parts instead of its reference
        chosen = PARTS if chosen == REFERENCE and spec.expands_to else chosen
        for kernel, plugin in candidates:
            if kernel.name == REFERENCE and spec.expands_to and layout is not None:
                continue  # it knows no such pool
            if kernel.name in (self.pins.get(context.op, kernel.name), REFERENCE) and why_not(kernel, context) is None:
                yield self._row(context, kernel.name, plugin.name, chosen), partial(made, kernel, context)
        if spec.expands_to and (
            "kv_write" not in context.op or layout is not None
        ):  # whose other part is the layout's
            yield self._row(context, PARTS, "", chosen), partial(parts, self.registry, context, self.pins, layout)

    def _row(self, context: OpContext, kernel: str, plugin: str, chosen: str) -> BenchRow:
        return BenchRow(context.op, kernel, plugin, context.dtype, dict(context.shape), chosen=kernel == chosen)

    def _time(
        self, row: BenchRow, make: Call, module: Any, context: OpContext, rotated: Sequence[tuple[Any, ...]]
    ) -> None:
        try:
            calls, row.tokens = _calls(make(), module, context, rotated)
            row.kv_len, row.moved, row.flops = _declared(module, context, rotated[0], row.tokens)
            floor, row.bound = self.best.seconds(row.moved, row.flops)
            seconds, captured = seconds_per_call(self.device, calls, self.effort.seconds)
            row.host_time = self.device.graphs and not captured
            row.us, row.roofline = 1e6 * seconds, floor / seconds
        except BaseException as error:  # noqa: BLE001 - the row shows it
            reraise_if_stopping(error)
            row.failure = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
            self.device.synchronize()


def parts(
    registry: Registry, context: OpContext, pins: Mapping[str, str] | None = None, layout: Stores | None = None
) -> Any:
    """A composite's expansion. Raises LlmcoreError if a part has no kernel that fits."""

    def part(op: str, **shape: Any) -> Any:
        if op == "kv_write" and layout is not None:
            return layout.write
        own = replace(context, op=op, shape=shape)
        chosen = resolve(candidates_for(registry, op), own, pins or {}, registry.order).chosen
        if chosen.name == REFERENCE and registry.find(OpSpec, op).expands_to:
            return parts(registry, own, pins, layout)
        return made(chosen, own)

    return load(f"{registry.find(OpSpec, context.op).module}:expand")(context, part)


def _tokens(effort: Effort, module: Any, shape: Shape, dtype: DType) -> Iterator[int]:
    """The effort's tokens, while one call's declared bytes are at most a quarter of the effort's memory."""
    for tokens in effort.tokens:
        declared = {"kv_len": 512, **shape, "tokens": tokens, "element": DTYPES[dtype].itemsize}
        if tokens > 1 and module.cost(declared)[0] > effort.memory / 4:
            return
        yield tokens


def _samples(module: Any, context: OpContext, tokens: int) -> Iterator[tuple[Any, ...]]:
    if hasattr(module, "timed"):
        yield from cases_of(module, context, module.timed(context, tokens))
    else:
        yield from itertools.islice(module.samples(context), 1)


def _calls(kernel: Any, module: Any, context: OpContext, rotated: Sequence[tuple[Any, ...]]) -> tuple[list[Call], int]:
    """A call per copy of the arguments, and the number of tokens in a call's result."""
    one = rotated[0][0]
    if isinstance(one, AttnCase):
        meta, out = dict(one.meta), one.out()
        planned(kernel, one, meta)
        return [partial(kernel.run, c.q, c.k_new, c.v_new, c.kv, meta, out) for (c,) in rotated], len(one.q)
    rotated = [as_packed(kernel, module, context, sample) for sample in rotated]
    result = tensors(kernel(*rotated[0]))[0]
    return [partial(kernel, *arguments) for arguments in rotated], result.shape[0]


def _declared(
    module: Any, context: OpContext, arguments: tuple[Any, ...], tokens: int
) -> tuple[int | None, float, float]:
    """(KV tokens, bytes, flops) of one call, from the op's `cost`.

    For attention this is a sum over rows. A row's bytes include the KV that any of its queries sees. Its flops use the
    average KV of a query, which is about half of a causal prompt.
    """
    element = DTYPES[context.dtype].itemsize
    if not isinstance(arguments[0], AttnCase):
        return None, *module.cost({**context.shape, "tokens": tokens, "element": element})
    case = arguments[0]
    shape, spec = {**case.context.shape, "element": element}, spec_of(case.context)
    held, flops = 0.0, 0.0
    for n, length in zip(case.rows.n_query.tolist(), case.rows.kv_len.tolist(), strict=True):
        ends = np.arange(length - n + 1, length + 1) if spec.mask == "causal" else np.full(n, length)
        window = spec.window or length
        held += module.cost({**shape, "tokens": n, "kv_len": min(length, window + n - 1)})[0]
        flops += module.cost({**shape, "tokens": n, "kv_len": round(float(np.minimum(ends, window).mean()))})[1]
    return int(case.rows.kv_len.sum()), held, flops


# --- arguments -----------------------------------------------------------------------------------------------------


def _rotated(arguments: tuple[Any, ...], effort: Effort) -> list[tuple[Any, ...]]:
    """Copies of the arguments, together larger than a cache."""
    used = max(sum(tensor.nbytes for tensor in tensors(arguments)), 1)
    copies = max(1, min(effort.most, -(-effort.cold // used), effort.memory // used))
    return [arguments, *(_cloned(arguments) for _ in range(copies - 1))]


def _cloned(value: Any) -> Any:
    if isinstance(value, AttnCase):
        return replace(value, kv=tuple(pool.clone() for pool in value.kv))
    if isinstance(value, torch.Tensor):
        # the strides of a view are part of what is timed
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)
    return tuple(_cloned(item) for item in value) if isinstance(value, tuple) else value
