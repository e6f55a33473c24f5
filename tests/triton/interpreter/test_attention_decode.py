"""The decode kernels against the op's reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from llmcore.api.models import AttnSpec
from llmcore.api.protocols import AttnLimits, AttnRows, MetaWriter
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore.ops import attention, attn_gqa_decode
from llmcore_devtools.kernels.compare import check
from llmcore_triton.attention import flashdecoding, gqa_attention, gqa_flashdecoding
from llmcore_triton.attention.listed import Config, reserve

H200 = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=132)
SPLITTING = vars(Config(block_n=16, stages=3, least=16, per_processor=1))
MODULES = {"gqa_flashdecoding": gqa_flashdecoding, "gqa_attention": gqa_attention, "flashdecoding": flashdecoding}


def context(granule: int = 1, dtype: str = "f32", **spec: Any) -> OpContext:
    sizes = {"heads": 6, "kv_heads": 2, "key_size": 16, "value_size": 16, "scale": 0.25, **spec}
    return OpContext(
        op="attn.gqa.decode",
        device=H200,
        dtype=dtype,
        layout="token",
        granule=granule,
        shape=attention.shape_of(AttnSpec(**sizes)),
    )


CASES: dict[str, Mapping[str, Any]] = {
    "groups of 3": {},
    "f16 in granules": {"granule": 4, "dtype": "f16"},
    "a window over 7 heads": {"heads": 7, "kv_heads": 1, "granule": 4, "window": 5},
    "no groups, odd sizes, soft cap": {"heads": 2, "key_size": 80, "value_size": 24, "window": 40, "soft_cap": 2.0},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", MODULES)
def test_against_the_reference(name: str, case: str) -> None:
    where = context(**CASES[case])
    assert check(attn_gqa_decode, MODULES[name].make(where), where) >= 4


@pytest.mark.parametrize("case", [case for case in CASES if case != "groups of 3"])
@pytest.mark.parametrize(
    ("name", "early"), [("gqa_flashdecoding", False), ("gqa_flashdecoding", True), ("flashdecoding", False)]
)
def test_split_rows_of_uneven_lengths(name: str, early: bool, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attn_gqa_decode, "samples", uneven)
    where = context(**CASES[case])
    kernel = MODULES[name].make_with(where, {**SPLITTING, "early": early})
    plan = kernel.plan

    def longer(rows: AttnRows, into: MetaWriter) -> str:
        more = np.array([3, 1, 20, 60, 5, 0], np.int32)[: len(rows.kv_len)]
        return plan(replace(rows, kv_len=rows.kv_len + more), into)

    monkeypatch.setattr(kernel, "plan", longer)
    assert check(attn_gqa_decode, kernel, where) == 2


def uneven(where: OpContext) -> Iterator[attention.Sample]:
    """Rows of one chunk, of several, and of none. And a row that is alone."""
    yield attention.rows([1, 1, 1, 1, 1, 0], [150, 16, 17, 1, 70, 0])
    yield attention.rows([1], [150])


def test_what_a_step_uploads_is_determined_by_its_key() -> None:
    kernel = gqa_flashdecoding.make(context())
    kernel.workspace(AttnLimits(rows=4, tokens=4, kv_len=4096))
    seen: dict[str, dict[str, int]] = {}
    for longest in (1, 100, 256, 257, 700, 3000, 4096):
        into = Sizes()
        rows = AttnRows(n_query=np.ones(4, np.int32), kv_len=np.array([longest, 1, longest // 2 + 1, 0], np.int32))
        assert seen.setdefault(kernel.plan(rows, into), into.sizes) == into.sizes
    assert 2 <= len(seen) <= 3


class Sizes:
    """A MetaWriter that only counts."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}

    def put(self, name: str, values: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        self.sizes[name] = len(values)


def test_partial_results_share_a_buffer_until_it_is_in_use() -> None:
    device = torch.device("cpu")
    first, second = reserve(device, 10), reserve(device, 1000)
    assert first is second
    assert len(first) >= 1000
    kept = first.buffer()
    assert reserve(device, 10) is first
    other = reserve(device, len(first) + 1)
    assert other is not first
    assert first.buffer() is kept
