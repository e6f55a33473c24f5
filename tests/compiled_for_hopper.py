"""Kernels compiled for a Hopper on any machine, instead of launched."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton
from llmcore_triton import launch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Hopper:
    """What Triton's compiler asks of a driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiling(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """From now on launches compile kernels and do nothing else. Returns the compiled kernels, a list that grows.

    Triton's cache is `folder`.
    """
    compiled: list[Any] = []

    run = JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, warmup: bool, **fixed: Any) -> None:
        compiled.append(run(kernel, *arguments, warmup=True, **fixed))

    def compile_bound(bound: Any, form: Any, grid: Any, arguments: Any) -> Any:
        bound._kernel[grid](*arguments, **bound._fixed)
        return lambda *launched: None

    monkeypatch.setattr(driver, "_active", Hopper())
    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(launch.Bound, "_compile", compile_bound)
    monkeypatch.setattr(launch, "_device", lambda: 0)
    monkeypatch.setattr(launch, "_stream", lambda device: 0)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    return compiled


def instructions(kernel: Any, folder: Path) -> str:
    """Returns the disassembly of a compiled kernel."""
    cubin = folder / "cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    return subprocess.run([TOOLS / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
