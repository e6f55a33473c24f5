"""Layouts that quantize: codes and scales are those of the formulas, in numpy; what is written, copied and moved is
equal to the bit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from llmcore.api import ConfigError, DType, KVGroupSpec
from llmcore.layers.layout import TokenLayout
from llmcore_devtools.conformance_computing import check_register_kv_layouts
from llmcore_devtools.loaded_model import registry_for_tests
from llmcore_quantization.kv.layouts import LatentCodes, TokenCodes
from llmcore_quantization.kv.names import FORMS, LATENT, Form, modes
from numpy.typing import NDArray

CPU = torch.device("cpu")
DTYPES = get_args(DType)
HEADS, KEY, VALUE, TOKENS = 2, 128, 64, 24
SLOTS = torch.randperm(32, generator=torch.Generator().manual_seed(1))[:TOKENS]

Array = NDArray[Any]


# --- the formulas ------------------------------------------------------------------------------------------------


@cache
def floats() -> Array:
    """All finite numbers of e4m3 from 0 up, by code: 4 bits of exponent, 3 of mantissa."""
    code = np.arange(127)
    exponent, mantissa = code >> 3, code & 7
    found: Array = np.where(exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa / 8 * 2.0**-6)
    return found


def nearest_float(x: Array) -> Array:
    """The code of the nearest e4m3, of two equally near ones the even code."""
    known, size = floats(), np.minimum(np.abs(x), 448)
    above = np.clip(np.searchsorted(known, size), 1, 126)
    down, up = size - known[above - 1], known[above] - size
    code: Array = np.where((down < up) | ((down == up) & (above % 2 == 1)), above - 1, above)
    return code + 128 * np.signbit(x)


def encoded(x: Array, form: Form, marks: Any, fixed: Array | None = None) -> tuple[Array, Array | None, Array]:
    """x f32 [T, heads, width] -> the code of each element, the marks, and what they stand for in f32."""
    groups = x.reshape(*x.shape[:-1], -1, min(form.group or x.shape[-1], x.shape[-1]))
    top = {"i8": 255 if form.least else 127, "u4": 15, "e4m3": 448}[form.codes]
    least = groups.min(-1).astype(marks) if form.least else np.zeros(groups.shape[:-1], marks)
    span = groups.max(-1) - least.astype(np.float32) if form.least else np.abs(groups).max(-1)
    smallest = np.finfo(marks).smallest_subnormal if marks == np.float16 else np.finfo(marks).tiny
    scale = np.maximum((span / np.float32(top)).astype(marks), smallest)
    if fixed is not None:
        scale = np.broadcast_to(fixed[:, None], scale.shape)
    steps = (groups - least.astype(np.float32)[..., None]) / scale.astype(np.float32)[..., None]
    if form.codes == "e4m3":
        codes = nearest_float(steps)
        values = np.where(codes >= 128, -1, 1) * floats()[codes % 128]
    else:
        values = codes = np.clip(np.rint(steps), 0 if form.least else -top, top) + 0.0  # integers have no -0
    means = values.astype(np.float32) * scale.astype(np.float32)[..., None]
    if form.least:
        means = means + least.astype(np.float32)[..., None]
    both = np.stack((scale, least), -1) if form.least else scale
    return codes.reshape(x.shape), None if fixed is not None else both, means.reshape(x.shape)


def bytes_of(codes: Array, form: Form) -> Array:
    """Codes as they are stored: two of 4 bits, of elements d and d + width / 2, in a byte."""
    if form.codes == "u4":
        low, high = np.split(codes.astype(np.uint8), 2, -1)
        return low + 16 * high
    return codes.astype(np.int64).astype(np.uint8)


# --- inputs --------------------------------------------------------------------------------------------------------


def drawn(width: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Tokens of all sizes, with zeros, constants, an outlier, the largest and the smallest numbers among them."""
    x = torch.randn(TOKENS, HEADS, width, generator=torch.Generator().manual_seed(seed))
    x *= torch.logspace(-3, 3, TOKENS)[:, None, None]
    x[0] = 0
    x[1] = 0.7
    x[2] = -3.0
    x[3, :, 5] = 900.0
    x[4, 0] = 0
    x[5] = torch.linspace(-1, 1, width)
    x[6] = x[6].abs() + 50
    x[7] *= 1e-5
    x[8, 0] = 60000.0
    return x.to(dtype)


