"""The built-in devices: what they say of themselves, and who is chosen."""

from __future__ import annotations

import mmap

import torch
from llmcore.builtin.devices import cpu, cuda, register_devices
from llmcore.registry.loader import load


def test_every_spec_loads() -> None:
    specs = list(register_devices())
    assert [spec.name for spec in specs] == ["cuda", "cpu"]
    for spec in specs:
        assert callable(load(spec.make))
        assert load(spec.available)() is None or spec.name == "cuda"


def test_the_cpu_measures_its_memory() -> None:
    device = cpu.make(0)
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
    device = cpu.make(0)
    tensor = torch.arange(3)
    assert device.pinned(tensor) is tensor and device.to_host(tensor) is tensor
    assert device.event().done()


def test_a_gpu_that_is_not_there_says_what_to_do() -> None:
    reason = cuda.available()
    assert torch.cuda.is_available() or (reason is not None and ("install" in reason or "check" in reason))
