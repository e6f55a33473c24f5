"""The fake model as a plugin: served like any other model, so that servers can be tested without one."""

from collections.abc import Iterable

from llmcore.api import ModelSpec, hookimpl


@hookimpl
def register_models() -> Iterable[ModelSpec]:
    """Architecture LlmcoreFake, as `llmcore_devtools.write_fake_model` writes it."""
    yield ModelSpec(
        name="fake",
        summary="deterministic model for tests",
        architectures=("LlmcoreFake",),
        read_config="llmcore_devtools.fake_files:read_config",
        build="llmcore_devtools.fake_model:build",
        weights="llmcore_devtools.fake_files:weights",
    )
