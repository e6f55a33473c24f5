"""The commands `serve` and `chat`, the options of `serve`, and the logits processor of one of them."""

from __future__ import annotations

from collections.abc import Iterable

from llmcore.api import CommandSpec, LogitsProcessorSpec, OptionSpec, hookimpl, options_of

from llmcore_server.settings import SECTIONS


@hookimpl
def register_commands() -> Iterable[CommandSpec]:
    """`llmcore serve` and `llmcore chat`."""
    yield CommandSpec(
        name="serve",
        summary="Serve a model over HTTP.",
        command="llmcore_server.serve:command",
        heading="Run",
        prepare="llmcore.config.process:check_limits",
    )
    yield CommandSpec(
        name="chat",
        summary="Talk to a model, or to a server.",
        command="llmcore_server.chat_command:command",
        heading="Run",
    )


@hookimpl
def register_options() -> Iterable[OptionSpec]:
    """The settings of llmcore_server.settings."""
    for section in SECTIONS:
        yield from options_of(section, serving=True)


@hookimpl
def register_logits_processors() -> Iterable[LogitsProcessorSpec]:
    """The processor that token healing needs."""
    yield LogitsProcessorSpec(
        name="token_healing",
        make="llmcore_server.http.healing:make",
        warm="llmcore_server.http.healing:warm",
        option="token_healing_mode",
        example={"prefix": "686f7573"},
        summary="The answer begins with the bytes `prefix` (hexadecimal), cut into tokens as the model likes.",
    )
