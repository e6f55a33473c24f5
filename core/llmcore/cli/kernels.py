"""`llmcore kernels`: which kernels there are, which one an op gets on a device, and why not the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from llmcore.cli.options import named_plugins
from llmcore.cli.tables import listing, registry_for, show_failures, show_json, show_table
from llmcore.inspect import ChoiceRow, choices_for_specs, find_device, kernel_rows
from llmcore.modes import apply_modes
from llmcore.plugins import Registry
from llmcore.specs import DType


@dataclass(frozen=True)
class Asked:
    """The command's options."""

    op: str | None
    explain: bool
    device: str
    dtype: DType
    layout: str
    mode: tuple[str, ...]
    kernel: tuple[str, ...]
    plugins: tuple[str, ...]
    as_json: bool


@click.command("kernels")
@click.argument("op", required=False)
@click.option("--explain", is_flag=True, help="Which kernel every op gets, and why not the others.")
@click.option("--device", default="cpu", show_default=True, metavar="NAME", help="A device, here or not.")
@click.option("--dtype", type=click.Choice(["f32", "f16", "bf16"]), default="bf16", show_default=True)
@click.option("--layout", default="token", show_default=True, help="KV layout.")
@click.option("--mode", multiple=True, metavar="NAME", help="As in llmcore serve.")
@click.option("--kernel", multiple=True, metavar="OP=NAME", help="As in llmcore serve.")
@listing
def command(**given: Any) -> None:
    """List kernels, and explain which one is chosen.

    OP: only those of one op. --explain knows no shapes: a kernel made for certain shapes shows what it needs.
    """
    asked = Asked(**given)
    registry = registry_for(asked.plugins)
    if asked.explain:
        _explain(_choices(asked, registry), asked)
    else:
        rows = kernel_rows(registry, asked.op)
        if asked.as_json:
            show_json(rows)
        else:
            header = ("OP", "KERNEL", "FROM", "PRIORITY", "REQUIRES")
            show_table(header, [(r.op, r.name, r.dist, str(r.priority), r.requires) for r in rows])
    show_failures(registry)


def _choices(asked: Asked, registry: Registry) -> list[ChoiceRow]:
    device = find_device(registry, asked.device)
    pins = apply_modes(asked.mode, registry, device, asked.kernel)
    order = named_plugins(asked.plugins).plugins.plugins or ()
    rows = choices_for_specs(registry, device, asked.dtype, pins.layout or asked.layout, pins, order)
    if asked.op is not None:
        kernel_rows(registry, asked.op)
    return [row for row in rows if asked.op in (None, row.op)]


def _explain(rows: Sequence[ChoiceRow], asked: Asked) -> None:
    if asked.as_json:
        show_json(rows)
        return
    lines = [(_what(row), row.tokens, row.chosen or "none", row.plugin or "", _why(row)) for row in rows]
    show_table(("OP", "TOKENS", "CHOSEN", "FROM", "WHY"), lines)


def _what(row: ChoiceRow) -> str:
    shape = ", ".join(f"{name}={value}" for name, value in row.shape.items())
    return f"{row.op} ({shape})" if shape else row.op


def _why(row: ChoiceRow) -> str:
    return "; ".join([row.why, *(f"{name}: {reason}" for name, reason in row.others.items())])
