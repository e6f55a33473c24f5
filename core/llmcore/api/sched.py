"""The interface for authors of schedulers, length estimators and prefix caches. No torch."""

from llmcore.api.protocols import (
    Decision,
    Int32,
    Int64,
    KVManager,
    LengthEstimator,
    RequestInfo,
    SchedulerLimits,
    SchedulerPolicy,
    SchedulerView,
    WaitingRequest,
)
from llmcore.sched.policy import Share

__all__ = [
    "Decision",
    "Int32",
    "Int64",
    "KVManager",
    "LengthEstimator",
    "RequestInfo",
    "SchedulerLimits",
    "SchedulerPolicy",
    "SchedulerView",
    "Share",
    "WaitingRequest",
]
