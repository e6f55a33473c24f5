"""LightLLM's native dialect: /generate, /generate_stream and what its clients ask beside them."""

from __future__ import annotations

from collections.abc import Iterable

from llmcore.api import DialectSpec, hookimpl


@hookimpl
def register_dialects() -> Iterable[DialectSpec]:
    """`/generate`, `/generate_stream`, `/`, `/tokens`, `/token_load` and `/get_model_name`."""
    yield DialectSpec(name="lightllm", make=f"{__name__}.routes:routes", summary="LightLLM's native HTTP API")
