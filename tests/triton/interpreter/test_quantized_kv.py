"""The kernels that write KV, over the layouts that quantize, in Triton's interpreter: what is stored is what the
layout stores, and what is left in keys and values is what it gives back.

The interpreter rounds some f32 to a wrong fp8: half of a power of two, or the next subnormal number. So a few codes of
fp8 may differ here, and keys and values are compared only with what was stored. `llmcore kernels --check` is exact.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from llmcore.api.models import KVGroupSpec
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore.ops import DTYPES, qk_norm_rope_kv_write, rms_norm, rope, rope_kv_write
from llmcore_deepseek.ops import latent_rope_kv_write
from llmcore_quantization.kv.layouts import LatentCodes, TokenCodes
from llmcore_triton.mla import latent_rope_kv_write as latent_writing
from llmcore_triton.specs.layouts import QUANTIZED

H200 = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=132)
REFERENCES = {"rope": rope.reference, "rms_norm": rms_norm.reference}
FP8 = {name for name, forms in QUANTIZED.items() if forms[0].codes == "e4m3"}


class Sizes(NamedTuple):
    """Heads of one attention. Keys and values may differ in size."""

    heads: int
    kv_heads: int
    size: int
    rotated: int
    value_size: int


WHOLE = Sizes(heads=5, kv_heads=3, size=64, rotated=64, value_size=32)
PARTLY = Sizes(heads=4, kv_heads=1, size=32, rotated=16, value_size=64)
"""A part of each head is rotated, and one block of heads has queries and keys."""
ACROSS = Sizes(heads=3, kv_heads=2, size=96, rotated=96, value_size=160)
"""An odd number of groups of 32: one of them lies in both halves of a head."""
FITTING = {"token-int4-g64": WHOLE._replace(size=128, rotated=128, value_size=64), "token-int4-g128": WHOLE}


def context(op: str, layout: str, dtype: str, sizes: Sizes) -> OpContext:
    shape = {name: getattr(sizes, name) for name in ("heads", "kv_heads", "size", "rotated")}
    return OpContext(op=op, device=H200, dtype=dtype, layout=layout, bucket=1, shape=shape)  # type: ignore[arg-type]


def layout_of(where: OpContext, sizes: Sizes) -> TokenCodes:
    group = KVGroupSpec(
        name="kv",
        layers=(0,),
        layout=str(where.layout),
        kv_heads=sizes.kv_heads,
        key_size=sizes.size,
        value_size=sizes.value_size,
    )
    layout = TokenCodes(group, 1, where.dtype)
    if layout.constants(layout.group.layers[0]):
        layout.scales = {0: (torch.rand(sizes.kv_heads) / 100 + 0.01, torch.rand(sizes.kv_heads) / 50 + 0.01)}
    return layout


def pool_of(layout: Any, slots: int) -> tuple[torch.Tensor, ...]:
    pool: tuple[torch.Tensor, ...] = layout.tensors(slots, torch.device("cpu"))[0]
    return pool


def drawn(tokens: int, sizes: Sizes, dtype: str) -> tuple[torch.Tensor, ...]:
    """(qk, v, cos, sin, slots): qk and v are parts of one tensor, as a projection returns them."""
    generator = torch.Generator().manual_seed(tokens)
    border = (sizes.heads + sizes.kv_heads) * sizes.size
    joined = torch.randn(tokens, border + sizes.kv_heads * sizes.value_size, generator=generator)
    joined *= torch.logspace(-2, 2, tokens)[:, None]
    joined = joined.to(DTYPES[dtype])
    qk = joined[:, :border].view(tokens, sizes.heads + sizes.kv_heads, sizes.size)
    v = joined[:, border:].view(tokens, sizes.kv_heads, sizes.value_size)
    angles = torch.arange(tokens)[:, None] * 977 / 100.0 ** torch.linspace(0, 1, sizes.rotated // 2)
    cos, sin = torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)
    return qk, v, cos, sin, torch.randperm(2 * tokens + 1, generator=generator)[:tokens]


def expansion(where: OpContext, write: Any) -> Callable[..., torch.Tensor]:
    """rope_kv_write as the builder makes it over a layout without a kernel."""

    def part(op: str, **shape: Any) -> Any:
        return write if op == "kv_write" else REFERENCES[op]

    return rope_kv_write.expand(where, part)


def made(where: OpContext) -> Any:
    return importlib.import_module(f"llmcore_triton.{where.op}").make(where)


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """True if both have the same bits."""
    return got.dtype == expected.dtype and torch.equal(got.view(torch.uint8), expected.contiguous().view(torch.uint8))


def held(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> None:
    """Compares pools."""
    for got, expected in zip(ours, theirs, strict=True):
        if got.dtype == torch.float8_e4m3fn:
            got, expected = got.float(), expected.float()
            assert ((got - expected).abs() <= expected.abs() / 2 + 2.0**-9).all()
            assert (got != expected).float().mean() < 0.03
        elif got.dtype == torch.float32:
            # the norm of a latent adds up in halves
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
        else:
            assert same(got, expected)


@pytest.mark.parametrize(
    ("sizes", "dtype"), [(WHOLE, "f32"), (PARTLY, "f16"), (ACROSS, "f16")], ids=["whole", "partly", "across"]
)
@pytest.mark.parametrize("layout", QUANTIZED)
def test_what_is_stored_is_what_the_expansion_stores(layout: str, sizes: Sizes, dtype: str) -> None:
    sizes = FITTING.get(layout, sizes)
    where = context("rope_kv_write", layout, dtype, sizes)
    store = layout_of(where, sizes)
    for tokens in (0, 1, 3):
        qk, v, cos, sin, slots = drawn(tokens, sizes, dtype)
        left, expected, ours = v.clone(), pool_of(store, 9), pool_of(store, 9)
        turned = expansion(where, store.write)(qk.clone(), left, cos, sin, expected, slots)
        got = made(where)(qk, v, cos, sin, ours, slots)
        assert got.data_ptr() == qk.data_ptr()
        held(ours, expected)
        keys, values = store.gather(ours, slots)
        assert same(got[:, sizes.heads :].contiguous(), keys) and same(v.contiguous(), values)
        assert same(got[:, : sizes.heads].contiguous(), turned[:, : sizes.heads])
        if layout not in FP8:
            assert same(got.contiguous(), turned) and same(v.contiguous(), left)


@pytest.mark.parametrize("sizes", [WHOLE, PARTLY], ids=["whole", "partly"])
@pytest.mark.parametrize("layout", ["token-int8", "token-int8-min", "token-int8-int4"])
def test_keys_are_normed_before(layout: str, sizes: Sizes) -> None:
    """A norm adds up in another order than torch's, so the plain kernel says what the layout is to store."""
    where = context("qk_norm_rope_kv_write", layout, "f16", sizes)
    store = layout_of(where, sizes)
    qk, v, cos, sin, slots = drawn(3, sizes, "f16")
    norms, left = (torch.rand(sizes.size).half(), torch.rand(sizes.size).half()), v.clone()
    plain = tuple(torch.zeros(9, sizes.kv_heads, width).half() for width in (sizes.size, sizes.value_size))
    turned = made(replace(where, layout="token"))(qk.clone(), v.clone(), norms, 1e-6, cos, sin, plain, slots)
    reference = qk_norm_rope_kv_write.reference(qk.clone(), v.clone(), norms, 1e-6, cos, sin, plain, slots)
    torch.testing.assert_close(turned, reference, rtol=0, atol=8e-3)
    expected, ours = pool_of(store, 9), pool_of(store, 9)
    store.write(expected, slots, turned[:, sizes.heads :], left)
    got = made(where)(qk, v, norms, 1e-6, cos, sin, ours, slots)
    held(ours, expected)
    assert same(got.contiguous(), turned) and same(v.contiguous(), left)


