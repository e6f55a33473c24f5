"""The kernels for mixtures of experts against their ops' references, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from llmcore.ops import moe_combine, moe_dispatch, moe_experts, moe_fused, moe_route
from llmcore.ops.check import check
from llmcore.plugins import load
from llmcore.resolve import why_not
from llmcore.specs import DeviceInfo, KernelSpec, OpContext
from llmcore_triton.specs import moe as specs

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")

H200 = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=132)
MODULES = {
    "moe.route": moe_route,
    "moe.dispatch": moe_dispatch,
    "moe.experts": moe_experts,
    "moe.combine": moe_combine,
    "moe.fused": moe_fused,
}
SPECS = list(specs.kernels())


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write is NaN, or no index that there is."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def context(op: str, dtype: str = "f32", bucket: int = 0, **shape: Any) -> OpContext:
    return OpContext(op=op, device=H200, dtype=dtype, bucket=bucket, shape=shape)  # type: ignore[arg-type]


def spec_of(op: str) -> KernelSpec:
    return next(spec for spec in SPECS if spec.op == op)


def shapes_of(op: str) -> list[tuple[str, Any]]:
    return [(op, shape) for shape in MODULES[op].SHAPES]


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize(
    ("op", "shape"), [case for op in MODULES if any(s.op == op for s in SPECS) for case in shapes_of(op)]
)
def test_samples(op: str, shape: dict[str, Any], dtype: str) -> None:
    spec, module = spec_of(op), MODULES[op]
    for bucket in (0, 1, 4) if op == "moe.experts" else range(5):
        where = context(op, dtype, bucket, **shape)
        if why_not(spec, where) is None:
            assert check(module, load(spec.make)(where), where) > 0
