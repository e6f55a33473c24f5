"""The command `llmcore`: a table of commands, each imported only when it is named."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, cast

import click

from llmcore import __version__
from llmcore.config import debug_requested
from llmcore.errors import ConfigError, did_you_mean

log = logging.getLogger("llmcore.cli")


@dataclass(frozen=True)
class Entry:
    """One command: where it is, its heading in `llmcore --help`, and its line there."""

    target: str
    heading: str
    summary: str


COMMANDS: Mapping[str, Entry] = {
    "serve": Entry("llmcore.cli.serve:command", "Run", "Serve a model over HTTP."),
    "testserver": Entry(
        "llmcore.cli.testserver:command", "Run", "Serve a fake model, on which clients and plugins can be tried."
    ),
    "chat": Entry("llmcore.cli.chat:command", "Run", "Talk to a model, or to a server."),
    "generate": Entry("llmcore.cli.generate:command", "Run", "Answer a file of prompts, offline."),
    "bench": Entry("llmcore.cli.bench:command", "Run", "Measure latency and throughput, in process or over HTTP."),
    "plan": Entry("llmcore.cli.plan:command", "Look", "Predict what fits, from a model's headers alone."),
    "models": Entry("llmcore.cli.models:command", "Look", "List the model families that can be served."),
    "kernels": Entry(
        "llmcore.cli.kernels:command",
        "Look",
        "List kernels, explain which one is chosen, check and time them.",
    ),
    "modes": Entry("llmcore.cli.modes:command", "Look", "List what --mode accepts."),
    "plugins": Entry(
        "llmcore.cli.plugins:command", "Look", "List plugins and what they contribute; `new` writes one."
    ),
    "hooks": Entry("llmcore.cli.hooks:command", "Look", "List the hooks a plugin can implement."),
    "config": Entry("llmcore.cli.config:command", "Look", "Show settings and where each comes from."),
    "env": Entry("llmcore.cli.env:command", "Look", "Describe this machine, for a bug report."),
}


class Root(click.Group):
    """Core's commands from the table, plugins' when a name is not there or all are listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands, core's first."""
        return [*COMMANDS, *self._brought()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command called `cmd_name`, imported now."""
        name = cmd_name.replace("_", "-")
        if name in COMMANDS:
            module, _, attribute = COMMANDS[name].target.partition(":")
            return cast(click.Command, getattr(importlib.import_module(module), attribute))
        target = self._brought().get(name)
        if target is None:
            return None
        from llmcore.plugins import load

        return cast(click.Command, load(target[0]))

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
        """Commands by heading, without importing any."""
        for heading in dict.fromkeys(entry.heading for entry in COMMANDS.values()):
            with formatter.section(heading):
                formatter.write_dl([(n, e.summary) for n, e in COMMANDS.items() if e.heading == heading])
        if brought := self._brought():
            with formatter.section("From plugins"):
                formatter.write_dl([(name, summary) for name, (_, summary) in brought.items()])

    def _brought(self) -> dict[str, tuple[str, str]]:
        from llmcore.cli.options import named_plugins
        from llmcore.plugins import collect
        from llmcore.specs import CommandSpec

        found: dict[str, tuple[str, str]] = {}
        for spec, plugin in collect(named_plugins()).specs(CommandSpec):
            if spec.name in COMMANDS:
                log.warning("plugin %r brings a command %r, which core has: it must rename it", plugin.name, spec.name)
                continue
            found[spec.name] = (spec.command, spec.summary)
        return found


@click.group(
    cls=Root,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="`llmcore COMMAND --help` shows a command's options. LLMCORE_DEBUG=1 shows tracebacks.",
)
@click.version_option(__version__, prog_name="llmcore")
def root() -> None:
    """Serve large language models; everything that varies is a plugin."""


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line: exit code 0, 1 for a failure, 2 for wrong usage or settings, 130 for Ctrl-C."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    arguments = list(sys.argv[1:] if args is None else args)
    try:
        code = root.main(args=arguments, prog_name="llmcore", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        code = 130
    except Exception as error:
        if debug_requested():
            raise
        code = _report(error)
    sys.exit(code if isinstance(code, int) else 0)


def _report(error: Exception) -> int:
    from llmcore.cli.failure import show_failure

    show_failure(error)
    return 2 if isinstance(error, ConfigError) else 1
