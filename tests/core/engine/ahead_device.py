"""A plugin: the CPU with one step in flight, as on an accelerator, so that the pipeline is tested without one."""

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, TypeVar

import torch
from llmcore.api import DeviceInfo, DeviceSpec, hookimpl
from llmcore.builtin.devices.cpu import CPU
from llmcore.engine.memory import GRAPH_BYTES

T = TypeVar("T")


class Replayed:
    """A graph as far as a CPU can have one: the work is done anew, and what it returned the first time is overwritten.

    Capturing does the work instead of noting it, so the replay right after that has nothing left to do.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self.result = work()
        self._done = True

    def replay(self) -> None:
        """Once more."""
        if not self._done:
            _overwrite(self.result, self._work())
        self._done = False


def _overwrite(old: Any, new: Any) -> None:
    """Every tensor of a dataclass, and of those in it."""
    for column in fields(old):
        before, after = getattr(old, column.name), getattr(new, column.name)
        if isinstance(before, torch.Tensor):
            before.copy_(after)
        elif before is not None:
            _overwrite(before, after)


class AheadCPU(CPU):
    """Implements protocols.Device; also goes through what only measured devices go through."""

    ahead = 1
    measured = True
    graphs = True
    graph_memory = 0

    def capture(self, work: Callable[[], T]) -> tuple[Replayed, T]:
        """See Replayed."""
        graph = Replayed(work)
        return graph, graph.result

    def forget_graphs(self) -> None:
        """They hold nothing."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy: the next replay writes over what this one returned."""
        return tensor.clone()

    def kv_budget(self, fraction: float) -> int:
        """Room for 10,000 tokens of the fake model beside what graphs may take."""
        return 320_000 + GRAPH_BYTES


class Short(AheadCPU):
    """An accelerator that is old and has little memory, as kernels and limits see it."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.info = DeviceInfo("cuda", "Old and Small", capability=75, memory=1 << 30, processors=20)

    def kv_budget(self, fraction: float) -> int:
        """Room for 2,400 tokens of the fake model at 0.9, for none at 0.5."""
        return GRAPH_BYTES + (int(fraction * 6000) - 3000) * 32

    def free_memory(self) -> int:
        """Somebody else is here."""
        return 700 << 20

    def peak_memory(self) -> int:
        """Since the start."""
        return 300 << 20


@hookimpl
def register_devices() -> Iterable[DeviceSpec]:
    """`cpu-ahead` and `short`."""
    for name, made in (("cpu-ahead", "AheadCPU"), ("short", "Short")):
        yield DeviceSpec(name=name, make=f"{__name__}:{made}", available=f"{__name__}:available")


def available() -> str | None:
    """Always."""
    return None
