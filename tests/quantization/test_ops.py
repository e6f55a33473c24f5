"""The ops of quantized linears: the torch kernels in each dtype and bucket, and what they mean in plain numbers."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import llmcore_quantization.ops
import pytest
import torch
from llmcore.api import DeviceInfo, KernelSpec, OpContext
from llmcore.ops import made
from llmcore.registry.resolve import REFERENCE
from llmcore_devtools.kernels.compare import check, compare, tensors
from llmcore_quantization import register_ops
from llmcore_quantization.canonical import Scheme
from llmcore_quantization.ops import (
    linear_w4a16,
    linear_w8a8,
    linear_w8a16,
    linear_w8a16_silu_and_mul,
    quantize_rows,
    shape_of,
)
from llmcore_quantization.rounding import codes_of

OPS = {spec.name: spec for spec in register_ops()}


def context(op: str, dtype: str = "f32", **more: Any) -> OpContext:
    return OpContext(op=op, device=DeviceInfo("cpu"), dtype=dtype, **more)  # type: ignore[arg-type]


def test_every_module_has_an_op() -> None:
    files = {file.stem for file in Path(llmcore_quantization.ops.__file__).parent.glob("*.py")} - {"__init__"}
    assert files == {spec.module.rpartition(".")[2] for spec in OPS.values()}
    assert files == {name.replace(".", "_") for name in OPS}


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
    """The op's parts in torch; the op itself if it has none."""
    spec = OPS[op]

    def part(name: str, **shape: Any) -> Any:
        assert name in spec.expands_to
        if name in OPS:
            return expanded(name, replace(where, op=name, shape=shape))
        assert name != "linear" or shape.keys() == {"inputs", "outputs", "bias"}
        module = f"llmcore.ops.{name.replace('.', '_')}"
        return made(KernelSpec(name=REFERENCE, op=name, make=f"{module}:make"), replace(where, op=name, shape=shape))

    module = importlib.import_module(spec.module)
    return module.expand(where, part) if spec.expands_to else module.make(where)


@pytest.mark.parametrize("op", [name for name in OPS if not name.endswith("_quant") and "moe" not in name])
def test_long_samples(op: str) -> None:
    module = importlib.import_module(OPS[op].module)
    where = context(op, "bf16", bucket=1, shape=module.SHAPES[0])
    (sample,) = module.long_samples(where)
    assert sample[0].shape == (13, module.SHAPES[0].get("inputs", 40))
    assert compare(module, expanded(op, where), where, sample, torch.device("cpu"), long=True) <= 1


@pytest.mark.parametrize(
    "op", [name for name in OPS if hasattr(importlib.import_module(OPS[name].module), "compared")]
)
def test_rows_that_are_two_codes_apart_or_have_another_scale_are_found(op: str) -> None:
    module = importlib.import_module(OPS[op].module)
    for shape in module.SHAPES:
        where = context(op, "f16", bucket=1, shape=shape)
        right = made(KernelSpec(name=REFERENCE, op=op, make=f"{OPS[op].module}:make"), where)

        def off(change: Any, right: Any = right) -> Any:
            return lambda *arguments: change(*right(*arguments))

        def moved(codes: torch.Tensor, by: int) -> torch.Tensor:
            bits = codes.clone().view(torch.uint8)
            bits[(bits > 3) & (bits < 100)] += by
            return bits.view(codes.dtype)

        assert check(module, off(lambda codes, *rest: (moved(codes, 1), *rest)), where)
        for wrong in (
            off(lambda codes, *rest: (moved(codes, 2), *rest)),
            off(lambda codes, scale, *rest: (codes, scale * 1.02, *rest)),
        ):
            with pytest.raises(AssertionError, match="off by"):
                check(module, wrong, where)


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


