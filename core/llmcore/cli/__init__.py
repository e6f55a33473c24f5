"""The command `llmcore`: a table of commands, each imported only when it is named."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn, cast

import click

from llmcore import __version__
from llmcore.cli.lazy import Entry, LazyGroup
from llmcore.config import Config, debug_requested
from llmcore.errors import ConfigError, LlmcoreError, PluginError, text_of
from llmcore.logs import guard_standard_streams
from llmcore.machine import check_limits

log = logging.getLogger("llmcore.cli")


COMMANDS: Mapping[str, Entry] = {
    "serve": Entry("llmcore_server.serve:command", "Run", "Serve a model over HTTP."),
    "testserver": Entry(
        "llmcore_devtools.cli.testserver:command", "Run", "Serve a fake model, on which clients and plugins can be tried."
    ),
    "chat": Entry("llmcore.cli.chat:command", "Run", "Talk to a model, or to a server."),
    "generate": Entry("llmcore.cli.generate:command", "Run", "Answer a file of prompts, offline."),
    "bench": Entry("llmcore_devtools.cli.bench:command", "Run", "Measure latency and throughput, in process or over HTTP."),
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

SERVERS = ("serve", "testserver")
"""Commands that need what a server needs of the machine, before they are imported."""


class Root(LazyGroup):
    """Core's commands from the table, plugins' when a name is not there or all are listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands, core's first."""
        return [*super().list_commands(ctx), *self._brought()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command called `cmd_name`, imported now."""
        name = cmd_name.replace("_", "-")
        if name in SERVERS:
            check_limits()
        if name in COMMANDS:
            return super().get_command(ctx, name)
        target = self._brought().get(name)
        if target is None:
            return None
        from llmcore.plugins import load

        return cast(click.Command, load(target[0]))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Core's, then plugins'."""
        super().format_commands(ctx, formatter)
        if brought := self._brought():
            with formatter.section("From plugins"):
                formatter.write_dl([(name, summary) for name, (_, summary) in brought.items()])

    def _brought(self) -> dict[str, tuple[str, str]]:
        from llmcore.cli.options import named_plugins
        from llmcore.plugins import collect
        from llmcore.specs import CommandSpec

        try:
            registry = collect(named_plugins())
        except LlmcoreError as error:  # LLMCORE_PLUGINS or LLMCORE_CONFIG is wrong: commands are there all the same
            log.warning("%s", error)
            registry = collect(Config())
        found: dict[str, tuple[str, str]] = {}
        for spec, plugin in registry.specs(CommandSpec):
            if spec.name in COMMANDS:
                log.warning("plugin %r brings a command %r, which core has: it must rename it", plugin.name, spec.name)
                continue
            found[spec.name] = (spec.command, spec.summary)
        return found


@click.group(
    cls=Root,
    table=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="`llmcore COMMAND --help` shows a command's options. LLMCORE_DEBUG=1 shows tracebacks.",
)
@click.version_option(__version__, prog_name="llmcore")
def root() -> None:
    """Serve large language models; everything that varies is a plugin."""


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line: exit code 0, 1 for a failure, 2 for wrong usage or settings, 130 for Ctrl-C."""
    guard_standard_streams()
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
    from llmcore.machine import shortage_of

    if not isinstance(error, LlmcoreError) or isinstance(error, PluginError):
        shortage = shortage_of(error)
        error = ConfigError(f"{text_of(error)}; {shortage}") if shortage else error
    show_failure(error)
    return 2 if isinstance(error, ConfigError) else 1
