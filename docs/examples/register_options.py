"""Options of `llmcore serve`: `--probe_layers 3` and `--probe_format csv`.

Only `on_startup` gets the config. It keeps the values that other hooks and the code that specs name need.
"""

import logging
from dataclasses import dataclass

from llmcore.api import hookimpl, option, options_of

log = logging.getLogger("my_plugin")


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Options for reports about layers while a model is built."""

    probe_layers: int = option(0, "Layers to probe.", low=0)
    probe_format: str = option("csv", "How to write probes.", choices=("csv", "json"))

    def check(self, config, origins):
        if self.probe_layers == 0 and origins["probe_format"] != "default":
            yield f"{origins['probe_format']} has no effect: probe_layers is 0."


@hookimpl
def register_options():
    return options_of(Probe)


KEPT = {}


@hookimpl
def on_startup(config):
    KEPT["probe"] = config.section(Probe)


@hookimpl
def build_layer(layer, info):
    if info.index < KEPT["probe"].probe_layers:
        log.warning("%s is a %s", info.name, type(layer).__name__)
