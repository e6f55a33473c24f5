"""`llmcore kernels`: list kernels, explain the choice for a device, check and time them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import click

from llmcore.api.errors import ResolveError
from llmcore.api.models import data_type
from llmcore.api.specs import TOKEN_BUCKETS, DeviceInfo, OpContext, OpSpec, Requires
from llmcore.cli.group import loaded
from llmcore.cli.options import outlined
from llmcore.cli.tables import Row, listing, registry_for, show_failures, show_rows
from llmcore.registry.devices import find_device
from llmcore.registry.modes import Pins, apply_modes
from llmcore.registry.registry import Registry
from llmcore.registry.resolve import Resolution, bucket_text, candidates_for, resolve

Asked = SimpleNamespace
"""The command's options, by the names that click gives them."""


@click.command("kernels")
@click.argument("ops", nargs=-1, metavar="[OP]...")
@click.option("--explain", is_flag=True, help="Which kernel every op gets, and why not the others.")
@click.option("--check", is_flag=True, help="Run every kernel that fits here, and compare it with its reference.")
@click.option("--bench", is_flag=True, help="Time every kernel that fits here, beside its alternatives.")
@click.option("--device", metavar="NAME", help="A device, here or not (default: the one that serve would take).")
@click.option("--model", metavar="MODEL", help="For the ops and shapes of this model, a path or a name.")
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

    OP: only those of these ops. Without --model no shapes are known: a kernel made for certain ones shows which.
    """
    asked = Asked(**given)
    if sum((asked.check, asked.bench, asked.explain)) > 1:
        raise click.UsageError("give one of --explain, --check and --bench")
    if not asked.check and (asked.jobs or asked.seed is not None):
        raise click.UsageError("--jobs and --seed are for --check")
    registry = registry_for(asked.plugins)
    show_failures(registry)
    for op in asked.ops:
        registry.find(OpSpec, op)
    if asked.bench or asked.check:
        loaded(ctx, f"kernels --{'bench' if asked.bench else 'check'}")(asked, registry)
    elif asked.explain or asked.model is not None:
        rows = [row for row in _choices(asked, registry) if not asked.ops or row["op"] in asked.ops]
        lines = [(_what(row), row["tokens"], row["chosen"] or "none", row["plugin"] or "", _why(row)) for row in rows]
        show_rows(rows, asked.as_json, ("OP", "TOKENS", "CHOSEN", "FROM", "WHY"), lines)
    else:
        ops = asked.ops or sorted(spec.name for spec, _ in registry.specs(OpSpec))
        rows = [row for op in ops for row in _kernels(registry, op)]
        lines = [(row["op"], row["name"], row["dist"], str(row["priority"]), row["requires"]) for row in rows]
        show_rows(rows, asked.as_json, ("OP", "KERNEL", "FROM", "PRIORITY", "REQUIRES"), lines)


# --- what there is ---------------------------------------------------------------------------------------------


def _kernels(registry: Registry, op: str) -> Iterator[Row]:
    """The kernels of an op, the highest priority first."""
    for spec, plugin in sorted(candidates_for(registry, op), key=lambda pair: (-pair[0].priority, pair[0].name)):
        yield {
            "op": op,
            "name": spec.name,
            "plugin": plugin.name,
            "dist": plugin.dist,
            "priority": spec.priority,
            "requires": requires_text(spec.when),
            "summary": spec.summary,
        }


def requires_text(when: Requires) -> str:
    """A kernel's requirement in words; "" if it has none."""
    parts = [when.device] if when.device else []
    if when.capability:
        parts.append("capability {}-{}".format(*when.capability))
    named = {"dtype": when.dtypes, "layout": when.layouts, "granule": when.granules}
    tokens = frozenset(bucket_text(bucket) for bucket in when.buckets)
    sets: Mapping[str, Iterable[object]] = {**named, "tokens": tokens, **when.shape}
    parts += [f"{name} {' or '.join(sorted(map(str, values)))}" for name, values in sets.items() if values]
    return ", ".join(parts)


# --- what is chosen --------------------------------------------------------------------------------------------


def _choices(asked: Asked, registry: Registry) -> list[Row]:
    device = find_device(registry, asked.device or "auto")
    if asked.model is None:
        pins = apply_modes(asked.mode, registry, device, asked.kernel)
        return choice_rows(_choices_of_specs(asked, registry, device, pins))
    from llmcore.engine.blueprint import blueprint_at

    with outlined(asked.model, registry) as path:
        plain = blueprint_at(path, registry, device, asked.dtype, asked.deterministic)
    found = plain.pinned(asked.mode, asked.kernel).resolutions()
    return choice_rows((resolution.context, resolution) for resolution in found)


def _choices_of_specs(
    asked: Asked, registry: Registry, device: DeviceInfo, pins: Pins
) -> Iterator[tuple[OpContext, Resolution | ResolveError]]:
    """The kernel of every op on `device`, from specs alone: without shapes, at granule 1."""
    for op in sorted(spec.name for spec, _ in registry.specs(OpSpec)):
        for bucket in range(len(TOKEN_BUCKETS)):
            context = OpContext(
                op=op,
                device=device,
                dtype=data_type(asked.dtype or "bf16"),
                layout=pins.layouts.get(asked.layout, asked.layout),
                bucket=bucket,
                deterministic=asked.deterministic,
            )
            try:
                yield context, resolve(candidates_for(registry, op), context, pins.kernels, registry.order)
            except ResolveError as error:
                yield context, error


def choice_rows(outcomes: Iterable[tuple[OpContext, Resolution | ResolveError]]) -> list[Row]:
    """One row per op, shape and set of buckets with the same outcome, in the order of `outcomes`.

    `chosen` is None if no kernel can be chosen; `why` is then the error. `others`: kernel -> why it was not chosen.
    """
    grouped: dict[str, tuple[Row, set[int]]] = {}
    for context, outcome in outcomes:
        row: Row = {"op": context.op, "tokens": "", "shape": dict(context.shape)}
        if isinstance(outcome, Resolution):
            row |= {"chosen": outcome.chosen.name, "plugin": outcome.plugin.name, "why": outcome.why}
            row["others"] = dict(outcome.reasons)
        else:
            row |= {"chosen": None, "plugin": None, "why": str(outcome), "others": {}}
        key = repr(row) if row["chosen"] else f"{context.op} {row['shape']}"
        grouped.setdefault(key, (row, set()))[1].add(context.bucket)
    return [row | {"tokens": _tokens(buckets)} for row, buckets in grouped.values()]


def _tokens(buckets: Collection[int]) -> str:
    if len(buckets) == len(TOKEN_BUCKETS):
        return "any"
    return ", ".join(bucket_text(bucket) for bucket in sorted(buckets))


def _what(row: Row) -> str:
    shape = ", ".join(f"{name}={value}" for name, value in row["shape"].items() if value not in (None, False))
    return f"{row['op']} ({shape})" if shape else str(row["op"])


def _why(row: Row) -> str:
    return "; ".join([row["why"], *(f"{name}: {reason}" for name, reason in row["others"].items())])
