"""`llmcore plugins`: the plugins with their states, failures and contributions; `new` writes a plugin."""

from __future__ import annotations

from collections.abc import Sequence

import click

from llmcore.api.hookspecs import HOOKS
from llmcore.api.specs import KernelSpec, PluginInfo, Spec
from llmcore.cli.group import PluginGroup
from llmcore.cli.tables import Row, listing, registry_for, show_rows
from llmcore.registry.loader import available
from llmcore.registry.registry import KIND_NAMES, Registry


@click.group("plugins", cls=PluginGroup, below="plugins", invoke_without_command=True)
@click.option("--hook", metavar="HOOK", help="Only plugins that implement this hook.")
@listing
@click.pass_context
def command(ctx: click.Context, hook: str | None, plugins: tuple[str, ...], as_json: bool) -> None:
    """List plugins and what they contribute; `new` writes one.

    Exit code 1 if a plugin named with --plugins failed, or two clash.
    """
    if ctx.invoked_subcommand is not None:
        if hook is not None or plugins or as_json:
            raise click.UsageError(f"`llmcore plugins {ctx.invoked_subcommand}` takes none of these options", ctx)
        return
    registry = registry_for(plugins)
    known = sorted({*available(), *registry.offered}, key=lambda info: (info.name, info.dist))
    rows = [row for row in (_row(registry, info) for info in known) if hook is None or hook in row["hooks"]]
    show_rows(rows, as_json, ("NAME", "FROM", "STATE", "BRINGS"), [_line(row) for row in rows])
    if not as_json:
        for row in rows:
            for note in row["notes"]:
                click.echo(f"{row['name']}: {note}", err=True)
    ctx.exit(any(failure.fatal for failure in registry.failures))


def _row(registry: Registry, info: PluginInfo) -> Row:
    """One plugin. `state`: "active", "failed" or "off" if `--plugins` left it out; `brings`: kind -> names."""
    failures = [f"{f.stage}: {f.error.rstrip('.')}; {f.fix}" for f in registry.failures if f.plugin == info]
    declined = [f"{KIND_NAMES[type(d.spec)]} {d.spec.name}: {d.reason}" for d in registry.declined if d.plugin == info]
    brings = {
        name: [_called(spec) for spec, plugin in registry.specs(kind) if plugin == info]
        for kind, name in KIND_NAMES.items()
    }
    return {
        "name": info.name,
        "dist": info.dist,
        "version": info.version,
        "entry_point": info.entry_point,
        "state": "active" if info in registry.plugins else "failed" if failures else "off",
        "hooks": [hook for hook in HOOKS if info in registry.implementers(hook)],
        "brings": {kind: names for kind, names in brings.items() if names},
        "notes": [*failures, *declined],
    }


def _called(spec: Spec) -> str:
    return f"{spec.op}={spec.name}" if isinstance(spec, KernelSpec) else spec.name


def _line(row: Row) -> tuple[str, str, str, str]:
    brings = "; ".join(f"{kind}: {_shortened(names)}" for kind, names in row["brings"].items())
    others = ", ".join(hook for hook in row["hooks"] if not hook.startswith("register_"))
    what = "; ".join(filter(None, (brings, others)))
    return row["name"], f"{row['dist']} {row['version']}".strip(), row["state"], what


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
