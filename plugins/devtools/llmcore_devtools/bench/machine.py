"""The context of every figure: the machine, the versions, and the age of this process. No torch."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from llmcore import __version__
from llmcore.registry.registry import Registry

_PACKAGES = ("torch", "triton", "numpy", "msgspec")


def machine() -> dict[str, str | int]:
    """This machine's processor, the cores this process may use, memory and system."""
    return {
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30,
        "system": f"{platform.system()} {platform.release()}",
    }


def versions(registry: Registry | None = None) -> dict[str, str]:
    """Versions of llmcore, Python, the libraries that compute, and the plugins of `registry`."""
    found = {"llmcore": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    for plugin in registry.plugins if registry is not None else ():
        if plugin.dist != "llmcore-engine":
            found[f"plugin {plugin.name}"] = plugin.version
    return found


def process_age() -> float:
    """Seconds since this process was started, by the kernel's clock (ticks of 10 ms)."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # field 22: starttime, in ticks since boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
