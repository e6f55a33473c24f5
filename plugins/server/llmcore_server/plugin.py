"""The command that serves, and its options."""

from __future__ import annotations

from collections.abc import Iterable

from llmcore.api import CommandSpec, OptionSpec, hookimpl, options_of

from llmcore_server.settings import SECTIONS


@hookimpl
def register_commands() -> Iterable[CommandSpec]:
    """`llmcore serve`."""
    yield CommandSpec(
        name="serve",
        summary="Serve a model over HTTP.",
        command="llmcore_server.serve:command",
        heading="Run",
        prepare="llmcore.config.process:check_limits",
    )


@hookimpl
def register_options() -> Iterable[OptionSpec]:
    """The settings of llmcore_server.settings."""
    for section in SECTIONS:
        yield from options_of(section, serving=True)
