"""`llmcore bench`: a group whose commands are imported when they are named."""

from __future__ import annotations

from collections.abc import Mapping

import click

from llmcore.cli.lazy import Entry, LazyGroup

_SUMMARIES = {
    "latency": "Time decode steps and first tokens, by batch size, in this process.",
    "throughput": "Time whole workloads, submitted at once, in this process.",
    "serve": "Load a server over HTTP at given rates.",
}

COMMANDS: Mapping[str, Entry] = {
    name: Entry(f"{__name__}.{name}:command", "Commands", summary) for name, summary in _SUMMARIES.items()
}


@click.group("bench", cls=LazyGroup, table=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Measure latency and throughput, in process or over HTTP."""
