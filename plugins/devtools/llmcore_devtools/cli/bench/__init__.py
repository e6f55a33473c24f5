"""`llmcore bench`: a group whose commands are imported when they run."""

from __future__ import annotations

import click
from llmcore.cli.group import PluginGroup


@click.group("bench", cls=PluginGroup, below="bench", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Measure latency and throughput, in process or over HTTP."""
