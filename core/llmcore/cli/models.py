"""`llmcore models`: the architectures that can be served, and their distributions."""

from __future__ import annotations

import click

from llmcore.api.specs import ModelSpec
from llmcore.cli.tables import Row, listing, registry_for, show_failures, show_rows


@click.command("models")
@listing
def command(plugins: tuple[str, ...], as_json: bool) -> None:
    """List the model families that can be served."""
    registry = registry_for(plugins)
    rows: list[Row] = [
        {
            "name": spec.name,
            "architectures": spec.architectures,
            "plugin": plugin.name,
            "dist": plugin.dist,
            "version": plugin.version,
            "summary": spec.summary,
        }
        for spec, plugin in sorted(registry.specs(ModelSpec), key=lambda pair: pair[0].name)
    ]
    lines = [(row["name"], ", ".join(row["architectures"]), f"{row['dist']} {row['version']}".strip()) for row in rows]
    show_rows(rows, as_json, ("FAMILY", "ARCHITECTURES", "FROM"), lines)
    show_failures(registry)
