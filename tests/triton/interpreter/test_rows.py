"""The row-wise kernels in Triton's interpreter: their ops' samples, views of wider tensors, writes in place."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore.ops import DTYPES
from llmcore_devtools.kernels.compare import check
from llmcore_triton.specs.rows import LONGEST, kernels

H200 = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=132)
SPECS = {spec.op: spec for spec in kernels() if "." not in spec.op and spec.op != "sample"}
"""Row-wise kernels. test_moe.py and test_sample.py try the others."""
HEADS = {"heads": 5, "kv_heads": 2, "size": 16}
SHAPES: dict[str, list[dict[str, int]]] = {
    "embedding": [{"vocab": 97, "size": 40}, {"vocab": 11, "size": 1100}],
    "rms_norm": [{"size": 40}, {"size": 576}, {"size": 1200}],
    "add_rms_norm": [{"size": 64}, {"size": 1030}],
    "layer_norm": [{"size": 40}, {"size": 1200, "bias": True}, {"size": 24, "heads": 3}],
    "add_layer_norm": [{"size": 64}, {"size": 1030, "bias": True}],
    "silu_and_mul": [{"size": 44}, {"size": 1030}],
    "gelu_and_mul": [{"size": 44}, {"size": 1030}],
    "gelu_tanh": [{"size": 44}, {"size": 1030}],
    "rope": [{"heads": 5, "size": 16, "rotated": 16}, {"heads": 18, "size": 20, "rotated": 12}],
    "rope_kv_write": [{**HEADS, "rotated": 16}, {"heads": 18, "kv_heads": 3, "size": 20, "rotated": 12}],
    "qk_norm_rope_kv_write": [{**HEADS, "rotated": 16}, {"heads": 18, "kv_heads": 3, "size": 20, "rotated": 12}],
    "rope_angles": [{"rotated": 16}, {"rotated": 20}],
    "kv_slots": [{}],
    "step_inputs": [{}],
    "step_outputs": [{}],
}
CASES = [(op, shape) for op, shapes in SHAPES.items() for shape in shapes]


def context(op: str, dtype: str = "f32", bucket: int = 1, granule: int = 1, **shape: int) -> OpContext:
    return OpContext(op=op, device=H200, dtype=dtype, layout="token", granule=granule, bucket=bucket, shape=shape)  # type: ignore[arg-type]


def made(where: OpContext) -> Any:
    return importlib.import_module(f"llmcore_triton.{where.op}").make(where)


def module(op: str) -> Any:
    return importlib.import_module(f"llmcore.ops.{op}")


def numbers(*shape: int, dtype: str = "f32", seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])


def close(got: torch.Tensor, expected: torch.Tensor, dtype: str) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 if dtype == "f32" else 8e-3)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize(
    ("op", "shape"), CASES, ids=lambda p: p if isinstance(p, str) else "-".join(map(str, p.values()))
)
def test_samples(op: str, shape: dict[str, int], dtype: str) -> None:
    for bucket in (0, 1) if shape is not SHAPES[op][0] else (0, 1, 3):
        for granule in (1, 6) if op == "kv_slots" else (1,):
            where = context(op, dtype, bucket, granule, **shape)
            assert check(module(op), made(where), where) > 0


@pytest.mark.parametrize("op", ["step_inputs", "step_outputs", "kv_slots", "rope_angles"])
def test_more_tokens_than_a_program_takes(op: str) -> None:
    where = context(op, bucket=4, granule=4, **SHAPES[op][0])
    assert check(module(op), made(where), where) > 0


@pytest.mark.parametrize("op", SHAPES)
def test_every_launch_configuration(op: str) -> None:
    kernel = importlib.import_module(f"llmcore_triton.{op}")
    where = context(op, bucket=0, **SHAPES[op][-1])
    for config in kernel.candidates(where) if hasattr(kernel, "candidates") else ():
        assert check(module(op), kernel.make_with(where, config), where) > 0


def test_every_row_wise_op_is_tried() -> None:
    assert set(SPECS) == set(SHAPES)
    for op, shape in CASES:
        refuses = SPECS[op].refuses
        assert refuses is not None and refuses(context(op, **shape)) is None


def test_kernels_say_what_they_need() -> None:
    for op in ("rms_norm", "rope_kv_write"):
        assert "needs to know" in str(SPECS[op].refuses(context(op)))  # type: ignore[misc]
    for op in ("rms_norm", "add_layer_norm"):
        assert "not 32769" in str(SPECS[op].refuses(context(op, size=LONGEST + 1)))  # type: ignore[misc]


def test_one_configuration_where_results_may_not_depend_on_the_batch() -> None:
    for op in ("rms_norm", "qk_norm_rope_kv_write"):
        kernel = importlib.import_module(f"llmcore_triton.{op}")
        steady = [replace(context(op, "bf16", bucket, **SHAPES[op][0]), deterministic=True) for bucket in range(5)]
        assert len({tuple(kernel.default(where).items()) for where in steady}) == 1


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_norm_of_heads_within_wider_rows(dtype: str) -> None:
    joined = numbers(7, 6 * 24, dtype=dtype)
    joined[:, :48], joined[:, 120:] = torch.nan, torch.nan
    heads, weight = joined[:, 48:120].view(7, 3, 24), numbers(24, dtype=dtype, seed=1)
    got = made(context("rms_norm", dtype, size=24))(heads, weight, 1e-5)
    close(got, module("rms_norm").reference(heads, weight, 1e-5), dtype)
    four = heads.unflatten(0, (7, 1))
    close(made(context("rms_norm", dtype, size=24))(four, weight, 1e-5), got.unflatten(0, (7, 1)), dtype)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_layer_norm_of_heads_within_wider_rows(dtype: str) -> None:
    """Every head has a weight and a bias of its own, or all have the same."""
    joined = numbers(7, 6 * 24, dtype=dtype)
    joined[:, :48], joined[:, 120:] = torch.nan, torch.nan
    heads, run = joined[:, 48:120].view(7, 3, 24), made(context("layer_norm", dtype, size=24))
    for shape in ((3, 24), (24,)):
        weight, bias = (numbers(*shape, dtype=dtype, seed=seed) for seed in (1, 2))
        for given in (bias, None):
            got = run(heads, weight, given, 1e-5)
            close(got, module("layer_norm").reference(heads, weight, given, 1e-5), dtype)
    close(run(heads.unflatten(0, (7, 1)), weight, None, 1e-5), got.unflatten(0, (7, 1)), dtype)


@pytest.mark.parametrize("op", ["add_rms_norm", "add_layer_norm"])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_sum_and_norm_take_the_place_of_their_inputs(dtype: str, op: str) -> None:
    wide, residual = numbers(5, 100, dtype=dtype), numbers(5, 60, dtype=dtype, seed=1)
    weight, x = numbers(60, dtype=dtype, seed=2), wide[:, 20:80]
    weights = (weight,) if op == "add_rms_norm" else (weight, numbers(60, dtype=dtype, seed=3))
    before = wide.clone()
    normed, total = module(op).reference(x, residual, *weights, 1e-5)
    got, summed = made(context(op, dtype, size=60))(x, residual, *weights, 1e-5)
    assert got.data_ptr() == x.data_ptr() and summed.data_ptr() == residual.data_ptr()
    close(got, normed, dtype)
    assert torch.equal(summed, total)
    assert torch.equal(wide[:, :20], before[:, :20]) and torch.equal(wide[:, 80:], before[:, 80:])


def test_a_norm_rounds_as_its_reference() -> None:
    x, weight = numbers(16, 128, dtype="f16"), numbers(128, dtype="f16", seed=1)
    got = made(context("rms_norm", "f16", size=128))(x, weight, 1e-5)
    assert (got != module("rms_norm").reference(x, weight, 1e-5)).float().mean() < 0.01


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize(("op", "size"), [("silu_and_mul", 50), ("gelu_and_mul", 50), ("gelu_tanh", 100)])
def test_activation_of_a_view(dtype: str, op: str, size: int) -> None:
    wide = torch.full((6, 200), torch.nan, dtype=DTYPES[dtype])
    wide[:, 30:130] = numbers(6, 100, dtype=dtype)
    x = wide[:, 30:130]
    close(made(context(op, dtype, size=size))(x), module(op).reference(x), dtype)


@pytest.mark.parametrize(("op", "size"), [("gelu_and_mul", 8), ("gelu_tanh", 16)])
def test_gelu_of_numbers_whose_cubes_overflow(op: str, size: int) -> None:
    x = torch.tensor([[-3e38, -1e13, -30.0, -1e-30, 0.0, 1e-30, 1e13, 3e38] * 2])
    got = made(context(op, size=size))(x)
    assert torch.equal(got.isfinite(), module(op).reference(x).isfinite())
    close(made(context(op, size=size))(x.clamp(-99, 99)), module(op).reference(x.clamp(-99, 99)), "f32")


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "value_size", "rotated"), [(6, 2, 16, 16, 16), (9, 3, 20, 12, 8)]
)
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_one_pass_over_a_projection(
    dtype: str, heads: int, kv_heads: int, size: int, value_size: int, rotated: int, norm: bool
) -> None:
    """qk and v are views of one tensor; qk turns in place, v and slots that are not named stay as they were."""
    tokens, border = 5, (heads + kv_heads) * size
    joined = numbers(tokens, border + kv_heads * value_size, dtype=dtype)
    qk, v = joined[:, :border].view(tokens, -1, size), joined[:, border:].view(tokens, kv_heads, value_size)
    positions = torch.tensor([0, 3, 131071, 5000, 77], dtype=torch.int32)
    cos, sin = module("rope_angles").reference(positions, 1e4 ** -(torch.arange(rotated // 2) / 8), 1.0)
    slots = torch.tensor([8, 1, 5, 0, 3])
    pools = tuple(torch.full((9, kv_heads, n), torch.nan, dtype=DTYPES[dtype]) for n in (size, value_size))
    ours, new = tuple(pool.clone() for pool in pools), v.clone()
    extra = ((numbers(size, dtype=dtype, seed=3), numbers(size, dtype=dtype, seed=4)), 1e-6) if norm else ()
    op = "qk_norm_rope_kv_write" if norm else "rope_kv_write"
    expected = module(op).reference(qk.clone(), v.clone(), *extra, cos, sin, pools, slots)
    where = context(op, dtype, heads=heads, kv_heads=kv_heads, size=size, rotated=rotated)
    got = made(where)(qk, v, *extra, cos, sin, ours, slots)
    assert got.data_ptr() == joined.data_ptr() and torch.equal(v, new)
    close(got, expected, dtype)
    for left, right in zip(ours, pools, strict=True):
        assert torch.equal(left.isnan(), right.isnan())
        close(left[slots], right[slots], dtype)


def test_rope_of_a_view() -> None:
    wide = numbers(4, 10, 16)
    x = wide[:, 2:9]
    cos, sin = module("rope_angles").reference(torch.arange(4).int(), torch.tensor([1.0, 0.1, 0.01, 0.001]), 1.0)
    got = made(context("rope", heads=7, size=16, rotated=8))(x, cos, sin)
    assert got.is_contiguous()
    close(got, module("rope").reference(x, cos, sin), "f32")


def test_far_angles() -> None:
    positions = (131071 - torch.arange(64) * 2011).int()
    frequencies = 1.0 / 5e5 ** (torch.arange(0, 128, 2) / 128)
    cos, sin = made(context("rope_angles", rotated=128))(positions, frequencies, 1.0)
    angles = (positions[:, None] * frequencies).double()
    torch.testing.assert_close(cos[:, 64:].double(), angles.cos(), rtol=0, atol=3e-7)
    torch.testing.assert_close(sin[:, 64:].double(), angles.sin(), rtol=0, atol=3e-7)
    assert torch.equal(cos[:, :64], cos[:, 64:]) and torch.equal(sin[:, :64], -sin[:, 64:])


def test_filling_samples_stay_within_their_history() -> None:
    """All of them name one request; whichever wins, its length is at most that of the table."""
    history = torch.zeros(3, 4, dtype=torch.int32)
    lengths, computed = torch.tensor([1, 2, 4], dtype=torch.int32), torch.tensor([0, 2, 0], dtype=torch.int32)
    padding = torch.full((299,), 2, dtype=torch.int32)
    request = torch.cat((torch.tensor([1], dtype=torch.int32), padding))
    n_query = torch.cat((torch.tensor([1]), torch.zeros(299))).int()
    tokens = torch.arange(300, dtype=torch.int32) + 10
    run = made(context("step_outputs", bucket=4))
    finite = torch.arange(300) % 3 < 2
    for _ in range(3):
        read = run((history, lengths, computed), request, n_query, request, tokens, finite, 310)
    assert read.tolist() == [t if t % 3 else -1 for t in range(10, 310)]
    assert lengths.tolist() == [1, 4, 4]
    assert computed.tolist() == [0, 5, 0]
    assert history[1].tolist() == [0, 0, 10, 10]
    assert history[0].tolist() == [0] * 4
    assert history[2, :3].tolist() == [0] * 3 and int(history[2, 3]) in (0, *tokens[1:][finite[1:]].tolist())


def test_what_was_drawn_and_is_no_token_is_never_read() -> None:
    """Of a row that is not finite, or outside the vocabulary of 9."""
    drawn = torch.tensor([0, 8, 9, 1 << 30, -1, -5, 3, 1 << 30, -1], dtype=torch.int32)
    finite = torch.arange(9) < 6
    history, counts = torch.full((9, 4), 7, dtype=torch.int32), torch.arange(9, dtype=torch.int32) % 3
    rows, lengths = torch.arange(9, dtype=torch.int32), counts.clone()
    run = made(context("step_outputs"))
    read = run((history, lengths, counts.clone()), rows, rows * 0 + 1, rows, drawn, finite, 9)
    assert read.tolist() == [0, 8, *[-1] * 7]
    assert history[rows.long(), counts.long()].tolist() == [0, 8, *[0] * 7]
    assert int((history != 7).sum()) == 9 and torch.equal(lengths, counts + 1)


def test_a_step_that_samples_nothing() -> None:
    history = torch.zeros(2, 4, dtype=torch.int32)
    lengths, computed = torch.tensor([3, 2], dtype=torch.int32), torch.tensor([0, 0], dtype=torch.int32)
    none, row = torch.empty(0, dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
    made(context("step_outputs"))((history, lengths, computed), row, row + 2, none, none, none.bool(), 9)
    assert (lengths.tolist(), computed.tolist(), int(history.sum())) == ([3, 2], [2, 0], 0)
