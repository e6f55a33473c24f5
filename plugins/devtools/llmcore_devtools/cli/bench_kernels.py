"""`llmcore kernels --bench`: times of kernels on this machine's device, as shares of its roofline."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click
from llmcore.api.specs import OpContext, OpSpec
from llmcore.cli.kernels import Asked
from llmcore.cli.tables import show_failures, show_table
from llmcore.registry.modes import apply_modes
from llmcore.registry.registry import Registry
from llmcore.weights.dtypes import data_type

from llmcore_devtools.cli.check_kernels import asked_shapes

if TYPE_CHECKING:
    from llmcore.api.protocols import Device
    from llmcore.ops import Shape

    from llmcore_devtools.kernels.bench import BenchRow, Ceilings

SHAPES_EACH = 5
"""Shapes of every op if neither an op nor a model is given. A decoder has this number of linears."""

SMALL = 3
"""Number of real shapes, the smallest ones, for an op without shapes of its own."""


def run(asked: Asked, registry: Registry) -> None:
    """Time kernels, print a table or JSON, and exit with 1 if a kernel failed."""
    from llmcore.engine.model import pick_device

    from llmcore_devtools.kernels import bench

    if asked.op is not None:
        registry.find(OpSpec, asked.op)
    device = pick_device(registry, asked.device or "auto")
    dtype = data_type(asked.dtype or "bf16")
    pins = apply_modes(asked.mode, registry, device.info, asked.kernel)
    effort = bench.ACCELERATOR if device.measured else bench.HOST
    best = bench.ceilings(device, dtype, effort)
    click.echo(_heading(device, best), err=True)
    base = OpContext(
        op="", device=device.info, dtype=dtype, layout=pins.layout or asked.layout, deterministic=asked.deterministic
    )
    run = bench.Bench(registry, device, effort, best, base, pins.kernels)
    shapes = asked_shapes(asked, registry, device)
    rows: list[BenchRow] = []
    for spec, _ in sorted(registry.specs(OpSpec), key=lambda pair: pair[0].name):
        if asked.op in (None, spec.name) and (asked.model is None or spec.name in shapes):
            for row in run.rows(spec.name, _wanted(asked, spec, shapes.get(spec.name, ()))):
                rows.append(row)
                took = row.failure if row.us is None else f"{row.us:,.1f} us"
                click.echo(f"{row.op} {row.kernel}, {row.tokens} tokens: {took}", err=True)
    if asked.as_json:
        measured = {"copy": best.copy, "matmul": best.matmul}
        click.echo(json.dumps({"device": asdict(device.info), "ceilings": measured, "rows": _plain(rows)}, indent=2))
    else:
        _show(rows)
        show_failures(registry)
    if any(row.failure for row in rows):
        sys.exit(1)


def _wanted(asked: Asked, spec: OpSpec, known: Sequence[Shape]) -> Sequence[Shape]:
    """The shapes of the model or of common models; else the op's own; else the smallest real ones."""
    from llmcore_devtools.kernels.real_shapes import real_shapes

    module = importlib.import_module(spec.module)
    small = sorted(real_shapes(spec.name), key=lambda shape: module.cost({**shape, "tokens": 1})[0])[:SMALL]
    shapes = known or getattr(module, "SHAPES", ()) or small or ({},)
    return shapes if asked.op or asked.model else shapes[:SHAPES_EACH]


def _heading(device: Device, best: Ceilings) -> str:
    copy, matmul = f"{best.copy / 1e9:,.0f} GB/s copied", f"{best.matmul / 1e12:,.2f} TFLOP/s multiplied"
    return f"{device.info.type} {device.info.name}: {copy}, {matmul} in {best.dtype}"


def _plain(rows: Iterable[BenchRow]) -> list[dict[str, object]]:
    return [asdict(row) for row in rows]


def _show(rows: Sequence[BenchRow]) -> None:
    header = ("OP", "TOKENS", "KV", "KERNEL", "MICROSECONDS", "TIMES BEST", "ROOFLINE", "BOUND BY", "")
    lines = []
    groups: dict[tuple[object, ...], list[BenchRow]] = {}
    for row in rows:
        groups.setdefault((row.op, str(row.shape), row.tokens, row.kv_len), []).append(row)
    for alike in groups.values():
        timed = [row.us for row in alike if row.us is not None]
        for row in sorted(alike, key=lambda row: row.us or float("inf")):
            shape = ", ".join(f"{name}={value}" for name, value in row.shape.items() if value not in (None, False))
            what = (f"{row.op} ({shape})" if shape else row.op, str(row.tokens), str(row.kv_len or ""), row.kernel)
            if row.us is None or row.roofline is None:
                lines.append((*what, "", "", "", "", f"failed: {row.failure}"))
                continue
            notes = ", ".join(["chosen"] * row.chosen + ["with the host's time"] * row.host_time)
            figures = (f"{row.us:.1f}", f"{row.us / min(timed):.2f}", f"{row.roofline:.2f}", row.bound, notes)
            lines.append((*what, *figures))
    show_table(header, lines)
