"""The sampling kernels."""

from __future__ import annotations

from collections.abc import Iterable

from llmcore.api import KernelSpec


def kernels() -> Iterable[KernelSpec]:
    """None yet."""
    return ()
