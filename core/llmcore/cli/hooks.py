"""`llmcore hooks`: the hooks that a plugin can implement."""

from __future__ import annotations

import click

from llmcore.api.errors import ConfigError, did_you_mean
from llmcore.cli.tables import listing, registry_for, show_json, show_table
from llmcore.registry.inspect import HookRow, hook_rows


@click.command("hooks")
@click.argument("name", required=False)
@listing
def command(name: str | None, plugins: tuple[str, ...], as_json: bool) -> None:
    """List the hooks a plugin can implement.

    NAME: describe that one.
    """
    rows = hook_rows(registry_for(plugins))
    chosen = [row for row in rows if name in (None, row.name)]
    if not chosen:
        raise ConfigError(f"There is no hook {name!r}.{did_you_mean(str(name), [row.name for row in rows])}")
    if as_json:
        show_json(chosen)
    elif name is None:
        show_table(("HOOK", "WHAT", "PLUGINS"), [(row.name, row.summary, ", ".join(row.plugins)) for row in rows])
    else:
        _describe(chosen[0])


def _describe(row: HookRow) -> None:
    click.echo(f"{click.style(row.signature, bold=True)}\n\n{row.summary}\n")
    lines = {
        "Called": row.called,
        "Returns": row.returns,
        "Chosen by": row.chosen_by,
        "Plugins": ", ".join(row.plugins),
    }
    for label, text in lines.items():
        click.echo(f"{label}: {text or 'none'}")
