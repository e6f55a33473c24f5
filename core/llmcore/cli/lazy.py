"""A group of commands, each imported only when it is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, cast

import click

from llmcore.errors import did_you_mean


@dataclass(frozen=True)
class Entry:
    """One command: where it is, its heading in the group's help, and its line there."""

    target: str
    heading: str
    summary: str


class LazyGroup(click.Group):
    """The commands of `table`, by name."""

    def __init__(self, *args: Any, table: Mapping[str, Entry], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the table's order."""
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command called `cmd_name`, imported now."""
        entry = self._table.get(cmd_name)
        return None if entry is None else cast(click.Command, resolve_name(entry.target))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does it, with the nearest names in the error."""
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise click.UsageError(
                f"There is no command {args[0]!r}.{did_you_mean(args[0], self.list_commands(ctx))}", ctx
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """By heading, without importing any."""
        for heading in dict.fromkeys(entry.heading for entry in self._table.values()):
            with formatter.section(heading):
                formatter.write_dl([(n, e.summary) for n, e in self._table.items() if e.heading == heading])
