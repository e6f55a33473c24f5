"""The interface for a command that takes settings of the engine. No torch."""

from llmcore.cli.display import Stages
from llmcore.cli.options import Resolved, SettingsCommand, with_model
from llmcore.config import with_model_resolved
from llmcore.registry.registry import Registry

__all__ = ["Registry", "Resolved", "SettingsCommand", "Stages", "with_model", "with_model_resolved"]
