"""Settings: one frozen tree, the source of the command line, the YAML file, `LLMCORE_*` and the docs.

Nothing outside this package reads the environment.
"""

from llmcore.config.check import Origins, check_config, parse_pin, resolve_model, without_effect
from llmcore.config.load import (
    child_environment,
    debug_requested,
    environment,
    gateway_login,
    hide_private,
    make_config,
    preset,
    resolve_config,
    shown_settings,
    value_of,
    without_private,
)
from llmcore.config.setting import RETIRED, Setting, options_of, settings, without_login
from llmcore.config.tree import (
    Config,
    Kernels,
    Memory,
    Model,
    Plugins,
    Scheduling,
    option,
)
from llmcore.config.yaml_file import YamlSettings, read_yaml

__all__ = [
    "RETIRED",
    "Config",
    "Kernels",
    "Memory",
    "Model",
    "Origins",
    "Plugins",
    "Scheduling",
    "Setting",
    "YamlSettings",
    "check_config",
    "child_environment",
    "debug_requested",
    "environment",
    "gateway_login",
    "hide_private",
    "make_config",
    "option",
    "options_of",
    "parse_pin",
    "preset",
    "read_yaml",
    "resolve_config",
    "resolve_model",
    "settings",
    "shown_settings",
    "value_of",
    "without_effect",
    "without_login",
    "without_private",
]
