"""Options of `llmcore serve`: `--probe_layers 3` and `--probe_format csv`.

Only `on_startup` gets the config. It keeps the values that other hooks and the code that specs name need.
"""

import logging

from llmcore.api import ConfigError, OptionSpec, hookimpl

log = logging.getLogger("my_plugin")
OPTIONS = {}


@hookimpl
def register_options():
    yield OptionSpec(name="probe_layers", type=int, default=0, summary="Layers to probe.")
    yield OptionSpec(name="probe_format", choices=("csv", "json"), default="csv", summary="How to write probes.")


@hookimpl
def on_startup(config):
    OPTIONS.update(config.plugin_options)
    if OPTIONS["probe_layers"] < 0:
        raise ConfigError("--probe_layers is negative; give 0 to probe nothing")


@hookimpl
def build_layer(layer, info):
    if info.index < OPTIONS["probe_layers"]:
        log.warning("%s is a %s", info.name, type(layer).__name__)
