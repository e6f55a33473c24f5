"""The command that serves."""

from __future__ import annotations

from collections.abc import Iterable

from llmcore.api import CommandSpec, hookimpl


@hookimpl
def register_commands() -> Iterable[CommandSpec]:
    """`llmcore serve`."""
    yield CommandSpec(
        name="serve",
        summary="Serve a model over HTTP.",
        command="llmcore_server.serve:command",
        heading="Run",
        prepare="llmcore.machine:check_limits",
    )
