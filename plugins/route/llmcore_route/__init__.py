"""The command `llmcore route`: one address for several servers."""

from __future__ import annotations

from collections.abc import Iterable

from llmcore.api import CommandSpec, hookimpl


@hookimpl
def register_commands() -> Iterable[CommandSpec]:
    """`llmcore route`."""
    yield CommandSpec(
        name="route",
        summary="Serve several servers at one address.",
        command="llmcore_route.command:command",
        heading="Run",
    )
