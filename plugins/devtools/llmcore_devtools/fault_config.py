"""Settings of a server whose requests may ask for faults."""

from __future__ import annotations

from dataclasses import replace

from llmcore import __version__
from llmcore.api.specs import PluginInfo
from llmcore.config import Config, with_plugins
from llmcore.registry.loader import CORE_DIST, discover

from llmcore_devtools.faults import NAME


def with_faults(config: Config) -> Config:
    """`config` with the plugin `faults`. Its prefix cache replaces `radix`."""
    plugin = PluginInfo(NAME, CORE_DIST, __version__, "llmcore_devtools.faults")
    config = with_plugins(config, [*discover(config.plugins.plugins), plugin])
    if config.scheduling.kv_manager == "radix":
        config = replace(config, scheduling=replace(config.scheduling, kv_manager=NAME))
    return config
