"""The CPU as a device: its memory, and tensors that need no copy."""

from __future__ import annotations

import mmap

import torch
from llmcore.builtin.devices import cpu


def test_the_cpu_measures_its_memory() -> None:
    device = cpu.CPU(0)
    assert 0 < device.free_memory() <= device.info.memory
    assert 0 < device.kv_budget(0.9) <= 4 << 30
    device.reset_peak()
    before = device.peak_memory()
    with mmap.mmap(-1, 32 << 20) as fresh:
        fresh.write(b"x" * (32 << 20))
    assert device.peak_memory() - before > 24 << 20
    device.reset_peak()
    assert device.peak_memory() < before + (24 << 20)


def test_the_cpu_does_not_copy() -> None:
    device = cpu.CPU(0)
    tensor = torch.arange(3)
    assert device.pinned(tensor) is tensor and device.to_host(tensor) is tensor
    assert device.event().done()
