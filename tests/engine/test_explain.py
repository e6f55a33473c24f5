"""What is said of ops that run as their slow torch reference."""

from __future__ import annotations

from pathlib import Path

from llmcore.engine.explain import fallbacks
from llmcore.registry import Registry
from llmcore.resolve import Resolution, candidates_for, resolve
from llmcore.specs import DeviceInfo, OpContext
from llmcore_devtools import registry_of

PLUGIN = """
from llmcore.api import KernelSpec, Requires, hookimpl

@hookimpl
def register_kernels():
    yield KernelSpec(op="attn.merge", name="half", make="x:y", when=Requires(device="gpu", dtypes={"f16"}))
    yield KernelSpec(op="attn.merge", name="other", make="x:y", when=Requires(device="npu"))
"""


def chosen(registry: Registry, device: str) -> Resolution:
    context = OpContext(op="attn.merge", device=DeviceInfo(device), dtype="f32")
    return resolve(candidates_for(registry, "attn.merge"), context, {})


def test_a_slow_choice_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "half.py"
    file.write_text(PLUGIN)
    registry = registry_of(str(file))
    slow = chosen(registry, "gpu")
    lines = fallbacks(registry, [slow, slow])
    assert lines == ["attn.merge runs as its slower torch reference, half: needs dtype f16, has f32"]
    assert fallbacks(registry, [chosen(registry, "cpu")]) == [], "nobody has a kernel for it there"
