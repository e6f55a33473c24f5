"""The command `llmcore`: a group of the commands that plugins register, each imported only when it is named."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from llmcore import __version__
from llmcore.api.errors import ConfigError, LlmcoreError, PluginError, text_of
from llmcore.cli.group import PluginGroup
from llmcore.cli.streams import guard_standard_streams
from llmcore.config import debug_requested


@click.group(
    cls=PluginGroup,
    below="",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="`llmcore COMMAND --help` shows a command's options. LLMCORE_DEBUG=1 shows tracebacks.",
)
@click.version_option(__version__, prog_name="llmcore")
def root() -> None:
    """Serve large language models; everything that varies is a plugin."""


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line. Exit codes: 0, 1 for a failure, 2 for wrong usage or settings, 130 for Ctrl-C."""
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
    from llmcore.cli.display import show_failure
    from llmcore.config.process import shortage_of

    if not isinstance(error, LlmcoreError) or isinstance(error, PluginError):
        shortage = shortage_of(error)
        error = ConfigError(f"{text_of(error)}; {shortage}") if shortage else error
    show_failure(error)
    return 2 if isinstance(error, ConfigError) else 1
