"""For plugin authors: conformance checks, fixtures, the fake model and the simulator."""

from __future__ import annotations

from llmcore.config import Config, Plugins
from llmcore.plugins import Registry, build_registry

__all__ = ["registry_of"]


def registry_of(*plugins: str) -> Registry:
    """The registry of the named plugins (or paths to plugin files) and the built-ins. Raises PluginError."""
    return build_registry(Config(plugins=Plugins(plugins=plugins)))
