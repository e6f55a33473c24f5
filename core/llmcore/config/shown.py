"""Settings for people to see, without secrets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llmcore.config.setting import GROUPS, HIDDEN, Setting, settings
from llmcore.config.tree import Config


def value_of(config: Config, setting: Setting) -> Any:
    """A setting's value in a config."""
    section = getattr(config, setting.group) if setting.group in GROUPS else None
    return config.plugin_options[setting.name] if section is None else getattr(section, setting.name)


def shown_value(config: Config, setting: Setting) -> Any:
    """A setting's value in a config, without secrets."""
    return setting.shown(value_of(config, setting))


def shown_settings(config: Config, brought: Iterable[Setting]) -> dict[str, Any]:
    """The settings of core, and those `brought` by plugins, by name.

    Other settings of plugins appear without their values, because a config does not say which of them are secret.
    """
    known = (*settings(), *(setting for setting in brought if setting.name in config.plugin_options))
    return dict.fromkeys(config.plugin_options, HIDDEN) | {s.name: shown_value(config, s) for s in known}
