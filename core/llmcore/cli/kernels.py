"""`llmcore kernels`: list kernels, explain the choice for a device, check and time them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from llmcore.api.models import data_type
from llmcore.api.specs import OpSpec
from llmcore.cli.group import loaded
from llmcore.cli.tables import listing, registry_for, show_failures, show_rows
from llmcore.config import resolve_model
from llmcore.registry.inspect import ChoiceRow, choice_rows, choices_for_specs, find_device, kernel_rows
from llmcore.registry.modes import apply_modes
from llmcore.registry.registry import Registry


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
    worker: bool
    plugins: tuple[str, ...]
    as_json: bool


@click.command("kernels")
@click.argument("op", required=False)
@click.option("--explain", is_flag=True, help="Which kernel every op gets, and why not the others.")
@click.option("--check", is_flag=True, help="Run every kernel that fits here, and compare it with its reference.")
@click.option("--bench", is_flag=True, help="Time every kernel that fits here, beside its alternatives.")
@click.option("--device", metavar="NAME", help="A device, here or not (default: the one that serve would take).")
@click.option("--model", metavar="PATH", help="For the ops and shapes of this model.")
@click.option("--dtype", metavar="TYPE", help="As --data_type (default: the model's; else bf16, --check: all).")
@click.option("--layout", default="token", show_default=True, help="KV layout.")
@click.option("--mode", multiple=True, metavar="NAME", help="As in llmcore serve.")
@click.option("--kernel", multiple=True, metavar="OP=NAME", help="As in llmcore serve.")
@click.option("--deterministic", is_flag=True, help="As in llmcore serve.")
@click.option("--seed", type=int, metavar="N", help="--check: seed of the inputs (default: another every time).")
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="--check: processes (default: as fits the device).")
@click.option("--worker", is_flag=True, hidden=True, help="--check: takes what to check from its input.")
@listing
@click.pass_context
def command(ctx: click.Context, /, **given: Any) -> None:
    """List kernels, explain which one is chosen, check and time them.

    OP: only those of one op. Without --model no shapes are known: a kernel made for certain ones shows which.
    """
    asked = Asked(**given)
    if sum((asked.check, asked.bench, asked.explain)) > 1:
        raise click.UsageError("give one of --explain, --check and --bench")
    if not asked.check and (asked.jobs or asked.seed is not None):
        raise click.UsageError("--jobs and --seed are for --check")
    registry = registry_for(asked.plugins)
    show_failures(registry)
    if asked.op is not None:
        registry.find(OpSpec, asked.op)
    if asked.bench or asked.check:
        loaded(ctx, f"kernels --{'bench' if asked.bench else 'check'}")(asked, registry)
    elif asked.explain or asked.model is not None:
        _explain(_choices(asked, registry), asked)
    else:
        rows = kernel_rows(registry, asked.op)
        lines = [(row.op, row.name, row.dist, str(row.priority), row.requires) for row in rows]
        show_rows(rows, asked.as_json, ("OP", "KERNEL", "FROM", "PRIORITY", "REQUIRES"), lines)


def _choices(asked: Asked, registry: Registry) -> list[ChoiceRow]:
    device = find_device(registry, asked.device or "auto")
    if asked.model is not None:
        from llmcore.engine.blueprint import blueprint_at

        plain = blueprint_at(resolve_model(asked.model), registry, device, asked.dtype, asked.deterministic)
        found = plain.pinned(asked.mode, asked.kernel).resolutions()
        rows = choice_rows((resolution.context, resolution) for resolution in found)
    else:
        pins = apply_modes(asked.mode, registry, device, asked.kernel)
        dtype = data_type(asked.dtype or "bf16")
        rows = choices_for_specs(registry, device, dtype, pins.layout or asked.layout, pins, asked.deterministic)
    return [row for row in rows if asked.op in (None, row.op)]


def _explain(rows: Sequence[ChoiceRow], asked: Asked) -> None:
    lines = [(_what(row), row.tokens, row.chosen or "none", row.plugin or "", _why(row)) for row in rows]
    show_rows(rows, asked.as_json, ("OP", "TOKENS", "CHOSEN", "FROM", "WHY"), lines)


def _what(row: ChoiceRow) -> str:
    shape = ", ".join(f"{name}={value}" for name, value in row.shape.items() if value not in (None, False))
    return f"{row.op} ({shape})" if shape else row.op


def _why(row: ChoiceRow) -> str:
    return "; ".join([row.why, *(f"{name}: {reason}" for name, reason in row.others.items())])
