"""Devices. No other code names torch's backends."""

import re
from collections.abc import Iterable

from llmcore.api import DeviceInfo, DeviceSpec, hookimpl

_DEVICES: dict[str, tuple[str, int, str]] = {
    "cuda": ("CUDA", 50, "NVIDIA GPU"),
    "cpu": ("CPU", 0, "CPU, steps run synchronously"),
}
"""Module -> its class, its priority, and a summary."""


@hookimpl
def register_devices() -> Iterable[DeviceSpec]:
    """The built-in devices; each is one module."""
    for name, (kind, priority, summary) in _DEVICES.items():
        module = f"llmcore.builtin.devices.{name}"
        yield DeviceSpec(
            name=name,
            make=f"{module}:{kind}",
            available=f"{module}:available",
            named=f"{__name__}:named_{name}",
            priority=priority,
            summary=summary,
        )


def named_cpu(text: str) -> DeviceInfo | None:
    """The device named "cpu"; None for another name. The device need not be in this machine."""
    return DeviceInfo("cpu") if text == "cpu" else None


def named_cuda(text: str) -> DeviceInfo | None:
    """A GPU by its compute capability, such as "sm90", in this machine or not; None for another name."""
    found = re.fullmatch(r"sm_?(\d{2,3})", text)
    return DeviceInfo("cuda", name=text, capability=int(found[1])) if found else None