@pytest.mark.parametrize("layout", ["token-int8", "token-int4"])
def test_every_launch_configuration(layout: str) -> None:
    where = context("rope_kv_write", layout, "f16", WHOLE)
    store, kernel = layout_of(where, WHOLE), importlib.import_module("llmcore_triton.rope_kv_write")
    qk, v, cos, sin, slots = drawn(2, WHOLE, "f16")
    expected = pool_of(store, 9)
    turned = expansion(where, store.write)(qk.clone(), v.clone(), cos, sin, expected, slots)
    for config in kernel.candidates(where):
        ours = pool_of(store, 9)
        got = kernel.make_with(where, config)(qk.clone(), v.clone(), cos, sin, ours, slots)
        assert all(map(same, ours, expected)) and same(got, turned)


@pytest.mark.parametrize("layout", ["token-int8", "token-int8-g8", "token-int8-min", "token-int4"])
def test_groups_without_a_usual_scale(layout: str) -> None:
    """Zeros and equal numbers read as they are. The group of a NaN or of infinity reads as NaN."""
    sizes = WHOLE._replace(kv_heads=1, value_size=32)
    where = context("rope_kv_write", layout, "f16", sizes)
    store = layout_of(where, sizes)
    qk, v, cos, sin, slots = drawn(6, sizes, "f16")
    v[0], v[1], v[2] = 0, 3, 2.0**-24
    v[3, 0, 5], v[4, 0, 9], v[5, 0, 31] = torch.nan, torch.inf, -torch.inf
    left, expected, ours = v.clone(), pool_of(store, 13), pool_of(store, 13)
    expansion(where, store.write)(qk.clone(), left, cos, sin, expected, slots)
    made(where)(qk, v, cos, sin, ours, slots)
    values = store.gather(ours, slots)[1]
    assert torch.equal(v.isnan(), left.isnan()) and torch.equal(v.isnan(), values.isnan())
    assert v[3:].isnan().any(-1).all() and not v[:3].isnan().any()
    assert same(v[:3].contiguous(), left[:3].contiguous()) and same(v[:3].contiguous(), values[:3])
    assert not v[0].any()
    torch.testing.assert_close(v[1], torch.full_like(v[1], 3), rtol=2e-3, atol=0)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize(("latent", "rotated"), [(256, 12), (32, 8)], ids=["groups", "one group"])
