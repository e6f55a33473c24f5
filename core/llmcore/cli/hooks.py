"""`llmcore hooks`: the hooks that a plugin can implement."""

from __future__ import annotations

import inspect
import re

import click

from llmcore.api.errors import ConfigError, did_you_mean
from llmcore.api.hookspecs import HOOKS
from llmcore.cli.tables import Row, listing, registry_for, show_rows

_PARTS = re.compile(r"^(?:Called|Returns|Chosen by):", re.MULTILINE)
"""The beginnings of the parts of a contract, which stand at the end of a hook's docstring in this order."""


@click.command("hooks")
@click.argument("name", required=False)
@listing
def command(name: str | None, plugins: tuple[str, ...], as_json: bool) -> None:
    """List the hooks a plugin can implement.

    NAME: describe that one.
    """
    registry = registry_for(plugins)
    if name is not None and name not in HOOKS:
        raise ConfigError(f"There is no hook {name!r}.{did_you_mean(name, HOOKS)}")
    rows = [
        {**contract(hook), "plugins": [info.name for info in registry.implementers(hook)]}
        for hook in HOOKS
        if name in (None, hook)
    ]
    if name is None or as_json:
        lines = [(row["name"], row["summary"], ", ".join(row["plugins"])) for row in rows]
        show_rows(rows, as_json, ("HOOK", "WHAT", "PLUGINS"), lines)
    else:
        _describe(rows[0])


def contract(hook: str) -> Row:
    """A hook's name, signature and summary, and what its docstring says: `called`, `returns`, `chosen_by`."""
    text, *parts = _PARTS.split(inspect.cleandoc(HOOKS[hook].__doc__))
    summary, called, returns, chosen_by = (" ".join(part.split()) for part in (text.partition("\n\n")[0], *parts))
    return {
        "name": hook,
        "signature": f"{hook}{inspect.signature(HOOKS[hook])}".replace("'", ""),
        "summary": summary,
        "called": called,
        "returns": returns,
        "chosen_by": chosen_by,
    }


def _describe(row: Row) -> None:
    click.echo(f"{click.style(row['signature'], bold=True)}\n\n{row['summary']}\n")
    lines = {
        "Called": row["called"],
        "Returns": row["returns"],
        "Chosen by": row["chosen_by"],
        "Plugins": ", ".join(row["plugins"]),
    }
    for label, text in lines.items():
        click.echo(f"{label}: {text or 'none'}")
