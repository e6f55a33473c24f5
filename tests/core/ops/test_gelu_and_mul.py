"""gelu_and_mul: both forms are torch's gelu, and one of them gives a row the same bits wherever it stands."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore.ops.gelu_and_mul import in_one_pass, make, reference


@pytest.mark.parametrize("op", [reference, in_one_pass])
def test_values(op) -> None:
    x = torch.linspace(-12, 12, 2002, dtype=torch.float32).view(7, 286)
    gate, up = x.double().chunk(2, -1)
    before = x.clone()
    torch.testing.assert_close(op(x).double(), F.gelu(gate, approximate="tanh") * up, rtol=0, atol=2e-5)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_bits_do_not_depend_on_others(dtype: torch.dtype) -> None:
    op = make(OpContext(op="gelu_and_mul", device=DeviceInfo("cpu"), dtype="f32", deterministic=True))
    x = (torch.randn(301, 2 * 77, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    together = op(x)
    assert all(torch.equal(together[i : i + 1], op(x[i : i + 1])) for i in range(len(x)))
