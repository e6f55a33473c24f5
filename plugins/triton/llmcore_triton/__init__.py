"""Triton kernels for NVIDIA GPUs, and the modes that pin some of them. Nothing here imports torch or triton."""

from collections.abc import Iterable

from llmcore.api import KernelSpec, ModeSpec, hookimpl

from llmcore_triton.specs import attention, linear, rows, sampling


@hookimpl
def register_kernels() -> Iterable[KernelSpec]:
    """By what they do."""
    for part in (attention, linear, rows, sampling):
        yield from part.kernels()


@hookimpl
def register_modes() -> Iterable[ModeSpec]:
    """The seeds' names for ways to decode."""
    yield from attention.modes()
