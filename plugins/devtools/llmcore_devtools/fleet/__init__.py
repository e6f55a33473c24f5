"""A fleet of replicas that a real balancer serves, as discrete events: `simulate(trace, balancer)`. No torch."""

from llmcore_devtools.fleet.replica import Machine
from llmcore_devtools.fleet.simulation import HERD, Outcome, Simulation, simulate
from llmcore_devtools.fleet.traces import TRACES, Call, Fleet, Trace, make_trace

__all__ = ["HERD", "TRACES", "Call", "Fleet", "Machine", "Outcome", "Simulation", "Trace", "make_trace", "simulate"]
