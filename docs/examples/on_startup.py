"""Refuse a setting that our site forbids. A ConfigError ends the start-up with its text."""

from llmcore.api import ConfigError, hookimpl


@hookimpl
def on_startup(config):
    if config.model.trust_remote_code:
        raise ConfigError("this site runs no code that comes with a model; leave out --trust_remote_code")
