"""Settings as people may see them: nothing secret in them."""

from __future__ import annotations

from typing import Any

from llmcore.config.setting import HIDDEN, Setting, settings
from llmcore.config.tree import Config


def value_of(config: Config, setting: Setting) -> Any:
    """A setting's value in a config."""
    if setting.group == "plugin_options":
        return config.plugin_options[setting.name]
    return getattr(getattr(config, setting.group), setting.name)


def shown_value(config: Config, setting: Setting) -> Any:
    """The same for people to see."""
    return setting.shown(value_of(config, setting))


def shown_settings(config: Config) -> dict[str, Any]:
    """Every setting of core by name. Clients may see it, so the path of the private key is hidden. Settings of plugins
    are named only, because they do not say which of them are secret."""
    shown = {setting.name: shown_value(config, setting) for setting in settings()}
    shown["ssl_keyfile"] = HIDDEN if config.access.ssl_keyfile else None
    return {**shown, **dict.fromkeys(config.plugin_options, HIDDEN)}