def test_latent_rows(latent: int, rotated: int, dtype: str) -> None:
    """The plain kernel says what the layout is to store: a norm adds up in another order than torch's."""
    shape = {"heads": 5, "size": 20, "latent": latent, "rotated": rotated}
    plain = OpContext(
        op="latent_rope_kv_write",
        device=H200,
        dtype=dtype,  # type: ignore[arg-type]
        layout="mla-latent",
        bucket=1,
        shape=shape,
    )
    where = replace(plain, layout="mla-latent-fp8")
    group = KVGroupSpec(
        name="kv", layers=(0,), layout="mla-latent-fp8", kv_heads=1, key_size=latent + rotated, value_size=latent
    )
    store = LatentCodes(group, 1, where.dtype)
    for q, row, weight, eps, cos, sin, (pool,), slots in latent_rope_kv_write.samples(where):
        rows, queries = row.clone(), q.clone()
        latent_writing.make(plain)(queries, rows, weight, eps, cos, sin, (pool,), slots)
        expected, ours = pool_of(store, len(pool)), pool_of(store, len(pool))
        store.write(expected, slots, rows[:, None], None)
        got_q, got_row = latent_writing.make(where)(q, row, weight, eps, cos, sin, ours, slots)
        assert same(got_q.contiguous(), queries.contiguous())
        held(ours, expected)
        assert same(got_row.contiguous(), store.gather(ours, slots)[0][:, 0])
