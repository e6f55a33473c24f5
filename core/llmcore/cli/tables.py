"""Printing rows: a plain table that pipes well, or JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from llmcore.cli.options import named_plugins
from llmcore.registry.loader import collect
from llmcore.registry.registry import Registry

F = TypeVar("F", bound=Callable[..., Any])

Row = dict[str, Any]
"""One row of a listing, as `--json` prints it."""


def listing(function: F) -> F:
    """The options of every listing command: `--plugins` (also read from LLMCORE_PLUGINS) and `--json`."""
    named = click.option("--plugins", multiple=True, metavar="NAME", help="Only these plugins; -NAME: not this one.")
    as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    return named(as_json(function))


def registry_for(plugins: Sequence[str]) -> Registry:
    """The registry of `--plugins`. The command shows failures."""
    return collect(named_plugins(plugins))


def show_rows(rows: Sequence[Row], as_json: bool, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print rows as JSON, or their `lines` as a table."""
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        show_table(header, lines)


def show_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print columns as wide as their longest cell; "none" without lines."""
    if not lines:
        click.echo("none")
        return
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    for line in ([click.style(name, bold=True) for name in header], *lines):
        cells = [cell + " " * (width - len(click.unstyle(cell))) for cell, width in zip(line, widths, strict=True)]
        click.echo("  ".join(cells).rstrip())


def show_failures(registry: Registry) -> None:
    """Print failures on standard error."""
    for failure in registry.failures:
        click.echo(f"{click.style('failed', fg='red')}: {failure}", err=True)
