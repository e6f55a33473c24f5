"""`llmcore plugins`: the plugins with their states, failures and contributions; `new` writes a plugin."""

from __future__ import annotations

import click

from llmcore.cli.group import PluginGroup
from llmcore.cli.tables import listing, registry_for, show_json, show_table
from llmcore.registry.inspect import PluginRow, plugin_rows


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
    rows = [row for row in plugin_rows(registry) if hook is None or hook in row.hooks]
    if as_json:
        show_json(rows)
    else:
        show_table(("NAME", "FROM", "STATE", "BRINGS"), [_line(row) for row in rows])
        for row in rows:
            for note in row.notes:
                click.echo(f"{row.name}: {note}", err=True)
    ctx.exit(any(failure.fatal for failure in registry.failures))


def _line(row: PluginRow) -> tuple[str, str, str, str]:
    brings = "; ".join(f"{kind}: {_shortened(names)}" for kind, names in row.brings.items())
    others = ", ".join(hook for hook in row.hooks if not hook.startswith("register_"))
    return row.name, f"{row.dist} {row.version}".strip(), row.state, "; ".join(filter(None, (brings, others)))


def _shortened(names: tuple[str, ...]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
