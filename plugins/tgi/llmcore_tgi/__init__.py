"""The HTTP API of Hugging Face's text-generation-inference, in place of LightLLM's on the paths that both have."""

from __future__ import annotations

from collections.abc import Iterable

from llmcore.api import DialectSpec, OptionSpec, hookimpl


@hookimpl
def register_dialects() -> Iterable[DialectSpec]:
    """`/generate`, `/generate_stream`, `/` and `/info`, with `--use_tgi_api`."""
    yield DialectSpec(name="tgi", make=f"{__name__}.routes:routes", summary="TGI's HTTP API, with --use_tgi_api")


@hookimpl
def register_options() -> Iterable[OptionSpec]:
    """Which of the two dialects has the paths."""
    yield OptionSpec(
        name="use_tgi_api",
        type=bool,
        default=False,
        summary="/generate, /generate_stream and / speak text-generation-inference's API instead of LightLLM's.",
        serving=True,
    )
