"""Options of `llmcore serve`: `--probe_layers 3` and `--probe_format csv`, read when the process starts."""

from llmcore.api import ConfigError, OptionSpec, hookimpl


@hookimpl
def register_options():
    yield OptionSpec(name="probe_layers", type=int, default=0, summary="Layers to probe.")
    yield OptionSpec(name="probe_format", choices=("csv", "json"), default="csv", summary="How to write probes.")


@hookimpl
def on_startup(config):
    if config.plugin_options.get("probe_layers", 0) < 0:
        raise ConfigError("--probe_layers is negative; give 0 to probe nothing")
