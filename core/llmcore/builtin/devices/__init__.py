"""Devices. No other code names torch's backends."""

from collections.abc import Iterable

from llmcore.api import DeviceSpec, hookimpl

_DEVICES: dict[str, tuple[int, str]] = {
    "cuda": (50, "NVIDIA GPU"),
    "cpu": (0, "CPU, steps run synchronously"),
}


@hookimpl
def register_devices() -> Iterable[DeviceSpec]:
    """The built-in devices; each is one module."""
    for name, (priority, summary) in _DEVICES.items():
        module = f"llmcore.builtin.devices.{name}"
        yield DeviceSpec(
            name=name,
            make=f"{module}:make",
            available=f"{module}:available",
            named=f"{__name__}.named:{name}",
            priority=priority,
            summary=summary,
        )
