"""The interface for programs and commands that run the engine or read a model. It imports torch."""

from llmcore.config.process import die_with_parent
from llmcore.engine.build import build_engine
from llmcore.engine.engine import DeviceLost, Engine, Events, refusal
from llmcore.engine.follower import Follower
from llmcore.engine.leader import Led
from llmcore.engine.model_runner import GroupKV
from llmcore.engine.parts import join
from llmcore.engine.rank_messages import Answer, Broke, Doing, FromRank, RankLost, RankReady, ToRank
from llmcore.sched.scheduler import QueueStats
from llmcore.weights.source import open_checkpoint, read_model_as_set

__all__ = [
    "Answer",
    "Broke",
    "DeviceLost",
    "Doing",
    "Engine",
    "Events",
    "Follower",
    "FromRank",
    "GroupKV",
    "Led",
    "QueueStats",
    "RankLost",
    "RankReady",
    "ToRank",
    "build_engine",
    "die_with_parent",
    "join",
    "open_checkpoint",
    "read_model_as_set",
    "refusal",
]
