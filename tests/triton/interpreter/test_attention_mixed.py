"""The kernel for mixed steps against the op's reference, and its bits under `deterministic`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from llmcore.api.models import AttnSpec
from llmcore.api.protocols import AttnLimits, AttnRows, MetaWriter
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore.ops import attention, attn_gqa_mixed
from llmcore_devtools.kernels.attention_cases import AttnCase, Uploads, case
from llmcore_devtools.kernels.compare import check
from llmcore_triton.attention import unified
from llmcore_triton.attention.grouped import Grouped
from llmcore_triton.attention.listed import Config
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

H200 = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=132)
SPLITTING = vars(Config(block_n=16, stages=3, least=16, per_processor=1))


def context(granule: int = 1, dtype: str = "f32", deterministic: bool = False, **spec: Any) -> OpContext:
    sizes = {"heads": 6, "kv_heads": 2, "key_size": 16, "value_size": 16, "scale": 0.25, **spec}
    return OpContext(
        op="attn.gqa.mixed",
        device=H200,
        dtype=dtype,
        layout="token",
        granule=granule,
        shape=attention.shape_of(AttnSpec(**sizes)),
        deterministic=deterministic,
    )


CASES: dict[str, Mapping[str, Any]] = {
    "groups of 3": {},
    "f16 in granules": {"granule": 4, "dtype": "f16"},
    "a window over 7 heads": {"heads": 7, "kv_heads": 1, "granule": 4, "window": 5},
    "no groups, odd sizes, soft cap": {"heads": 2, "key_size": 80, "value_size": 24, "window": 40, "soft_cap": 2.0},
}


@pytest.mark.parametrize("case", CASES)
def test_against_the_reference(case: str) -> None:
    where = context(**CASES[case])
    assert check(attn_gqa_mixed, unified.make(where), where) >= 3


@pytest.mark.parametrize("case", [case for case in CASES if case != "groups of 3"])
def test_split_rows_of_uneven_lengths(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attn_gqa_mixed, "samples", uneven)
    where = context(**CASES[case])
    assert check(attn_gqa_mixed, planning_too_much(unified.make_with(where, SPLITTING)), where) == 1


@pytest.mark.parametrize("window", [None, 40])
def test_fixed_chunks_against_the_reference(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attn_gqa_mixed, "samples", uneven)
    where = context(deterministic=True, window=window, heads=3, kv_heads=1)
    kernel = planning_too_much(Grouped(where, Config(**SPLITTING), decode=False, fixed=32))
    assert check(attn_gqa_mixed, kernel, where) == 1


def uneven(where: OpContext) -> Iterator[attention.Sample]:
    """Rows of one chunk and of several."""
    yield attention.rows([1, 1, 6, 20, 0], [90, 16, 70, 37, 0])


def planning_too_much(kernel: Grouped) -> Grouped:
    """`kernel`, for rows that the host believes to be longer than they are."""
    plan = kernel.plan

    def longer(rows: AttnRows, into: MetaWriter) -> str:
        return plan(replace(rows, kv_len=rows.kv_len + np.array([40, 1, 5, 30, 0], np.int32)), into)

    kernel.plan = longer  # type: ignore[method-assign]
    return kernel


def run(kernel: Grouped, case: AttnCase) -> torch.Tensor:
    kernel.workspace(AttnLimits(rows=8, tokens=512, kv_len=512))
    meta = dict(case.meta)
    kernel.plan(case.rows, Uploads(meta))
    return kernel.run(case.q, case.k_new, case.v_new, case.kv, meta, case.out())


def cut(case: AttnCase, rows: Sequence[tuple[int, int, int]]) -> AttnCase:
    """A step over the same KV: (request of `case`, query tokens, length) each."""
    borders = case.meta["q_start"].tolist()
    which = [row for row, _, _ in rows]
    queries = [
        case.q[borders[row] + length - n : borders[row] + length]
        for row, n, length in rows  # all tokens are there
    ]
    n_query = np.array([n for _, n, _ in rows], np.int32)
    kv_len = np.array([length for _, _, length in rows], np.int32)
    meta = {
        "table": case.meta["table"],
        "request": case.meta["request"][which],
        "q_start": torch.from_numpy(np.cumsum([0, *n_query], dtype=np.int32)),
        "kv_len": torch.from_numpy(kv_len),
    }
    return replace(case, q=torch.cat(queries), meta=meta, rows=AttnRows(n_query=n_query, kv_len=kv_len))


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
@pytest.mark.parametrize("window", [None, 50])
def test_a_token_has_the_same_bits_in_every_step(window: int | None) -> None:
    """Token 66 of a prompt: in the whole prompt, in a chunk, behind a prefix hit, alone, and beside others."""
    where = context(deterministic=True, window=window, heads=3, kv_heads=1)
    whole = case(where, [70, 50], [70, 50], seed=3)
    few, many = chunked(where, programs=1), chunked(where, programs=500)
    expected = run(few, whole)[66]  # in the third chunk of KV
    torch.testing.assert_close(expected, whole.expected()[0][66])
    for name, rows, at in (
        ("decode", [(0, 1, 67)], 0),
        ("decode beside", [(1, 1, 50), (0, 1, 67), (1, 1, 40)], 1),
        ("chunk", [(0, 20, 70)], 16),
        ("chunk beside", [(1, 3, 40), (0, 9, 69)], 9),
    ):
        for made in (few, many):
            got = run(made, cut(whole, rows))[at]
            assert torch.equal(got, expected), f"{name}: off by {float((got - expected).abs().max())}"


def chunked(where: OpContext, programs: int) -> Grouped:
    """Chunks of 32 tokens, and work cut into so many programs."""
    where = replace(where, device=replace(H200, processors=programs))
    config = Config(block_m=16, block_n=16, stages=3, per_processor=1)
    return Grouped(where, config, decode=False, fixed=32)


@pytest.mark.parametrize(("programs", "split"), [(1, False), (500, True)])
def test_each_way_to_cut_the_work_is_taken(programs: int, split: bool) -> None:
    """The bits above are compared between tiles that are split over programs and tiles that are not."""
    where = context(deterministic=True, heads=3, kv_heads=1)
    kernel = chunked(where, programs)
    kernel.workspace(AttnLimits(rows=8, tokens=512, kv_len=512))
    one = case(where, [1], [101])
    assert kernel.plan(one.rows, Uploads(dict(one.meta))).endswith("+") == split
