"""Settings as people may see them: nothing secret in them."""

from __future__ import annotations

import re
from typing import Any

from llmcore.config.setting import Setting, settings
from llmcore.config.tree import Config

HIDDEN = "(hidden)"
"""Stands for what a secret setting holds."""

_LOGIN = re.compile(r"^(?:[a-z]+://|)([^/\s]+)@")
"""The login in an address."""


def value_of(config: Config, setting: Setting) -> Any:
    """A setting's value in a config."""
    if setting.group == "plugin_options":
        return config.plugin_options[setting.name]
    return getattr(getattr(config, setting.group), setting.name)


def shown_value(config: Config, setting: Setting) -> Any:
    """The same for people to see."""
    value = value_of(config, setting)
    if setting.secret and value:
        return HIDDEN
    return without_login(value, value) if setting.name == "metric_gateway" and value else value


def without_login(address: str, text: str) -> str:
    """`text` without the user and the password that `address` may hold."""
    found = _LOGIN.match(address)
    if found is None:
        return text
    password = found[1].partition(":")[2]
    text = text.replace(found[1], HIDDEN)
    return text.replace(password, HIDDEN) if password else text


def shown_settings(config: Config) -> dict[str, Any]:
    """Every setting of core by name. Clients may see it, so the path of the private key is hidden. Settings of plugins
    are named only, because they do not say which of them are secret."""
    shown = {setting.name: shown_value(config, setting) for setting in settings()}
    shown["ssl_keyfile"] = HIDDEN if config.access.ssl_keyfile else None
    return {**shown, **dict.fromkeys(config.plugin_options, HIDDEN)}
