"""The kernels of latent attention in Triton's interpreter: their ops' samples, in every bucket and configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from llmcore.api.models import AttnSpec
from llmcore.api.protocols import AttnLimits, AttnRows, MetaWriter
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore.ops import attention, attn_merge, attn_varlen
from llmcore_deepseek.ops import attn_mla, head_linear, latent_rope_kv_write
from llmcore_devtools.kernels.attention_cases import AttnCase, Uploads, case
from llmcore_devtools.kernels.compare import check
from llmcore_triton.attention import listed
from llmcore_triton.attention.listed import Config
from llmcore_triton.mla import decode, head_linear_cublas, merge, unified, varlen
from llmcore_triton.mla import head_linear as per_head
from llmcore_triton.mla import latent_rope_kv_write as writing
from llmcore_triton.specs import attention as specs
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

H200 = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=132)
SMALL = replace(H200, processors=6)
"""So that a test need not run hundreds of programs that find nothing to do."""

SPLITTING = vars(Config(block_n=16, stages=3, least=16, per_processor=1, warps=4))
SPECS: dict[str, dict[str, Any]] = {
    "6 heads": {"heads": 6, "key_size": 24, "value_size": 16},
    "20 heads, odd sizes": {"heads": 20, "key_size": 52, "value_size": 40},
}
ODD = {"heads": 5, "size": 20, "latent": 24, "rotated": 12}


def context(op: str, dtype: str = "f32", bucket: int = 1, granule: int = 1, **shape: Any) -> OpContext:
    return OpContext(op=op, device=H200, dtype=dtype, layout="mla-latent", granule=granule, bucket=bucket, shape=shape)  # type: ignore[arg-type]


def attending(op: str, dtype: str = "f32", bucket: int = 1, granule: int = 1, **spec: Any) -> OpContext:
    sizes = attention.shape_of(AttnSpec(**{"kv_heads": 1, "scale": 0.2, **spec}))
    return context(op, dtype, bucket, granule, **sizes)


# --- latent_rope_kv_write ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize(
    "shape", [*latent_rope_kv_write.SHAPES, {"heads": 5, "size": 20, "latent": 24, "rotated": 12}]
)
def test_rows_are_normed_turned_and_stored(shape: dict[str, int], dtype: str) -> None:
    for bucket in (0, 2):
        where = context("latent_rope_kv_write", dtype, bucket, **shape)
        assert check(latent_rope_kv_write, writing.make(where), where) > 0


def test_every_configuration_of_the_write() -> None:
    where = context("latent_rope_kv_write", bucket=0, **latent_rope_kv_write.SHAPES[1])
    for config in writing.candidates(where):
        assert check(latent_rope_kv_write, writing.make_with(where, config), where) > 0


# --- attn.mla.* --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype", "granule"), [("6 heads", "f32", 1), ("20 heads, odd sizes", "f16", 4)])
@pytest.mark.parametrize("op", ["attn.mla.decode", "attn.mla.mixed", "attn.mla.prefill"])
def test_attention_against_the_reference(op: str, name: str, dtype: str, granule: int) -> None:
    where = replace(attending(op, dtype, 2, granule, **SPECS[name]), device=SMALL)
    kernel = decode.make(where) if op == "attn.mla.decode" else unified.make(where)
    assert check(attn_mla, kernel, where) >= 3


def uneven(where: OpContext) -> Iterator[attention.Sample]:
    """Rows of one chunk, of several, and of none."""
    yield attention.rows([1, 1, 1, 1, 1, 0], [150, 16, 17, 1, 70, 0])


@pytest.mark.parametrize("block_m", [16, 64])
def test_split_rows_of_uneven_lengths(block_m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attn_mla, "samples", uneven)
    if block_m == 64:
        # a row is merged in two blocks of values, and in several rounds
        monkeypatch.setattr(listed, "_MERGED", 32)
        monkeypatch.setattr(listed, "_CHUNKS", ((2, 1),))
    where = replace(attending("attn.mla.decode", granule=4, **SPECS["20 heads, odd sizes"]), device=SMALL)
    kernel = decode.make_with(where, {**SPLITTING, "block_m": block_m})
    plan = kernel.plan

    def longer(rows: AttnRows, into: MetaWriter) -> str:
        return plan(replace(rows, kv_len=rows.kv_len + np.array([3, 1, 20, 60, 5, 0], np.int32)), into)

    monkeypatch.setattr(kernel, "plan", longer)
    assert check(attn_mla, kernel, where) == 1


def test_split_chunks_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    def chunks(where: OpContext) -> Iterator[attention.Sample]:
        yield attention.rows([9, 1, 0, 5], [120, 90, 0, 5])

    monkeypatch.setattr(attn_mla, "samples", chunks)
    where = replace(attending("attn.mla.mixed", "f16", granule=4, **SPECS["6 heads"]), device=SMALL)
    assert check(attn_mla, unified.make_with(where, SPLITTING), where) == 1


@pytest.fixture
def products_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a row of a matrix product does not depend on its place in the tile; in numpy's, which is BLAS's, it
    does. This one adds up in the same order for every row."""

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> TensorHandle:
        total = d.data.copy()
        for left, right in zip(a.data.T, b.data, strict=True):
            total += left[:, None] * right[None, :]
        return TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.usefixtures("products_by_row")
