"""A plugin: the CPU as a device that is one step ahead and whose forwards take a given time."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from llmcore.api import DeviceSpec, hookimpl
from llmcore.builtin.devices.cpu import CPU


class Timed:
    """A protocols.Event that passes at a given time."""

    def __init__(self, at: float) -> None:
        self.at = at

    def done(self) -> bool:
        """True if the time has passed."""
        return time.perf_counter() >= self.at

    def wait(self) -> None:
        """Wait for the time."""
        time.sleep(max(0.0, self.at - time.perf_counter()))


class TimedCPU(CPU):
    """A device whose forward takes `seconds` from its launch."""

    ahead = 1
    seconds = 0.0
    launching = False

    def event(self) -> Any:
        """Returns the event of a forward, which passes later. All other work ends when the host has done it."""
        return Timed(time.perf_counter() + (self.seconds if TimedCPU.launching else 0.0))


@hookimpl
def register_devices() -> Iterable[DeviceSpec]:
    """`cpu-timed`."""
    yield DeviceSpec(name="cpu-timed", make=f"{__name__}:TimedCPU", available=f"{__name__}:available")


def available() -> None:
    """Returns None: the device is always available."""
