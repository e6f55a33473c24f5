"""The fake model as a plugin: served like any other model, so that servers can be tested without one."""

from collections.abc import Iterable

from llmcore.api import ModelSpec, hookimpl


@hookimpl
def register_models() -> Iterable[ModelSpec]:
    """Architecture LlmcoreFake, as `llmcore.testing.write_fake_model` writes it."""
    yield ModelSpec(
        name="fake",
        summary="deterministic model for tests",
        architectures=("LlmcoreFake",),
        read_config="llmcore.testing.fake_config:read_config",
        build="llmcore.testing.fake_model:build",
        weights="llmcore.testing.fake_config:weights",
    )
