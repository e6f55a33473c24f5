"""`llmcore modes`: what `--mode` accepts, and what does not fit."""

from __future__ import annotations

import click

from llmcore.cli.tables import listing, registry_for, show_failures, show_json, show_table
from llmcore.inspect import ModeRow, find_device, mode_rows


@click.command("modes")
@click.option("--device", default="cpu", show_default=True, metavar="NAME", help="A device, here or not.")
@listing
def command(device: str, plugins: tuple[str, ...], as_json: bool) -> None:
    """List what --mode accepts.

    Those that do not fit the device say why.
    """
    registry = registry_for(plugins)
    rows = mode_rows(registry, find_device(registry, device))
    if as_json:
        show_json(rows)
        return
    show_table(("MODE", "PINS", "FROM", "FITS"), [_line(row) for row in rows])
    show_failures(registry)


def _line(row: ModeRow) -> tuple[str, str, str, str]:
    pins = {"layout": row.layout, "quantization": row.quant, **row.kernels}
    shown = ", ".join(f"{what}={value}" for what, value in pins.items() if value is not None)
    return row.name, shown, row.plugin, "yes" if row.misfit is None else f"no: {row.misfit}"
