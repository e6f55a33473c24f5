"""A mode is data: a name for a set of pins. `--mode reference` runs every norm in plain torch."""

from llmcore.api import ModeSpec, hookimpl


@hookimpl
def register_modes():
    yield ModeSpec(
        name="reference",
        kernels={"rms_norm": "torch", "add_rms_norm": "torch"},
        summary="norms by their torch reference",
    )
