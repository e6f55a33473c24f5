"""`llmcore models`: the architectures that can be served, and their distributions."""

from __future__ import annotations

import click

from llmcore.cli.tables import listing, registry_for, show_failures, show_rows
from llmcore.registry.inspect import model_rows


@click.command("models")
@listing
def command(plugins: tuple[str, ...], as_json: bool) -> None:
    """List the model families that can be served."""
    registry = registry_for(plugins)
    rows = model_rows(registry)
    lines = [(row.name, ", ".join(row.architectures), f"{row.dist} {row.version}".strip()) for row in rows]
    show_rows(rows, as_json, ("FAMILY", "ARCHITECTURES", "FROM"), lines)
    show_failures(registry)
