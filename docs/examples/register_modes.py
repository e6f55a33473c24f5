"""A mode: a name for a bundle of pins. Modes are data; `--mode reference` runs every norm in plain torch."""

from llmcore.api import ModeSpec, hookimpl


@hookimpl
def register_modes():
    yield ModeSpec(
        name="reference",
        kernels={"rms_norm": "torch", "add_rms_norm": "torch"},
        summary="norms by their torch reference",
    )
