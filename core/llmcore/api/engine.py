"""The interface for a program that runs the engine in a process of its own. It imports torch."""

from llmcore.child import die_with_parent
from llmcore.engine.build import build_engine
from llmcore.engine.engine import DeviceLost, Engine, Events
from llmcore.engine.refusals import refusal
from llmcore.sched.crowd import Crowd

__all__ = ["Crowd", "DeviceLost", "Engine", "Events", "build_engine", "die_with_parent", "refusal"]
