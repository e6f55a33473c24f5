"""The interface for a program that runs the engine in a process of its own. It imports torch."""

from llmcore.config.process import die_with_parent
from llmcore.engine.build import build_engine
from llmcore.engine.engine import DeviceLost, Engine, Events, refusal
from llmcore.sched.scheduler import QueueStats

__all__ = ["DeviceLost", "Engine", "Events", "QueueStats", "build_engine", "die_with_parent", "refusal"]
