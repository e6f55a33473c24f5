"""The ops of quantized linears: the torch kernels in each dtype and bucket, and what they mean in plain numbers."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import llmcore_quantization.ops
import pytest
import torch
from llmcore.api import DeviceInfo, KernelSpec, OpContext
from llmcore.ops import linear, made
from llmcore.registry.resolve import REFERENCE
from llmcore_devtools.kernels.compare import check, compare
from llmcore_quantization import register_ops
from llmcore_quantization.canonical import Scheme
from llmcore_quantization.ops import linear_fp8_block, linear_w4a16, linear_w8a8, linear_w8a16, shape_of

OPS = {spec.name: spec for spec in register_ops()}


def context(op: str, dtype: str = "f32", **more: Any) -> OpContext:
    return OpContext(op=op, device=DeviceInfo("cpu"), dtype=dtype, **more)  # type: ignore[arg-type]


def test_every_module_has_an_op() -> None:
    files = {file.stem for file in Path(llmcore_quantization.ops.__file__).parent.glob("*.py")} - {"__init__"}
    assert files == {spec.module.rpartition(".")[2] for spec in OPS.values()}
    assert all(f"linear_{name.removeprefix('linear.')}" in files for name in OPS)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("op", OPS)
def test_torch_kernel(op: str, dtype: str) -> None:
    """The reference, and the expansion, which is what a model runs if there is no kernel."""
    module = importlib.import_module(OPS[op].module)
    torch_kernel = KernelSpec(name=REFERENCE, op=op, make=f"{OPS[op].module}:make")
    for bucket in range(5):
        for shape in module.SHAPES:
            where = context(op, dtype, bucket=bucket, shape=shape)
            assert check(module, made(torch_kernel, where), where) > 0
            assert check(module, expanded(op, where), where) > 0


def expanded(op: str, where: OpContext) -> Any:
    def part(name: str, **shape: Any) -> Any:
        assert (name,) == OPS[op].expands_to and shape.keys() == {"inputs", "outputs", "bias"}
        return linear.reference

    return importlib.import_module(OPS[op].module).expand(where, part)


@pytest.mark.parametrize("op", OPS)
def test_long_samples(op: str) -> None:
    module = importlib.import_module(OPS[op].module)
    where = context(op, "bf16", bucket=1, shape=module.SHAPES[0])
    (sample,) = module.long_samples(where)
    assert sample[0].shape == (13, module.SHAPES[0]["inputs"])
    assert compare(module, module.reference, where, sample, torch.device("cpu"), long=True) <= 1


def test_weight_only_ops_multiply_the_dequantized_weight() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    codes = torch.tensor([[0x98, 0x0F], [0x21, 0x43]], dtype=torch.uint8)  # 8 9 15 0, 1 2 3 4
    scale, zero = torch.tensor([[2.0, 0.5], [1.0, 10.0]]), torch.tensor([[8, 0], [0, 4]], dtype=torch.uint8)
    bias, order = torch.tensor([100.0, 0.0]), torch.tensor([3, 0, 1, 2], dtype=torch.int32)
    # Row 0 is (0, 2, 7.5, 0), row 1 is (1, 2, -10, 0).
    y = linear_w4a16.reference(x, codes, scale, zero, None, bias)
    assert y.tolist() == [[100 + 4 + 22.5, 1 + 4 - 30]]
    # Input 3 of the linear comes first in the codes, then inputs 0, 1 and 2.
    y = linear_w4a16.reference(x, codes, scale, zero, order)
    assert y.tolist() == [[2 * 1 + 7.5 * 2, 4 * 1 + 1 * 2 - 10 * 2]]
    # Without zeros, 8 means 0.
    assert linear_w4a16.reference(x, codes, scale).tolist() == [[4 + 3.5 * 3 - 4 * 4, -7 - 12 - 150 - 160]]
    eight = torch.tensor([[-128, 127, 1, 0]], dtype=torch.int8)
    assert linear_w8a16.reference(x, eight, torch.tensor([[0.5]])).tolist() == [[-64 + 127 + 1.5]]


def test_a_weight_is_rounded_to_the_type_of_the_inputs() -> None:
    scale = torch.tensor([[0.1]])
    y = linear_w8a16.reference(torch.ones(1, 2, dtype=torch.bfloat16), torch.tensor([[3, 0]], dtype=torch.int8), scale)
    assert y.item() == torch.tensor(0.3).bfloat16().item()


def test_w8a8_rounds_each_token_by_its_own_magnitude() -> None:
    x = torch.tensor([[127.0, 10.4, -3.6], [1.27, 0.0, -0.996]])
    codes, scale = torch.tensor([[1, 1, 0], [0, 0, 2]], dtype=torch.int8), torch.tensor([[1.0], [0.5]])
    y = linear_w8a8.reference(x, codes, scale, None, torch.tensor([0.0, 1.0]))
    assert torch.allclose(y, torch.tensor([[137.0, -3.0], [1.27, 0.0]]))
    fixed = linear_w8a8.reference(x, codes, scale, torch.tensor([0.5]))
    assert torch.allclose(fixed, torch.tensor([[63.5 + 10.5, -3.5], [1.5, -1.0]]))
    eights = linear_w8a8.reference(x, codes.to(torch.float8_e4m3fn), scale, torch.tensor([0.25]))
    # In steps of 0.25: 508 is above the largest number, 448; 41.6 is between 40 and 44; -14.4 between -15 and -14.
    assert torch.allclose(eights[0], torch.tensor([112.0 + 10.0, -3.5]))


def test_fp8_block_rounds_each_group_by_its_own_magnitude() -> None:
    x = torch.zeros(1, 256)
    x[0, 0], x[0, 1], x[0, 128] = 448.0, 17.0, 1.0
    codes = torch.ones(1, 256).to(torch.float8_e4m3fn)
    y = linear_fp8_block.reference(x, codes, torch.tensor([[1.0, 3.0]]))
    assert y.item() == 448.0 + 16.0 + 3.0


@pytest.mark.parametrize(
    ("op", "scheme", "held"),
    [
        ("w4a16", Scheme(codes="u4", group=128, zeros=True), 4096 * 4096 // 2 + 3 * 4096 * 32),
        ("w8a16", Scheme(codes="i8", scale="f32"), 4096 * 4096 + 4 * 4096),
        ("w8a8", Scheme(codes="e4m3", scale="f32", inputs="static"), 4096 * 4096 + 4 * 4096),
        ("fp8_block", Scheme(codes="e4m3", group=128, scale="f32"), 4096 * 4096 + 4 * 4096 * 32),
    ],
)
def test_cost_counts_packed_bytes(op: str, scheme: Scheme, held: int) -> None:
    shape = {**shape_of(scheme, 4096, 4096, bias=False), "tokens": 3, "element": 2}
    moved, flops = importlib.import_module(OPS[f"linear.{op}"].module).cost(shape)
    assert moved == held + 3 * 2 * 4096 * 2
    assert flops == 2 * 3 * 4096 * 4096
