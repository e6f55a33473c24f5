"""The attention kernels."""

from __future__ import annotations

from collections.abc import Iterable

from llmcore.api import KernelSpec, ModeSpec


def kernels() -> Iterable[KernelSpec]:
    """None yet."""
    return ()


def modes() -> Iterable[ModeSpec]:
    """None yet."""
    return ()
