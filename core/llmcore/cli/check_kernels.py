"""`llmcore kernels --check`: kernels compared with their references on the device that is here."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmcore.cli.tables import show_failures, show_table
from llmcore.errors import ConfigError
from llmcore.modes import apply_modes
from llmcore.plugins import Registry
from llmcore.specs import DType, OpSpec
from llmcore.weights.dtypes import data_type

if TYPE_CHECKING:
    from llmcore.ops import Shape
    from llmcore.protocols import Device

DTYPES: tuple[DType, ...] = ("f32", "f16", "bf16")

JOBS = 12
"""Processes on an accelerator: most of the time goes into compiling, on the host."""

Row = dict[str, Any]
"""An engine.check_kernels.CheckRow."""


@dataclass(frozen=True)
class Asked:
    """The command's options."""

    op: str | None
    explain: bool
    device: str | None
    model: str | None
    dtype: str | None
    layout: str
    mode: tuple[str, ...]
    kernel: tuple[str, ...]
    deterministic: bool
    check: bool
    bench: bool
    seed: int | None
    jobs: int | None
    share: str | None
    plugins: tuple[str, ...]
    as_json: bool


def run(asked: Asked, registry: Registry) -> None:
    """Check, print a table or JSON, and exit with 1 where a kernel is wrong."""
    from llmcore.engine.model import pick_device

    if asked.op is not None:
        registry.find(OpSpec, asked.op)
    device = pick_device(registry, asked.device or "auto")
    seed = secrets.randbits(31) if asked.seed is None else asked.seed
    if asked.share is not None:
        first, _, step = asked.share.partition("/")
        rows = list(_rows(asked, registry, device, seed, slice(int(first), None, int(step))))
    else:
        jobs = asked.jobs or (min(JOBS, os.cpu_count() or 1) if device.measured else 1)
        click.echo(f"{device.info.type} {device.info.name}, seed {seed}, {jobs} processes", err=True)
        if jobs > 1:
            rows = list(_spread(asked, seed, jobs))
        else:
            rows = list(_rows(asked, registry, device, seed, slice(None)))
    rows.sort(key=lambda row: (row["op"], row["kernel"], row["dtype"]))
    if asked.as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        _show(rows)
        show_failures(registry)
    if any(row["failed"] for row in rows):
        sys.exit(1)


def _rows(asked: Asked, registry: Registry, device: Device, seed: int, share: slice) -> Iterator[Row]:
    from llmcore.engine.check_kernels import check_units, units

    pins = apply_modes(asked.mode, registry, device.info, asked.kernel).kernels
    dtypes = (data_type(asked.dtype),) if asked.dtype else DTYPES
    todo = units(registry, asked.op, pins, dtypes)[share]
    shapes = asked_shapes(asked, registry, device)
    for row in check_units(todo, device, lambda op: shapes.get(op, ()), seed, asked.deterministic):
        yield asdict(row)


def asked_shapes(asked: Asked, registry: Registry, device: Device) -> dict[str, Sequence[Shape]]:
    """By op: the model's shapes, or on an accelerator those of common models."""
    from llmcore.engine.explain import resolutions_of
    from llmcore.ops.real_shapes import real_shapes

    if asked.model is None:
        ops = [spec.name for spec, _ in registry.specs(OpSpec)]
        return {op: real_shapes(op) for op in ops} if device.measured else {}
    pins = apply_modes(asked.mode, registry, device.info)
    found: dict[str, list[Shape]] = {}
    for resolution in resolutions_of(Path(asked.model), registry, device.info, pins, asked.dtype):
        shapes = found.setdefault(resolution.context.op, [])
        if resolution.context.shape not in shapes:
            shapes.append(resolution.context.shape)
    return {op: tuple(shapes) for op, shapes in found.items()}


def _spread(asked: Asked, seed: int, jobs: int) -> Iterator[Row]:
    """The rows of `jobs` processes, each of which runs this command on its share."""
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
    command = [sys.executable, "-m", "llmcore.cli", "kernels", "--check", "--json", f"--seed={seed}", *options]
    command += [asked.op] if asked.op else []
    children = [
        subprocess.Popen([*command, f"--share={index}/{jobs}"], stdout=subprocess.PIPE, text=True)
        for index in range(jobs)
    ]
    try:
        for child in children:
            text, _ = child.communicate()
            if child.returncode not in (0, 1) or not text:
                raise ConfigError(f"a process of --check ended with exit code {child.returncode}; see above")
            yield from json.loads(text)
    finally:
        for child in children:
            child.kill()


def _show(rows: Sequence[Row]) -> None:
    header = ("OP", "KERNEL", "DTYPE", "CASES", "ERROR / ALLOWED", "SECONDS", "RESULT")
    lines = [
        (op, kernel, ", ".join(row["dtype"] for row in alike), "", "", "", f"declines: {why}")
        for (op, kernel, why), alike in _declined(rows).items()
    ]
    for row in rows:
        if row["declined"] is not None:
            continue
        worst = "" if row["worst"] is None else f"{row['worst']:.3f}"
        wrong = f"wrong in {row['failed']} contexts"
        result = click.style(wrong, fg="red") if row["failed"] else "ok"
        seconds = f"{row['seconds']:.1f}"
        lines.append((row["op"], row["kernel"], row["dtype"], str(row["cases"]), worst, seconds, result))
    show_table(header, sorted(lines))
    for row in rows:
        for failure in row["failures"]:
            click.echo(f"{row['op']}={row['kernel']} {row['dtype']}: {failure}")


def _declined(rows: Sequence[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """Rows of kernels that take nothing here, those with one reason together."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row["declined"] is not None:
            found.setdefault((row["op"], row["kernel"], row["declined"]), []).append(row)
    return found
