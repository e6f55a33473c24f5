"""Groups of commands that plugins register. A command is imported when it runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, cast

import click

from llmcore.api.errors import ConfigError, LlmcoreError, did_you_mean
from llmcore.api.specs import CommandSpec
from llmcore.config import Config
from llmcore.config.process import check_address_space

log = logging.getLogger("llmcore.cli")

_KEY = "llmcore.commands"


def commands(ctx: click.Context) -> Mapping[str, CommandSpec]:
    """Every registered command by its name."""
    if _KEY not in ctx.meta:
        check_address_space()  # before numpy is imported, which the loader and every plugin do
        from llmcore.cli.options import named_plugins
        from llmcore.registry.loader import collect

        try:
            registry = collect(named_plugins())
        except LlmcoreError as error:  # a wrong LLMCORE_PLUGINS or LLMCORE_CONFIG must not hide the commands
            log.warning("%s", error)
            registry = collect(Config())
        ctx.meta[_KEY] = {spec.name: spec for spec, _ in registry.specs(CommandSpec)}
    return cast("Mapping[str, CommandSpec]", ctx.meta[_KEY])


def loaded(ctx: click.Context, name: str) -> Any:
    """The object of the command called `name`. Raises ConfigError that names the distribution to install."""
    spec = commands(ctx).get(name)
    from llmcore.registry.loader import load
    from llmcore.registry.official import missing_command

    if spec is None:
        raise ConfigError(
            missing_command(name) or f"there is no command {name!r}; upgrade or repair the plugin that has it"
        )
    if spec.prepare is not None:
        load(spec.prepare)()
    return load(spec.command)


class PluginGroup(click.Group):
    """A group of the commands called `below NAME`. With "" for `below`, a group of the commands of one word."""

    def __init__(self, *args: Any, below: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._below = f"{below} " if below else ""

    def _specs(self, ctx: click.Context) -> dict[str, CommandSpec]:
        """Last word of a command -> its spec, in the order of the help."""
        found = {name.removeprefix(self._below): spec for name, spec in commands(ctx).items() if self._has(name)}
        return dict(sorted(found.items(), key=lambda item: (_ORDER.get(item[1].heading, len(_ORDER)), item[0])))

    def _has(self, name: str) -> bool:
        last = name.removeprefix(self._below)
        return name.startswith(self._below) and " " not in last and not last.startswith("-")

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of the commands, by heading."""
        return list(self._specs(ctx))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command called `cmd_name`, imported now."""
        return cast(click.Command, loaded(ctx, self._below + cmd_name)) if cmd_name in self._specs(ctx) else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve as click does. The error names the distribution that has the command, or the nearest names."""
        name = args[0].replace("_", "-")
        if not name.startswith("-") and name not in self._specs(ctx):
            from llmcore.registry.official import missing_command

            if told := missing_command(self._below + name):
                raise ConfigError(told)
            raise click.UsageError(
                f"There is no command {args[0]!r}.{did_you_mean(args[0], self.list_commands(ctx))}", ctx
            )
        return super().resolve_command(ctx, [name, *args[1:]])

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by heading, without importing them."""
        specs = self._specs(ctx)
        for heading in dict.fromkeys(spec.heading for spec in specs.values()):
            with formatter.section(heading):
                formatter.write_dl([(n, spec.summary) for n, spec in specs.items() if spec.heading == heading])


_ORDER = {"Run": 0, "Look": 1}
"""Headings in the order of `llmcore --help`; others follow."""
