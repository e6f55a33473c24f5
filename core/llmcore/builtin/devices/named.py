"""Devices by name, whether they are here or not: kernels can be chosen for them anywhere. No torch."""

from __future__ import annotations

import re

from llmcore.api import DeviceInfo


def cpu(text: str) -> DeviceInfo | None:
    """ "cpu"."""
    return DeviceInfo("cpu") if text == "cpu" else None


def cuda(text: str) -> DeviceInfo | None:
    """ "sm90": any GPU of that compute capability."""
    found = re.fullmatch(r"sm_?(\d{2,3})", text)
    return DeviceInfo("cuda", name=text, capability=int(found[1])) if found else None