def product(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    fixed: float | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x in codes of the weight's type and groups, times the weight."""
    kind, groups = ("i8" if codes.dtype == torch.int8 else "e4m3"), scale.shape[1]
    form = {"size": x.shape[1], "codes": kind, "group": x.shape[1] // groups if groups > 1 else 0}
    quantize = quantize_rows.make(context("quantize_rows", shape={**form, "static": fixed is not None}))
    rows = quantize(x, None if fixed is None else torch.tensor([fixed]))
    y: torch.Tensor = linear_w8a8.make(context("linear.w8a8"))(*rows, codes, scale, bias)
    return y


def test_w8a8_rounds_each_token_by_its_own_magnitude() -> None:
    x = torch.tensor([[127.0, 10.4, -3.6], [1.27, 0.0, -0.996]])
    codes, scale = torch.tensor([[1, 1, 0], [0, 0, 2]], dtype=torch.int8), torch.tensor([[1.0], [0.5]])
    y = product(x, codes, scale, bias=torch.tensor([0.0, 1.0]))
    assert torch.allclose(y, torch.tensor([[137.0, -3.0], [1.27, 0.0]]))
    assert torch.allclose(product(x, codes, scale, 0.5), torch.tensor([[63.5 + 10.5, -3.5], [1.5, -1.0]]))
    eights = product(x, codes.to(torch.float8_e4m3fn), scale, 0.25)
    # In steps of 0.25: 508 is above the largest number, 448; 41.6 is between 40 and 44; -14.4 between -15 and -14.
    assert torch.allclose(eights[0], torch.tensor([112.0 + 10.0, -3.5]))


def test_fp8_block_rounds_each_group_by_its_own_magnitude() -> None:
    x = torch.zeros(1, 256)
    x[0, 0], x[0, 1], x[0, 128] = 448.0, 17.0, 1.0
    codes = torch.ones(1, 256).to(torch.float8_e4m3fn)
    assert product(x, codes, torch.tensor([[1.0, 3.0]])).item() == 448.0 + 16.0 + 3.0


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("op", ["rms_norm_quant", "add_rms_norm_quant", "silu_and_mul_quant"])
def test_what_is_quantized_is_the_plain_result_in_the_models_type(op: str, dtype: str) -> None:
    module, plain = (importlib.import_module(f"{name}") for name in (OPS[op].module, f"llmcore.ops.{op[:-6]}"))
    for shape in module.SHAPES:
        where = context(op, dtype, bucket=1, shape=shape)
        for sample in module.samples(where):
            codes, scale, *rest = module.make(where)(*sample)
            y, *others = tensors(plain.reference(*sample))
            kind, group = codes.dtype, int(shape["group"])
            right, steps = codes_of(y, kind, group)
            assert torch.equal(codes.view(torch.uint8), right.view(torch.uint8)) and torch.equal(scale, steps)
            assert all(map(torch.equal, rest, others))


@pytest.mark.parametrize(
    ("op", "scheme", "held"),
    [
        ("w4a16", Scheme(codes="u4", group=128, zeros=True), 4096 * 4096 // 2 + 3 * 4096 * 32),
        ("w8a16", Scheme(codes="i8", scale="f32"), 4096 * 4096 + 4 * 4096),
        ("w8a8", Scheme(codes="e4m3", scale="f32"), 4096 * 4096 + 4 * 4096),
        ("fp8_block", Scheme(codes="e4m3", group=128, scale="f32"), 4096 * 4096 + 4 * 4096 * 32),
    ],
)
def test_cost_counts_packed_bytes(op: str, scheme: Scheme, held: int) -> None:
    shape = {**shape_of(scheme, 4096, 4096, bias=False), "tokens": 3, "element": 2}
    moved, flops = importlib.import_module(OPS[f"linear.{op}"].module).cost(shape)
    row = 4096 * 2 if op.endswith("a16") else 4096 + 4 * (32 if op == "fp8_block" else 1)
    assert moved == held + 3 * (row + 4096 * 2)
    assert flops == 2 * 3 * 4096 * 4096


def test_an_activation_halves_what_is_written() -> None:
    shape = shape_of(Scheme(codes="i8", scale="f32"), 64, 80, bias=False, activation="silu_and_mul")
    assert shape["size"] == 40 and "outputs" not in shape
    moved, flops = linear_w8a16_silu_and_mul.cost({**shape, "tokens": 3, "element": 2})
    assert (moved, flops) == (64 * 80 + 4 * 80 + 3 * 2 * (64 + 40), 2 * 3 * 64 * 80)


def test_rows_of_quantized_ops_move_a_byte_per_code() -> None:
    shape = {"size": 64, "codes": "i8", "group": 0, "tokens": 3, "element": 2}
    moved = {op: importlib.import_module(OPS[op].module).cost(shape)[0] / 192 for op in OPS if "." not in op}
    assert moved == {"quantize_rows": 3, "rms_norm_quant": 3, "add_rms_norm_quant": 7, "silu_and_mul_quant": 5}
