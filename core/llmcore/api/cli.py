"""The interface for a command that takes settings of the engine. No torch."""

from llmcore.cli.display import Stages
from llmcore.cli.options import Resolved, SettingsCommand, resolved_without_options, with_model
from llmcore.cli.tables import show_rows
from llmcore.registry.loader import load
from llmcore.registry.model_sources import with_model_resolved
from llmcore.registry.registry import Registry

__all__ = [
    "Registry",
    "Resolved",
    "SettingsCommand",
    "Stages",
    "load",
    "resolved_without_options",
    "show_rows",
    "with_model",
    "with_model_resolved",
]
