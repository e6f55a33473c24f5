"""What a scheduler, length-estimator or prefix-cache author may use. No torch."""

from llmcore.protocols import (
    Decision,
    Int32,
    Int64,
    KVManager,
    LengthEstimator,
    SchedulerLimits,
    SchedulerPolicy,
    SchedulerView,
    WaitingRequest,
)

__all__ = [
    "Decision",
    "Int32",
    "Int64",
    "KVManager",
    "LengthEstimator",
    "SchedulerLimits",
    "SchedulerPolicy",
    "SchedulerView",
    "WaitingRequest",
]