@pytest.mark.parametrize("programs", [1, 24])
def test_bits_depend_neither_on_the_batch_nor_on_the_chunks(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of a prompt: in the whole of it, in chunks, behind a prefix hit and alone; split over programs or not."""
    monkeypatch.setattr(unified, "CHUNK", 32)
    where = replace(attending("attn.mla.mixed", **SPECS["6 heads"]), deterministic=True)
    few, many = (replace(where, device=replace(H200, processors=count)) for count in (1, programs))
    whole = case(where, [70, 1], [70, 40]).joined()
    together = ran(unified.make(few), whole)
    torch.testing.assert_close(together, whole.expected()[0])
    first = whole.meta["request"][:1]
    for n, length in ((1, 70), (37, 70), (20, 45)):
        rows = AttnRows(n_query=np.array([n], np.int32), kv_len=np.array([length], np.int32))
        meta = {
            **{"table": whole.meta["table"], "request": first},
            **{"q_start": torch.tensor([0, n]).int(), "kv_len": torch.tensor([length]).int()},
        }
        alone = replace(whole, q=whole.q[length - n : length], rows=rows, meta=meta)
        assert torch.equal(ran(unified.make(many), alone), together[length - n : length])


def ran(kernel: Any, case: AttnCase) -> torch.Tensor:
    kernel.workspace(AttnLimits(rows=8, tokens=200, kv_len=200))
    meta = dict(case.meta)
    kernel.plan(case.rows, Uploads(meta))
    return kernel.run(case.q, case.k_new, None, case.kv, meta, case.out())


# --- attn.varlen, head_linear, attn.merge ------------------------------------------------------------------------


VARLEN = [*attn_varlen.SHAPES, {**attn_varlen.SHAPES[0], "heads": 4, "kv_heads": 2, "key_size": 44, "value_size": 20}]


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("shape", VARLEN, ids=lambda s: f"{s['heads']}-{s['key_size']}-{s['mask']}")
def test_rows_of_varying_lengths(shape: dict[str, Any], dtype: str) -> None:
    where = context("attn.varlen", dtype, **shape)
    assert check(attn_varlen, varlen.make(where), where) == 3


@pytest.mark.parametrize("tma", [True, False])
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_whole_blocks_and_parts_of_wider_heads(mask: str, tma: bool) -> None:
    """Keys and values as a projection leaves them, side by side; what follows a row is another's, and NaN."""
    spec = attention.shape_of(AttnSpec(heads=2, kv_heads=2, key_size=48, value_size=32, scale=0.2, mask=mask))
    where = context("attn.varlen", "f16", 4, **spec)
    q, k, v, q_start, k_start, longest = attn_varlen._sample(where, (40, 1, 20), (75, 0, 40))
    joined = torch.full((len(k) + 16, 2, 96), torch.nan, dtype=k.dtype)
    joined[: len(k), :, 8:56], joined[: len(k), :, 64:] = k, v
    joined[len(k) - 40 :] = torch.nan
    wide_k, wide_v = joined[: len(k), :, 8:56], joined[: len(k), :, 64:]
    config = {"block_m": 32, "block_n": 16, "warps": 4, "stages": 2, "tma": tma}
    out, lse = varlen.make_with(where, config)(q, wide_k, wide_v, q_start, k_start, longest)
    expected, expected_lse = attn_varlen.make(where)(q, k, v, q_start, k_start, longest)
    torch.testing.assert_close(out[:41], expected[:41], rtol=0, atol=5e-3)
    torch.testing.assert_close(lse[:41], expected_lse[:41], rtol=0, atol=5e-3)
    assert out[41:].isnan().all()


def test_keys_are_cut_into_parts_that_matrix_units_take() -> None:
    assert [varlen.parts(n) for n in (8, 16, 24, 40, 48, 64, 96, 128, 192, 256)] == [
        *((16, 0), (16, 0), (32, 0), (32, 16), (32, 16), (64, 0), (64, 32), (128, 0), (128, 64), (256, 0)),
    ]


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("shape", [*head_linear.SHAPES, {"heads": 2, "inputs": 64, "outputs": 64}])
def test_every_head_by_its_matrix(shape: dict[str, int], dtype: str) -> None:
    for bucket, deterministic in ((0, False), (3, False), (1, True)):
        where = replace(context("head_linear", dtype, bucket, **shape), deterministic=deterministic)
        assert check(head_linear, per_head.make(where), where) > 0
        assert check(head_linear, head_linear_cublas.make(where), where) > 0


def test_inputs_in_steps() -> None:
    where = context("head_linear", "f16", 1, heads=2, inputs=72, outputs=40)
    config = {"block_m": 16, "block_n": 32, "block_k": 16, "warps": 4, "stages": 3}
    assert check(head_linear, per_head.make_with(where, config), where) > 0


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize(("heads", "bucket"), [(3, 1), (20, 0)])
def test_parts_are_joined(heads: int, bucket: int, dtype: str) -> None:
    where = context("attn.merge", dtype, bucket, heads=heads, value_size=24)
    assert check(attn_merge, merge.make(where), where) >= 4


def test_parts_that_saw_nothing_give_nothing() -> None:
    where = context("attn.merge", heads=3, value_size=16)
    parts, lses = torch.full((2, 4, 3, 16), torch.nan), torch.full((2, 4, 3), -torch.inf)
    out, lse = merge.make(where)(parts, lses)
    assert not out.any() and lse.isneginf().all()


def test_many_tokens_go_to_cublas_until_somebody_measures() -> None:
    shape = {"heads": 2, "inputs": 31, "outputs": 7}
    refuses = next(spec.refuses for spec in specs.latent_kernels() if spec.name == "per_head")
    assert refuses is not None
    assert refuses(context("head_linear", bucket=2, **shape)) is None
    assert "measured" in str(refuses(context("head_linear", bucket=3, **shape)))
    assert refuses(replace(context("head_linear", bucket=3, **shape), deterministic=True)) is None


def test_kernels_say_what_they_are_not_for() -> None:
    spec = SPECS["6 heads"]
    assert specs.latent_beyond(attending("attn.mla.decode", **spec)) is None
    for change in ({"window": 5}, {"kv_heads": 2}, {"mask": "full"}, {"value_size": 24}, {"value_size": 11}):
        assert specs.latent_beyond(attending("attn.mla.decode", **{**spec, **change}))
    wide = {"heads": 16, "key_size": 1088, "value_size": 1024}
    assert "not 1024" in str(specs.latent_beyond(attending("attn.mla.decode", **wide)))
