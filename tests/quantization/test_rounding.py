"""Rounding to a scheme's grid: the numbers of each scheme, the nearest code, ends of the range, and zeros."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from llmcore_quantization import rounding
from llmcore_quantization.canonical import Scheme, dequantized, shapes, unpacked
from llmcore_quantization.rounding import LIMITS, quantized
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SCHEMES = {
    "asymmetric": Scheme(codes="u4", group=32, zeros=True),
    "symmetric": Scheme(codes="u4", group=32),
    "symmetric rows": Scheme(codes="u4"),
    "int8": Scheme(codes="i8", scale="f32"),
    "int8 with zeros": Scheme(codes="i8", group=16, zeros=True),
    "fp8": Scheme(codes="e4m3", scale="f32"),
    "fp8 groups": Scheme(codes="e4m3", group=32, scale="f32"),
}


def restored(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return dequantized(tensors["codes"], tensors["scale"], tensors.get("zero"))


def drawn(rows: int = 40, inputs: int = 96) -> torch.Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(0)) * 0.05


@pytest.mark.parametrize("name", SCHEMES)
def test_tensors_have_the_canonical_shapes_and_types(name: str) -> None:
    found = quantized(drawn(), SCHEMES[name])
    assert {leaf: (tuple(t.shape), t.dtype) for leaf, t in found.items()} == shapes(SCHEMES[name], 96, 40)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_weight_is_dequantized_in_f32_and_rounded_once(name: str, dtype: torch.dtype) -> None:
    found = quantized(drawn() * 100, SCHEMES[name])
    weight = dequantized(found["codes"], found["scale"], found.get("zero"), dtype=dtype)
    assert torch.equal(weight, restored(found).to(dtype))


@pytest.mark.parametrize("name", ["asymmetric", "symmetric", "symmetric rows", "int8", "int8 with zeros"])
def test_each_weight_has_the_nearest_code(name: str) -> None:
    """Half a step off at most, but for the ends of the range, where the scale was rounded."""
    weight, scheme = drawn(), SCHEMES[name]
    found = quantized(weight, scheme)
    steps = found["scale"].float().repeat_interleave(scheme.group or 96, 1)
    off = (restored(found) - weight).abs() / steps
    assert (off <= 0.501).float().mean() > 0.97 and off.max() < 1.1


def test_asymmetric_scales_and_zeros_are_the_documented_ones() -> None:
    weight = torch.tensor([[-3.0, 12.0, 0.4, 5.6], [2.0, 15.0, 7.0, 1.0], [-1.0, -15.0, 0.0, -7.6]])
    found = quantized(weight, Scheme(codes="u4", zeros=True, scale="f32"))
    assert found["scale"].flatten().tolist() == [1.0, 1.0, 1.0]
    assert found["zero"].flatten().tolist() == [3, 0, 15]
    assert unpacked(found["codes"]).tolist() == [[0, 15, 3, 9], [2, 15, 7, 1], [14, 0, 15, 7]]


def test_symmetric_codes_use_both_ends_and_round() -> None:
    weight = torch.tensor([[7.5, -7.5, 1.6, -0.4]])
    found = quantized(weight, Scheme(codes="u4", scale="f32"))
    assert (unpacked(found["codes"]).int() - 8).tolist() == [[7, -8, 2, 0]]
    eight = quantized(torch.tensor([[12.7, -12.7, 0.06, -0.04]]), Scheme(codes="i8", scale="f32"))
    assert eight["codes"].tolist() == [[127, -127, 1, 0]]  # 0.6 is not truncated to 0


def test_blocks_of_rows_share_a_scale() -> None:
    weight = drawn(rows=5)
    found = quantized(weight, Scheme(codes="e4m3", group=32, scale="f32"), rows=2)
    scale = found["scale"]
    assert torch.equal(scale[0], scale[1]) and torch.equal(scale[2], scale[3]) and not torch.equal(scale[1], scale[2])
    assert torch.allclose(scale[4], weight[4].view(3, 32).abs().amax(1) / 448)
    assert torch.allclose(scale[0], weight[:2].view(2, 3, 32).abs().amax((0, 2)) / 448)


@pytest.mark.parametrize("name", SCHEMES)
def test_weights_that_are_zero_or_tiny_stay_finite(name: str) -> None:
    weight = drawn()
    weight[0], weight[1] = 0.0, 1e-12
    found = restored(quantized(weight, SCHEMES[name]))
    assert found.isfinite().all() and (found[0] == 0).all() and found[1].abs().max() < 1e-8


def rounded(x: torch.Tensor, kind: torch.dtype, group: int = 0, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Inputs as their codes give them back."""
    return rounding.restored(*rounding.codes_of(x, kind, group, scale))


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_inputs_are_rounded_per_token_or_per_group(kind: torch.dtype) -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    limit = LIMITS["i8" if kind == torch.int8 else "e4m3"]
    for group in (64, 16):
        for token in range(3):
            for first in range(0, 64, group):
                part = x[token, first : first + group]
                step = part.abs().max() / limit
                codes = (part / step).round() if kind == torch.int8 else (part / step).to(kind).float()
                got = rounded(x, kind, 0 if group == 64 else group)[token, first : first + group]
                assert torch.allclose(got, codes * step, rtol=1e-6)
    assert (rounded(torch.zeros(1, 8), kind) == 0).all() and rounded(torch.zeros(0, 8), kind).shape == (0, 8)
    assert rounded(torch.tensor([[1.0, torch.nan]]), kind).isnan().all()


def test_a_static_scale_clamps() -> None:
    x = torch.tensor([[1000.0, -1000.0, 0.3]])
    assert rounded(x, torch.int8, scale=torch.tensor([0.5])).tolist() == [[63.5, -64.0, 0.5]]
    assert rounded(x, torch.float8_e4m3fn, scale=torch.tensor([1.0])).tolist() == [[448.0, -448.0, 0.3125]]


class Peak(TorchDispatchMode):
    """The most bytes that tensors made in this mode hold at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.made += [weakref.ref(made) for made in tree_leaves(found) if isinstance(made, torch.Tensor)]
        alive = [tensor for held in self.made if (tensor := held()) is not None]
        storages = {held.data_ptr(): held.nbytes() for held in map(torch.Tensor.untyped_storage, alive)}
        self.bytes = max(self.bytes, sum(storages.values()))
        return found


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_is_quantized_in_chunks_and_stays_as_it_is(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(500, 384, generator=torch.Generator().manual_seed(0)).to(dtype)
    before, whole = weight.clone(), quantized(weight, SCHEMES[name], rows=4)
    monkeypatch.setattr(rounding, "CHUNK", 8000)
    with Peak() as peak:
        found = quantized(weight, SCHEMES[name], rows=4)
    assert torch.equal(weight, before)
    for leaf, tensor in whole.items():
        assert torch.equal(found[leaf].float(), tensor.float())
    made = sum(tensor.nbytes for tensor in found.values())
    beside = peak.bytes - weight.nbytes
    assert made < beside < 2 * made + 8 * 8000, "the tensors, their parts, and a chunk in f32"
