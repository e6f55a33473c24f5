"""A plugin: the CPU with one step in flight, as on an accelerator, so that the pipeline is tested without one."""

from collections.abc import Iterable

from llmcore.api import DeviceSpec, hookimpl
from llmcore.builtin.devices.cpu import CPU


class AheadCPU(CPU):
    """Implements protocols.Device; also goes through what only measured devices go through."""

    ahead = 1
    measured = True

    def kv_budget(self, fraction: float) -> int:
        """Room for 10,000 tokens of the fake model."""
        return 320_000


@hookimpl
def register_devices() -> Iterable[DeviceSpec]:
    """`cpu-ahead`."""
    yield DeviceSpec(name="cpu-ahead", make=f"{__name__}:AheadCPU", available=f"{__name__}:available")


def available() -> str | None:
    """Always."""
    return None