def made(
    name: str, dtype: DType = "bf16", granule: int = 1, **more: Any
) -> tuple[TokenCodes, tuple[torch.Tensor, ...]]:
    sizes = {"key_size": KEY, "value_size": VALUE, **more}
    group = KVGroupSpec(name="kv", layers=(0, 2), kv_heads=HEADS, layout=name, **sizes)
    layout = TokenCodes(group, granule, dtype)
    if layout.constants(layout.group.layers[0]):
        layout.scales = {layer: (torch.tensor([0.02, 0.3]), torch.tensor([1.5, 0.01])) for layer in group.layers}
    return layout, layout.tensors(32 // granule, CPU)[2]


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """True if they have the same bits, NaN included."""
    return left.dtype == right.dtype and torch.equal(left.contiguous().view(torch.uint8), right.view(torch.uint8))


# --- what is stored --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
def test_codes_and_scales_are_those_of_the_formulas(name: str, dtype: DType) -> None:
    layout, kv = made(name, dtype)
    marks = np.float32 if dtype == "f32" else np.float16
    new = drawn(KEY, layout.dtype, 0), drawn(VALUE, layout.dtype, 1)
    plain = [x.float().numpy().copy() for x in new]
    layout.write(kv, SLOTS, *new)
    for side, (form, x, left) in enumerate(zip(FORMS[name], plain, new, strict=True)):
        fixed = kv[2 + side].numpy() if form.fixed else None
        codes, beside, means = encoded(x, form, marks, fixed)
        stored = kv[side].view(torch.uint8)[SLOTS].numpy()
        assert np.array_equal(stored, bytes_of(codes, form))
        if beside is not None:
            assert np.array_equal(kv[2 + side][SLOTS].numpy().squeeze(), beside.squeeze())
        assert same(left, torch.from_numpy(means).to(layout.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
def test_what_write_leaves_is_what_gather_returns(name: str, dtype: DType) -> None:
    layout, kv = made(name, dtype)
    k, v = drawn(KEY, layout.dtype, 2), drawn(VALUE, layout.dtype, 3)
    k[9, 0, 3], k[10, 1, 0], v[11, 0, 1], v[12, 1, 63] = torch.nan, torch.inf, -torch.inf, torch.nan
    # as a projection returns them: parts of wider rows
    wide = torch.cat((k.flatten(1), v.flatten(1)), 1)
    k_new, v_new = wide[:, : HEADS * KEY].view(k.shape), wide[:, HEADS * KEY :].view(v.shape)
    layout.write(kv, SLOTS, k_new, v_new)
    for left, read in zip((k_new, v_new), layout.gather(kv, SLOTS), strict=True):
        assert same(left, read)
        assert left[:9].isfinite().all() or dtype == "f16"


@pytest.mark.parametrize("name", FORMS)
def test_numbers_that_are_not_finite_stay_in_their_group(name: str) -> None:
    layout, kv = made(name)
    for side, form in enumerate(FORMS[name]):
        width = (KEY, VALUE)[side]
        new = [torch.ones(4, HEADS, size).bfloat16() for size in (KEY, VALUE)]
        for token, value in enumerate((torch.nan, torch.inf, -torch.inf)):
            new[side][token, 1, 0] = value
        layout.write(kv, torch.arange(4), *new)
        read = layout.gather(kv, torch.arange(4))[side]
        group = 1 if form.fixed else min(form.group or width, width)
        assert read[0, 1, :group].isnan().all()
        if form.fixed:  # beyond the largest code a number is cut, and infinity too
            cut = 448 * kv[2 + side][1]
            assert torch.equal(read[1:3, 1, 0].float(), torch.stack((cut, -cut)).bfloat16().float())
        else:
            assert read[1:3, 1, :group].isnan().all()
        rest = torch.ones_like(read, dtype=torch.bool)
        rest[:3, 1, :group] = False
        assert read[rest].isfinite().all()


@pytest.mark.parametrize("name", FORMS)
def test_zeros_are_zeros(name: str) -> None:
    layout, kv = made(name)
    for slots in (torch.arange(32), SLOTS):  # never written, then written
        assert not any(part.any() for part in layout.gather(kv, slots))
        layout.write(
            kv, SLOTS, torch.zeros(TOKENS, HEADS, KEY).bfloat16(), torch.zeros(TOKENS, HEADS, VALUE).bfloat16()
        )


def test_an_outlier_costs_its_own_group_alone() -> None:
    x = torch.randn(1, HEADS, KEY, generator=torch.Generator().manual_seed(0))
    x[..., 0] = 1000.0
    errors = {}
    for name in ("token-int4", "token-int4-g128"):
        layout, kv = made(name, "f32", value_size=KEY)
        left = x.clone()
        layout.write(kv, torch.tensor([0]), left, x.clone())
        errors[name] = (left - x)[..., 32:].abs().max()
    assert errors["token-int4"] < 0.2 and errors["token-int4-g128"] > 1


def test_large_bf16_numbers_are_finite() -> None:
    """f16 scales hold what 8-bit codes need for numbers up to 8e6."""
    layout, kv = made("token-int8")
    k, v = torch.full((1, HEADS, KEY), 8e6).bfloat16(), torch.full((1, HEADS, VALUE), -8e6).bfloat16()
    layout.write(kv, torch.tensor([3]), k, v)
    assert k.isfinite().all() and (k.float() / 8e6 - 1).abs().max() < 0.01 and (v.float() / 8e6 + 1).abs().max() < 0.01


# --- moving it -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
def test_exports_and_copies_keep_every_bit(name: str) -> None:
    layout, kv = made(name, granule=4)
    k, v = drawn(KEY, layout.dtype, 4), drawn(VALUE, layout.dtype, 5)
    k[0, 0, 0] = torch.nan
    layout.write(kv, SLOTS, k, v)
    raw, other = layout.export(kv, SLOTS), layout.tensors(8, CPU)[0]
    assert len(raw) == len(layout.pool(kv)) and sum(part.nbytes for part in raw) == layout.bytes // 4 * TOKENS // 2
    layout.restore(other, SLOTS.flip(0), raw)
    assert all(map(same, layout.export(other, SLOTS.flip(0)), raw))
    before = layout.export(kv, torch.arange(32))
    layout.copy(kv, torch.tensor([1, 5]), torch.tensor([6, 0]))
    moved = torch.arange(32).view(8, 4)
    moved[6], moved[0] = moved[1].clone(), moved[5].clone()
    after = layout.export(kv, torch.arange(32))
    assert all(same(now, old[moved.flatten()]) for now, old in zip(after, before, strict=True))


def test_the_identity_names_what_an_export_means() -> None:
    layout, _ = made("token-fp8")
    again, _ = made("token-fp8")
    assert layout.identity == again.identity and layout.identity.startswith("token-fp8/kv/")
    ones, _ = made("token-fp8")
    ones.scales = {layer: (torch.ones(HEADS), torch.ones(HEADS)) for layer in (0, 2)}
    last, _ = made("token-fp8")
    last.scales[2] = last.scales[2][0], last.scales[2][1] * 1.001
    others = [made(name)[0] for name in FORMS if name != "token-fp8"]
    sizes = [made("token-fp8", "f16")[0], made("token-fp8", value_size=32)[0]]
    found = {one.identity for one in (layout, ones, last, *others, *sizes)}
    assert len(found) == 3 + len(others) + len(sizes)


# --- latent rows -----------------------------------------------------------------------------------------------------


def latent(dtype: DType, size: int = 256, rotated: int = 16) -> tuple[LatentCodes, tuple[torch.Tensor, ...]]:
    group = KVGroupSpec(name="kv", layers=(0,), kv_heads=1, key_size=size + rotated, value_size=size, layout=LATENT)
    layout = LatentCodes(group, 1, dtype)
    return layout, layout.tensors(32, CPU)[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_latents_have_a_scale_per_128_elements(dtype: DType) -> None:
    layout, kv = latent(dtype)
    rows = drawn(272, layout.dtype, 6)[:, :1]
    plain = rows.clone()
    codes, scales, means = encoded(plain[..., :256].float().numpy(), Form("e4m3", group=128), np.float32)
    layout.write(kv, SLOTS, rows, None)
    assert np.array_equal(kv[0].view(torch.uint8)[SLOTS].numpy(), codes.astype(np.uint8))
    assert scales is not None and np.array_equal(kv[1][SLOTS].numpy(), scales)
    assert torch.equal(kv[2][SLOTS], plain[..., 256:])
    assert same(rows, torch.cat((torch.from_numpy(means).to(layout.dtype), plain[..., 256:]), -1))
    both = layout.gather(kv, SLOTS)
    assert same(both[0], rows) and same(both[1], rows[..., :256].contiguous())
    assert not layout.constants(0) and layout.joined and not layout.sharded


def test_a_latent_with_nan_is_nan() -> None:
    layout, kv = latent("bf16")
    rows = torch.ones(1, 1, 272).bfloat16()
    rows[0, 0, 130] = torch.nan
    layout.write(kv, torch.tensor([0]), rows, None)
    assert rows[0, 0, 128:256].isnan().all() and (rows[0, 0, :128] == 1).all() and (rows[0, 0, 256:] == 1).all()


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "width", "fitting"),
    [
        ("token-int4", 80, "8 or 16 or 128"),
        ("token-int4-g64", 96, "8 or 16 or 32 or 128"),
        ("token-int4", 100, "128"),
        ("token-int8-g8", 20, "32 or 64 or 128"),
        ("token-int4", 15, "no size"),
    ],
)
def test_groups_that_do_not_divide_a_head(name: str, width: int, fitting: str) -> None:
    group = FORMS[name][0].group
    with pytest.raises(
        ConfigError, match=f"layout {name}: groups of {min(group, width)} do not divide a head of {width}"
    ) as e:
        made(name, key_size=width)
    assert f"groups of {fitting} do" in str(e.value)
    for size in fitting.split(" or ") if fitting != "no size" else ():
        made("token-int4" if size == "32" else f"token-int4-g{size}", key_size=width)


def test_a_group_that_is_wider_than_the_head_is_the_head() -> None:
    layout, kv = made("token-int4-g128", key_size=24, value_size=16)
    assert [tuple(part.shape[1:]) for part in kv] == [(2, 12), (2, 8), (2, 1, 2), (2, 1, 2)]
    assert layout.bytes == 2 * 2 * (12 + 8 + 4 + 4)


LLAMA_8B: Mapping[str, int] = {
    "token": 4096,
    "token-int8": 2080,
    "token-int8-min": 2112,
    "token-int4": 1280,
    "token-int4-g128": 1088,
    "token-fp8": 2048,
    "token-fp8-dynamic": 2080,
}
"""Bytes per token and layer of 8 KV heads of 128, from the specification."""


def bytes_of_a_token(name: str) -> int:
    group = KVGroupSpec(name="kv", layers=(0,), kv_heads=8, key_size=128, value_size=128, layout=name)
    layout = TokenLayout(group, 1, "bf16") if name == "token" else TokenCodes(group, 1, "bf16")
    assert layout.bytes * 8 == sum(part.nbytes for part in layout.pool(layout.tensors(8, CPU)[0]))
    return layout.bytes


def test_bytes_are_those_of_the_specification_and_of_the_page() -> None:
    assert {name: bytes_of_a_token(name) for name in LLAMA_8B} == LLAMA_8B
    page = (Path(__file__).resolve().parents[3] / "docs" / "operators.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(token[^`]*)` \| (.*?) \|.* \| ([\d,]+) \| \S+ \|$", page, re.MULTILINE)
    assert {name: int(size.replace(",", "")) for name, _, size in rows} == {
        name: bytes_of_a_token(name) for name in ("token", *FORMS)
    }
    pinned = {mode.name: layout for mode in modes() for layout in mode.layouts.values()}
    for layout, named, _ in rows:
        assert all(pinned[mode] == layout for mode in re.findall("`(.+?)`", named))


def test_a_latent_row_has_656_bytes() -> None:
    group = KVGroupSpec(name="kv", layers=(0,), kv_heads=1, key_size=576, value_size=512, layout=LATENT)
    assert LatentCodes(group, 1, "bf16").bytes == 656
    with pytest.raises(ConfigError, match="groups of 128 do not divide a head of 200"):
        LatentCodes(replace(group, value_size=200), 1, "bf16")


def test_every_layout_keeps_the_contract() -> None:
    assert check_register_kv_layouts(registry_for_tests(), "quantization") == len(FORMS) + 1
