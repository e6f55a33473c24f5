"""LMDeploy's own client, registration and proxy, out of its wheel and without its engine.

`python lmdeploy_parts.py PORT` is its proxy. Its packages import the engine and kernels for a GPU when they are
imported. So they stand here as packages without contents, and so do the modules that only the engine needs.
"""

from __future__ import annotations

import sys
import sysconfig
from importlib import import_module
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

ROOT = Path(sysconfig.get_path("purelib"))

PACKAGES = ("lmdeploy", "lmdeploy.serve", "lmdeploy.serve.core")

ENGINE = (
    "lmdeploy.archs",
    "lmdeploy.messages",
    "lmdeploy.metrics",
    "lmdeploy.metrics.metrics_processor",
    "lmdeploy.model",
    "lmdeploy.serve.anthropic",
    "lmdeploy.serve.core.generation_config",
    "lmdeploy.serve.openai.endpoints",
    "lmdeploy.serve.openai.responses",
)


class _Empty(ModuleType):
    """A package or module whose names can be imported and do nothing."""

    def __getattr__(self, name: str) -> MagicMock:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


def part(name: str) -> ModuleType:
    """LMDeploy's module `name`."""
    for other in (*PACKAGES, *ENGINE):
        if other not in sys.modules:
            sys.modules[other] = _Empty(other)
            sys.modules[other].__path__ = [str(ROOT.joinpath(*other.split(".")))] if other in PACKAGES else []
    return import_module(name)


if __name__ == "__main__":
    part("lmdeploy.serve.proxy.proxy").proxy("127.0.0.1", int(sys.argv[1]), disable_cache_status=True)
