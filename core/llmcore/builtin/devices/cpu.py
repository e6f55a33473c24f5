"""The CPU as a device: a step has finished when `enqueue` returns."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from llmcore.api import DeviceInfo

GIB = 1 << 30
_MOST_KV = 4 * GIB
_KV_SHARE = 4
"""The KV cache takes at most 1 / _KV_SHARE of the available memory."""

_LIMITS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)
"""Files with the container's (memory limit, memory use), for cgroups v2 and v1."""


class Passed:
    """An event that has always passed."""

    def done(self) -> bool:
        """Always True."""
        return True

    def wait(self) -> None:
        """Returns at once."""


class CPU:
    """Implements protocols.Device. Every index is the one CPU."""

    ahead = 0
    step_tokens = 2048
    prefill_stall_ms = 0.0
    measured = False
    graphs = False

    def __init__(self, index: int = 0) -> None:
        memory = min([_meminfo("MemTotal"), *(limit for limit, _ in _container())])
        self.info = DeviceInfo(type="cpu", name=platform.processor() or platform.machine(), memory=memory)
        self.torch_device = torch.device("cpu")
        self._passed = Passed()

    def kv_budget(self, fraction: float) -> int:
        """The smaller of 4 GiB and a quarter of the available memory, because other programs need memory too."""
        return min(_MOST_KV, self.free_memory() // _KV_SHARE)

    def sticky(self, error: BaseException) -> bool:
        """Always False: no error makes the CPU unusable."""
        return False

    def free_memory(self) -> int:
        """The smaller of the system's available memory and the rest below the container's limit, in bytes."""
        return min([_meminfo("MemAvailable"), *(max(limit - use, 0) for limit, use in _container())])

    def peak_memory(self) -> int:
        """The highest resident memory of this process since `reset_peak`, in bytes."""
        return _kilobytes(Path("/proc/self/status"), "VmHWM")

    def reset_peak(self) -> None:
        """Ask the Linux kernel to reset the high-water mark."""
        Path("/proc/self/clear_refs").write_text("5")

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def event(self) -> Passed:
        """An event that has passed already: all work on a CPU has finished."""
        return self._passed

    def synchronize(self) -> None:
        """Does nothing: all work on a CPU has finished."""


def available() -> str | None:
    """Always None: every machine has a CPU."""
    return None


def _meminfo(name: str) -> int:
    return _kilobytes(Path("/proc/meminfo"), name)


def _kilobytes(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"{path} has no line {name}")


def _container() -> list[tuple[int, int]]:
    """(memory limit, memory use) of the container, in bytes; [] without a limit."""
    present = [(limit.read_text().strip(), use) for limit, use in _LIMITS if limit.exists()]
    return [(int(limit), int(use.read_text())) for limit, use in present if limit != "max"]
