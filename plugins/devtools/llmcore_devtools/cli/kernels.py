"""`llmcore kernels --check` and `--bench`: this machine's kernels, compared with their references or timed."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import secrets
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from llmcore.api.errors import ConfigError
from llmcore.api.models import data_type
from llmcore.api.specs import DType, OpContext, OpSpec
from llmcore.cli.kernels import Asked
from llmcore.cli.options import outlined
from llmcore.cli.tables import show_table
from llmcore.registry.modes import apply_modes
from llmcore.registry.registry import Registry

if TYPE_CHECKING:
    from llmcore.api.protocols import Device
    from llmcore.ops import Shape

    from llmcore_devtools.kernels.bench import BenchRow, Ceilings
    from llmcore_devtools.kernels.check import Unit


DTYPES: tuple[DType, ...] = ("f32", "f16", "bf16")

JOBS = 12
"""Processes on an accelerator. Most of the time goes into compiling, on the host."""

Row = dict[str, Any]
"""A kernels.check.CheckRow as a dictionary."""


def check(asked: Asked, registry: Registry) -> None:
    """Check kernels, print a table or JSON, and exit with 1 if a kernel is wrong."""
    from llmcore.engine.model import pick_device

    device = pick_device(registry, asked.device or "auto")
    seed = secrets.randbits(31) if asked.seed is None else asked.seed
    if asked.worker:
        _work(asked, registry, device, seed)
        return
    todo = _units(asked, registry, device)
    jobs = min(asked.jobs or (min(JOBS, os.cpu_count() or 1) if device.measured else 1), max(len(todo), 1))
    click.echo(f"{device.info.type} {device.info.name}, seed {seed}, {jobs} processes", err=True)
    rows = []
    for row in _spread(asked, seed, jobs, len(todo)) if jobs > 1 else _rows(asked, registry, device, seed, todo):
        rows.append(row)
        if row["declined"] is None and jobs > 1:
            click.echo(f"{len(rows)} of {len(todo)}: {_said(row)}", err=True)
    rows.sort(key=lambda row: (row["op"], row["kernel"], row["dtype"]))
    _end(asked, rows, partial(_show_checks, rows), failed=any(row["failed"] for row in rows))


def _end(asked: Asked, content: Any, show: Callable[[], None], *, failed: bool) -> None:
    """Print `content` as JSON, or `show` it as a table, and exit with 1 if a kernel `failed`."""
    if asked.as_json:
        click.echo(json.dumps(content, indent=2))
    else:
        show()
    if failed:
        sys.exit(1)


def _units(asked: Asked, registry: Registry, device: Device) -> list[Unit]:
    from llmcore_devtools.kernels.check import units

    pins = apply_modes(asked.mode, registry, device.info, asked.kernel).kernels
    dtypes = (data_type(asked.dtype),) if asked.dtype else DTYPES
    return units(registry, asked.ops, pins, dtypes, asked.deterministic)


def _rows(asked: Asked, registry: Registry, device: Device, seed: int, todo: Iterable[Unit]) -> Iterator[Row]:
    from llmcore_devtools.kernels.check import Bench, check_units

    shapes = asked_shapes(asked, registry, device)
    run = Bench(registry, device, lambda op: shapes.get(op, ()), seed, asked.deterministic)
    for row in check_units(todo, run):
        yield asdict(row)


def _work(asked: Asked, registry: Registry, device: Device, seed: int) -> None:
    """Run as a process of `_spread`. It reads a unit's number per line, and writes the unit's row per line."""
    todo = _units(asked, registry, device)
    for row in _rows(asked, registry, device, seed, (todo[int(line)] for line in sys.stdin)):
        click.echo(json.dumps(row))


def asked_shapes(asked: Asked, registry: Registry, device: Device) -> dict[str, Sequence[Shape]]:
    """Op -> the model's shapes, or on an accelerator the shapes of common models."""
    from llmcore.engine.blueprint import blueprint_at

    from llmcore_devtools.kernels.real_shapes import real_shapes

    if asked.model is None:
        ops = [spec.name for spec, _ in registry.specs(OpSpec)]
        return {op: real_shapes(op) for op in ops} if device.measured else {}
    found: dict[str, list[Shape]] = {}
    with outlined(asked.model, registry) as path:
        plain = blueprint_at(path, registry, device.info, asked.dtype)
    for resolution in plain.pinned(asked.mode).resolutions():
        shapes = found.setdefault(resolution.context.op, [])
        if resolution.context.shape not in shapes:
            shapes.append(resolution.context.shape)
    return {op: tuple(shapes) for op, shapes in found.items()}


