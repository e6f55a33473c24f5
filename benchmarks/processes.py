"""The kernel's figures of processes: CPU time, memory, descriptors and threads, and what other processes use
meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")
_PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 2**20


@dataclass(frozen=True)
class Figures:
    """The figures of one process at one time."""

    cpu_seconds: float
    rss_mb: float
    threads: int
    descriptors: int


def figures(pid: int) -> Figures:
    """Returns the figures. Raises OSError if the process does not exist."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    cpu = (int(fields[11]) + int(fields[12])) / _TICK
    return Figures(cpu, int(fields[21]) * _PAGE_MB, int(fields[17]), len(os.listdir(f"/proc/{pid}/fd")))


class Window:
    """Measures the cores that some processes, and all others, use between now and the call of `cores`."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._before = {pid: figures(pid).cpu_seconds for pid in pids}
        self._busy = _busy_seconds()
        self._start = time.monotonic()

    def cores(self) -> tuple[dict[int, float], float]:
        """Returns the cores by process, and of all others together."""
        seconds = time.monotonic() - self._start
        used = {pid: figures(pid).cpu_seconds - before for pid, before in self._before.items()}
        others = _busy_seconds() - self._busy - sum(used.values())
        return {pid: cpu / seconds for pid, cpu in used.items()}, max(0.0, others / seconds)


def _busy_seconds() -> float:
    """Returns the CPU time that the machine has spent on anything but waiting."""
    user, nice, system, _idle, _wait, irq, soft, *_ = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + soft) / _TICK
