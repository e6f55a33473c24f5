"""Devices by name, present or not, so that llmcore can choose kernels for a device of another machine. No torch."""

from __future__ import annotations

import re

from llmcore.api import DeviceInfo


def cpu(text: str) -> DeviceInfo | None:
    """The device named "cpu"; None for another name."""
    return DeviceInfo("cpu") if text == "cpu" else None


def cuda(text: str) -> DeviceInfo | None:
    """A GPU by its compute capability, such as "sm90"; None for another name."""
    found = re.fullmatch(r"sm_?(\d{2,3})", text)
    return DeviceInfo("cuda", name=text, capability=int(found[1])) if found else None
