"""The interface for programs and commands that run the engine or read a model. It imports torch."""

from llmcore.config.process import die_with_parent
from llmcore.engine.build import build_engine
from llmcore.engine.engine import DeviceLost, Engine, Events, refusal
from llmcore.engine.model_runner import GroupKV
from llmcore.sched.scheduler import QueueStats
from llmcore.weights.source import open_checkpoint, read_model_as_set

__all__ = [
    "DeviceLost",
    "Engine",
    "Events",
    "GroupKV",
    "QueueStats",
    "build_engine",
    "die_with_parent",
    "open_checkpoint",
    "read_model_as_set",
    "refusal",
]
