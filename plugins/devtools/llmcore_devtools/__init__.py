"""For plugin authors: conformance checks, fixtures, the fake model and the simulator.

from llmcore_devtools import check_plugin, registry_of

def test_my_plugin_keeps_the_contracts():
    check_plugin(registry_of("my-plugin"), "my-plugin")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmcore.config import Config, Plugins
from llmcore.registry.loader import build_registry, load
from llmcore.registry.registry import Registry

from llmcore_devtools.conformance import CHECKS, Nonconformance, check_plugin

if TYPE_CHECKING:
    from llmcore_devtools.conformance_computing import check_interpreted
    from llmcore_devtools.fake_files import fake_answer, write_fake_model

__all__ = [
    "Nonconformance",
    "check_interpreted",
    "check_plugin",
    "fake_answer",
    "registry_of",
    "write_fake_model",
]

_ELSEWHERE = {
    "check_interpreted": "llmcore_devtools.conformance_computing:check_interpreted",
    "fake_answer": "llmcore_devtools.fake_files:fake_answer",
    "write_fake_model": "llmcore_devtools.fake_files:write_fake_model",
}


def registry_of(*plugins: str) -> Registry:
    """The registry of the named plugins (or paths to plugin files) and the built-ins.

    Raises ConfigError for a name that is not installed, and PluginError if a plugin fails.
    """
    return build_registry(Config(plugins=Plugins(plugins=plugins)))


def __getattr__(name: str) -> Any:
    # `check_<hook>` for every hook. Some checks import torch, so each is imported at its first use.
    if name in _ELSEWHERE:
        return load(_ELSEWHERE[name])
    hook = name.removeprefix("check_")
    if hook != name and hook in CHECKS:
        return load(CHECKS[hook])
    raise AttributeError(f"module 'llmcore_devtools' has no attribute {name!r}")