def _spread(asked: Asked, seed: int, jobs: int, count: int) -> Iterator[Row]:
    """The rows of `count` units, in the order in which `jobs` processes finish them. Each runs this command."""
    given: list[tuple[str, Iterable[str]]] = [
        ("device", [asked.device] if asked.device else []),
        ("model", [asked.model] if asked.model else []),
        ("dtype", [asked.dtype] if asked.dtype else []),
        ("mode", asked.mode),
        ("kernel", asked.kernel),
        ("plugins", asked.plugins),
    ]
    options = [f"--{name}={value}" for name, values in given for value in values]
    options += ["--deterministic"] * asked.deterministic
    command = [sys.executable, "-m", "llmcore.cli", "kernels", "--check", "--worker", f"--seed={seed}", *options]
    command += asked.ops
    todo = iter(range(count))
    children: list[subprocess.Popen[str]] = []
    done: queue.Queue[Row | ConfigError] = queue.Queue()

    def attend(child: subprocess.Popen[str]) -> None:
        assert child.stdin is not None and child.stdout is not None
        for number in todo:  # all threads share this iterator, so a free process takes the next unit
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(f"{number}\n")
                child.stdin.flush()
            line = child.stdout.readline()
            if not line:
                done.put(ConfigError(f"a process of --check ended with exit code {child.wait()}; see above"))
                return
            done.put(json.loads(line))
        child.stdin.close()

    try:
        for _ in range(jobs):
            children.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            threading.Thread(target=attend, args=(children[-1],), daemon=True).start()
        for _ in range(count):
            row = done.get()
            if isinstance(row, ConfigError):
                raise row
            yield row
    finally:
        for child in children:
            child.kill()
            child.wait()


def _said(row: Row) -> str:
    result = "wrong" if row["failed"] else "ok"
    return f"{row['op']}={row['kernel']} {row['dtype']} {result}, {row['seconds']:.1f} s"


def _show_checks(rows: Sequence[Row]) -> None:
    header = ("OP", "KERNEL", "DTYPE", "CASES", "ERROR / ALLOWED", "SECONDS", "RESULT")
    lines = []
    declined: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
    for row in rows:
        if row["declined"] is not None:
            declined[row["op"], row["kernel"], row["declined"]].append(row["dtype"])
            continue
        worst = "" if row["worst"] is None else f"{row['worst']:.3f}"
        wrong = f"wrong in {row['failed']} contexts"
        result = click.style(wrong, fg="red") if row["failed"] else "ok"
        seconds = f"{row['seconds']:.1f}"
        lines.append((row["op"], row["kernel"], row["dtype"], str(row["cases"]), worst, seconds, result))
    for (op, kernel, why), dtypes in declined.items():
        lines.append((op, kernel, ", ".join(dtypes), "", "", "", f"declines: {why}"))
    show_table(header, sorted(lines))
    for row in rows:
        for failure in row["failures"]:
            click.echo(f"{row['op']}={row['kernel']} {row['dtype']}: {failure}")


SHAPES_EACH = 5
"""Shapes of every op if neither an op nor a model is given. A decoder has this number of linears."""

SMALL = 3
"""Number of real shapes, the smallest ones, for an op without shapes of its own."""


def bench(asked: Asked, registry: Registry) -> None:
    """Time kernels, print a table or JSON, and exit with 1 if a kernel failed."""
    from llmcore.engine.model import pick_device

    from llmcore_devtools.kernels import bench as timing

    device = pick_device(registry, asked.device or "auto")
    dtype = data_type(asked.dtype or "bf16")
    pins = apply_modes(asked.mode, registry, device.info, asked.kernel)
    effort = timing.ACCELERATOR if device.measured else timing.HOST
    best = timing.ceilings(device, dtype, effort)
    click.echo(_heading(device, best), err=True)
    base = OpContext(
        op="",
        device=device.info,
        dtype=dtype,
        layout=asked.layout,
        deterministic=asked.deterministic,
    )
    run = timing.Bench(registry, device, effort, best, base, pins.kernels, pins.layouts)
    shapes = asked_shapes(asked, registry, device)
    rows: list[BenchRow] = []
    for spec, _ in sorted(registry.specs(OpSpec), key=lambda pair: pair[0].name):
        if (not asked.ops or spec.name in asked.ops) and (asked.model is None or spec.name in shapes):
            for row in run.rows(spec.name, _wanted(asked, spec, shapes.get(spec.name, ()))):
                rows.append(row)
                took = row.failure if row.us is None else f"{row.us:,.1f} us"
                click.echo(f"{row.op} {row.kernel}, {row.tokens} tokens: {took}", err=True)
    content = {
        "device": asdict(device.info),
        "ceilings": {"copy": best.copy, "matmul": best.matmul},
        "rows": [asdict(row) for row in rows],
    }
    _end(asked, content, partial(_show_times, rows), failed=any(row.failure for row in rows))


def _wanted(asked: Asked, spec: OpSpec, known: Sequence[Shape]) -> Sequence[Shape]:
    """The shapes of the model or of common models; else the op's own; else the smallest real ones."""
    from llmcore_devtools.kernels.real_shapes import real_shapes

    module = importlib.import_module(spec.module)
    small = sorted(real_shapes(spec.name), key=lambda shape: module.cost({**shape, "tokens": 1})[0])[:SMALL]
    shapes = known or getattr(module, "SHAPES", ()) or small or ({},)
    return shapes if asked.ops or asked.model else shapes[:SHAPES_EACH]


def _heading(device: Device, best: Ceilings) -> str:
    copy, matmul = f"{best.copy / 1e9:,.0f} GB/s copied", f"{best.matmul / 1e12:,.2f} TFLOP/s multiplied"
    return f"{device.info.type} {device.info.name}: {copy}, {matmul} in {best.dtype}"


def _show_times(rows: Sequence[BenchRow]) -> None:
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
