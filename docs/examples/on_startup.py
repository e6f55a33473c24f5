"""Refuse a setting that our site forbids. A ConfigError ends the start-up with its text."""

from llmcore.api import ConfigError, hookimpl


@hookimpl
def on_startup(config):
    if config.server.host == "0.0.0.0":
        raise ConfigError("this site never listens on every interface; give --host an address")
