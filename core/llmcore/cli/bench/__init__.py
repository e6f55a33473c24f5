"""`llmcore bench`: a group whose commands are imported when they are named."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import cast

import click

from llmcore.errors import did_you_mean

COMMANDS: Mapping[str, str] = {
    "latency": "Time decode steps and first tokens, by batch size, in this process.",
    "throughput": "Time whole workloads, submitted at once, in this process.",
    "serve": "Load a server over HTTP at given rates.",
}


class Bench(click.Group):
    """The commands of the table, each in the module of its name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the table's order."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command called `cmd_name`, imported now."""
        if cmd_name not in COMMANDS:
            return None
        return cast(click.Command, importlib.import_module(f"llmcore.cli.bench.{cmd_name}").command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does it, with the nearest names in the error."""
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(f"There is no benchmark {args[0]!r}.{did_you_mean(args[0], COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group("bench", cls=Bench, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Measure latency and throughput, in process or over HTTP."""
